"""Questions to a store's index in SQL, which DuckDB answers.

A condition is an expression over one table, a row for each live (sample, variant). DuckDB parses
it, and is cut off from files, the network, its own settings and the variables of this process.
"""

from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from store_format.errors import PrebakeError
from store_format.index import Ints
from store_format.rows import SAMPLE_SCHEMA
from store_format.store import Store

ROWS_AT_ONCE = 2048
_ROW = "live_row"  # where a row is among the live ones
_MADE_COLUMNS = {
    "bucket": "bucket_width_px || 'x' || bucket_height_px",
    "caption": "captions[1]",
    "num_texts": "len(captions)",
}
COLUMNS = [*(name for name in SAMPLE_SCHEMA.names if name != "dropped"), *_MADE_COLUMNS]


def select_rows(store: Store, where: str) -> Ints:
    """Return the rows of the samples that a condition selects, sorted, with all their variants.

    Args:
        store: what to look through.
        where: an SQL condition over `COLUMNS`.

    Raises:
        PrebakeError: the condition is no valid one, or nothing meets it.
    """
    batches = _answer(store, where, _ROW, order=_ROW)
    rows = np.concatenate([np.zeros(0, np.int64), *(batch[_ROW].to_numpy() for batch in batches)])
    if not len(rows):
        raise PrebakeError(
            f"--where {where!r} selects none of the {len(store)} rows of {store.root}. "
            f"'prebake store ls {store.root}' lists them."
        )
    return store.index.rows_of_same_samples(rows)


def list_rows(store: Store, where: str | None, *columns: str) -> Iterator[dict[str, Any]]:
    """Yield some columns of the rows that a condition selects, by source, path and variant.

    Raises:
        PrebakeError: the condition is no valid one.
    """
    order = "source, path, variant"
    for batch in _answer(store, where or "true", ", ".join(columns), order):
        yield from batch.to_pylist()


def _answer(store: Store, where: str, columns: str, order: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows that meet a condition, some at a time."""
    connection = duckdb.connect(
        config={"enable_external_access": "false", "python_enable_replacements": "false"}
    )
    with connection:
        connection.execute("SET enable_progress_bar = false; SET lock_configuration = true")
        table = connection.from_arrow(_table(store)).project(", ".join(_projections()))
        try:
            found = table.filter(where).order(order).project(columns)
            yield from found.to_arrow_reader(ROWS_AT_ONCE)
        except duckdb.Error as error:
            reason = " ".join(str(error).split("\n\nLINE ")[0].split()).rstrip(".?!")
            raise PrebakeError(
                f"--where {where!r}: {reason}. The columns are: {', '.join(COLUMNS)}."
            ) from None


def _table(store: Store) -> pa.Table:
    """Return the live rows with all their columns, as Arrow has them."""
    index = store.index
    columns = {
        name: t[name] for t in (index.samples, index.sample_details) for name in t.column_names
    }
    return pa.table(columns | {_ROW: np.arange(len(store))})


def _projections() -> Iterator[str]:
    """Yield each column as conditions see it; DuckDB works out those that one uses."""
    for name in SAMPLE_SCHEMA.names:
        kind = SAMPLE_SCHEMA.field(name).type
        if pa.types.is_fixed_size_binary(kind):
            yield f"lower(hex({name})) AS {name}"
        elif pa.types.is_list(kind) and pa.types.is_fixed_size_binary(kind.value_type):
            yield f"[lower(hex(key)) FOR key IN {name}] AS {name}"
        elif name in COLUMNS:
            yield name
    yield from (f"{formula} AS {name}" for name, formula in _MADE_COLUMNS.items())
    yield _ROW
