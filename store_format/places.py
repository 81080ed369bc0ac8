"""Where tensors lie: what the index says, checked against the sizes of the shards.

T texts of all sample rows, K tensors of a row, S shards. What is there once a row is a view of the
index, so that millions of rows are held once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.errors import DamagedStoreError
from store_format.index import Ints, LiveIndex, as_array, list_starts, list_values, shard_codes
from store_format.manifest import MAX_ROW_BYTES, Manifest, TensorSpec

Spot = tuple[str, int, int]  # of a tensor: its file, relative to the store; its offset; its crc32c


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of sample rows, or of text rows, lie: one after the other in flat lists.

    The lists are memoryviews, out of which single numbers come five times as fast as out of arrays.
    """

    files: list[list[str]]  # [S][K] the file of each tensor in each shard
    shard: memoryview  # [rows] i32 position in `files`
    starts: memoryview  # [rows + 1] i32 where a row begins in the lists
    offsets: memoryview  # [tensors of all rows] i64 bytes
    crc32c: memoryview  # [tensors of all rows] u32

    def of(self, row: int, first: int, k: int) -> Spot:
        """Return where tensor `first + k` of a row lies, in the k-th file of the shard."""
        at = self.starts[row] + first + k
        return self.files[self.shard[row]][k], self.offsets[at], self.crc32c[at]


def file_of(manifest: Manifest, shard: str, spec: TensorSpec) -> str:
    """Return the file, relative to the store, that holds a shard's tensor."""
    if manifest.layout == "zarr":
        return zarr_layout.tensor_file(shard, spec)
    return webdataset_layout.tar_file(shard)


def sample_places(manifest: Manifest, index: LiveIndex) -> Places:
    """Return where the tensors of each live sample row lie, those of inline texts among them.

    Raises:
        DamagedStoreError: the index places one outside of its file.
    """
    specs = manifest.variant_tensors
    places = _places(manifest, index.samples, manifest.tensors if manifest.texts_inline else specs)
    text_starts = list_starts(index.samples["text_keys"])
    num_texts = np.diff(text_starts) if manifest.texts_inline else np.zeros(len(index), np.int32)
    _check_lengths(index, places, len(specs) + num_texts * len(manifest.text_tensors))
    rows = np.arange(len(index))
    buckets, bucket_of_row = index.bucket_codes
    _check_inside(index, places, rows, 0, _row_bytes(manifest, specs, buckets)[bucket_of_row])
    if manifest.texts_inline:
        rows = np.repeat(rows, num_texts)
        number = np.arange(len(rows)) - text_starts[rows]  # of a text in its sample
        first = len(specs) + number * len(manifest.text_tensors)
        row_bytes = _row_bytes(manifest, manifest.text_tensors, [None])
        _check_inside(index, places, rows, first, row_bytes)
    return places


def text_places(manifest: Manifest, index: LiveIndex) -> Places:
    """Return where the tensors of each text row lie.

    Raises:
        DamagedStoreError: the index places one outside of its file.
    """
    rows = np.arange(len(index.texts))
    places = _places(manifest, index.texts, manifest.text_tensors)
    _check_lengths(index, places, np.full(len(rows), len(manifest.text_tensors)))
    _check_inside(index, places, rows, 0, _row_bytes(manifest, manifest.text_tensors, [None]))
    return places


def text_rows_of_texts(index: LiveIndex) -> NDArray[np.int32]:
    """Return, for each text of each sample, one after the other, its text row: [T].

    Raises:
        DamagedStoreError: the index places a sample's text nowhere.
    """
    keys = as_array(index.samples["text_keys"]).flatten()
    found = pc.index_in(keys, value_set=as_array(index.texts["text_key"]))
    if found.null_count:
        missing = keys.filter(pc.is_null(found))[0].as_py().hex()
        raise DamagedStoreError(
            f"{index.root}: a sample names text {missing}, which no text row holds. "
            f"Run 'prebake store verify {index.root}'."
        )
    return np.asarray(found.to_numpy(), np.int32)


def _places(manifest: Manifest, table: pa.Table, specs: Iterable[TensorSpec]) -> Places:
    names, codes = shard_codes(table)
    return Places(
        [[file_of(manifest, name, spec) for spec in specs] for name in names],
        codes.data,
        list_starts(table["offsets"]).data,
        list_values(table["offsets"]).data,
        list_values(table["crc32c"]).data,
    )


def _check_lengths(index: LiveIndex, places: Places, expected: NDArray[np.integer]) -> None:
    """Raise DamagedStoreError unless row r has places for `expected[r]` tensors."""
    if (np.diff(places.starts) != expected).any():
        raise DamagedStoreError(
            f"{index.root}: the index does not place each tensor of each row that the manifest "
            f"declares. Run 'prebake store verify {index.root}'."
        )


def _row_bytes(
    manifest: Manifest, specs: Sequence[TensorSpec], buckets: Sequence[tuple[int, int] | None]
) -> Ints:
    """Return the bytes of a row of each tensor in each bucket: [buckets, K]."""
    cells = [manifest.cells(bucket) if bucket else None for bucket in buckets]
    sizes = [[min(spec.row_bytes(size), MAX_ROW_BYTES + 1) for spec in specs] for size in cells]
    return np.array(sizes, np.int64).reshape(len(buckets), len(specs))


def _check_inside(
    index: LiveIndex, places: Places, rows: Ints, first: Ints | int, row_bytes: Ints
) -> None:
    """Raise DamagedStoreError unless K tensors of rows, from `first` on, lie inside of their files.

    As the commits state these, so that a read allocates no more than what the store really holds.

    Args:
        index: what states them.
        places: of some rows, all of which or some more than once are checked.
        rows: [N].
        first: the first of the K tensors in each, [N] or the same in all.
        row_bytes: [N or 1, K].
    """
    shard, starts, all_offsets = map(np.asarray, (places.shard, places.starts, places.offsets))
    shard, position = shard[rows], starts[rows] + first
    for k, num_bytes in enumerate(row_bytes.T):
        paths = [files[k] for files in places.files]
        stated = [index.files[path].bytes if path in index.files else -1 for path in paths]
        size = np.array(stated, np.int64)[shard]
        offsets = all_offsets[position + k]
        outside = (offsets < 0) | (num_bytes > MAX_ROW_BYTES) | (offsets > size - num_bytes)
        if outside.any():
            raise DamagedStoreError(
                f"{index.root.at(paths[shard[outside.argmax()]])}: the index places a tensor "
                f"outside of this file. Run 'prebake store verify {index.root}'."
            )
