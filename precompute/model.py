"""The parts of a Stable Diffusion model that a bake needs, and what identifies them.

An encoder's identity is a hash over what its outputs depend on: the configuration keys that change
them and its tensors under canonical names. So a folder and a re-saved copy of it agree, whatever
library version wrote them (FORMAT.md, section 8).
"""

import hashlib
import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_format.errors import PrebakeError
from store_format.keys import canonical_json
from store_format.manifest import BaseFacts, Encoders, TextEncoderFacts, VaeFacts

# Output-changing keys with the defaults of diffusers.AutoencoderKL and transformers.CLIPTextConfig.
_VAE_KEYS: dict[str, Any] = {
    "in_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "use_quant_conv": True,
    "mid_block_add_attention": True,
}
_CLIP_KEYS: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "use_attention_mask": False,
}
# Before diffusers 0.18 the attention of a VAE had these names (its loader still renames them).
_OLD_VAE_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_HUB_PATTERNS = [
    "model_index.json",
    *(f"{part}/*.json" for part in ("vae", "text_encoder*", "tokenizer", "scheduler")),
    *(f"{part}/*.safetensors" for part in ("vae", "text_encoder")),
    "tokenizer/*.txt",
]
_WEIGHTS_NAME = re.compile(r"(model|diffusion_pytorch_model)(\.[^.]+)?\.safetensors")


@dataclass(frozen=True)
class ModelParts:
    """A local model folder, checked for the parts that a bake needs, and their facts."""

    folder: Path
    encoders: Encoders
    base: BaseFacts
    max_token_length: int
    num_text_layers: int


def open_model(model: str) -> ModelParts:
    """Find the parts of `model` (diffusers folder or hub id) and identify them.

    No weights are loaded: files are hashed, and hashes remembered by size and time.

    Raises:
        PrebakeError: a part is missing, unreadable or of a kind that is not supported.
    """
    folder = _local_folder(model)
    if (folder / "text_encoder_2").is_dir():
        raise PrebakeError(f"{folder} has two text encoders (SDXL); prebake bakes SD 1.x so far.")
    vae_config = _read_config(folder, "vae")
    text_config = _read_config(folder, "text_encoder")
    _check_kind(folder / "vae", vae_config.get("_class_name"), "AutoencoderKL")
    _check_kind(
        folder / "text_encoder", (text_config.get("architectures") or [None])[0], "CLIPTextModel"
    )
    scheduler = _read_config(folder, "scheduler", "scheduler_config.json")
    tokenizer_files = _tokenizer_files(folder / "tokenizer")
    latent_channels = int(vae_config.get("latent_channels", 4))
    encoders = Encoders(
        vae=VaeFacts(
            identity=_remembered(
                [folder / "vae/config.json", weights_file(folder / "vae")],
                lambda: _vae_identity(folder / "vae", vae_config),
            ),
            scaling_factor=float(vae_config.get("scaling_factor", 0.18215)),
            shift_factor=float(vae_config.get("shift_factor") or 0.0),
            latent_channels=latent_channels,
        ),
        text=(
            TextEncoderFacts(
                identity=_remembered(
                    [folder / "text_encoder/config.json", weights_file(folder / "text_encoder")],
                    lambda: _clip_identity(folder / "text_encoder", text_config),
                ),
                tokenizer_identity=_remembered(
                    tokenizer_files, lambda: _tokenizer_identity(folder / "tokenizer")
                ),
                width=int(text_config.get("hidden_size", 512)),
            ),
        ),
    )
    base = BaseFacts(
        family="sd1",
        prediction_type=str(scheduler.get("prediction_type", "epsilon")),
        num_train_timesteps=int(scheduler.get("num_train_timesteps", 1000)),
    )
    return ModelParts(
        folder,
        encoders,
        base,
        max_token_length=int(text_config.get("max_position_embeddings", 77)),
        num_text_layers=int(text_config.get("num_hidden_layers", 12)),
    )


def _check_kind(part: Path, found: str | None, expected: str) -> None:
    if found not in (None, expected):
        raise PrebakeError(f"{part} is a {found}; prebake bakes {expected} so far.")


def downscale_of(folder: Path) -> int:
    """Return the pixels of an image side per latent cell: 2 for each level below the first."""
    config = _read_config(folder, "vae")
    return int(2 ** (len(config.get("block_out_channels", [64])) - 1))


