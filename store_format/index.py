"""The live rows of a store, resolved from its commits (FORMAT.md, section 6).

What reading tensors takes is loaded at once; captions, paths and the like (*details*) when somebody
asks, for a million rows of them would not fit beside it in a training process. Strings stay in
Arrow tables; what every read needs is held as numpy arrays, one entry a row.
R live sample rows in the order of (sample_id, variant); S shards.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format.commits import (
    Commit,
    FileEntry,
    Segment,
    ShardEntry,
    damaged_index,
    heads,
    parse_segment,
    read_commits,
    rows_of_groups,
)
from store_format.errors import DamagedStoreError
from store_format.folders import Folder, Location, folder_of
from store_format.rows import (
    SAMPLE_SCHEMA,
    TEXT_SCHEMA,
    SampleRow,
    TextRow,
    detail_schema,
    reading_schema,
    sample_row,
    text_row,
)

Ints = NDArray[np.int64]
Kind = Literal["samples", "texts"]
SCHEMAS: dict[Kind, pa.Schema] = {"samples": SAMPLE_SCHEMA, "texts": TEXT_SCHEMA}
REMEMBERED_ROWS = 1 << 18  # of details that were asked for one by one


class LiveIndex:
    """What a store holds now: its commits, its live sample rows and its text rows."""

    def __init__(self, location: Location | Folder) -> None:
        """Read all commits of the store at `location`.

        Raises:
            DamagedStoreError: a commit or a segment is damaged, or what they say is impossible.
        """
        self.root = folder_of(location)
        self.commits: list[Commit] = read_commits(self.root)
        self.shards: dict[str, ShardEntry] = {
            shard.name: shard for commit in self.commits for shard in commit.shards
        }
        self._details = {kind: _Details(self.root, self.commits, kind) for kind in SCHEMAS}
        columns = _columns(self.root, self.commits, "samples", reading_schema)
        order = _live_order(columns, self._details["samples"].commit_of_row())
        self._details["samples"].order = order
        num_tombstones = pc.sum(columns["dropped"]).as_py() or 0
        self.num_dead_rows: int = len(columns["dropped"]) - len(order) - num_tombstones
        self.samples: pa.Table = _take(columns, order, reading_schema(SAMPLE_SCHEMA))
        columns = _columns(self.root, self.commits, "texts", reading_schema)
        order = _last_of_key(columns["text_key"])
        self._details["texts"].order = order
        self.texts: pa.Table = _take(columns, order, reading_schema(TEXT_SCHEMA))
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

    @cached_property
    def files(self) -> dict[str, FileEntry]:
        """All files of all shards, by their paths."""
        return {file.path: file for shard in self.shards.values() for file in shard.files}

    @cached_property
    def sample_details(self) -> pa.Table:
        """The columns of all live sample rows that `samples` leaves out."""
        table = self._details["samples"].all()
        captions = list_starts(table["captions"])
        if not np.array_equal(captions, list_starts(self.samples["text_keys"])):
            raise self._wrong("captions and text_keys differ in number")
        return self._without_nulls(table)

    @cached_property
    def text_details(self) -> pa.Table:
        """The columns of all text rows that `texts` leaves out."""
        return self._without_nulls(self._details["texts"].all())

    def whole_samples(self) -> pa.Table:
        """Return all live sample rows with all their columns, as commits hold them."""
        return _whole(self.samples, self.sample_details, SAMPLE_SCHEMA)

    def whole_texts(self) -> pa.Table:
        """Return all text rows with all their columns, as commits hold them."""
        return _whole(self.texts, self.text_details, TEXT_SCHEMA)

    def sample(self, row: int) -> SampleRow:
        """Return one live row in full."""
        record = self.samples.slice(row, 1).to_pylist()[0] | self._details["samples"].of(row)
        captions = record["captions"]
        no_captions = not captions or None in captions or len(captions) != len(record["text_keys"])
        if None in record.values() or no_captions:
            raise self._wrong(f"sample {record['sample_id'].hex()} lacks something")
        return sample_row(record)

    def text(self, row: int) -> TextRow:
        """Return one text row in full."""
        record = self.texts.slice(row, 1).to_pylist()[0] | self._details["texts"].of(row)
        if None in record.values():
            raise self._wrong(f"text {record['text_key'].hex()} lacks something")
        return text_row(record)

    def iter_samples(self) -> Iterator[SampleRow]:
        """Yield all live rows in order."""
        return map(sample_row, _records(self.samples, self.sample_details))

    def iter_texts(self) -> Iterator[TextRow]:
        """Yield all text rows, sorted by key."""
        return map(text_row, _records(self.texts, self.text_details))

    def sample_ids(self) -> NDArray[np.uint8]:
        """Return the ids of the live rows: [R, 16] uint8, sorted."""
        return id_bytes(self.samples["sample_id"])

    def column(self, name: str) -> NDArray[Any]:
        """Return a numeric column of the live rows as a numpy array [R]."""
        table = self.samples if name in self.samples.column_names else self.sample_details
        return np.asarray(as_array(table[name]).to_numpy(zero_copy_only=False))

    def buckets(self) -> NDArray[np.int32]:
        """Return the bucket of each live row: [R, 2] int32, (width, height) in px."""
        return np.stack([self.column("bucket_width_px"), self.column("bucket_height_px")], axis=1)

    @cached_property
    def bucket_codes(self) -> tuple[list[tuple[int, int]], NDArray[np.int32]]:
        """The distinct buckets, and for each live row the position of its own: [R]."""
        packed = self.column("bucket_width_px").astype(np.int64) << 32
        packed |= self.column("bucket_height_px")
        encoded = pa.array(packed).dictionary_encode()
        buckets = [(number >> 32, number & 0xFFFFFFFF) for number in encoded.dictionary.to_pylist()]
        return buckets, encoded.indices.to_numpy()

    def rows_of_same_samples(self, rows: Ints) -> Ints:
        """Return the rows of all variants of the samples that `rows` belong to, sorted."""
        starts_sample = _starts_of_equal(id_words(self.samples["sample_id"]))
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
        """Raise DamagedStoreError if a live row cannot be: no read has to doubt the index."""
        for kind, table in (("samples", self.samples), ("texts", self.texts)):
            for problem in _problems(table, kind, self.shards):
                raise self._wrong(problem)

    def _without_nulls(self, table: pa.Table) -> pa.Table:
        for name in _columns_with_nulls(table):
            raise self._wrong(f"{name} of a live row is null")
        return table

    def _wrong(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.root}: the index is wrong in itself: {what}. "
            f"Run 'prebake store verify {self.root}'."
        )


def _problems(table: pa.Table, kind: str, shards: dict[str, ShardEntry]) -> Iterator[str]:
    for name in _columns_with_nulls(table):
        yield f"{name} of a live row is null"
        return
    names, codes = shard_codes(table)
    used = np.unique(codes).tolist()
    for name in [names[code] for code in used]:
        if name not in shards or shards[name].kind != kind:
            yield f"it names shard {name}, which no commit lists among the {kind}"
            return
    num_rows = np.zeros(len(names), np.int64)
    num_rows[used] = [shards[names[code]].rows for code in used]
    row = table["row"].to_numpy()
    if ((row < 0) | (row >= num_rows[codes])).any():
        yield "it names a row that its shard does not have"
    if not _equally_long(table, "offsets", "crc32c"):
        yield "offsets and crc32c differ in number"
    if kind == "texts":
        return
    if not _equally_long(table, "text_keys", "text_weights"):
        yield "text_keys and text_weights differ in number"
    if (np.diff(list_starts(table["text_keys"])) < 1).any():
        yield "a sample has no text"
    if (table["bucket_width_px"].to_numpy() < 1).any():
        yield "a bucket has no width"
    if (table["bucket_height_px"].to_numpy() < 1).any():
        yield "a bucket has no height"
    if (table["variant"].to_numpy() < 0).any():
        yield "a variant is negative"
    for weights in (table["weight"].to_numpy(), list_values(table["text_weights"])):
        if not (np.abs(weights) <= np.finfo(np.float32).max).all():  # NaN is not either
            yield "a weight is no number that float32 has"
    same_sample = (np.diff(id_words(table["sample_id"]), axis=0) == 0).all(axis=1)
    if (same_sample & (np.diff(table["variant"].to_numpy()) == 0)).any():
        yield "a variant of a sample is there twice"


def _columns_with_nulls(table: pa.Table) -> list[str]:
    return [
        name
        for name in table.column_names
        if table[name].null_count
        or (pa.types.is_list(table[name].type) and pc.list_flatten(table[name]).null_count)
        or (pa.types.is_map(table[name].type) and table[name].combine_chunks().items.null_count)
    ]


def _rows_by_shard(table: pa.Table) -> dict[str, Ints]:
    names, codes = shard_codes(table)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
    parts = {name: order[bounds[i] : bounds[i + 1]] for i, name in enumerate(names)}
    return {name: rows for name, rows in parts.items() if len(rows)}


def shard_codes(table: pa.Table) -> tuple[list[str], NDArray[np.int32]]:
    """Return the shard names of a table, and for each row the position of its own."""
    encoded = as_array(table["shard"])
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _equally_long(table: pa.Table, *names: str) -> bool:
    starts = [list_starts(table[name]) for name in names]
    return all(np.array_equal(starts[0], other) for other in starts[1:])


def as_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array: itself where it is one, which `combine_chunks` would copy."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def list_starts(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return where each row's list begins in the flattened values, and the end: [rows + 1]."""
    offsets = as_array(column).offsets.to_numpy()
    return np.asarray(offsets - offsets[0] if offsets[0] else offsets, np.int32)


