"""What a run is, worked out and checked before any weights are loaded."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.index import counted_keys, id_bytes, list_values
from store_format.manifest import Manifest, TensorSpec
from store_format.store import Store, open_store
from store_format.verify import live_shards, verify_store
from store_format.wording import counted
from train.config import MAY_CHANGE, TrainConfig
from train.loader import Samples
from train.order import BatchShape, Blocks, Order
from train.unet import ModelFacts, read_model_facts

OF_BLOCKS = ("order_block_mib", "assignment of samples to shards")
"""Settings of a run whose order goes by blocks of shards."""


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
    if config.cache or config.cache_size:
        from store_format.cache import configure_cache, parse_size

        limit_bytes = parse_size(config.cache_size, "--cache-size") if config.cache_size else None
        configure_cache(Path(config.cache) if config.cache else None, limit_bytes)
    store = open_store(config.store)
    findings = verify_store(store, full=False)
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
    blocks = None
    if config.order == "shards":
        blocks = find_blocks(store, samples, block_bytes=config.order_block_mib << 20)
    order = Order(samples.ids, samples.buckets, shape, config.seed, blocks)
    epochs_steps = (config.max_epochs or 0) * order.steps_per_epoch
    settings = {k: v for k, v in config.model_dump(mode="json").items() if k not in MAY_CHANGE}
    settings |= {"world_size": world_size, "content of the store": content_hash(store)}
    if blocks is not None:
        of_blocks = config.order_block_mib, assignment_hash(blocks)
        settings |= dict(zip(OF_BLOCKS, of_blocks, strict=True))
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
    samples = store.index.samples
    for name in ("sample_id", "latent_key"):
        digest.update(id_bytes(samples[name]).data)
    digest.update(counted_keys(samples["text_keys"]).data)
    for weights in (list_values(samples["text_weights"]), store.index.column("weight")):
        digest.update(np.ascontiguousarray(weights, "<f8").data)
    return digest.hexdigest()


def find_blocks(store: Store, samples: Samples, *, block_bytes: int) -> Blocks:
    """Return which shard each sample lies in, for an order by blocks of shards.

    A sample lies where its first variant does; its others may lie in other shards. In layout zarr
    its texts lie in text shards, which play no part and whose bytes do not count: samples of any
    shards may share a caption.
    """
    by_shard = sorted(store.index.rows_by_shard().items())
    shard_of_row = np.zeros(len(store), np.int32)  # [R]
    for number, (_, rows) in enumerate(by_shard):
        shard_of_row[rows] = number
    held, shard_of = np.unique(shard_of_row[samples.first_row], return_inverse=True)  # [K], [N]
    names = tuple(by_shard[number][0] for number in held)
    shard_bytes = [sum(file.bytes for file in store.index.shards[name].files) for name in names]
    return Blocks(names, np.array(shard_bytes, np.int64), shard_of.astype(np.int32), block_bytes)


def assignment_hash(blocks: Blocks) -> str:
    """Return a hash of which shard each sample lies in, and of the shards' sizes."""
    shards = list(zip(blocks.names, blocks.shard_bytes.tolist(), strict=True))
    digest = hashlib.sha256(json.dumps(shards).encode())
    digest.update(np.ascontiguousarray(blocks.shard_of, "<i4").tobytes())
    return digest.hexdigest()


def _describe_cache(setup: RunSetup, config: TrainConfig, limit_bytes: int) -> Iterator[str]:
    """Say how a store behind a URL and its cache go together."""
    num_bytes = sum(file.bytes for shard in live_shards(setup.store) for file in shard.files)
    sizes = f"the store has {num_bytes / 2**30:.2f} GiB, the cache {limit_bytes / 2**30:.2f} GiB"
    yield f"cache: {sizes}"
    if config.order == "global" and num_bytes > limit_bytes:
        yield (
            "warning: the global order reads all shards in turns, so each will be fetched many "
            "times. Give --order shards, or a larger --cache-size."
        )
    if config.order == "shards" and 2 * config.order_block_mib << 20 > limit_bytes:
        yield (
            f"warning: the cache holds fewer than two blocks of {config.order_block_mib} MiB, so "
            "shards will be fetched more than once an epoch. Give a smaller --order-block-mib."
        )


def describe(setup: RunSetup, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Say what will be trained on what, and for how long."""
    counts = np.bincount(setup.samples.bucket_of).tolist()
    by_bucket = sorted(zip(setup.samples.distinct_buckets, counts, strict=True))
    shown = ", ".join(f"{width}x{height}: {n}" for (width, height), n in by_bucket)
    say(f"store: {config.store}, {counted(len(setup.samples), 'sample')} in buckets {shown}")
    num_ranks = setup.settings["world_size"]
    effective = config.batch_size * config.gradient_accumulation * num_ranks
    ranks = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    say(
        f"steps: {setup.total_steps} of up to {counted(effective, 'sample')} "
        f"(batch {config.batch_size} x accumulation {config.gradient_accumulation}{ranks}); "
        f"{setup.order.steps_per_epoch} an epoch, "
        f"{setup.total_steps / setup.order.steps_per_epoch:.1f} epochs"
    )
    blocks = setup.order.blocks
    limit_bytes = setup.store.root.cache_limit_bytes
    if limit_bytes is not None:
        for line in _describe_cache(setup, config, limit_bytes):
            say(line)
    if blocks is not None:
        num_blocks = blocks.of_shards(config.seed, epoch=0).max() + 1
        say(
            f"order: {counted(len(blocks.names), 'shard')} in {counted(num_blocks, 'block')} "
            f"of up to {config.order_block_mib} MiB; samples are shuffled within a block"
        )
    say(
        f"learning rate: {config.learning_rate:g}, {config.lr_scheduler}, "
        f"{counted(config.warmup_steps, 'warm-up step')}; {config.optimizer}"
    )
    if config.warmup_steps >= setup.total_steps:
        say(f"warning: all {setup.total_steps} steps are warm-up; the rate never gets to its peak")


def run_name(out: Path) -> str:
    """Return the name under which the LoRA is known: the run folder's own."""
    return out.resolve().name