def weights_file(part: Path) -> Path:
    """Return the safetensors file of a model part.

    Raises:
        PrebakeError: there is none, or only a pickle.
    """
    files = sorted(file for file in part.glob("*.safetensors") if _is_weights(file))
    plain = [file for file in files if variant_of(file) is None]
    if plain or len(files) == 1:
        return (plain or files)[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise PrebakeError(f"{part} holds several weight files ({names}). Keep one of them.")
    pickles = sorted(file for file in part.glob("*") if file.suffix in (".bin", ".ckpt", ".pt"))
    if pickles:
        raise PrebakeError(
            f"{pickles[0]} is a pickle, which prebake never loads. Save the model again with "
            "save_pretrained(..., safe_serialization=True)."
        )
    raise PrebakeError(
        f"{part} holds no weights (model.safetensors or diffusion_pytorch_model.safetensors). "
        "The model folder is incomplete."
    )


def _is_weights(file: Path) -> bool:
    return _WEIGHTS_NAME.fullmatch(file.name) is not None


def variant_of(weights: Path) -> str | None:
    """Return the `variant` under which diffusers and transformers find a weights file."""
    parts = weights.name.split(".")
    return parts[1] if len(parts) == 3 else None


def _local_folder(model: str) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrebakeError(
            f"model {model}: no such folder, and the hub does not give it ({reason})."
        ) from None


def _read_config(folder: Path, part: str, name: str = "config.json") -> dict[str, Any]:
    path = folder / part / name
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PrebakeError(
            f"{folder} is not a complete diffusers model: {part}/{name} is missing."
        ) from None
    except OSError as error:
        raise PrebakeError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise PrebakeError(f"{path} is not valid JSON ({error}). Copy the model again.") from None
    if not isinstance(config, dict):
        raise PrebakeError(f"{path}: expected a JSON object.")
    return config


def _tokenizer_files(folder: Path) -> list[Path]:
    files = sorted(p for p in folder.glob("*") if p.suffix in (".json", ".txt"))
    names = {file.name for file in files}
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
        raise PrebakeError(
            f"{folder.parent} is not a complete diffusers model: tokenizer/ needs vocab.json and "
            "merges.txt, or tokenizer.json."
        )
    return files


def _vae_identity(part: Path, config: dict[str, Any]) -> str:
    def canonical(name: str) -> str | None:
        if not name.startswith(("encoder.", "quant_conv.")):
            return None
        pieces = name.split(".")
        if "attentions" in pieces:
            pieces = [_OLD_VAE_NAMES.get(piece, piece) for piece in pieces]
        return ".".join(pieces)

    return _identity(weights_file(part), _chosen(config, _VAE_KEYS), canonical)


def _clip_identity(part: Path, config: dict[str, Any]) -> str:
    def canonical(name: str) -> str | None:
        name = name.removeprefix("text_model.")
        return None if name.endswith("position_ids") else name

    return _identity(weights_file(part), _chosen(config, _CLIP_KEYS), canonical)


def _chosen(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {key: config.get(key, default) for key, default in defaults.items()}


def _identity(weights: Path, config: dict[str, Any], canonical: Callable[[str], str | None]) -> str:
    digest = hashlib.sha256(canonical_json(config))
    named = [(canonical(name), dtype, data) for name, dtype, data in _tensors(weights)]
    kept = [(name, dtype, data) for name, dtype, data in named if name is not None]
    for name, dtype, data in sorted(kept, key=lambda item: item[0]):
        digest.update(canonical_json([name, dtype, len(data)]))
        digest.update(data)
    return digest.hexdigest()


def _tensors(weights: Path) -> Iterator[tuple[str, str, memoryview]]:
    """Yield (name, dtype, bytes) of each tensor of a safetensors file, mapped into memory.

    Source: the safetensors format: u64 little-endian header length, JSON header, data.
    """
    try:
        with weights.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (header_bytes,) = struct.unpack_from("<Q", view)
        if 8 + header_bytes > len(view):
            raise ValueError(f"its header ends at byte {8 + header_bytes} of {len(view)}")
        header = json.loads(bytes(view[8 : 8 + header_bytes]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            if not 8 + header_bytes <= start <= end <= len(view):
                raise ValueError(f"tensor {name} is at bytes {start} to {end} of {len(view)}")
            yield name, entry["dtype"], view[start:end]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise PrebakeError(
            f"{weights} is not a whole safetensors file ({error}). Copy the model again."
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """Load the CLIP tokenizer in a model's `tokenizer` folder.

    Raises:
        PrebakeError: its files are damaged.
    """
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the Rust tokenizers raise bare Exceptions
        reason = " ".join(str(error).split())
        raise PrebakeError(
            f"{folder} does not load as a CLIP tokenizer ({reason:.200}). Copy the model again."
        ) from error


def _tokenizer_identity(folder: Path) -> str:
    """Hash what decides the ids of a text: vocabulary, merges, special tokens, length."""
    tokenizer = load_tokenizer(folder)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        merges = json.loads(fast.to_str())["model"]["merges"]
        merges = [m.split(" ") if isinstance(m, str) else list(m) for m in merges]
    else:  # the slow tokenizer of transformers 4
        merges = [list(pair) for pair in tokenizer.bpe_ranks]
    facts = {
        "vocab": tokenizer.get_vocab(),
        "merges": merges,
        "special": [str(getattr(tokenizer, f"{n}_token")) for n in ("bos", "eos", "pad", "unk")],
        "model_max_length": tokenizer.model_max_length,
    }
    return hashlib.sha256(canonical_json(facts)).hexdigest()


def _remembered(files: list[Path], compute: Callable[[], str]) -> str:
    """Return `compute()`, or its earlier result for the same files by path, size and time."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    key = hashlib.sha256(
        canonical_json([["identity", 1], *([p, s.st_size, s.st_mtime_ns] for p, s in stats)])
    ).hexdigest()
    memory = _cache_folder() / "identities" / key
    try:
        remembered = memory.read_bytes()
        if re.fullmatch(rb"[0-9a-f]{64}", remembered):
            return remembered.decode("ascii")
    except OSError:
        pass
    identity = compute()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        part = memory.with_suffix(f".{os.getpid()}")
        part.write_text(identity)
        part.replace(memory)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return identity


def _cache_folder() -> Path:
    """Return the user's cache folder for prebake (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prebake"
