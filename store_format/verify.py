"""A store that proves itself: checks that name what is damaged, and the hash of what it holds."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.commits import INDEX_FOLDER, ShardEntry
from store_format.errors import DamagedStoreError
from store_format.files import sha256_of
from store_format.store import Store, open_store
from store_format.writer import zarr_views


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage: the shard (or index file), what is wrong, and how many live samples it holds."""

    where: str
    what: str
    num_samples: int


def verify_store(root: Path, *, full: bool) -> list[Finding]:
    """Check the store at `root`; an empty list means that nothing is wrong.

    Quick: the index parses and matches its hashes, every shard file of a live shard exists with the
    stated size. Full: every file's sha256, every live tensor's crc32c and finite values, and the
    views of plain readers.

    Raises:
        NotAStoreError: there is no store to check.
    """
    try:
        store = open_store(root)
    except DamagedStoreError as error:
        return [Finding(f"{root / INDEX_FOLDER}", str(error), 0)]
    rows_by_shard = store.index.rows_by_shard()
    needed = set(rows_by_shard) | set(store.index.texts["shard"].to_pylist())
    findings = []
    for name in sorted(needed):
        num_samples = len(rows_by_shard.get(name, ()))
        for what in _file_damage(root, store.index.shards[name], full):
            findings.append(Finding(name, what, num_samples))
    if full and not findings:
        findings = list(_tensor_damage(store)) + list(_view_damage(store))
    return findings


def _file_damage(root: Path, shard: ShardEntry, full: bool) -> Iterator[str]:
    for entry in shard.files:
        path = root / entry.path
        if not path.is_file():
            yield f"{entry.path} is missing"
        elif path.stat().st_size != entry.bytes:
            yield f"{entry.path} has {path.stat().st_size} bytes, expected {entry.bytes}"
        elif full and (found := sha256_of(path)) != entry.sha256:
            yield (
                f"{entry.path}: sha256 differs from the index "
                f"(found {found[:8]}..., expected {entry.sha256[:8]}...)"
            )


def _tensor_damage(store: Store) -> Iterator[Finding]:
    for name, rows in store.index.rows_by_shard().items():
        for row in rows:
            try:
                batches = [store.read([int(row)], [t]) for t in range(store.num_texts(int(row)))]
            except DamagedStoreError as error:
                yield Finding(name, str(error), len(rows))
                break
            for spec in store.manifest.tensors:
                if not all(is_finite(batch[spec.name], spec.dtype) for batch in batches):
                    what = f"{spec.name} of sample {store.sample_ids[row]} is not finite"
                    yield Finding(name, what, len(rows))


def _view_damage(store: Store) -> Iterator[Finding]:
    if store.manifest.layout == "webdataset":
        listed = webdataset_layout.read_shard_list(store.root)
        if sorted(store.index.rows_by_shard()) != listed:
            what = "differs from the index; run the same 'prebake precompute' again"
            yield Finding(webdataset_layout.SHARD_LIST_NAME, what, 0)
        return
    for name, live, keys in zarr_views(store.index):
        found_live, found_keys = zarr_layout.read_view(store.root, name, len(live))
        wanted = [bytes.fromhex("".join(texts)) for texts in keys]
        found = [row.tobytes()[: len(want)] for row, want in zip(found_keys, wanted, strict=True)]
        if not np.array_equal(live, found_live) or wanted != found:
            what = "live or text_key differs from the index; run 'prebake precompute' again"
            yield Finding(name, what, int(live.sum()))


def is_finite(array: NDArray[Any], dtype: str) -> bool:
    """Return whether all numbers are finite; `bfloat16` comes as raw uint16."""
    if dtype == "bfloat16":  # an exponent of all ones means infinity or NaN
        return bool(((array & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())


def store_hash(store: Store) -> str:
    """Return the SHA-256, in hex, of ids and tensor bytes in id order (FORMAT.md, section 9)."""
    digest = hashlib.sha256()
    specs = store.manifest
    variants = store.index.column("variant")
    for row in range(len(store)):
        digest.update(bytes.fromhex(store.sample_ids[row]))
        digest.update(int(variants[row]).to_bytes(2, "little"))
        for text, weight in enumerate(store.text_weights(row)):
            batch = store.read([row], [text])
            if text == 0:
                for spec in specs.variant_tensors:
                    digest.update(batch[spec.name].tobytes())
            digest.update(weight.astype("<f4").tobytes())
            for spec in specs.text_tensors:
                digest.update(batch[spec.name].tobytes())
    empty = store.read_empty_text()
    for spec in specs.text_tensors:
        digest.update(empty[spec.name].tobytes())
    return digest.hexdigest()
