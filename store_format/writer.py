"""Writing a store: any number of processes at a time, commit by commit (FORMAT.md, section 9)."""

import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store_format.commits import (
    COMMIT_FILE,
    INDEX_FOLDER,
    Commit,
    ShardEntry,
    heads,
    parse_commit,
    parse_segment,
    write_commit,
)
from store_format.errors import DamagedStoreError, NotAStoreError, StoreBusyError
from store_format.folders import Folder, LocalFolder, Location, folder_of
from store_format.index import LiveIndex, id_words
from store_format.locks import LOCK_NAME, STAGING_FOLDER
from store_format.manifest import MANIFEST_NAME, Manifest, check_same_bake, read_manifest
from store_format.rows import (
    SAMPLE_SCHEMA,
    TEXT_SCHEMA,
    Place,
    SampleRow,
    TextRow,
    Tombstone,
    sample_table,
    text_table,
)
from store_format.store import Store
from store_format.views import outdated, shards_with_dead_rows, used_texts, view_files, with_files
from store_format.webdataset_layout import TarShard
from store_format.zarr_layout import ZarrShard

COMPACT_FROM_COMMITS = 200
ROWS_OF_A_RESTATEMENT = 1 << 18  # rows in one commit of a compacted index
ShardDraft = ZarrShard | TarShard

_NEWS = {  # what a writer wants to know of other writers' commits
    "samples": pa.schema(
        [SAMPLE_SCHEMA.field(name) for name in ("sample_id", "latent_key", "text_keys")]
    ),
    "texts": pa.schema([TEXT_SCHEMA.field("text_key")]),
}


