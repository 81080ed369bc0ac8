"""LoRA files in the two layouts programs read, and back.

`diffusers` layout: `unet.<module path>.lora_A.weight` and `.lora_B.weight`, for
`load_lora_weights`, peft and ComfyUI. `kohya` layout: `lora_unet_<path with underscores>`
with `.lora_down.weight`, `.lora_up.weight` and `.alpha`, for AUTOMATIC1111, Forge, ComfyUI
and InvokeAI.

r rank, "in" and "out" widths of the adapted module, k its kernel. A module with weights W
then acts as W + scale * B A, with scale = alpha / rank.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from store_format.errors import PrebakeError

FP16_MAX = 65504.0
SD2_TEXT_WIDTH = 1024  # SD 2.x; SD 1.x has 768
KOHYA_PREFIX = "lora_unet_"
# Names of SD 1.x and 2.x U-Net modules that hold an underscore of their own.
UNET_WORDS = (
    "down_blocks|up_blocks|mid_block|transformer_blocks|to_out|to_q|to_k|to_v|proj_in|proj_out|"
    "time_emb_proj|time_embedding|conv_shortcut|conv_in|conv_out|linear_1|linear_2"
)


@dataclass(frozen=True)
class LoraPair:
    """The two factors of one adapted module.

    Linear: A [r, in], B [out, r]. Convolution: A [r, in, k, k], B [out, r, 1, 1].
    """

    lora_A: torch.Tensor  # noqa: N815  peft's spelling
    lora_B: torch.Tensor  # noqa: N815


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file as read: the pairs by module path, and the scale each is applied with."""

    layout: Literal["diffusers", "kohya"]
    pairs: dict[str, LoraPair]
    scales: dict[str, float]
    metadata: dict[str, str]


def save_diffusers_lora(
    path: Path,
    pairs: Mapping[str, LoraPair],
    *,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    prediction_type: str = "epsilon",
) -> int:
    """Write the `diffusers` layout; return how many nonzero values became zero in `dtype`.

    The format has no alpha of its own and most readers ignore the header, so the scale is
    multiplied into lora_B: alpha = rank is then true everywhere. `metadata` is added to
    the header and wins over the keys written here.

    Raises: PrebakeError if a value is not finite or too large for `dtype`.
    Source: diffusers 0.42.1, `loaders/lora_base.py` (`lora_adapter_metadata`).
    """
    pairs = _clean_pairs(pairs, rank)
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"unet.{module}.lora_A.weight"] = pair.lora_A.float()
        tensors[f"unet.{module}.lora_B.weight"] = pair.lora_B.float() * (alpha / rank)
    # Only these: a whole LoraConfig has fields that other peft versions refuse (peft #2275).
    config = {"r": rank, "lora_alpha": rank, "target_modules": list(pairs), "rank_pattern": {}}
    prefixed = {f"unet.{key}": value for key, value in config.items()}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(prefixed, sort_keys=True)}
    header |= _type_markers(pairs, prediction_type, path.stem)
    return _write(path, tensors, dtype, header | dict(metadata))


def save_kohya_lora(
    path: Path,
    pairs: Mapping[str, LoraPair],
    *,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    prediction_type: str = "epsilon",
) -> int:
    """Write the `kohya` layout; return how many nonzero values became zero in `dtype`.

    `metadata` is added to the header and wins over the keys written here; give
    `ss_output_name` to name the LoRA other than its file. No timestamp is written.

    Raises: PrebakeError if a value is not finite or too large for `dtype`.
    Source: kohya-ss/sd-scripts, `networks/lora.py` (keys), `train_network.py` (metadata),
    `library/sai_model_spec.py` (modelspec), `library/train_util.py` (the two hashes).
    """
    pairs = _clean_pairs(pairs, rank)
    tensors = {}
    for module, pair in pairs.items():
        name = KOHYA_PREFIX + module.replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = pair.lora_A.float()
        tensors[f"{name}.lora_up.weight"] = pair.lora_B.float()
        # Always: without it most programs take alpha = rank.
        tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    convolutions = any(pair.lora_A.shape[2:].numel() > 1 for pair in pairs.values())
    network_args = {"conv_dim": rank, "conv_alpha": alpha} if convolutions else {}
    header = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps(network_args, sort_keys=True),
        "ss_output_name": path.stem,
    }
    header |= _type_markers(pairs, prediction_type, path.stem) | dict(metadata)
    return _write(path, tensors, dtype, header, with_hashes=True)


