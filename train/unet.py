"""The base model: its facts, its noise schedule and its frozen U-Net, and nothing else of it.

A base model is a diffusers folder or a Hub id (`owner/name`). Only `unet/`, `scheduler/`
and `vae/config.json` are ever read: training works when the rest has been deleted.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import train.xformers_import  # noqa: F401  before diffusers, which imports xformers too

# isort: split
from diffusers import DDPMScheduler, UNet2DConditionModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from store_format.errors import PrebakeError
from train.objective import require_prediction_type

WEIGHTS = "diffusion_pytorch_model.safetensors"
WEIGHTS_INDEX = WEIGHTS + ".index.json"
JSON_FILES = ["unet/config.json", "scheduler/scheduler_config.json", "vae/config.json"]
# Not `unet/*`: an SD 1.5 repository holds the U-Net four times (.bin, fp16, non_ema, this).
WEIGHT_FILES = [f"unet/{WEIGHTS}", f"unet/{WEIGHTS_INDEX}", "unet/diffusion_pytorch_model-*-of-*"]
MAPPED_BYTES = 8 * 2**20


@dataclass(frozen=True)
class ModelFacts:
    """What the configuration files of a base model say about training it.

    `scaling_factor` is the VAE's, None where the folder has no `vae/config.json`;
    `cross_attention_dim` is the width of the text states the U-Net takes.
    """

    latent_channels: int
    cross_attention_dim: int
    prediction_type: str
    num_train_timesteps: int
    scaling_factor: float | None


def read_model_facts(model: str) -> ModelFacts:
    """Read the facts from two or three small JSON files.

    Raises: PrebakeError for a missing or damaged file, an SDXL U-Net, or a prediction type
    that cannot be trained.
    """
    folder = _resolve(model, JSON_FILES)
    unet = _read_unet_config(folder, model)
    scheduler = _read_json(folder / JSON_FILES[1], model)
    vae_path = folder / JSON_FILES[2]
    scaling_factor = None
    if vae_path.exists():  # 0.18215 is AutoencoderKL's default, for configurations without it
        scaling_factor = float(_read_json(vae_path, model).get("scaling_factor", 0.18215))
    # Defaults as in DDPMScheduler: the first SD 1.x releases have no prediction_type.
    prediction_type = scheduler.get("prediction_type", "epsilon")
    require_prediction_type(prediction_type, f"base model {model}")
    return ModelFacts(
        latent_channels=int(unet["in_channels"]),
        cross_attention_dim=int(unet["cross_attention_dim"]),
        prediction_type=prediction_type,
        num_train_timesteps=int(scheduler.get("num_train_timesteps", 1000)),
        scaling_factor=scaling_factor,
    )


def load_noise_scheduler(model: str) -> DDPMScheduler:
    """Load the noise schedule the base was trained with.

    The folder names the sampler (PNDM, DDIM, ...); training needs its betas, in a
    DDPMScheduler. Settings of the sampler only are left out.
    """
    config = _read_json(_resolve(model, JSON_FILES) / JSON_FILES[1], model)
    accepted = inspect.signature(DDPMScheduler).parameters
    return DDPMScheduler(**{key: value for key, value in config.items() if key in accepted})


def load_unet(model: str, dtype: torch.dtype, device: torch.device) -> UNet2DConditionModel:
    """Load the U-Net, frozen, straight into `dtype` on `device`.

    Each tensor is converted as it is read and the model is built without storage of its
    own, so the peak is the weights in `dtype` plus one tensor and MAPPED_BYTES of file.

    Raises: PrebakeError for a missing part, weights that are not there, not safetensors or
    damaged, and weights that do not fit the configuration.
    """
    folder = _resolve(model, JSON_FILES + WEIGHT_FILES)
    config = _read_unet_config(folder, model)
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    expected = {name: tensor.shape for name, tensor in unet.state_dict().items()}
    weights = {}
    for path in _weight_paths(folder / "unet", model):
        for name, tensor in _read_tensors(path, model):
            weights[name] = tensor.to(device=device, dtype=dtype, copy=True)
    _require_fit(expected, {name: tensor.shape for name, tensor in weights.items()}, model)
    unet.load_state_dict(weights, assign=True)
    return unet.requires_grad_(False)


def _resolve(model: str, patterns: list[str]) -> Path:
    """Return the local folder of a base model, from disk or from the Hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).exists():
        raise PrebakeError(
            f"base model {model} is a file; a diffusers folder (with unet/ and scheduler/) or a "
            f"Hub id is needed. Convert it with diffusers' from_single_file and save_pretrained."
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise PrebakeError(f"base model {model}: no such folder. Check the path.")
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PrebakeError(
            f"base model {model}: no such folder here, and the Hub gave none ({reason}). Check "
            f"the path or id, or download it first with 'hf download {model}'."
        ) from error


def _read_json(path: Path, model: str) -> dict[str, Any]:
    part = f"{path.parent.name}/{path.name}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PrebakeError(
            f"base model {model} has no {part}. A diffusers folder with unet/ and scheduler/ "
            f"is needed; download or convert the model again."
        ) from error
    except (OSError, ValueError) as error:
        raise PrebakeError(
            f"base model {model}: {part} cannot be read ({error}). Download the model again."
        ) from error
    if not isinstance(content, dict):
        raise PrebakeError(
            f"base model {model}: {part} holds no JSON object. Download the model again."
        )
    return content


