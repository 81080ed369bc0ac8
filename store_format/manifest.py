"""The manifest, `prebake.json`: what one store is, for good (FORMAT.md, section 4)."""

import json
import math
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from store_format.errors import NotAStoreError, OtherBakeError, PrebakeError
from store_format.folders import Folder, Location, folder_of
from store_format.strict_json import parse_json

MANIFEST_NAME = "prebake.json"
FORMAT_NAME = "prebake-store"
FORMAT_VERSION = 1
MAX_ROW_BYTES = 1 << 30  # of one tensor of one row
MAX_TENSORS = 64

Layout = Literal["zarr", "webdataset"]
Dtype = Literal["float16", "bfloat16", "float32", "uint8"]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # raw upper half of the float32 pattern
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Count = Annotated[int, Field(strict=True)]  # no `true`, no "8"
Number = Annotated[float, Field(strict=True)]


class TensorSpec(_Frozen):
    """One named tensor of each row: which rows have it, its dtype, its shape."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    kind: Literal["variant", "text"]
    dtype: Dtype
    shape: tuple[Count | Literal["h", "w"], ...] = Field(min_length=1, max_length=6)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(isinstance(n, int) and not 0 < n <= 1 << 20 for n in self.shape):
            raise ValueError(f"tensor {self.name}: dimensions of {self.shape} must be 1 to 2**20")
        if sum(isinstance(n, str) for n in self.shape) > 2:
            raise ValueError(f"tensor {self.name}: 'h' and 'w' may each appear once")
        if self.kind == "text" and any(isinstance(n, str) for n in self.shape):
            raise ValueError(f"tensor {self.name}: a text tensor cannot depend on the bucket")
        return self

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the stored numbers (uint16 for bfloat16)."""
        return NUMPY_DTYPES[self.dtype]

    def row_shape(self, cells: tuple[int, int] | None) -> tuple[int, ...]:
        """Return the shape in a bucket of `cells` = (w, h) latent cells (None for text tensors)."""
        size = {"w": cells[0], "h": cells[1]} if cells else {}
        return tuple(n if isinstance(n, int) else size[n] for n in self.shape)

    def row_bytes(self, cells: tuple[int, int] | None) -> int:
        """Return the bytes of one row."""
        return math.prod(self.row_shape(cells)) * self.numpy_dtype.itemsize


class VaeFacts(_Frozen):
    """The image encoder, as far as training and keys need it."""

    identity: str
    scaling_factor: Number
    shift_factor: Number = 0.0
    latent_channels: Count


class TextEncoderFacts(_Frozen):
    """One text encoder with its tokenizer."""

    identity: str
    tokenizer_identity: str
    width: Count


class Encoders(_Frozen):
    """The models whose outputs the store holds."""

    vae: VaeFacts
    text: tuple[TextEncoderFacts, ...]


class BaseFacts(_Frozen):
    """The base model's properties that training must agree with."""

    family: str
    prediction_type: str
    num_train_timesteps: Count


class Manifest(_Frozen):
    """What a store is. Written once; a store of another manifest is another store."""

    format: Literal["prebake-store"] = "prebake-store"
    version: Literal[1] = 1
    layout: Layout
    config: dict[str, str | int | float | bool | list[int] | None]
    encoders: Encoders
    base: BaseFacts
    downscale: Count = Field(default=8, ge=1, le=64)
    latents_scaled: Literal[True] = True
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=MAX_TENSORS)
    empty_text_key: str = Field(pattern=r"^[0-9a-f]{32}$")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"tensor names repeat: {names}")
        return self

    @property
    def variant_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors stored once a (sample, variant)."""
        return tuple(spec for spec in self.tensors if spec.kind == "variant")

    @property
    def text_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors stored once a text."""
        return tuple(spec for spec in self.tensors if spec.kind == "text")

    @property
    def texts_inline(self) -> bool:
        """Whether each sample row carries its texts (FORMAT.md, section 5.3)."""
        return self.layout == "webdataset"

    def cells(self, bucket: tuple[int, int]) -> tuple[int, int]:
        """Return (w, h) in latent cells of a bucket of (width, height) px."""
        return bucket[0] // self.downscale, bucket[1] // self.downscale

    def to_json(self) -> bytes:
        """Return the bytes of `prebake.json`."""
        return (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode("utf-8")


def read_manifest(location: Location | Folder) -> Manifest:
    """Read and check the manifest of the store at `location`.

    Raises:
        NotAStoreError: no manifest, not JSON, another format, a later version, or invalid fields.
    """
    root = folder_of(location)
    path = root.at(MANIFEST_NAME)
    try:
        raw = parse_json(root.read(MANIFEST_NAME))
    except FileNotFoundError:
        raise NotAStoreError(
            f"{root} is not a prebake store ({MANIFEST_NAME} is missing). "
            f"'prebake precompute IMAGES --model MODEL --out STORE' makes one."
        ) from None
    except OSError as error:
        raise NotAStoreError(
            f"{path} cannot be read ({error.strerror or error}). A store is a folder that holds it."
        ) from None
    except PrebakeError:
        raise
    except ValueError as error:
        raise NotAStoreError(f"{path} is not valid JSON ({error}). The store is damaged.") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise NotAStoreError(f'{path} does not say "format": "{FORMAT_NAME}"; not a prebake store.')
    version = raw.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise NotAStoreError(
            f"{root} has format version {version!r}; this prebake reads version "
            f"{FORMAT_VERSION}. Use the prebake that wrote it, or bake it again to another --out."
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NotAStoreError(f"{path}: {where}: {first['msg']}. The store is damaged.") from None


def check_same_bake(root: Folder, found: Manifest, asked: Manifest) -> None:
    """Raise `OtherBakeError` naming every difference between the two bakes."""
    mine, theirs = (_flatten(m.model_dump(mode="json")) for m in (found, asked))
    differences = [
        f"{key} = {mine.get(key)!r} (asked for: {theirs.get(key)!r})"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    if differences:
        shown = [d for d in differences if d.startswith(("config.", "layout", "encoders."))]
        raise OtherBakeError(
            f"{root} holds another bake: {'; '.join(shown or differences)}. "
            f"One store is one bake: choose another --out, with --reuse {root} to take over what "
            f"is equal."
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for name in value for k, v in _flatten(value[name], f"{prefix}{name}.").items()
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, x in enumerate(value) for k, v in _flatten(x, f"{prefix}{i}.").items()}
    return {prefix.rstrip("."): value}
