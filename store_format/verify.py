"""A store that proves itself: checks that name what is damaged, and the hash of what it holds."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store_format.commits import INDEX_FOLDER, ShardEntry
from store_format.errors import DamagedStoreError
from store_format.files import is_file_with, sha256_of
from store_format.store import Store, open_store
from store_format.writer import view_files


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage: the shard (or index file), what is wrong, and how many live samples it holds."""

    where: str
    what: str
    num_samples: int


def verify_store(
    root: Path, *, full: bool, progress: Callable[[int], None] | None = None
) -> list[Finding]:
    """Check the store at `root`; an empty list means that nothing is wrong.

    Quick: the index parses, matches its hashes and places every tensor inside of a shard, and every
    file of a shard with live rows exists with the stated size. Full: also each such file's sha256,
    every live tensor's crc32c and finite values, and the views of plain readers.

    Args:
        root: the store.
        full: whether to read everything.
        progress: is told the bytes of each shard after it was checked.

    Raises:
        NotAStoreError: there is no store to check.
    """
    try:
        store = open_store(root)
    except DamagedStoreError as error:
        return [Finding(f"{root / INDEX_FOLDER}", str(error), 0)]
    rows_by_shard = store.index.rows_by_shard()
    findings: list[Finding] = []
    for shard in live_shards(store):
        num_samples = len(rows_by_shard.get(shard.name, ()))
        damage = list(_file_damage(root, shard, full))
        if full and not damage:
            damage = list(_tensor_damage(store, shard.name))
        findings += [Finding(shard.name, what, num_samples) for what in damage]
        if progress:
            progress(sum(entry.bytes for entry in shard.files))
    if full:
        findings += _view_damage(store)
    return findings


def live_shards(store: Store) -> list[ShardEntry]:
    """Return the shards that hold live rows, sorted by name."""
    names = store.index.rows_by_shard().keys() | store.index.text_rows_by_shard().keys()
    return [store.index.shards[name] for name in sorted(names)]


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


def _tensor_damage(store: Store, shard: str) -> Iterator[str]:
    """Read the live tensors of a shard, up to the first that cannot be read."""
    dtypes = {spec.name: spec.dtype for spec in store.manifest.tensors}
    try:
        for whose, tensors in _tensors(store, shard):
            for name, array in tensors.items():
                if not is_finite(array, dtypes[name]):
                    yield f"{name} of {whose} is not finite"
    except DamagedStoreError as error:
        yield str(error)


def _tensors(store: Store, shard: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for row in store.index.rows_by_shard().get(shard, ()):
        whose = f"sample {store.sample_ids[row]}"
        yield whose, store.read_variant(int(row))
        if store.manifest.texts_inline:
            for text in store.read_texts(int(row)):
                yield whose, text
    for row in store.index.text_rows_by_shard().get(shard, ()):
        key = store.index.texts["text_key"][int(row)].as_py().hex()
        yield f"text {key}", store.read_text(key)


def _view_damage(store: Store) -> Iterator[Finding]:
    for where, files in view_files(store.manifest, store.index):
        for path, data in files.items():
            if not is_file_with(store.root / path, data):
                what = (
                    f"{path} is not what the index says, so plain readers do not see the last "
                    f"commit; run the same 'prebake precompute' again"
                )
                yield Finding(where, what, 0)


def is_finite(array: NDArray[Any], dtype: str) -> bool:
    """Return whether all numbers are finite; `bfloat16` comes as raw uint16."""
    if dtype == "bfloat16":  # an exponent of all ones means infinity or NaN
        return bool(((array & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())


def store_hash(store: Store) -> str:
    """Return the SHA-256, in hex, of ids and tensor bytes in id order (FORMAT.md, section 9)."""
    digest = hashlib.sha256()
    variants = store.index.column("variant")
    for row in range(len(store)):
        digest.update(bytes.fromhex(store.sample_ids[row]))
        digest.update(int(variants[row]).to_bytes(2, "little"))
        for array in store.read_variant(row).values():
            digest.update(array.data)
        for weight, text in zip(store.text_weights(row), store.read_texts(row), strict=True):
            digest.update(weight.astype("<f4").tobytes())
            for array in text.values():
                digest.update(array.data)
    for array in store.read_empty_text().values():
        digest.update(array.data)
    return digest.hexdigest()
