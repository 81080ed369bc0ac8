"""What plain readers meet in a shard, compared with FORMAT.md, section 7, and with the index.

A hash in the index only says that a file is what its writer wrote. Here it is checked that the
writer wrote what the format says: a reader that knows tar and npy, or Zarr, and nothing of prebake
then sees the same samples with the same tensors. Nothing is unpacked and nothing is executed.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.commits import FileEntry, ShardEntry
from store_format.errors import DamagedStoreError
from store_format.index import Ints, id_bytes, list_starts, list_values
from store_format.keys import canonical_json
from store_format.manifest import TensorSpec
from store_format.rows import SampleRow, TextRow, sample_row, text_row
from store_format.store import Store
from store_format.strict_json import parse_json

CRC_BYTES = zarr_layout.CRC_BYTES
MAX_METADATA_BYTES = 1 << 20  # of a zarr.json, which has less than 2 kB
_ROWS_AT_ONCE = 1024


class WrongStructureError(ValueError):
    """A file of a shard is not what the format says; the message says how."""


@dataclass(frozen=True)
class ShardFacts:
    """A shard as the manifest and the index describe it.

    Attributes:
        store: whose it is.
        entry: what its commit states.
        rows: its live rows, in the order in which they lie; positions in the index of their kind.
        places: where each of them lies: its row in the shard.
        cells: (w, h) of its bucket in latent cells; None for texts.
    """

    store: Store
    entry: ShardEntry
    rows: Ints
    places: NDArray[np.int32]
    cells: tuple[int, int] | None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that each row has once."""
        manifest = self.store.manifest
        return manifest.variant_tensors if self.entry.kind == "samples" else manifest.text_tensors

    @cached_property
    def table(self) -> pa.Table:
        """What the index has of the live rows for reading."""
        return _table(self.store, self.entry).take(pa.array(self.rows))

    @cached_property
    def spots(self) -> tuple[NDArray[np.int32], Ints, NDArray[np.uint32]]:
        """Where each live row begins in the lists of offsets and of crc32c, and these lists."""
        offsets, crcs = (list_values(self.table[name]) for name in ("offsets", "crc32c"))
        return list_starts(self.table["offsets"]), offsets, crcs

    def described(self) -> Iterator[SampleRow | TextRow]:
        """Yield the live rows in full."""
        of_samples = self.entry.kind == "samples"
        index = self.store.index
        details = index.sample_details if of_samples else index.text_details
        for start in range(0, len(self.rows), _ROWS_AT_ONCE):
            rows = pa.array(self.rows[start : start + _ROWS_AT_ONCE])
            records = self.table.slice(start, _ROWS_AT_ONCE).to_pylist()
            for record, more in zip(records, details.take(rows).to_pylist(), strict=True):
                yield sample_row(record | more) if of_samples else text_row(record | more)


def _table(store: Store, entry: ShardEntry) -> pa.Table:
    return store.index.samples if entry.kind == "samples" else store.index.texts


def shard_facts(store: Store, entry: ShardEntry, rows: Ints) -> ShardFacts:
    """Return what the index says of a shard whose live rows are `rows`, in any order.

    Raises:
        WrongStructureError: it cannot be, whatever is in the shard's files.
    """
    places = _table(store, entry)["row"].to_numpy()[rows]
    order = np.argsort(places, kind="stable")
    rows, places = rows[order], places[order]
    if (np.diff(places) == 0).any():
        raise WrongStructureError("the index has two live rows at the same row of it")
    cells = None
    if entry.kind == "samples":
        buckets, bucket_of_row = store.index.bucket_codes
        width, height = buckets[bucket_of_row[rows[0]]]
        if (bucket_of_row[rows] != bucket_of_row[rows[0]]).any():
            raise WrongStructureError("the index has live rows of several buckets in it")
        if width % store.manifest.downscale or height % store.manifest.downscale:
            raise WrongStructureError(
                f"bucket {width} x {height} px is no multiple of {store.manifest.downscale}"
            )
        cells = store.manifest.cells((width, height))
    facts = ShardFacts(store, entry, rows, places, cells)
    _check_stated_files(facts)
    return facts


