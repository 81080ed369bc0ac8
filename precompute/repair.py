"""Repair of a store: what cannot be read is encoded anew, what still can is copied.

verify -> (restore the index) -> bake of the damaged samples only -> copy the healthy rows of
damaged shards to new ones -> verify
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from precompute.bake import bake
from precompute.bake_keys import FULL_NAMES
from precompute.config import BakeConfig
from precompute.plan import Repair
from precompute.problems import Problem
from store_format.errors import PrebakeError
from store_format.folders import folder_of
from store_format.index import LiveIndex
from store_format.manifest import Manifest, read_manifest
from store_format.progress import Progress
from store_format.salvage import Losses, forget_losses, lost_texts, restore_index
from store_format.store import Store
from store_format.verify import Damage, Finding, damaged_rows, find_damage
from store_format.writer import StoreWriter

MAX_PASSES = 3  # damage may hide behind damage: texts that are lost hide what is wrong elsewhere


@dataclass
class Outcome:
    """What a repair did, and what it could not mend."""

    num_images_encoded: int = 0
    num_captions_encoded: int = 0
    num_rows_copied: int = 0
    problems: list[Problem] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)


def repair_store(
    location: str,
    images: Path | None,
    model: str | None,
    *,
    source_name: str = "",
    device: str = "auto",
    say: Callable[[str], None],
) -> Outcome:
    """Mend the store at `location` as far as `images` and `model` allow.

    Args:
        location: the store, on this machine.
        images: the folder of its images; not needed where nothing must be encoded.
        model: the model that it was baked with; likewise.
        source_name: which of several sources the images are.
        device: where the encoders run.
        say: prints one line for the person who waits.

    Raises:
        PrebakeError: images or model are needed and not given, or are not those of the store.
    """
    root = folder_of(location)
    if not root.is_local:
        raise PrebakeError(
            f"{location}: only a store on this machine can be repaired. Pull it, or bake into it "
            f"again: 'prebake precompute' adds what is missing."
        )
    manifest = read_manifest(root)
    losses = restore_index(root)
    for name in losses.commits:
        say(f"the index has lost commit {name}")
    for path in losses.segments:
        say(f"the index has lost {path}")
    outcome = Outcome()
    for number in range(MAX_PASSES):
        index = LiveIndex(root)
        damage = _find(Store(root, manifest, index), f"verifying {location}")
        texts = lost_texts(manifest, index, damage.text_rows)
        must_encode = bool(len(damage.sample_rows) or texts or losses)
        outcome.left = damage.findings
        if number and (not damage.findings or outcome.problems):
            break
        for finding in damage.findings:
            say(f"{finding.where}: {finding.what}")
        say(f"to encode anew: {len(damage.sample_rows)} samples and {len(texts)} texts")
        if must_encode:
            if images is None or model is None:
                raise PrebakeError(
                    f"{location}: something must be encoded anew. Give --images and --model."
                )
            source = source_name or _only_source(index, images, location)
            config = _config(manifest, images, model, location, source, device)
            rows = frozenset(damage.sample_rows.tolist())
            summary = bake(config, say=say, repair=Repair(rows, tuple(texts), bool(losses)))
            outcome.num_images_encoded += summary.num_images_encoded
            outcome.num_captions_encoded += summary.num_captions_encoded
            outcome.problems += summary.problems
            if losses and not summary.interrupted:
                with StoreWriter(location, manifest) as writer:
                    forget_losses(root, writer.staging)
            losses = Losses()
        outcome.num_rows_copied += _copy_healthy(location, manifest, damage)
    return outcome


def _find(store: Store, what: str) -> Damage:
    num_bytes = sum(file.bytes for file in store.index.files.values())
    with Progress(num_bytes, "bytes", what) as progress:
        return find_damage(store, progress.advance)


def _only_source(index: LiveIndex, images: Path, location: str) -> str:
    sources = sorted(set(index.sample_details["source"].to_pylist()))
    if len(sources) > 1:
        raise PrebakeError(
            f"{location} holds several sources: {', '.join(sources)}. Name the one whose images "
            f"are in {images} with --source-name, and repair the others in further runs."
        )
    return sources[0] if sources else ""


def _config(
    manifest: Manifest, images: Path, model: str, location: str, source: str, device: str
) -> BakeConfig:
    """Return the bake that made the store."""
    asked = manifest.config
    short: dict[str, str] = {full: name for name, full in FULL_NAMES.items()}
    background = asked["background"]
    assert isinstance(background, list)
    red, green, blue = background
    return BakeConfig.model_validate(
        {
            "images": images,
            "model": model,
            "out": location,
            "format": manifest.layout,
            "source_name": source,
            "background": f"#{red:02x}{green:02x}{blue:02x}",
            "dtype": short[str(asked["stored_dtype"])],
            "compute_dtype": short[str(asked["compute_dtype"])],
            "device": device,
            **{
                name: asked[name]
                for name in ("resolution", "bucket_step", "upscale", "posterior", "clip_skip")
            },
        }
    )


def _copy_healthy(location: str, manifest: Manifest, damage: Damage) -> int:
    """Copy what is readable in the damaged shards to new ones; return how many rows."""
    if not damage.findings:
        return 0
    with StoreWriter(location, manifest) as writer:
        writer.become_exclusive()
        index = writer.index
        store = Store(writer.root, manifest, index)
        bad = damaged_rows(store, damage.shards)  # some are elsewhere by now, encoded anew
        samples, texts = (
            {
                name: kept
                for name, rows in by_shard.items()
                if name in damage.shards and len(kept := np.setdiff1d(rows, lost))
            }
            for by_shard, lost in zip(
                (index.rows_by_shard(), index.text_rows_by_shard()), bad, strict=True
            )
        )
        writer.move_rows(samples, texts)
        writer.tidy()
    return sum(map(len, (*samples.values(), *texts.values())))
