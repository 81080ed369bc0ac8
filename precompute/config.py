"""What a bake is asked for. Light: loads neither torch nor pyvips."""

import os
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class BakeConfig(BaseModel):
    """The options of `prebake precompute`; in `pipelines.yaml` the keys of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    images: Path = Field(json_schema_extra={"argument": True})
    """Folder of captioned images, read recursively."""
    model: str
    """Stable Diffusion 1.x model: a diffusers folder, a hub id (owner/name), or 'bundled'."""
    out: str
    """The store: a folder or an s3:// URL; made if absent, continued if it holds the same bake."""
    format: Literal["zarr", "webdataset"] = "zarr"
    """Layout of the store: zarr keeps equal captions once; webdataset suits plain tar readers."""
    resolution: int = Field(default=512, ge=16, le=4096)
    """Buckets have at most RESOLUTION x RESOLUTION pixels."""
    bucket_step: int = Field(default=64, ge=8, le=512)
    """Bucket sides are multiples of this, in pixels; itself a multiple of 8."""
    background: str = "white"
    """Colour behind transparent pixels: white, black or #rrggbb."""
    upscale: bool = False
    """Enlarge images that are too small for any bucket instead of reporting them."""
    source_name: str = ""
    """Name of this image set in the store, part of sample ids.  [default: the folder's name]"""
    posterior: Literal["sample", "mode", "moments"] = "sample"
    """What to keep of the VAE posterior: one sample, its mode, or mean and deviation."""
    clip_skip: int = Field(default=1, ge=1, le=12)
    """Text encoder layer to take, counted from the end (1 = last layer, kohya's numbering)."""
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """Number format of what is stored."""
    compute_dtype: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    """Number format of the encoders' arithmetic; auto: fp32 on a CPU, fp16 on a GPU."""
    batch_size: int = Field(default=4, ge=1, le=512)
    """Images encoded at once on a GPU; on a CPU, which gains nothing by it, one by one."""
    device: str = "auto"
    """Where the encoders run: auto, cpu, cuda, cuda:1, ..."""
    num_workers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=256)
    """Threads that read and decode images.  [default: the number of CPU cores]"""
    shard_size_mib: int = Field(default=64, ge=1, le=4096)
    """A shard is closed at this size, in MiB."""
    shard_max_seconds: float = Field(default=60.0, gt=0)
    """A shard is closed after this many seconds, so that an interruption costs at most that."""
    reuse: str = ""
    """Another store, from which every latent and text of equal key is taken over."""
    worker: str = ""
    """i/n: bake the i-th of n parts of the images, beside other processes; drops nothing."""
    rehash: bool = False
    """Hash every image anew instead of trusting an unchanged size and modification time."""
    max_megapixels: int = Field(default=200, ge=1, le=100_000)
    """Images of more pixels are reported, not decoded: a small file can hold a huge picture."""
    allow_drop: bool = False
    """Let a run drop more than half of a source's samples (their images are gone)."""

    @field_validator("out", mode="before")
    @classmethod
    def _location_is_text(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("source_name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if "/" in value or "\\" in value or "\0" in value:
            raise ValueError("must not contain a slash")
        return value

    @field_validator("worker")
    @classmethod
    def _worker_is_a_part(cls, value: str) -> str:
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
        if value and not (match and 1 <= int(match[1]) <= int(match[2])):
            raise ValueError("expected i/n with 1 <= i <= n, such as 1/3")
        return value

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if self.bucket_step % 8:
            raise ValueError(f"bucket_step must be a multiple of 8, got {self.bucket_step}")
        if self.resolution % self.bucket_step:
            raise ValueError(
                f"resolution must be a multiple of bucket_step {self.bucket_step}, "
                f"got {self.resolution}"
            )
        return self

    @property
    def part(self) -> tuple[int, int]:
        """(i, n): this process bakes the i-th of n parts, counted from 1."""
        i, n = (self.worker or "1/1").split("/")
        return int(i), int(n)

    @property
    def source(self) -> str:
        """The source's name: as given, or the folder's own."""
        return self.source_name or self.images.resolve().name