def _check_stated_files(facts: ShardFacts) -> None:
    """Raise WrongStructureError unless the commit lists the files that a shard has, and no other.

    Each must have the size that the stated number of rows gives it.
    """
    sizes = {file.path: file.bytes for file in facts.entry.files}
    expected = _expected_files(facts)
    if sizes.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - sizes), sorted(sizes.keys() - expected)
        what = f"does not list {missing[0]}" if missing else f"lists {extra[0]}"
        raise WrongStructureError(f"the commit that adds it {what}")
    for path, (least, most) in expected.items():
        if not least <= sizes[path] <= most:
            raise WrongStructureError(
                f"{path}: {sizes[path]} bytes are stated, but {facts.entry.rows} rows have "
                f"{least}{'' if least == most else ' or more'}"
            )


def _expected_files(facts: ShardFacts) -> dict[str, tuple[int, int]]:
    """Return the files of a shard, by path, each with the fewest and the most bytes it can have."""
    name, num_rows = facts.entry.name, facts.entry.rows
    row_bytes = [spec.row_bytes(facts.cells) for spec in facts.specs]
    if facts.store.manifest.layout == "webdataset":
        block = webdataset_layout.BLOCK_BYTES
        if facts.entry.kind == "samples":  # of its texts, a sample has one at least
            row_bytes += [spec.row_bytes(None) for spec in facts.store.manifest.text_tensors]
        least = 2 * block + sum(block + num_bytes + -num_bytes % block for num_bytes in row_bytes)
        return {webdataset_layout.tar_file(name): (num_rows * least + 2 * block, 1 << 62)}
    files = {f"{name}/zarr.json": (1, MAX_METADATA_BYTES)}
    for spec, num_bytes in zip(facts.specs, row_bytes, strict=True):
        size = num_rows * (num_bytes + CRC_BYTES + 16) + CRC_BYTES
        files[f"{name}/{spec.name}/zarr.json"] = (1, MAX_METADATA_BYTES)
        files[zarr_layout.tensor_file(name, spec)] = (size, size)
    for array, (shape, dtype) in zarr_layout.plain_arrays(facts.entry.kind, num_rows).items():
        size = math.prod(shape) * dtype.itemsize
        files[f"{name}/{array}/zarr.json"] = (1, MAX_METADATA_BYTES)
        files[zarr_layout.plain_array_file(f"{name}/{array}", shape)] = (size, size)
    return files


@contextmanager
def open_file(store: Store, entry: FileEntry) -> Iterator[int]:
    """Open a file of a shard; what goes wrong with it becomes a WrongStructureError that names it.

    Yields:
        A file descriptor.
    """
    try:
        descriptor = store.root.open(entry.path, entry.bytes, entry.sha256)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        what = f"it cannot be read ({error.strerror or error})"
        raise WrongStructureError(f"{entry.path}: {what}") from None
    except DamagedStoreError as error:
        raise WrongStructureError(str(error)) from None
    except WrongStructureError as error:
        raise WrongStructureError(f"{entry.path}: {error}") from None


