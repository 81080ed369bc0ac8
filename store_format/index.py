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

from store_format.commits import Commit, ShardEntry, read_commits, read_segment
from store_format.errors import DamagedStoreError
from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA, SampleRow, TextRow, sample_row, text_row

Ints = NDArray[np.int64]


class LiveIndex:
    """What a store holds now: its commits, its live sample rows and its text rows."""

    def __init__(self, root: Path) -> None:
        """Read all commits of the store at `root`.

        Raises:
            DamagedStoreError: a commit or a segment is damaged.
        """
        self.commits: list[Commit] = read_commits(root)
        self.shards: dict[str, ShardEntry] = {
            shard.name: shard for commit in self.commits for shard in commit.shards
        }
        all_samples, commit_of_row = _concatenate(root, self.commits, "samples", SAMPLE_SCHEMA)
        order = _live_order(all_samples, commit_of_row)
        self.samples: pa.Table = all_samples.take(pa.array(order)).combine_chunks()
        self.num_dead_rows = int(
            all_samples.num_rows - len(order) - pc.sum(all_samples["dropped"]).as_py()
            if all_samples.num_rows
            else 0
        )
        all_texts, _ = _concatenate(root, self.commits, "texts", TEXT_SCHEMA)
        self.texts: pa.Table = all_texts.take(pa.array(_last_of_key(all_texts))).combine_chunks()
        self._check_shards()

    def __len__(self) -> int:
        return int(self.samples.num_rows)

    @property
    def last_sequence(self) -> int:
        """The highest sequence number in use, 0 for a store without commits."""
        return max((commit.sequence for commit in self.commits), default=0)

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

    def rows_by_shard(self) -> dict[str, Ints]:
        """Return, for each live sample shard, its live rows (positions in this index)."""
        names = self.samples["shard"].combine_chunks().dictionary_encode()
        codes = np.asarray(names.indices.to_numpy(zero_copy_only=False))
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1))
        return {
            name.as_py(): order[bounds[i] : bounds[i + 1]]
            for i, name in enumerate(names.dictionary)
        }

    def _check_shards(self) -> None:
        for table in (self.samples, self.texts):
            for name in pc.unique(table["shard"]).to_pylist():
                if name not in self.shards:
                    raise DamagedStoreError(f"the index names shard {name}, which no commit lists.")


def id_bytes(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Return a fixed_size_binary(16) column as [rows, 16] uint8."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if len(array) == 0:
        return np.zeros((0, 16), np.uint8)
    data = np.frombuffer(array.buffers()[1], np.uint8)
    return data[array.offset * 16 : (array.offset + len(array)) * 16].reshape(-1, 16)


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
    words = id_bytes(table["sample_id"]).view(">u8")  # [rows, 2]
    variant = table["variant"].combine_chunks().to_numpy(zero_copy_only=False)
    dropped = table["dropped"].combine_chunks().to_numpy(zero_copy_only=False)
    order = np.lexsort((variant, commit_of_row, words[:, 1], words[:, 0]))
    sorted_words = words[order]
    starts_group = np.ones(len(order), bool)
    starts_group[1:] = (sorted_words[1:] != sorted_words[:-1]).any(axis=1)
    group = np.cumsum(starts_group) - 1
    last_of_group = np.append(np.flatnonzero(starts_group)[1:], len(order)) - 1
    deciding_commit = commit_of_row[order[last_of_group]][group]
    live = (commit_of_row[order] == deciding_commit) & ~dropped[order]
    return np.asarray(order[live], dtype=np.int64)


def _last_of_key(table: pa.Table) -> Ints:
    """Return, for each text key, its last row; ordered by key."""
    words = id_bytes(table["text_key"]).view(">u8") if table.num_rows else np.zeros((0, 2), ">u8")
    order = np.lexsort((np.arange(len(words)), words[:, 1], words[:, 0]))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (words[order][1:] != words[order][:-1]).any(axis=1)
    return np.asarray(order[is_last], dtype=np.int64)
