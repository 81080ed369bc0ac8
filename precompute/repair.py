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
from store_format.errors import DamagedStoreError, PrebakeError
from store_format.folders import Folder, folder_of
from store_format.index import LiveIndex
from store_format.manifest import Manifest, read_manifest
from store_format.progress import Progress
from store_format.salvage import Losses, forget_losses, lost_texts, restore_index
from store_format.store import Store
from store_format.verify import Damage, Finding, damaged_rows, find_damage
from store_format.wording import counted
from store_format.writer import StoreWriter

MAX_PASSES = 3  # damage may hide behind damage: texts that are lost hide what is wrong elsewhere


@dataclass
class Outcome:
    """What a repair did, and what it could not mend."""

    num_damaged: int = 0
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
    if images is None or model is None:
        _check_index(root, location)  # before anything is changed
    losses = restore_index(root)
    for name in losses.commits:
        say(f"the index has lost commit {name}")
    for path in losses.segments:
        say(f"the index has lost {path}")
    outcome = Outcome(num_damaged=len(losses.commits) + len(losses.segments))
    for number in range(MAX_PASSES):
        index = LiveIndex(root)
        damage = _find(Store(root, manifest, index), f"verifying {location}")
        texts = lost_texts(manifest, index, damage.text_rows)
        must_encode = bool(len(damage.sample_rows) or texts or losses)
        outcome.left = damage.findings
        if number and (not damage.findings or outcome.problems):
            break
        outcome.num_damaged += sum(not finding.is_lag for finding in damage.findings)
        for finding in damage.findings:
            if not finding.is_lag:
                say(str(finding))
        if losses:
            say("to encode anew: all that the index has lost")
        elif must_encode:
            say(
                f"to encode anew: {counted(len(damage.sample_rows), 'sample')} and "
                f"{counted(len(texts), 'text')}"
            )
        if must_encode:
            if images is None or model is None:
                raise PrebakeError(
                    f"{location}: something must be encoded anew. Give --images and --model."
                )
            source = source_name or _only_source(index, images, location, bool(losses))
            config = _config(manifest, images, model, location, source, device)
            rows = frozenset(damage.sample_rows.tolist())
            summary = bake(config, say=say, repair=Repair(rows, tuple(texts), bool(losses)))
            outcome.num_images_encoded += summary.num_images_encoded
            outcome.num_captions_encoded += summary.num_captions_encoded
            outcome.problems += _of_damaged(summary.problems, index, damage, source)
            if losses and not summary.interrupted:
                with StoreWriter(location, manifest) as writer:
                    forget_losses(root, writer.staging)
                    num_back = len(writer.index) - len(index)
                if losses.commits or num_back < losses.rows:
                    say(_what_may_be_missing(losses, num_back, source, images))
            losses = Losses()
        _copy_healthy(location, manifest, damage)
        outcome.num_rows_copied += _num_healthy(index, damage)
    return outcome


def _of_damaged(
    problems: list[Problem], index: LiveIndex, damage: Damage, source: str
) -> list[Problem]:
    """Return the problems with images of damaged samples: others were never in the store."""
    samples = (index.sample(row) for row in damage.sample_rows.tolist())
    paths = {sample.path for sample in samples if sample.source == source}
    return [problem for problem in problems if problem.path in paths]


def _find(store: Store, what: str) -> Damage:
    num_bytes = sum(file.bytes for file in store.index.files.values())
    with Progress(num_bytes, "bytes", what) as progress:
        return find_damage(store, progress.advance)


def _check_index(root: Folder, location: str) -> None:
    try:
        index = LiveIndex(root)
        _ = index.sample_details, index.text_details
    except DamagedStoreError as error:
        raise PrebakeError(
            f"{error} Give --images and --model: rows that the index has lost are encoded anew."
        ) from None


def _what_may_be_missing(losses: Losses, num_back: int, source: str, images: Path) -> str:
    lost = "an unknown number of rows" if losses.commits else counted(losses.rows, "row")
    return (
        f"warning: the index had lost {lost}; {num_back} are back, of source '{source}', from "
        f"{images}. If the store held other sources too, or images that are gone, bake those again."
    )


def _only_source(index: LiveIndex, images: Path, location: str, has_losses: bool) -> str:
    sources = sorted(set(index.sample_details["source"].to_pylist()))
    if has_losses and images.resolve().name not in sources:
        raise PrebakeError(
            f"{location}: its index has lost rows and names of sources. Name the one whose images "
            f"are in {images} with --source-name: the folder's name at the time, if you gave none."
        )
    if has_losses:
        return images.resolve().name
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


def _num_healthy(index: LiveIndex, damage: Damage) -> int:
    """Return how many rows of the damaged shards can be read: all of them were copied."""
    by_shard = (index.rows_by_shard(), index.text_rows_by_shard())
    in_damaged = sum(
        len(rows) for each in by_shard for n, rows in each.items() if n in damage.shards
    )
    return in_damaged - len(damage.sample_rows) - len(damage.text_rows)


def _copy_healthy(location: str, manifest: Manifest, damage: Damage) -> None:
    """Copy what is readable in the damaged shards to new ones, and bring views up to date.

    In a store of tars the bake has done so already where it wrote rows of them anew.
    """
    if not damage.findings:
        return
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