def read_exactly(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Return bytes of a file, which must have as many."""
    data = os.pread(descriptor, num_bytes, offset)
    if len(data) < num_bytes:
        raise WrongStructureError("it ends early")
    return data


def zarr_problems(facts: ShardFacts) -> Iterator[str]:
    """Yield what Zarr readers would not find as it should be, a line a file."""
    entry = facts.entry
    metadata = zarr_layout.metadata_files(
        entry.name, entry.kind, facts.specs, facts.cells, entry.rows
    )
    by_path = {file.path: file for file in entry.files}
    checks = [(path, _metadata_check(expected)) for path, expected in metadata.items()]
    for number, spec in enumerate(facts.specs):
        path = zarr_layout.tensor_file(entry.name, spec)
        checks.append((path, _tensor_check(facts, spec, number)))
    for name, (shape, dtype) in zarr_layout.plain_arrays(entry.kind, entry.rows).items():
        path = zarr_layout.plain_array_file(f"{entry.name}/{name}", shape)
        checks.append((path, _plain_array_check(facts, name, shape, dtype)))
    for path, check in checks:
        try:
            with open_file(facts.store, by_path[path]) as descriptor:
                check(descriptor, by_path[path].bytes)
        except WrongStructureError as error:
            yield str(error)


Check = Callable[[int, int], None]  # of an open file of so many bytes


def _metadata_check(expected: bytes) -> Check:
    def check(descriptor: int, num_bytes: int) -> None:
        check_metadata(read_exactly(descriptor, num_bytes, 0), expected)

    return check


def check_metadata(found: bytes, expected: bytes) -> None:
    """Raise WrongStructureError unless two `zarr.json` mean the same."""
    if found == expected:
        return
    try:
        value = parse_json(found)
    except ValueError as error:
        raise WrongStructureError(f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise WrongStructureError("it is no JSON object")
    wanted = parse_json(expected)
    for key in sorted(value.keys() | wanted.keys()):
        if key == "attributes" and isinstance(value.get(key, {}), dict):
            continue  # of no matter to any reader
        if key == "storage_transformers" and key not in value:
            continue  # none, then
        if key not in value or key not in wanted:
            what = "is missing" if key in wanted else "is unknown"
            raise WrongStructureError(f"{key!r} {what}")
        if canonical_json(value[key]) != canonical_json(wanted[key]):
            shown = canonical_json(value[key]).decode()
            raise WrongStructureError(
                f"{key} is {shown[:200]}, expected {canonical_json(wanted[key]).decode()}"
            )


def _tensor_check(facts: ShardFacts, spec: TensorSpec, number: int) -> Check:
    """Return a check of the file of the shard's tensor `number`: its shard index and its crc32c."""

    def check(descriptor: int, num_bytes: int) -> None:
        row_bytes = spec.row_bytes(facts.cells)
        chunk_bytes = row_bytes + CRC_BYTES
        index = zarr_layout.sharding_index(facts.entry.rows, chunk_bytes)
        start = facts.entry.rows * chunk_bytes
        if read_exactly(descriptor, len(index), start) != index:
            raise WrongStructureError(
                f"its shard index does not say that {facts.entry.rows} rows of {chunk_bytes} bytes "
                f"lie one after the other"
            )
        starts, offsets, crcs = facts.spots
        places = facts.places
        if (offsets[starts[:-1] + number] != places.astype(np.int64) * chunk_bytes).any():
            raise WrongStructureError("the index places a row elsewhere than Zarr readers do")
        crc_of_row = dict(zip(places.tolist(), crcs[starts[:-1] + number].tolist(), strict=True))
        for row in range(facts.entry.rows):
            offset = row * chunk_bytes + row_bytes
            stored = int.from_bytes(read_exactly(descriptor, CRC_BYTES, offset), "little")
            expected = crc_of_row.get(row)
            if expected is None:  # a dead row: the index knows nothing of it any more
                data = read_exactly(descriptor, row_bytes, offset - row_bytes)
                expected = google_crc32c.value(data)
            if stored != expected:
                raise WrongStructureError(f"the crc32c that is stored after row {row} is wrong")

    return check


def _plain_array_check(
    facts: ShardFacts, name: str, shape: Sequence[int], dtype: np.dtype[Any]
) -> Check:
    """Return a check of the array `sample_id`, `variant` or `text_key` against the index."""

    def check(descriptor: int, num_bytes: int) -> None:
        found = np.frombuffer(read_exactly(descriptor, num_bytes, 0), dtype).reshape(shape)
        column = facts.table[name]
        expected = column.to_numpy() if name == "variant" else id_bytes(column)
        wrong = (found[facts.places] != expected).reshape(len(facts.rows), -1).any(axis=1)
        if wrong.any():
            row = facts.places[wrong.argmax()]
            raise WrongStructureError(f"row {row} is of another {name} than the index says")

    return check
