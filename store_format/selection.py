"""What a copy takes from its sources: rows of several stores side by side.

N rows, in the order of the stores and of the rows in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store_format.errors import PrebakeError
from store_format.index import Ints, id_bytes, shard_codes
from store_format.keys import sample_id
from store_format.rows import SAMPLE_SCHEMA, SampleRow, sample_row
from store_format.store import Store

ROWS_AT_ONCE = 1024  # as Python objects


@dataclass(frozen=True)
class Part:
    """What a copy takes from one store.

    Attributes:
        store: the open store.
        rows: its rows to take, sorted, with all variants of each sample.
        renamed: for each source that gets another name in the copy, this name.
    """

    store: Store
    rows: Ints
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def whole(cls, store: Store, renamed: Mapping[str, str] | None = None) -> "Part":
        """Return all of a store."""
        return cls(store, np.arange(len(store)), renamed or {})

    @cached_property
    def names(self) -> dict[str, pa.ChunkedArray]:
        """`sample_id` and `source` of all rows of the store, as they are in the copy."""
        index = self.store.index
        sources = index.sample_details["source"]
        if not self.renamed:
            return {"sample_id": index.samples["sample_id"], "source": sources}
        olds, paths = sources.to_pylist(), index.sample_details["path"].to_pylist()
        new = [self.renamed.get(old, old) for old in olds]
        ids = index.samples["sample_id"].to_pylist()
        for row, (old, path) in enumerate(zip(olds, paths, strict=True)):
            if old in self.renamed:
                ids[row] = bytes.fromhex(sample_id(self.renamed[old], path))
        return {
            "sample_id": pa.chunked_array([pa.array(ids, pa.binary(16))]),
            "source": pa.chunked_array([pa.array(new, pa.string())]),
        }

    def table(self, rows: Ints) -> pa.Table:
        """Return rows of the store in `SAMPLE_SCHEMA`, as they are in the copy but for places."""
        index, at = self.store.index, pa.array(rows)
        columns = {
            name: table[name].take(at)
            for table in (index.samples, index.sample_details)
            for name in table.column_names
        }
        columns |= {name: column.take(at) for name, column in self.names.items()}
        ordered = [columns[name] for name in SAMPLE_SCHEMA.names]
        return pa.table(ordered, SAMPLE_SCHEMA.names).cast(SAMPLE_SCHEMA)


def parse_renames(stores: Mapping[str, Store], renames: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return, for stores by the locations that a user gave, the new names of their sources.

    Args:
        stores: open stores by location.
        renames: each `LOCATION=NAME`, or `LOCATION:SOURCE=NAME`.

    Raises:
        PrebakeError: one names no such store or source, or a source more than once.
    """
    names: dict[str, dict[str, str]] = {}
    for text in renames:
        known = [
            location for location in stores if text.startswith((f"{location}=", f"{location}:"))
        ]
        if not known:
            raise PrebakeError(
                f"--rename {text!r}: expected STORE=NAME or STORE:SOURCE=NAME with one of the "
                f"stores {', '.join(stores)}."
            )
        location = max(known, key=len)
        rest = text.removeprefix(location)
        sources = stores[location].index.sample_details["source"].unique().to_pylist()
        having = [source for source in sources if rest.startswith(f":{source}=")]
        if rest.startswith("=") and len(sources) == 1:
            source, name = sources[0], rest.removeprefix("=")
        elif having:
            source = max(having, key=len)
            name = rest.removeprefix(f":{source}=")
        else:
            raise PrebakeError(
                f"--rename {text!r}: {location} has the sources {', '.join(sorted(sources))}. Name "
                f"one: --rename {location}:SOURCE=NAME."
            )
        if not name or set(name) & set("/\\\0"):
            raise PrebakeError(f"--rename {text!r}: the new name is empty or has a slash in it.")
        if source in names.setdefault(location, {}):
            raise PrebakeError(f"--rename {text!r}: {source} of {location} has a new name already.")
        names[location][source] = name
    return names