def read_lora(path: Path) -> LoraFile:
    """Read a U-Net LoRA of either layout; tensors keep the dtype of the file.

    Raises: PrebakeError if the file is damaged or has a key of neither layout.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key).clone() for key in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise PrebakeError(f"LoRA file {path} cannot be read ({reason}). Save it again.") from error
    factors: dict[str, dict[str, torch.Tensor]] = {}
    layouts, unknown = set(), []
    for key, tensor in tensors.items():
        if match := re.fullmatch(r"unet\.(.+)\.lora_([AB])\.weight", key):
            layouts.add("diffusers")
            factors.setdefault(match[1], {})[match[2]] = tensor
        elif match := re.fullmatch(
            rf"{KOHYA_PREFIX}(\w+)\.(lora_down\.weight|lora_up\.weight|alpha)", key
        ):
            layouts.add("kohya")
            part = {"lora_down.weight": "A", "lora_up.weight": "B", "alpha": "alpha"}[match[2]]
            factors.setdefault(_dotted(match[1]), {})[part] = tensor
        else:
            unknown.append(key)
    incomplete = sorted(
        module for module, parts in factors.items() if not parts.keys() >= {"A", "B"}
    )
    if unknown or incomplete or len(layouts) != 1:
        raise PrebakeError(
            f"LoRA file {path}: {len(unknown)} keys are of neither layout (first: "
            f"{unknown[:1]}), {len(incomplete)} modules lack a factor (first: {incomplete[:1]}), "
            f"layouts found: {sorted(layouts)}. Give a U-Net LoRA in the diffusers or kohya layout."
        )
    config = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    if special := [
        k for k in ("use_rslora", "use_dora", "alpha_pattern") if config.get(f"unet.{k}")
    ]:
        raise PrebakeError(
            f"LoRA file {path} was made with {', '.join(special)}, which is not supported. Convert "
            f"it to a plain LoRA first."
        )
    pairs, scales = {}, {}
    for module, parts in sorted(factors.items()):
        pairs[module] = LoraPair(parts["A"], parts["B"])
        rank = parts["A"].shape[0]
        default_alpha = config.get("unet.lora_alpha", rank)  # neither: alpha = rank
        scales[module] = float(parts.get("alpha", torch.tensor(float(default_alpha)))) / rank
    layout: Literal["diffusers", "kohya"] = "kohya" if "kohya" in layouts else "diffusers"
    return LoraFile(layout, pairs, scales, metadata)


def module_path(name: str) -> str:
    """Strip from a module's name what peft, torch.compile and DDP wrap around it."""
    name = name.replace("_orig_mod.", "")
    while (stripped := re.sub(r"^(base_model\.model|module)\.", "", name)) != name:
        name = stripped
    return re.sub(r"\.default(?=\.|$)", "", name)


def _clean_pairs(pairs: Mapping[str, LoraPair], rank: int) -> dict[str, LoraPair]:
    """Return the pairs sorted under their bare module paths, checked against the rank."""
    cleaned = {module_path(name): pair for name, pair in pairs.items()}
    wrong = sorted(
        module
        for module, pair in cleaned.items()
        if not pair.lora_A.shape[0] == pair.lora_B.shape[1] == rank
    )
    if not cleaned or len(cleaned) != len(pairs) or wrong:
        raise PrebakeError(
            f"LoRA to save: {len(pairs)} pairs under {len(cleaned)} module paths, of which "
            f"{len(wrong)} are not of rank {rank} (first: {wrong[:1]}). Save the pairs of one "
            f"adapter with the rank it was made with."
        )
    return dict(sorted(cleaned.items()))


