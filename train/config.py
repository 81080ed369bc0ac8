"""What a training run is asked for. Light: loads neither torch nor diffusers."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class TrainConfig(BaseModel):
    """The options of `prebake train`; in `pipelines.yaml` the keys of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    store: str = Field(json_schema_extra={"argument": True})
    """The baked store: a folder, or a URL such as s3://bucket/store."""
    model: str
    """The base model of the bake: a diffusers folder, a hub id (owner/name), or 'bundled'."""
    out: Path
    """Folder of the run: metrics, checkpoints, LoRA files."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps to train; give this or --max-epochs."""
    max_epochs: int | None = Field(default=None, ge=1)
    """Passes over the store to train; give this or --max-steps."""
    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the LoRA matrices."""
    alpha: float = Field(default=16.0, gt=0)
    """LoRA scale: the update is multiplied by alpha / rank."""
    target_modules: str = "attn"
    """Layers to adapt: a set (attn, attn+ff, ...) or a comma-separated list of module suffixes."""
    learning_rate: float = Field(default=1e-4, gt=0, le=10)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 along a cosine."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises to its peak."""
    batch_size: int = Field(default=1, ge=1, le=1024)
    """Samples in one forward pass."""
    gradient_accumulation: int = Field(default=1, ge=1, le=4096)
    """Forward passes in one optimizer step."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """torch's AdamW, or bitsandbytes' with 8-bit states."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm when they exceed it."""
    caption_dropout: float = Field(default=0.0, ge=0, le=1)
    """Fraction of samples that see the empty prompt instead of their caption."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the data order, noise, timesteps, dropout and initial weights."""
    order: Literal["global", "shards"] = "global"
    """Order of the samples. global: all are shuffled. shards: the shards are, and then the samples
    within each block of shards, for a store larger than the local cache of shards; less random, as
    images that were baked one after the other stay together in a block."""
    order_block_mib: int = Field(default=2048, ge=1, le=1 << 24)
    """Size in MiB of a block with --order shards. It should be less than half of the cache; the
    larger it is, the closer to the global order."""
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Number format of the U-Net and of its arithmetic; adapters stay in fp32."""
    attention: Literal["auto", "sdpa", "xformers"] = "auto"
    """Attention kernel; auto tries xformers, then SDPA, on the model's own shapes."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    save_every: int = Field(default=500, ge=1)
    """Write a checkpoint every this many steps, besides the last."""
    keep_last: int = Field(default=3, ge=1)
    """Checkpoints to keep."""
    lora_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """Number format of the LoRA files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPU if there is one."""
    cache: str = ""
    """Folder for shards of a store behind a URL.  [default: ~/.cache/prebake/shards]"""
    cache_size: str = ""
    """How large that folder may become, such as 20GiB.  [default: 20GiB, or 80 % of the room]"""
    num_workers: int = Field(default=2, ge=0, le=64)
    """Processes that read the store ahead of training; 0 reads in the training process."""
    resume: str = "auto"
    """auto: continue the newest valid checkpoint in --out; never; or the path of a checkpoint."""

    @field_validator("store", mode="before")
    @classmethod
    def _location_is_text(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise ValueError("give one of max_steps and max_epochs")
        return self


MAY_CHANGE = frozenset(
    {
        *("store", "model"),  # compared by content instead
        *("max_steps", "max_epochs"),  # compared as the total number of steps, which may grow
        "order_block_mib",  # compared by train/setup.py, where it matters
        *("cache", "cache_size"),
        *("out", "resume", "num_workers", "save_every", "keep_last", "lora_dtype"),
    }
)
"""Fields that may differ when a run goes on."""