class StoreWriter:
    """A writer of a store, one of several perhaps. A context manager; leaving it ends its claim.

    Nothing counts before `commit`; whatever a killed writer leaves behind is outside the index.

    Attributes:
        others_samples: what other writers have committed since this one opened the store: for each
            sample id its latent key and text keys, or None if they dropped it.
        others_texts: the text keys of their text rows.
    """

    def __init__(self, location: Location | Folder, manifest: Manifest) -> None:
        """Create the store at `location`, or open it for adding.

        Raises:
            OtherBakeError: it holds another bake.
            NotAStoreError: the folder holds something else.
        """
        self.root = folder_of(location)
        self.manifest = manifest
        self.writer = secrets.token_hex(4)
        self.others_samples: dict[str, tuple[str, tuple[str, ...]] | None] = {}
        self.others_texts: set[str] = set()
        self._num_shards = 0
        self._drafts: set[ShardDraft] = set()
        check_target(self.root, manifest)
        self._claim = self.root.claim(self.writer)
        try:
            self.staging = self._claim.staging
            self._make_manifest()
            self.index = LiveIndex(self.root)
            self._commits = {commit.name: commit for commit in self.index.commits}
            self._known = {n for c in self.index.commits for n in (c.name, *c.replaces)}
        except BaseException:
            self._claim.release()
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
        self._claim.release()

    def _make_manifest(self) -> None:
        if not self.root.sizes([MANIFEST_NAME]):
            self.root.make_folder(INDEX_FOLDER)
            with contextlib.suppress(FileExistsError):  # another writer was first
                self.root.create(MANIFEST_NAME, self.manifest.to_json(), self.staging)
        check_same_bake(self.root, read_manifest(self.root), self.manifest)

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

    def look_around(self) -> None:
        """Note what other writers have committed since the last look."""
        names = [name for name in self.root.names(INDEX_FOLDER) if COMMIT_FILE.fullmatch(name)]
        paths = [f"{INDEX_FOLDER}/{n}" for n in names if n.removesuffix(".json") not in self._known]
        for path, data in zip(paths, self.root.read_all(paths), strict=True):
            commit = parse_commit(data, self.root.at(path))
            self._commits[commit.name] = commit
            self._known.update((commit.name, *commit.replaces))
            for sample in self._news(commit, "samples"):
                key = sample["latent_key"]
                texts = tuple(text.hex() for text in sample["text_keys"] or ())
                self.others_samples[sample["sample_id"].hex()] = (key.hex(), texts) if key else None
            self.others_texts.update(text["text_key"].hex() for text in self._news(commit, "texts"))

    def _news(self, commit: Commit, kind: Literal["samples", "texts"]) -> list[dict[str, Any]]:
        segment = getattr(commit.segments, kind)
        if segment is None:
            return []
        data = self.root.read(segment.path)
        table = parse_segment(data, segment, _NEWS[kind], self.root.at(segment.path))
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows

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
        commit = self._commit_tables(sample_table(samples, tombstones), text_table(texts), entries)
        self._drafts.difference_update(shards)
        return commit

    def _commit_tables(
        self,
        samples: pa.Table | None,
        texts: pa.Table | None,
        shards: Sequence[ShardEntry],
        replaces: Sequence[str] = (),
    ) -> Commit:
        self.look_around()
        commits = list(self._commits.values())
        commit = write_commit(
            self.root,
            self.staging,
            sequence=max((commit.sequence for commit in commits), default=0) + 1,
            writer=self.writer,
            samples=samples,
            texts=texts,
            shards=shards,
            parents=heads(commits),
            replaces=replaces,
        )
        self._commits[commit.name] = commit
        self._known.add(commit.name)
        return commit

    def tidy(self, *, finished: bool = True) -> list[DamagedStoreError]:
        """Leave the store as plain readers and the next reader want it; the last writer out does.

        Args:
            finished: False after an interruption: only what takes no time.

        Returns:
            What kept live rows from being copied out of shards with dead ones. They stay there.
        """
        self.look_around()
        alone = self._claim.make_exclusive() or not (self.root.is_local or self.others_samples)
        self.reload()
        damage: list[DamagedStoreError] = []
        if not alone:
            return damage  # others write still, and do this after us
        if finished:
            damage = self.rewrite_shards_with_dead_rows()
            if len(self.index.commits) >= COMPACT_FROM_COMMITS and self.root.is_local:
                self.compact()
        self.refresh_views()
        return damage

    def become_exclusive(self) -> None:
        """Have the store alone from here on.

        Raises:
            StoreBusyError: another process writes it.
        """
        if not self._claim.make_exclusive():
            raise StoreBusyError(
                f"{self.root} is being written by another process. Wait for it to end."
            )
        self.look_around()
        self.reload()

    def compact(self, *, garbage: Collection[str] = (), used_texts_only: bool = False) -> None:
        """Restate all live rows in few commits, so that a store of many opens fast.

        To be called by a writer that has the store alone. The last of the commits replaces all
        older ones; killed before it, the rows are merely stated twice.

        Args:
            garbage: shards without live rows, which the new commits no longer list.
            used_texts_only: leave out texts that no live sample has.
        """
        self.reload()
        samples, texts = self.index.whole_samples(), self.index.whole_texts()
        if used_texts_only:
            texts = texts.take(pa.array(used_texts(self.manifest, self.index)))
        dead = set(garbage)
        shards = [shard for name, shard in self.index.shards.items() if name not in dead]
        replaces = sorted(self._known)  # and what those replaced: a copy may lack some of them
        bounds = _bounds_of_restatements(samples)
        num_parts = max(len(bounds) - 1, -(-len(texts) // ROWS_OF_A_RESTATEMENT), 1)
        for part in range(num_parts):
            start, stop = (bounds[min(i, len(bounds) - 1)] for i in (part, part + 1))
            is_last = part == num_parts - 1
            self._commit_tables(
                samples.slice(start, stop - start),
                texts.slice(part * ROWS_OF_A_RESTATEMENT, ROWS_OF_A_RESTATEMENT),
                shards if is_last else (),
                replaces if is_last else (),
            )
        for name in replaces:
            self._commits.pop(name, None)
        self.reload()

    def rewrite_shards_with_dead_rows(self) -> list[DamagedStoreError]:
        """Copy the live rows of tars that also hold dead ones to new tars.

        Zarr stores mark dead rows instead (FORMAT.md, section 7).

        Returns:
            For each tar that stays as it is, because a live row in it is damaged, the error.
        """
        self.reload()
        damage = []
        if self.manifest.layout == "webdataset":
            for name, rows in shards_with_dead_rows(self.index).items():
                try:
                    self.move_rows({name: rows}, {})
                except DamagedStoreError as error:
                    damage.append(error)
        return damage

    def move_rows(
        self,
        samples: Mapping[str, NDArray[np.int64]],
        texts: Mapping[str, NDArray[np.int64]],
        progress: Callable[[int], object] = lambda num_rows: None,
    ) -> None:
        """Copy rows from where they lie to new shards, one for each old one.

        Args:
            samples: rows of the index to copy, by the shard of samples in which they lie.
            texts: likewise text rows.
            progress: is told the rows of each shard after they were copied.

        Raises:
            DamagedStoreError: one of them cannot be read.
        """
        store = Store(self.root, self.manifest, self.index)
        moved: dict[int, Place] = {}
        for rows in samples.values():
            draft = self.new_sample_shard(store.sample(int(rows[0])).bucket_px)
            for row in rows.tolist():
                tensors = [store.read_variant(row)]
                tensors += store.read_texts(row) if self.manifest.texts_inline else []
                arrays = [array for each in tensors for array in each.values()]
                moved[row] = draft.append(store.sample(row), arrays)
            restated = []  # with the variants that lie in other shards
            for row in store.index.rows_of_same_samples(rows).tolist():
                sample = store.sample(row)
                restated.append(sample.placed(moved[row]) if row in moved else sample)
            self.commit([draft], restated)
            progress(len(rows))
        for rows in texts.values():
            draft = self.new_text_shard()
            text_rows = []
            for row in rows.tolist():
                text = self.index.text(row)
                states = list(store.read_text(text.text_key).values())
                text_rows.append(replace(text, place=draft.append(text, states)))
            self.commit([draft], texts=text_rows)
            progress(len(rows))
        self.reload()

    def refresh_views(self) -> None:
        """Bring what plain readers see (`live`, `text_key`, `shards.txt`) to the last commit."""
        self.reload()
        if shards_with_dead_rows(self.index) and self.manifest.texts_inline:
            return  # `shards.txt` stays at the last state that was whole
        present = with_files(self.root, self.index)
        for _, files in view_files(self.manifest, self.index, present):
            for path in outdated(self.root, files):
                self.root.replace(path, files[path], self.staging)

    def _new_name(self) -> str:
        self._num_shards += 1
        return f"{self.writer}-{self._num_shards:06d}"


def _bounds_of_restatements(samples: pa.Table) -> list[int]:
    """Cut rows that are sorted by sample into parts that keep the variants of a sample together."""
    words = id_words(samples["sample_id"])
    starts = np.flatnonzero(np.append(True, (words[1:] != words[:-1]).any(axis=1)))
    bounds = [0]
    while bounds[-1] + ROWS_OF_A_RESTATEMENT < len(words):
        wanted = bounds[-1] + ROWS_OF_A_RESTATEMENT
        later = starts[np.searchsorted(starts, wanted) :]
        if not len(later):
            break
        bounds.append(int(later[0]))
    return [*bounds, len(words)]


def check_target(location: Location | Folder, manifest: Manifest) -> None:
    """Check that a folder holds this bake, or may become a store; nothing is changed.

    Raises:
        OtherBakeError: it holds another bake.
        NotAStoreError: it holds something else.
    """
    root = folder_of(location)
    may_become_a_store = _may_become_a_store(root)
    if root.sizes([MANIFEST_NAME]):  # asked last, for another writer may be making one
        check_same_bake(root, read_manifest(root), manifest)
    elif not may_become_a_store:
        raise NotAStoreError(
            f"{root} is not empty and not a prebake store. Choose an --out that does not exist yet."
        )


def _may_become_a_store(root: Folder) -> bool:
    """Whether `root` is absent, empty, or was left by a writer killed before its manifest."""
    if isinstance(root, LocalFolder) and root.path.exists() and not root.path.is_dir():
        return False
    names = set(root.names())
    if not names <= {LOCK_NAME, STAGING_FOLDER, INDEX_FOLDER}:
        return False
    return not names or bool(root.sizes([LOCK_NAME]))  # the first to be made, the last to be listed
