"""The samples of a store as lines: for people, for programs, for spreadsheets."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.compute as pc

from store_format.sql import list_rows
from store_format.store import Store

COLUMNS = ("sample_id", "variant", "source", "path", "bucket", "captions")
_MAX_PATH_LETTERS = 60  # longer ones push the rest of their line to the right


def list_lines(store: Store, where: str | None, form: str) -> Iterator[str]:
    """Yield a line for each (sample, variant) that a condition selects, by source and path.

    Args:
        store: what to list.
        where: an SQL condition (`sql.select_rows`), None for all.
        form: `table`, `json` (an object a line) or `csv` (captions as a JSON list).

    Raises:
        PrebakeError: the condition is no valid one.
    """
    forms: dict[str, Callable[[Store, Iterator[dict[str, Any]]], Iterator[str]]]
    forms = {"table": _as_table, "json": _as_json, "csv": _as_csv}
    yield from forms[form](store, list_rows(store, where, *COLUMNS))


def _as_json(store: Store, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False)


def _as_csv(store: Store, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="")
    writer.writerow(COLUMNS)
    yield sink.getvalue()
    for row in rows:
        sink.seek(0)
        sink.truncate()
        captions = json.dumps(row["captions"], ensure_ascii=False)
        writer.writerow([*(row[name] for name in COLUMNS[:-1]), captions])
        yield sink.getvalue()


def _as_table(store: Store, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    details = store.index.sample_details
    longest = {
        name: pc.max(pc.utf8_length(details[name])).as_py() or 0 for name in ("source", "path")
    }
    widths = [
        34,  # an id with -V for variant V > 0
        max(6, longest["source"]),
        max(4, min(longest["path"], _MAX_PATH_LETTERS)),
        9,
    ]
    yield _padded(["sample", "source", "path", "bucket", "captions"], widths)
    for row in rows:
        key = row["sample_id"] + (f"-{row['variant']}" if row["variant"] else "")
        captions = " | ".join(row["captions"])
        yield _padded([key, row["source"], row["path"], row["bucket"], captions], widths)


def _padded(cells: list[str], widths: list[int]) -> str:
    """Return cells side by side in one line, whatever is in them."""
    plain = ["".join(c if c.isprintable() else " " for c in cell) for cell in cells]
    padded = [cell.ljust(width) for cell, width in zip(plain, widths, strict=False)]
    return "  ".join([*padded, plain[-1]])
