"""Writing a store: one process at a time, commit by commit (FORMAT.md, section 9)."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.commits import INDEX_FOLDER, Commit, write_commit
from store_format.errors import NotAStoreError, StoreBusyError
from store_format.files import is_file_with, make_folder, publish, replace_file, write_file
from store_format.index import LiveIndex, id_bytes, list_starts
from store_format.manifest import MANIFEST_NAME, Manifest, check_same_bake, read_manifest
from store_format.rows import Place, SampleRow, TextRow, Tombstone, sample_table, text_table
from store_format.store import Store
from store_format.webdataset_layout import TarShard
from store_format.zarr_layout import ZarrShard

LOCK_NAME = "writer.lock"
STAGING_FOLDER = "staging"
ShardDraft = ZarrShard | TarShard


class StoreWriter:
    """The one writer of a store. Use as a context manager; leaving it frees the lock.

    Nothing counts before `commit`; whatever a killed writer leaves behind is outside the index, and
    the next writer removes what it left in `staging/`.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """Create the store at `root`, or open it for adding.

        Raises:
            StoreBusyError: another process writes it.
            OtherBakeError: it holds another bake.
            NotAStoreError: the folder holds something else.
        """
        self.root = root
        self.manifest = manifest
        self.writer = secrets.token_hex(4)
        self._num_shards = 0
        self._drafts: set[ShardDraft] = set()
        check_target(root, manifest)
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(root)
        try:
            self.staging = root / STAGING_FOLDER
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir()
            if (root / MANIFEST_NAME).exists():  # again: another writer may have made it meanwhile
                check_same_bake(root, read_manifest(root), manifest)
            else:
                make_folder(root / INDEX_FOLDER)
                part = self.staging / MANIFEST_NAME
                write_file(part, manifest.to_json())
                publish(part, root / MANIFEST_NAME)
            self.index = LiveIndex(root)
            self._next_sequence = self.index.last_sequence + 1
            self._parents = self.index.heads
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for draft in self._drafts:
            draft.abandon()
        shutil.rmtree(self.staging, ignore_errors=True)
        os.close(self._lock)

    def reload(self) -> Store:
        """Read the index anew and return the store as committed so far."""
        self.index = LiveIndex(self.root)
        return Store(self.root, self.manifest, self.index)

    def new_sample_shard(self, bucket_px: tuple[int, int]) -> ShardDraft:
        """Begin a shard of samples of one bucket (width, height)."""
        bucket = f"{bucket_px[0]}x{bucket_px[1]}"
        cells = self.manifest.cells(bucket_px)
        specs = self.manifest.variant_tensors
        draft: ShardDraft
        if self.manifest.layout == "zarr":
            name = f"samples/{bucket}/{self._new_name()}"
            draft = ZarrShard(
                self.root, self.staging, name=name, kind="samples", specs=specs, cells=cells
            )
        else:
            draft = TarShard(
                self.root,
                self.staging,
                name=f"samples/{bucket}-{self._new_name()}",
                kind="samples",
                specs=specs,
                text_specs=self.manifest.text_tensors,
                cells=cells,
            )
        self._drafts.add(draft)
        return draft

    def new_text_shard(self) -> ShardDraft:
        """Begin a shard of texts."""
        kind: Callable[..., ShardDraft] = ZarrShard if self.manifest.layout == "zarr" else TarShard
        draft = kind(
            self.root,
            self.staging,
            name=f"texts/{self._new_name()}",
            kind="texts",
            specs=self.manifest.text_tensors,
            cells=None,
        )
        self._drafts.add(draft)
        return draft

    def commit(
        self,
        shards: Sequence[ShardDraft] = (),
        samples: Sequence[SampleRow] = (),
        texts: Sequence[TextRow] = (),
        tombstones: Sequence[Tombstone] = (),
    ) -> Commit:
        """Publish finished shards and make their rows count, in one atomic step.

        Args:
            shards: the shards that this commit adds.
            samples: placed rows, in these shards or in older ones. A sample that is named must be
                named with all its variants: older rows of it no longer count.
            texts: placed text rows.
            tombstones: the samples to drop.
        """
        variants = [(row.sample_id, row.variant) for row in samples]
        variants += [(tombstone.sample_id, 0) for tombstone in tombstones]
        assert len(set(variants)) == len(variants), "a commit names a variant of a sample twice"
        entries = [shard.finish() for shard in shards]
        commit = write_commit(
            self.root,
            self.staging,
            sequence=self._next_sequence,
            writer=self.writer,
            samples=sample_table(samples, tombstones),
            texts=text_table(texts),
            shards=entries,
            parents=self._parents,
        )
        self._drafts.difference_update(shards)
        self._next_sequence += 1
        self._parents = (commit.name,)
        return commit

    def rewrite_shards_with_dead_rows(self) -> int:
        """Copy the live rows of tars that also hold dead ones to new tars; return how many.

        Zarr stores mark dead rows instead (FORMAT.md, section 7).
        """
        store = self.reload()
        if self.manifest.layout == "zarr":
            return 0
        dirty = shards_with_dead_rows(self.index)
        moved: dict[int, Place] = {}
        for rows in dirty.values():
            draft = self.new_sample_shard(store.sample(int(rows[0])).bucket_px)
            for row in rows.tolist():
                tensors = [store.read_variant(row), *store.read_texts(row)]
                arrays = [array for each in tensors for array in each.values()]
                moved[row] = draft.append(store.sample(row), arrays)
            restated = []  # with the variants that lie in other shards
            for row in store.index.rows_of_same_samples(rows).tolist():
                sample = store.sample(row)
                restated.append(sample.placed(moved[row]) if row in moved else sample)
            self.commit([draft], restated)
        if dirty:
            self.reload()
        return len(dirty)

    def refresh_views(self) -> None:
        """Bring what plain readers see (`live`, `text_key`, `shards.txt`) to the last commit."""
        self.reload()
        if shards_with_dead_rows(self.index) and self.manifest.texts_inline:
            return  # `shards.txt` stays at the last state that was whole
        for _, files in view_files(self.manifest, self.index):
            for path, data in files.items():
                if not is_file_with(self.root / path, data):
                    replace_file(self.root / path, data, self.staging)

    def _new_name(self) -> str:
        self._num_shards += 1
        return f"{self.writer}-{self._num_shards:06d}"