def _read_unet_config(folder: Path, model: str) -> dict[str, Any]:
    config = _read_json(folder / JSON_FILES[0], model)
    if config.get("addition_embed_type") is not None:
        raise PrebakeError(
            f"base model {model}: its U-Net takes {config['addition_embed_type']!r} embeddings "
            f"(SDXL), which are not supported yet. Choose an SD 1.x or 2.x base."
        )
    for key in ("in_channels", "cross_attention_dim"):
        if not isinstance(config.get(key), int):
            raise PrebakeError(
                f"base model {model}: unet/config.json has {key} = {config.get(key)!r}, expected "
                f"one integer. Choose an SD 1.x or 2.x base."
            )
    return config


def _weight_paths(unet: Path, model: str) -> list[Path]:
    """List the safetensors files of the U-Net: one, or those its index names."""
    if (unet / WEIGHTS).exists():
        return [unet / WEIGHTS]
    if (unet / WEIGHTS_INDEX).exists():
        shards = _read_json(unet / WEIGHTS_INDEX, model).get("weight_map", {})
        return [unet / name for name in sorted(set(shards.values()))]
    if variants := sorted(path.name for path in unet.glob("diffusion_pytorch_model.*.safetensors")):
        raise PrebakeError(
            f"base model {model}: unet/ has only {', '.join(variants)}, expected {WEIGHTS}. Copy "
            f"the variant to train on to that name."
        )
    if pickles := sorted(path.name for path in unet.glob("*.bin")):
        raise PrebakeError(
            f"base model {model}: unet/ has only pickled weights ({', '.join(pickles)}), which can "
            f"run code when opened. Convert them: load with diffusers and save_pretrained, "
            f"or use a safetensors copy."
        )
    raise PrebakeError(f"base model {model}: unet/ has no {WEIGHTS}. Download the model again.")


def _read_tensors(path: Path, model: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each (name, tensor) of a safetensors file, memory-mapped: copy before going on.

    Pages of a map stay resident until it is closed, which for an fp32 file read into fp16
    would be twice the model. So the file is opened anew after every MAPPED_BYTES.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        while names:
            mapped_bytes = 0
            with safe_open(path, framework="pt") as file:
                while names and mapped_bytes < MAPPED_BYTES:
                    tensor = file.get_tensor(name := names.pop(0))
                    mapped_bytes += tensor.nbytes
                    yield name, tensor
                    del tensor
    except (SafetensorError, OSError) as error:
        raise PrebakeError(
            f"base model {model}: unet/{path.name} is damaged or cut short "
            f"({' '.join(str(error).split())}). Download the model again."
        ) from error


def _require_fit(expected: dict[str, torch.Size], found: dict[str, torch.Size], model: str) -> None:
    differing = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if differing:
        first = differing[0]
        raise PrebakeError(
            f"base model {model}: {len(differing)} U-Net tensors do not fit unet/config.json, the "
            f"first is {first} (found {_shape(found.get(first))}, expected "
            f"{_shape(expected.get(first))}). Weights and configuration are of different models."
        )


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))