def _type_markers(
    pairs: Mapping[str, LoraPair], prediction_type: str, title: str
) -> dict[str, str]:
    """Return the header keys that tell programs what base model the LoRA is for.

    Without them AUTOMATIC1111 hides the file or Forge guesses. SD 2.x is told from SD 1.x
    by the width of the text states, which attn2's to_k and to_v take.
    """
    text_widths = {pair.lora_A.shape[1] for name, pair in pairs.items() if "attn2.to_k" in name}
    is_sd2 = text_widths == {SD2_TEXT_WIDTH}
    is_v = prediction_type == "v_prediction"
    sd2_architecture = "stable-diffusion-v2-768-v" if is_v else "stable-diffusion-v2-512"
    architecture = sd2_architecture if is_sd2 else "stable-diffusion-v1"
    return {
        "ss_base_model_version": ("sd_v2" if is_sd2 else "sd_v1") + ("_v" if is_v else ""),
        "ss_v2": str(is_sd2),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": title,
        "modelspec.prediction_type": "v" if is_v else "epsilon",
    }


def _write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    header: dict[str, str],
    *,
    with_hashes: bool = False,
) -> int:
    """Convert, check and write; the file appears whole or not at all."""
    converted = {}
    num_flushed = 0
    for key, tensor in tensors.items():
        limit = FP16_MAX if dtype == torch.float16 else float("inf")
        stored = tensor.detach().cpu().to(dtype).contiguous()
        largest = tensor.abs().max().item()
        if not torch.isfinite(stored).all() or not largest < limit:
            raise PrebakeError(
                f"{path}: {key} has max |w| = {largest}, which {dtype} cannot hold. Nothing was "
                f"written; save in fp32, or train again with a lower learning rate if it is nan "
                f"or inf."
            )
        num_flushed += int(((stored == 0) & (tensor.cpu() != 0)).sum())
        converted[key] = stored
    if with_hashes:
        header = header | kohya_hashes(converted, header)
    content = _with_header(serialize(converted), header)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return num_flushed


def kohya_hashes(tensors: dict[str, torch.Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """Return the hashes A1111 and Civitai look a LoRA up by.

    `sshs_model_hash`: sha256 of all bytes after the header. `sshs_legacy_hash`: first 8 hex
    digits of the sha256 of 64 KiB from 1 MiB on (of nothing, in a smaller file), of the
    file as it would be with the ss_ keys only.
    Source: kohya-ss/sd-scripts, `library/train_util.py`, `precalculate_safetensors_hashes`.
    """
    training = {key: value for key, value in header.items() if key.startswith("ss_")}
    content = _with_header(serialize(tensors), training)
    data_start = 8 + int.from_bytes(content[:8], "little")
    return {
        "sshs_model_hash": hashlib.sha256(content[data_start:]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8],
    }


def _with_header(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """Put metadata into a serialised safetensors file, in sorted order.

    `safetensors` writes metadata in an order that changes from process to process; equal
    LoRAs shall be equal files.
    Source: safetensors format: 8 bytes length, JSON padded to 8 with spaces, tensor bytes.
    """
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    header = {"__metadata__": dict(sorted(metadata.items()))} | entries
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _dotted(name: str) -> str:
    """Turn `down_blocks_0_attentions_1_proj_in` back into a module path."""
    words = re.findall(rf"({UNET_WORDS}|[a-z]+[0-9]*|[0-9]+)(?:_|$)", name)
    if "_".join(words) != name:
        raise PrebakeError(
            f"LoRA module {KOHYA_PREFIX}{name} is not named like a module of an SD 1.x U-Net. "
            f"Only SD 1.x and 2.x LoRAs in diffusers' module names can be read."
        )
    return ".".join(words)
