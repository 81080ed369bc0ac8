"""Garbage: bytes of a store that no live row needs, and their removal.

Nothing else removes anything: a bake only adds. What goes:

- shards without live rows, and shard files that no commit lists (of writers that were killed);
- dead rows inside of shards: their live neighbours are copied to new shards first;
- texts that no sample has any more;
- commits and segments that a compaction replaced, or that were never finished;
- the unfinished work of writers that were killed.

Only names that this format gives (FORMAT.md, section 3) are removed; links are not followed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from store_format import webdataset_layout
from store_format.commits import INDEX_FOLDER
from store_format.errors import DamagedStoreError, PrebakeError
from store_format.folders import NOTE_NAME, Folder, LocalFolder, Location, folder_of
from store_format.index import LiveIndex
from store_format.locks import STAGING_FOLDER, ReaderLock, dead_work
from store_format.manifest import Manifest, read_manifest
from store_format.views import used_texts
from store_format.writer import StoreWriter

_SHARD = re.compile(r"([0-9]+x[0-9]+-)?[0-9a-f]{8}-[0-9]{6}(\.tar)?")
_BUCKET = re.compile(r"[0-9]+x[0-9]+")
_INDEX_FILE = re.compile(r"([0-9]{8}-[0-9a-f]{8})\.(json|samples\.parquet|texts\.parquet)")


@dataclass(frozen=True)
class Garbage:
    """What can go, and what must be copied for it.

    Attributes:
        stray: paths of files and shard folders that no commit lists, unfinished work among them.
        dead: names of shards without a live row.
        sample_rows: live rows of each shard of samples that holds dead ones too.
        text_rows: likewise of texts.
        is_index_clean: whether everything that the commits state counts.
        bytes: of all that goes.
        bytes_copied: of the shards whose live rows are copied, at most.
    """

    stray: list[str]
    dead: list[str]
    sample_rows: dict[str, NDArray[np.int64]]
    text_rows: dict[str, NDArray[np.int64]]
    is_index_clean: bool
    bytes: int
    bytes_copied: int = field(default=0)

    def __bool__(self) -> bool:
        return bool(self.stray) or not self.is_index_clean


def find_garbage(location: Location | Folder) -> Garbage:
    """Find what `collect_garbage` would remove; changes nothing.

    Raises:
        PrebakeError: the store is behind a URL, where nothing is ever removed.
    """
    root = _local(location)
    return _find(root, read_manifest(root), LiveIndex(root))


def collect_garbage(
    location: Location | Folder, progress: Callable[[int], object] = lambda rows: None
) -> Garbage:
    """Remove the garbage of a store; return what it was.

    Killed at any instant it leaves a valid store, and can be run again.

    Args:
        location: the store.
        progress: is told how many rows were copied.

    Raises:
        StoreBusyError: another process reads or writes the store.
        DamagedStoreError: a live row that must be copied cannot be read.
    """
    root = _local(location)
    if root.sizes([NOTE_NAME]):
        raise DamagedStoreError(
            f"{root} has lost a part of its index. Finish 'prebake store repair {root}' first: "
            f"what no commit lists may be needed."
        )
    with StoreWriter(root, read_manifest(root)) as writer:
        writer.become_exclusive()
        alone = ReaderLock(root.path, exclusive=True)
        garbage = _find(root, writer.manifest, writer.index)
        writer.move_rows(garbage.sample_rows, garbage.text_rows, progress)
        if not garbage.is_index_clean:
            dead = _dead_shards(writer.manifest, writer.index)
            writer.compact(garbage=dead, used_texts_only=True)
        writer.refresh_views()
        root.remove(_stray(root, writer.index), writer.staging)
        del alone
    return garbage


def _local(location: Location | Folder) -> LocalFolder:
    root = folder_of(location)
    if not isinstance(root, LocalFolder):
        raise PrebakeError(
            f"{root}: nothing is removed from an object store, which has no locks to keep others "
            f"from it. Pull the store, run 'prebake store gc' there, and push it to a new URL."
        )
    return root


def _find(root: LocalFolder, manifest: Manifest, index: LiveIndex) -> Garbage:
    dead = _dead_shards(manifest, index)
    sample_rows = _partly_live(index, index.rows_by_shard())
    text_rows = _partly_live(index, _used_text_rows(manifest, index))
    stray = _stray(root, index)
    stray += [f"{STAGING_FOLDER}/{left.name}" for left in dead_work(root.path / STAGING_FOLDER)]
    files = [path for each in stray for path in _files_below(root, each)]
    copied = {
        name: (sum(file.bytes for file in index.shards[name].files), len(rows))
        for name, rows in (sample_rows | text_rows).items()
    }
    shares = [size * (1 - kept / index.shards[name].rows) for name, (size, kept) in copied.items()]
    dead_bytes = sum(file.bytes for name in dead for file in index.shards[name].files)
    return Garbage(
        stray=stray,
        dead=sorted(dead),
        sample_rows=sample_rows,
        text_rows=text_rows,
        is_index_clean=not (dead or copied or index.num_dead_rows),
        bytes=sum(root.sizes(files).values()) + dead_bytes + round(sum(shares)),
        bytes_copied=sum(size for size, _ in copied.values()),
    )


def _partly_live(
    index: LiveIndex, live: dict[str, NDArray[np.int64]]
) -> dict[str, NDArray[np.int64]]:
    return {name: rows for name, rows in live.items() if len(rows) < index.shards[name].rows}


def _used_text_rows(manifest: Manifest, index: LiveIndex) -> dict[str, NDArray[np.int64]]:
    """Return, for each text shard, its rows (positions in the index) that are in use."""
    used = used_texts(manifest, index)
    return {
        name: kept
        for name, rows in index.text_rows_by_shard().items()
        if len(kept := np.intersect1d(rows, used))
    }


def _dead_shards(manifest: Manifest, index: LiveIndex) -> set[str]:
    live = index.rows_by_shard().keys() | _used_text_rows(manifest, index).keys()
    return index.shards.keys() - live


def _stray(root: LocalFolder, index: LiveIndex) -> list[str]:
    """Return the paths of shards, and of files in `index/`, that no commit lists."""
    commits = {commit.name for commit in index.commits}
    stray = [
        f"{INDEX_FOLDER}/{name}"
        for name in _own_names(root, INDEX_FOLDER)
        if (match := _INDEX_FILE.fullmatch(name)) and match[1] not in commits
    ]
    listed = index.shards.keys() | {webdataset_layout.tar_file(name) for name in index.shards}
    folders = ["texts", "samples"]
    folders += [
        f"samples/{name}" for name in _own_names(root, "samples") if _BUCKET.fullmatch(name)
    ]
    for folder in folders:
        paths = [f"{folder}/{name}" for name in _own_names(root, folder) if _SHARD.fullmatch(name)]
        stray += [path for path in paths if path not in listed]
    return stray


def _own_names(root: LocalFolder, folder: str) -> list[str]:
    """Return the names in a folder of the store; none where it is a link: another's, perhaps."""
    return [] if (root.path / folder).is_symlink() else root.names(folder)


def _files_below(root: LocalFolder, path: str) -> list[str]:
    top = root.path / path
    if not top.is_dir() or top.is_symlink():
        return [path]
    return [p.relative_to(root.path).as_posix() for p in top.rglob("*") if p.is_file()]
