"""Writing a store: one process at a time, commit by commit (FORMAT.md, section 9)."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from store_format import webdataset_layout, zarr_layout
from store_format.commits import INDEX_FOLDER, Commit, write_commit
from store_format.errors import NotAStoreError, StoreBusyError
from store_format.files import publish, write_file
from store_format.index import LiveIndex
from store_format.manifest import MANIFEST_NAME, Manifest, check_same_bake, read_manifest
from store_format.rows import SampleRow, TextRow, Tombstone, sample_table, text_table
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
        has_manifest = (root / MANIFEST_NAME).exists()
        if has_manifest:
            check_same_bake(root, read_manifest(root), manifest)
        elif root.is_dir() and any(
            p.name not in (LOCK_NAME, STAGING_FOLDER, INDEX_FOLDER) for p in root.iterdir()
        ):
            raise NotAStoreError(
                f"{root} is not empty and not a prebake store. "
                f"Choose an --out that does not exist yet."
            )
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(root)
        try:
            self.staging = root / STAGING_FOLDER
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir()
            (root / INDEX_FOLDER).mkdir(exist_ok=True)
            if has_manifest:
                check_same_bake(root, read_manifest(root), manifest)
            else:
                part = self.staging / MANIFEST_NAME
                write_file(part, manifest.to_json())
                publish(part, root / MANIFEST_NAME)
            self.index = LiveIndex(root)
            self._next_sequence = self.index.last_sequence + 1
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
        if self.manifest.layout == "zarr":
            name = f"samples/{bucket}/{self._new_name()}"
            return ZarrShard(
                self.root, self.staging, name=name, kind="samples", specs=specs, cells=cells
            )
        return TarShard(
            self.root,
            self.staging,
            name=f"samples/{bucket}-{self._new_name()}",
            kind="samples",
            specs=specs,
            text_specs=self.manifest.text_tensors,
            cells=cells,
        )

    def new_text_shard(self) -> ShardDraft:
        """Begin a shard of texts."""
        draft: Callable[..., ShardDraft] = ZarrShard if self.manifest.layout == "zarr" else TarShard
        return draft(
            self.root,
            self.staging,
            name=f"texts/{self._new_name()}",
            kind="texts",
            specs=self.manifest.text_tensors,
            cells=None,
        )

    def commit(
        self,
        shards: Sequence[ShardDraft] = (),
        samples: Sequence[SampleRow] = (),
        texts: Sequence[TextRow] = (),
        tombstones: Sequence[Tombstone] = (),
    ) -> Commit:
        """Publish finished shards and make their rows count, in one atomic step."""
        entries = [shard.finish() for shard in shards]
        commit = write_commit(
            self.root,
            self.staging,
            sequence=self._next_sequence,
            writer=self.writer,
            samples=sample_table(samples, tombstones),
            texts=text_table(texts),
            shards=entries,
        )
        self._next_sequence += 1
        return commit

    def rewrite_shards_with_dead_rows(self) -> int:
        """Copy the live rows of tars that also hold dead ones to new tars; return how many.

        Zarr stores mark dead rows instead (FORMAT.md, section 7).
        """
        store = self.reload()
        if self.manifest.layout == "zarr":
            return 0
        dirty = [
            (name, rows)
            for name, rows in self.index.rows_by_shard().items()
            if len(rows) < self.index.shards[name].rows
        ]
        for _, rows in dirty:
            samples = [store.sample(int(row)) for row in rows]
            draft = self.new_sample_shard(samples[0].bucket_px)
            placed = []
            for row, sample in zip(rows, samples, strict=True):
                tensors = read_inline(store, int(row), len(sample.texts))
                placed.append(sample.placed(draft.append(sample, tensors)))
            self.commit([draft], placed)
        if dirty:
            self.reload()
        return len(dirty)

    def refresh_views(self) -> None:
        """Bring what plain readers see (`live`, `text_key`, `shards.txt`) to the last commit."""
        self.reload()
        rows_by_shard = self.index.rows_by_shard()
        if self.manifest.layout == "webdataset":
            if all(len(rows) == self.index.shards[n].rows for n, rows in rows_by_shard.items()):
                webdataset_layout.write_shard_list(self.root, self.staging, list(rows_by_shard))
            return
        for name, live, keys in zarr_views(self.index):
            zarr_layout.write_view(self.root, self.staging, name, live, keys)

    def _new_name(self) -> str:
        self._num_shards += 1
        return f"{self.writer}-{self._num_shards:06d}"


def zarr_views(
    index: LiveIndex,
) -> "list[tuple[str, np.ndarray, list[tuple[str, ...]]]]":
    """Return for each sample shard what its view must say: (name, live [rows], text keys)."""
    rows_by_shard = index.rows_by_shard()
    places = index.column("row")
    keys = index.samples["text_keys"]
    views = []
    for name, shard in index.shards.items():
        if shard.kind != "samples":
            continue
        live = np.zeros(shard.rows, np.bool_)
        text_keys: list[tuple[str, ...]] = [()] * shard.rows
        for row in rows_by_shard.get(name, ()):
            live[places[row]] = True
            text_keys[places[row]] = tuple(key.hex() for key in keys[int(row)].as_py())
        views.append((name, live, text_keys))
    return views


def read_inline(store: Store, row: int, num_texts: int) -> list[np.ndarray]:
    """Return a row's tensors in the order of an inline shard: variant tensors, then each text's."""
    first = store.read([row])
    tensors = [first[spec.name][0] for spec in store.manifest.variant_tensors]
    for text in range(num_texts):
        batch = first if text == 0 else store.read([row], [text])
        tensors += [batch[spec.name][0] for spec in store.manifest.text_tensors]
    return tensors


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
