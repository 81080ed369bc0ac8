"""The live rows of a store, resolved from its commits (FORMAT.md, section 6).

Strings stay in Arrow tables; what every read needs is held as numpy arrays, one entry a row.
R live sample rows in the order of (sample_id, variant); S shards.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format.commits import Commit, ShardEntry, heads, read_commits, read_segment
from store_format.errors import DamagedStoreError
from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA, SampleRow, TextRow, sample_row, text_row

Ints = NDArray[np.int64]


class LiveIndex:
    """What a store holds now: its commits, its live sample rows and its text rows."""

    def __init__(self, root: Path) -> None:
        """Read all commits of the store at `root`.

        Raises:
            DamagedStoreError: a commit or a segment is damaged, or what they say is impossible.
        """
        self.root = root
        self.commits: list[Commit] = read_commits(root)
        self.shards: dict[str, ShardEntry] = {
            shard.name: shard for commit in self.commits for shard in commit.shards
        }
        all_samples, commit_of_row = _concatenate(root, self.commits, "samples", SAMPLE_SCHEMA)
        order = _live_order(all_samples, commit_of_row)
        self.samples: pa.Table = all_samples.take(pa.array(order)).combine_chunks()
        num_tombstones = pc.sum(all_samples["dropped"]).as_py() or 0
        self.num_dead_rows: int = all_samples.num_rows - len(order) - num_tombstones
        all_texts, _ = _concatenate(root, self.commits, "texts", TEXT_SCHEMA)
        self.texts: pa.Table = all_texts.take(pa.array(_last_of_key(all_texts))).combine_chunks()
        self._check()

    def __len__(self) -> int:
        return int(self.samples.num_rows)

    @property
    def last_sequence(self) -> int:
        """The highest sequence number in use, 0 for a store without commits."""
        return max((commit.sequence for commit in self.commits), default=0)

    @property
    def heads(self) -> tuple[str, ...]:
        """The commits on which no other one builds: the parents of the next one."""
        return heads(self.commits)

    def sample(self, row: int) -> SampleRow:
        """Return one live row in full."""
        return sample_row(self.samples.slice(row, 1).to_pylist()[0])

    def iter_samples(self) -> Iterator[SampleRow]:
        """Yield all live rows in order."""
        for batch in self.samples.to_batches(max_chunksize=4096):
            for record in batch.to_pylist():
                yield sample_row(record)

    def iter_texts(self) -> Iterator[TextRow]:
        """Yield all text rows."""
        for batch in self.texts.to_batches(max_chunksize=4096):
            for record in batch.to_pylist():
                yield text_row(record)

    def sample_ids(self) -> NDArray[np.uint8]:
        """Return the ids of the live rows: [R, 16] uint8, sorted."""
        return id_bytes(self.samples["sample_id"])

    def column(self, name: str) -> NDArray[Any]:
        """Return a numeric column of the live rows as a numpy array [R]."""
        return np.asarray(self.samples[name].combine_chunks().to_numpy(zero_copy_only=False))

    def buckets(self) -> NDArray[np.int32]:
        """Return the bucket of each live row: [R, 2] int32, (width, height) in px."""
        return np.stack([self.column("bucket_width_px"), self.column("bucket_height_px")], axis=1)

    def distinct_buckets(self) -> tuple[list[tuple[int, int]], Ints]:
        """Return the distinct buckets, and for each live row the position of its own: [R]."""
        width, height = self.buckets().astype(np.int64).T
        packed, position = np.unique(width << 32 | height, return_inverse=True)
        return [(number >> 32, number & 0xFFFFFFFF) for number in packed.tolist()], position

    def rows_of_same_samples(self, rows: Ints) -> Ints:
        """Return the rows of all variants of the samples that `rows` belong to, sorted."""
        words = id_words(self.samples["sample_id"])
        starts_sample = np.ones(len(self), bool)
        starts_sample[1:] = (words[1:] != words[:-1]).any(axis=1)
        sample = np.cumsum(starts_sample) - 1
        bounds = np.append(np.flatnonzero(starts_sample), len(self))
        wanted = np.unique(sample[rows])
        return np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in wanted])

    def rows_by_shard(self) -> dict[str, Ints]:
        """Return, for each live sample shard, its live rows (positions in this index)."""
        return _rows_by_shard(self.samples)

    def text_rows_by_shard(self) -> dict[str, Ints]:
        """Return, for each live text shard, its text rows (positions in this index)."""
        return _rows_by_shard(self.texts)

    def _check(self) -> None:
        """Raise DamagedStoreError if a live row cannot be: nothing later has to doubt the index."""
        for kind, table in (("samples", self.samples), ("texts", self.texts)):
            for problem in _problems(table, kind, self.shards):
                raise DamagedStoreError(
                    f"{self.root}: the index is wrong in itself: {problem}. "
                    f"Run 'prebake store verify {self.root}'."
                )


def _problems(table: pa.Table, kind: str, shards: dict[str, ShardEntry]) -> Iterator[str]:
    for name in table.column_names:
        column = table[name]
        is_list = pa.types.is_list(column.type)
        if column.null_count or (is_list and pc.list_flatten(column).null_count):
            yield f"{name} of a live row is null"
    for name in pc.unique(table["shard"]).to_pylist():
        if name not in shards or shards[name].kind != kind:
            yield f"it names shard {name}, which no commit lists among the {kind}"
            return
    names = table["shard"].combine_chunks().dictionary_encode()
    num_rows = np.array([shards[name].rows for name in names.dictionary.to_pylist()], np.int64)
    row = table["row"].to_numpy()
    if ((row < 0) | (row >= num_rows[names.indices.to_numpy()])).any():
        yield "it names a row that its shard does not have"
    if not _equally_long(table, "offsets", "crc32c"):
        yield "offsets and crc32c differ in number"
    if kind == "texts":
        return
    if not _equally_long(table, "captions", "text_keys", "text_weights"):
        yield "captions, text_keys and text_weights differ in number"
    if (np.diff(list_starts(table["captions"])) < 1).any():
        yield "a sample has no text"
    if (table["bucket_width_px"].to_numpy() < 1).any():
        yield "a bucket has no width"
    if (table["bucket_height_px"].to_numpy() < 1).any():
        yield "a bucket has no height"
    same_sample = (np.diff(id_words(table["sample_id"]), axis=0) == 0).all(axis=1)
    if (same_sample & (np.diff(table["variant"].to_numpy()) == 0)).any():
        yield "a variant of a sample is there twice"


def _rows_by_shard(table: pa.Table) -> dict[str, Ints]:
    names = table["shard"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1))
    return {
        name: order[bounds[i] : bounds[i + 1]]
        for i, name in enumerate(names.dictionary.to_pylist())
    }


def _equally_long(table: pa.Table, *names: str) -> bool:
    starts = [list_starts(table[name]) for name in names]
    return all(np.array_equal(starts[0], other) for other in starts[1:])


def list_starts(column: pa.ChunkedArray) -> Ints:
    """Return where each row's list begins in the flattened values, and the end: [rows + 1]."""
    lengths = pc.list_value_length(column).to_numpy()
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def list_values(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return the flattened values of a list column."""
    return np.asarray(pc.list_flatten(column).to_numpy())


def id_bytes(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Return a fixed_size_binary(16) column as [rows, 16] uint8."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if len(array) == 0:
        return np.zeros((0, 16), np.uint8)
    data = np.frombuffer(array.buffers()[1], np.uint8)
    return data[array.offset * 16 : (array.offset + len(array)) * 16].reshape(-1, 16)


def id_words(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a fixed_size_binary(16) column as [rows, 2] big-endian words, which sort as ids do."""
    return id_bytes(column).view(">u8")


def _concatenate(
    root: Path, commits: list[Commit], kind: str, schema: pa.Schema
) -> tuple[pa.Table, Ints]:
    """Return all rows of a kind, and for each the position of its commit."""
    tables: list[pa.Table] = []
    positions: list[Ints] = []
    for position, commit in enumerate(commits):
        segment = getattr(commit.segments, kind)
        if segment is not None:
            tables.append(read_segment(root, segment, schema))
            positions.append(np.full(segment.rows, position, np.int64))
    if not tables:
        return schema.empty_table(), np.zeros(0, np.int64)
    return pa.concat_tables(tables).combine_chunks(), np.concatenate(positions)


def _live_order(table: pa.Table, commit_of_row: Ints) -> Ints:
    """Return the live rows of a concatenated table, ordered by (sample_id, variant)."""
    if table.num_rows == 0:
        return np.zeros(0, np.int64)
    words = id_words(table["sample_id"])
    variant = table["variant"].combine_chunks().to_numpy(zero_copy_only=False)
    dropped = table["dropped"].combine_chunks().to_numpy(zero_copy_only=False)
    order = np.lexsort((variant, commit_of_row, words[:, 1], words[:, 0]))
    sorted_words = words[order]
    starts_group = np.ones(len(order), bool)
    starts_group[1:] = (sorted_words[1:] != sorted_words[:-1]).any(axis=1)
    group = np.cumsum(starts_group) - 1
    last_of_group = np.append(np.flatnonzero(starts_group)[1:], len(order)) - 1
    decides = commit_of_row[order] == commit_of_row[order[last_of_group]][group]
    is_dropped = np.zeros(len(last_of_group), bool)
    is_dropped[group[decides & dropped[order]]] = True
    live = decides & ~is_dropped[group]
    return np.asarray(order[live], dtype=np.int64)


def _last_of_key(table: pa.Table) -> Ints:
    """Return, for each text key, its last row; ordered by key."""
    words = id_words(table["text_key"])
    order = np.lexsort((np.arange(len(words)), words[:, 1], words[:, 0]))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (words[order][1:] != words[order][:-1]).any(axis=1)
    return np.asarray(order[is_last], dtype=np.int64)