def list_values(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return the flattened values of a list column."""
    return np.asarray(as_array(column).flatten().to_numpy(zero_copy_only=False))


def counted_keys(lists: pa.ChunkedArray) -> NDArray[np.uint32]:
    """Return, for each list of 16-byte keys, their number in 4 bytes and then the keys."""
    starts = list_starts(lists).astype(np.int64)
    words_per_key = 4
    words = np.empty(len(lists) + words_per_key * starts[-1], "<u4")
    is_key = np.ones(len(words), bool)
    is_key[np.arange(len(lists)) + words_per_key * starts[:-1]] = False
    words[~is_key] = np.diff(starts)
    words[is_key] = id_bytes(pc.list_flatten(lists)).reshape(-1).view("<u4")
    return words


def id_bytes(column: pa.ChunkedArray) -> NDArray[np.uint8]:
    """Return a fixed_size_binary(16) column as [rows, 16] uint8."""
    array = as_array(column)
    if len(array) == 0:
        return np.zeros((0, 16), np.uint8)
    data = np.frombuffer(array.buffers()[1], np.uint8)
    return data[array.offset * 16 : (array.offset + len(array)) * 16].reshape(-1, 16)


def id_words(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a fixed_size_binary(16) column as [rows, 2] big-endian words, which sort as ids do."""
    return id_bytes(column).view(">u8")


def rows_with_id(ids: NDArray[np.uint8], wanted: str) -> range:
    """Return the rows of an id, in hex, among sorted `ids` [rows, 16]."""
    rows, key = range(len(ids)), bytes.fromhex(wanted)
    start = bisect_left(rows, key, key=lambda row: ids[row].tobytes())
    return range(start, bisect_right(rows, key, lo=start, key=lambda row: ids[row].tobytes()))


@dataclass
class _Details:
    """The columns of one kind of rows that are read when somebody asks."""

    root: Folder
    commits: list[Commit]
    kind: Kind
    order: Ints | None = None  # for each live row its position among the rows of all commits

    def __post_init__(self) -> None:
        self._schema = detail_schema(SCHEMAS[self.kind])
        self._segments = [
            (number, segment)
            for number, commit in enumerate(self.commits)
            if (segment := getattr(commit.segments, self.kind)) is not None
        ]
        sizes = [segment.rows for _, segment in self._segments]
        self._starts = np.cumsum([0, *sizes])  # of each segment among the rows of all commits
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._whole: pa.Table | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_groups": OrderedDict(), "_whole": None}

    def commit_of_row(self) -> NDArray[np.int32]:
        """Return, for each row of all commits, the number of its commit."""
        numbers = np.array([number for number, _ in self._segments], np.int32)
        return np.repeat(numbers, np.diff(self._starts))

    def all(self) -> pa.Table:
        """Return them for all live rows."""
        assert self.order is not None
        columns = _columns(self.root, self.commits, self.kind, detail_schema)
        self._whole = _take(columns, self.order, detail_schema(SCHEMAS[self.kind]))
        return self._whole

    def of(self, row: int) -> dict[str, Any]:
        """Return those of one live row, without reading those of all."""
        assert self.order is not None
        if self._whole is not None:
            whole: dict[str, Any] = self._whole.slice(row, 1).to_pylist()[0]
            return whole
        position = int(self.order[row])
        which = int(np.searchsorted(self._starts, position, side="right")) - 1
        position -= int(self._starts[which])
        for (segment, start), table in self._groups.items():
            if segment == which and start <= position < start + table.num_rows:
                found: dict[str, Any] = table.slice(position - start, 1).to_pylist()[0]
                return found
        self._load_group(which, position)
        return self.of(row)

    def _load_group(self, which: int, position: int) -> None:
        """Read the row group that holds a row of a segment; forget older ones beyond a limit."""
        segment = self._segments[which][1]
        data, where = _read_segment(self.root, segment), self.root.at(segment.path)
        parse_segment(data, segment, pa.schema([]), where)
        start = 0
        for group, num_rows in enumerate(rows_of_groups(data)):
            if position < start + num_rows:
                table = parse_segment(data, segment, self._schema, where, group)
                self._groups[which, start] = table
                break
            start += num_rows
        while sum(table.num_rows for table in self._groups.values()) > REMEMBERED_ROWS:
            self._groups.popitem(last=False)


def _read_segment(root: Folder, segment: Segment) -> bytes:
    try:
        return root.read(segment.path)
    except OSError as error:
        raise damaged_index(root.at(segment.path), error) from None


def _records(*tables: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of several tables of equal length, side by side, as dictionaries."""
    step = 4096
    for start in range(0, tables[0].num_rows, step):
        parts = [table.slice(start, step).to_pylist() for table in tables]
        for records in zip(*parts, strict=True):
            yield {name: value for record in records for name, value in record.items()}


def _whole(reading: pa.Table, details: pa.Table, schema: pa.Schema) -> pa.Table:
    named = {name: table[name] for table in (reading, details) for name in table.column_names}
    return pa.table([named[name] for name in schema.names], names=schema.names).cast(schema)


def _columns(
    root: Folder, commits: list[Commit], kind: Kind, columns: Callable[[pa.Schema], pa.Schema]
) -> dict[str, pa.ChunkedArray]:
    """Return some columns of all rows of a kind, commit by commit."""
    schema = columns(SCHEMAS[kind])
    segments: list[Segment] = [
        segment for commit in commits if (segment := getattr(commit.segments, kind)) is not None
    ]
    tables = [schema.empty_table()]
    paths = [segment.path for segment in segments]
    try:
        for segment, data in zip(segments, root.read_all(paths), strict=True):
            tables.append(parse_segment(data, segment, schema, root.at(segment.path)))
    except OSError as error:
        raise damaged_index(root.at(paths[len(tables) - 1]), error) from None
    table = pa.concat_tables(tables).unify_dictionaries()
    return dict(zip(table.column_names, table.columns, strict=True))


def _take(columns: dict[str, pa.ChunkedArray], order: Ints, schema: pa.Schema) -> pa.Table:
    """Return rows of `columns`, which is emptied: one column at a time is there twice."""
    rows = pa.array(order)
    taken = [as_array(columns.pop(name).take(rows)) for name in schema.names]
    return pa.table(taken, schema=schema)


def _live_order(columns: dict[str, pa.ChunkedArray], commit_of_row: NDArray[np.int32]) -> Ints:
    """Return the live rows of all commits, ordered by (sample_id, variant)."""
    words = id_words(columns["sample_id"])
    if not len(words):
        return np.zeros(0, np.int64)
    variant = columns["variant"].to_numpy()
    dropped = columns["dropped"].to_numpy()
    order = _sorted_by(words, commit_of_row, variant)
    starts_group = _starts_of_equal(words[order])
    group = np.cumsum(starts_group) - 1
    last_of_group = np.append(np.flatnonzero(starts_group)[1:], len(order)) - 1
    decides = commit_of_row[order] == commit_of_row[order[last_of_group]][group]
    is_dropped = np.zeros(len(last_of_group), bool)
    is_dropped[group[decides & dropped[order]]] = True
    return np.asarray(order[decides & ~is_dropped[group]], np.int64)


def _last_of_key(keys: pa.ChunkedArray) -> Ints:
    """Return, for each text key, its last row; ordered by key."""
    words = id_words(keys)
    order = _sorted_by(words, np.arange(len(words)))
    starts_next = np.append(_starts_of_equal(words[order]), True)[1:]
    return np.asarray(order[starts_next], np.int64)


def _sorted_by(words: NDArray[np.uint64], *minor: NDArray[Any]) -> Ints:
    """Return the order of rows by id, [rows, 2] words, and among equal ids by each of `minor`."""
    high = words[:, 0].astype(np.uint64)
    order = np.argsort(high)
    is_new = np.append(_starts_of_equal(high[order, None]), True)
    tied = ~(is_new[:-1] & is_new[1:])
    rows = order[tied]  # few, unless many rows are superseded
    keys = (*(key[rows] for key in minor[::-1]), words[rows, 1], high[rows])
    order[tied] = rows[np.lexsort(keys)]
    return order


def _starts_of_equal(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return, for each row of sorted words [rows, 1 or 2], whether it differs from the last."""
    starts = np.ones(len(words), bool)
    starts[1:] = (words[1:] != words[:-1]).any(axis=1)
    return starts