class Rows:
    """The rows of several parts side by side.

    Attributes:
        parts: these parts.
        part: of each row its part: [N].
        row: its number in the part's store: [N].
        ids: its sample id in the copy: [N, 16].
        sample: the number of its sample among those of all parts, without looking for equal ids:
            [N], ascending.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.part = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
        self.row = np.concatenate([part.rows for part in parts])
        self.ids = np.concatenate([id_bytes(p.names["sample_id"])[p.rows] for p in parts])
        old_ids = [id_bytes(p.store.index.samples["sample_id"])[p.rows] for p in parts]
        starts = differs_from_before(np.concatenate(old_ids))
        starts |= differs_from_before(self.part[:, None])
        self.sample = np.cumsum(starts) - 1

    def column(self, name: str) -> NDArray[Any]:
        """Return a numeric column of the index: [N]."""
        return np.concatenate([part.store.index.column(name)[part.rows] for part in self.parts])

    def num_samples(self, at: Ints) -> int:
        """Return how many samples the rows at some positions belong to."""
        return len(np.unique(self.sample[at]))

    def keys(self, at: Ints) -> pa.Array:
        """Return id and variant of the rows at some positions as one binary value each."""
        variant = self.column("variant")[at].astype("<i2").view(np.uint8).reshape(-1, 2)
        return as_binary(np.concatenate([self.ids[at], variant], axis=1))

    def table(self, at: Ints) -> pa.Table:
        """Return the rows at some positions, in `SAMPLE_SCHEMA`."""
        part = self.part[at]
        tables = [self.parts[p].table(self.row[at[part == p]]) for p in np.unique(part)]
        by_part = np.argsort(part, kind="stable")
        whole = pa.concat_tables([SAMPLE_SCHEMA.empty_table(), *tables])
        return whole.take(pa.array(np.argsort(by_part)))

    def samples(self, at: Ints) -> Iterator[tuple[SampleRow, Part, int]]:
        """Yield the rows at some positions, each with its part and its number there."""
        for start in range(0, len(at), ROWS_AT_ONCE):
            some = at[start : start + ROWS_AT_ONCE]
            for position, record in zip(some.tolist(), self.table(some).to_pylist(), strict=True):
                part = self.parts[self.part[position]]
                yield sample_row(record), part, int(self.row[position])


def as_binary(values: NDArray[np.uint8]) -> pa.Array:
    """Return [N, bytes] as N values of Arrow's fixed-size binary."""
    kind = pa.binary(values.shape[1])
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), buffers)


def differs_from_before(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each row of [N, ...] whether it differs from the one before: [N]."""
    starts = np.ones(len(values), bool)
    starts[1:] = (values[1:] != values[:-1]).any(axis=1)
    return starts


def bounds_of(numbers: NDArray[Any]) -> Ints:
    """Return where each run of equal numbers begins, and the end: [runs + 1]."""
    starts = np.flatnonzero(differs_from_before(numbers[:, None]))
    return np.concatenate([starts, np.array([len(numbers)], np.int64)])


def copying_order(rows: Rows, at: Ints) -> Ints:
    """Sort positions by bucket, then as the rows lie in their stores; variants stay together.

    Args:
        rows: all rows.
        at: positions, by (sample id, variant).
    """
    bucket = rows.column("bucket_width_px").astype(np.int64) << 32 | rows.column("bucket_height_px")
    shard = np.concatenate([_shard_ranks(part) for part in rows.parts])
    bounds = bounds_of(rows.sample[at])
    lead = np.repeat(at[bounds[:-1]], np.diff(bounds))  # of each row its sample's first
    keys = rows.column("row")[lead], shard[lead], rows.part[lead], bucket[lead]
    order: Ints = at[np.lexsort((np.arange(len(at)), *keys))]
    return order


def _shard_ranks(part: Part) -> Ints:
    """Return for each row of a part where its shard stands among those of its store."""
    names, codes = shard_codes(part.store.index.samples)
    ranks = {name: rank for rank, name in enumerate(part.store.index.shards)}
    return np.array([ranks.get(name, -1) for name in names], np.int64)[codes[part.rows]]
