"""What a run is, worked out and checked before any weights are loaded."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.index import list_values
from store_format.manifest import Manifest, TensorSpec
from store_format.store import Store, open_store
from store_format.verify import verify_store
from train.config import MAY_CHANGE, TrainConfig
from train.loader import Samples
from train.order import BatchShape, Order
from train.unet import ModelFacts, read_model_facts


@dataclass(frozen=True)
class RunSetup:
    """A run's inputs, checked against each other."""

    store: Store
    samples: Samples
    order: Order
    facts: ModelFacts
    total_steps: int
    settings: dict[str, Any]
    """What must be equal for the run to be continued, but for the base model's weights."""


def set_up(config: TrainConfig, world_size: int) -> RunSetup:
    """Open the store, check it and that it fits the model, and fix the order.

    Raises:
        PrebakeError: the store is damaged, empty, or does not fit the model.
    """
    store = open_store(config.store)
    findings = verify_store(config.store, full=False)
    if findings:
        first = findings[0]
        raise DamagedStoreError(
            f"{config.store} is damaged: {first.where}: {first.what} "
            f"(and {len(findings) - 1} more). "
            f"Run 'prebake store verify {config.store}'."
        )
    facts = read_model_facts(config.model)
    check_fit(store, facts, config.model)
    samples = Samples(store)
    shape = BatchShape(config.batch_size, world_size, config.gradient_accumulation)
    order = Order(samples.ids, samples.buckets, shape, config.seed)
    epochs_steps = (config.max_epochs or 0) * order.steps_per_epoch
    settings = {k: v for k, v in config.model_dump(mode="json").items() if k not in MAY_CHANGE}
    settings |= {"world_size": world_size, "content of the store": content_hash(store)}
    return RunSetup(store, samples, order, facts, config.max_steps or epochs_steps, settings)


def check_fit(store: Store, facts: ModelFacts, model: str) -> None:
    """Refuse a store whose tensors do not fit the base model, naming both sides.

    Raises:
        PrebakeError: latent channels, text width, prediction type, steps or scaling differ.
    """
    manifest = store.manifest
    pairs = [
        ("latent channels", latents_spec(manifest).shape[0], facts.latent_channels),
        ("text width", text_spec(manifest).shape[-1], facts.cross_attention_dim),
        ("prediction type", manifest.base.prediction_type, facts.prediction_type),
        ("training timesteps", manifest.base.num_train_timesteps, facts.num_train_timesteps),
    ]
    if facts.scaling_factor is not None:
        scaling = manifest.encoders.vae.scaling_factor
        if not math.isclose(scaling, facts.scaling_factor, rel_tol=1e-6):
            pairs.append(("VAE scaling factor", scaling, facts.scaling_factor))  # type: ignore[arg-type]
    differing = [
        f"{what} {ours} (the model's: {theirs})" for what, ours, theirs in pairs if ours != theirs
    ]
    if differing:
        raise PrebakeError(
            f"{store.root} does not fit {model}: the store has {', '.join(differing)}. "
            "Train with the model that the store was baked with, or bake again with this one."
        )


def latents_spec(manifest: Manifest) -> TensorSpec:
    """Return the spec of the latents, or of their mean.

    Raises:
        PrebakeError: the store declares neither.
    """
    for name in ("latents", "latents_mean"):
        for spec in manifest.variant_tensors:
            if spec.name == name:
                return spec
    raise PrebakeError("the store declares no latents; it cannot be trained from.")


def text_spec(manifest: Manifest) -> TensorSpec:
    """Return the spec of the text states.

    Raises:
        PrebakeError: the store declares none.
    """
    for spec in manifest.text_tensors:
        if spec.name == "encoder_hidden_states":
            return spec
    raise PrebakeError("the store declares no encoder_hidden_states; it cannot be trained from.")


def content_hash(store: Store) -> str:
    """Return a hash of which samples, latents, texts and weights the store holds, by their keys."""
    bake = store.manifest.model_dump(mode="json", exclude={"layout"})  # bytes are equal in each
    digest = hashlib.sha256(json.dumps(bake, sort_keys=True).encode())
    for name in ("sample_id", "latent_key"):
        for key in store.index.samples[name].to_pylist():
            digest.update(key)
    for keys in store.index.samples["text_keys"].to_pylist():
        digest.update(len(keys).to_bytes(4, "little") + b"".join(keys))
    for weights in (
        list_values(store.index.samples["text_weights"]),
        store.index.column("weight"),
    ):
        digest.update(np.ascontiguousarray(weights, "<f8").tobytes())
    return digest.hexdigest()


def describe(setup: RunSetup, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Say what will be trained on what, and for how long."""
    bucket_px, counts = np.unique(setup.samples.buckets, axis=0, return_counts=True)
    shown = ", ".join(f"{w}x{h}: {n}" for (w, h), n in zip(bucket_px, counts, strict=True))
    say(f"store: {config.store}, {len(setup.samples)} samples in buckets {shown}")
    num_ranks = setup.settings["world_size"]
    effective = config.batch_size * config.gradient_accumulation * num_ranks
    ranks = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    say(
        f"steps: {setup.total_steps} of up to {effective} samples (batch {config.batch_size} x "
        f"accumulation {config.gradient_accumulation}{ranks}); {setup.order.steps_per_epoch} an "
        f"epoch, {setup.total_steps / setup.order.steps_per_epoch:.1f} epochs"
    )
    say(
        f"learning rate: {config.learning_rate:g}, {config.lr_scheduler}, "
        f"{config.warmup_steps} warm-up steps; {config.optimizer}"
    )
    if config.warmup_steps >= setup.total_steps:
        say(f"warning: all {setup.total_steps} steps are warm-up; the rate never gets to its peak")


def run_name(out: Path) -> str:
    """Return the name under which the LoRA is known: the run folder's own."""
    return out.resolve().name