def shards_with_dead_rows(index: LiveIndex) -> dict[str, NDArray[np.int64]]:
    """Return the shards that hold live and dead sample rows, each with its live rows."""
    return {
        name: rows
        for name, rows in index.rows_by_shard().items()
        if len(rows) < index.shards[name].rows
    }


def view_files(manifest: Manifest, index: LiveIndex) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield what plain readers must see: (shard, or shard list; its files by path)."""
    rows_by_shard = index.rows_by_shard()
    if manifest.layout == "webdataset":
        yield webdataset_layout.SHARD_LIST_NAME, webdataset_layout.view_files(rows_by_shard)
        return
    place = index.column("row")
    starts = list_starts(index.samples["text_keys"])
    num_texts = np.diff(starts)
    keys = id_bytes(pc.list_flatten(index.samples["text_keys"]))
    for name, shard in index.shards.items():
        if shard.kind != "samples":
            continue
        rows = rows_by_shard.get(name, np.zeros(0, np.int64))
        live = np.zeros(shard.rows, np.bool_)
        live[place[rows]] = True
        text_key = np.zeros((shard.rows, num_texts[rows].max(initial=1), 16), np.uint8)
        for text in range(text_key.shape[1]):
            having = rows[num_texts[rows] > text]
            text_key[place[having], text] = keys[starts[having] + text]
        yield name, zarr_layout.view_files(name, live, text_key)


def check_target(root: Path, manifest: Manifest) -> None:
    """Check that `root` holds this bake, or may become a store; nothing is changed.

    Raises:
        OtherBakeError: it holds another bake.
        NotAStoreError: it holds something else.
    """
    if (root / MANIFEST_NAME).exists():
        check_same_bake(root, read_manifest(root), manifest)
    elif not _may_become_a_store(root):
        raise NotAStoreError(
            f"{root} is not empty and not a prebake store. Choose an --out that does not exist yet."
        )


def _may_become_a_store(root: Path) -> bool:
    """Whether `root` is absent, empty, or was left by a writer killed before its manifest."""
    if not root.exists():
        return True
    if not root.is_dir():
        return False
    names = {path.name for path in root.iterdir()}
    return not names or (LOCK_NAME in names and names <= {LOCK_NAME, STAGING_FOLDER, INDEX_FOLDER})


def _lock(root: Path) -> int:
    """Take the store's writer lock; the system frees it when the process ends, however it ends."""
    descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreBusyError(
            f"{root} is being written by another process. "
            f"Wait for it to end, or bake to another --out."
        ) from None
    return descriptor
