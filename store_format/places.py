"""Where tensors lie: the lists of the index as arrays, checked against the sizes of the shards.

R live sample rows, N entries (variants, or texts), K tensors of an entry, S shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.errors import DamagedStoreError
from store_format.index import Ints, LiveIndex, list_starts, list_values
from store_format.manifest import MAX_ROW_BYTES, Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class Places:
    """Where N entries lie: each has K tensors, all in one shard."""

    files: list[list[str]]  # [K][S] the file of each tensor in each shard
    shard: NDArray[np.int32]  # [N] position in the inner lists of `files`
    offsets: Ints  # [N, K] bytes
    crc32c: NDArray[np.uint32]  # [N, K]


@dataclass(frozen=True, slots=True)
class TextPlaces:
    """Where the texts lie: those inside sample rows, if they are there, then the text rows."""

    places: Places
    entry_of_text: Ints  # for each text of each sample, one after the other, its entry
    first_text_row: int  # the entry of text row 0


def file_of(manifest: Manifest, shard: str, spec: TensorSpec) -> str:
    """Return the file, relative to the store, that holds a shard's tensor."""
    if manifest.layout == "zarr":
        return zarr_layout.tensor_file(shard, spec)
    return webdataset_layout.tar_file(shard)


def variant_places(manifest: Manifest, index: LiveIndex) -> Places:
    """Return where the variant tensors of each live sample row lie.

    Raises:
        DamagedStoreError: the index places one outside of its file.
    """
    specs = manifest.variant_tensors
    names, codes = _shard_codes(index.samples)
    offsets, crc32c = _lists_of_samples(manifest, index, of_texts=False)
    buckets, bucket_of_row = index.distinct_buckets()
    row_bytes = _row_bytes(manifest, specs, buckets)
    places = Places(_files(manifest, names, specs), codes, offsets, crc32c)
    _check_inside(index, places, row_bytes[bucket_of_row])
    return places


def text_places(manifest: Manifest, index: LiveIndex) -> TextPlaces:
    """Return where the text tensors of each text lie.

    Raises:
        DamagedStoreError: the index places one outside of its file, or a sample's text nowhere.
    """
    specs = manifest.text_tensors
    num_texts = np.diff(list_starts(index.samples["text_keys"]))
    num_inline = num_texts if manifest.texts_inline else np.zeros_like(num_texts)
    sample_names, sample_codes = _shard_codes(index.samples)
    text_names, text_codes = _shard_codes(index.texts)
    inline = _lists_of_samples(manifest, index, of_texts=True)
    shared = _lists(index, index.texts, np.full(len(index.texts), len(specs)))
    places = Places(
        _files(manifest, sample_names + text_names, specs),
        np.concatenate([np.repeat(sample_codes, num_inline), text_codes + len(sample_names)]),
        np.concatenate([inline[0], shared[0].reshape(-1, len(specs))]),
        np.concatenate([inline[1], shared[1].reshape(-1, len(specs))]),
    )
    _check_inside(index, places, _row_bytes(manifest, specs, [None]))
    if manifest.texts_inline:
        return TextPlaces(places, np.arange(num_texts.sum()), int(num_texts.sum()))
    return TextPlaces(places, _text_row_of_each_text(index), 0)


def _shard_codes(table: pa.Table) -> tuple[list[str], NDArray[np.int32]]:
    """Return the distinct shard names of a table, and for each row the position of its own."""
    encoded = table["shard"].combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _files(manifest: Manifest, shards: list[str], specs: tuple[TensorSpec, ...]) -> list[list[str]]:
    return [[file_of(manifest, shard, spec) for shard in shards] for spec in specs]


def _lists(index: LiveIndex, table: pa.Table, expected: Ints) -> tuple[Ints, NDArray[np.uint32]]:
    """Return the flattened offsets and crc32c of a table whose row r must have `expected[r]`."""
    if (np.diff(list_starts(table["offsets"])) != expected).any():
        raise DamagedStoreError(
            f"{index.root}: the index does not place each tensor of each row that the manifest "
            f"declares. Run 'prebake store verify {index.root}'."
        )
    return list_values(table["offsets"]), list_values(table["crc32c"])


def _lists_of_samples(
    manifest: Manifest, index: LiveIndex, *, of_texts: bool
) -> tuple[Ints, NDArray[np.uint32]]:
    """Return offsets and crc32c of the variant tensors, or of the inline texts: [N, K] each."""
    num_tensors = len(manifest.variant_tensors), len(manifest.text_tensors)
    num_texts = np.diff(list_starts(index.samples["text_keys"])) if manifest.texts_inline else 0
    lengths = np.full(len(index), num_tensors[0]) + num_texts * num_tensors[1]
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    wanted = (position >= num_tensors[0]) == of_texts
    offsets, crc32c = _lists(index, index.samples, lengths)
    shape = (-1, num_tensors[of_texts])
    return offsets[wanted].reshape(shape), crc32c[wanted].reshape(shape)


def _row_bytes(
    manifest: Manifest, specs: tuple[TensorSpec, ...], buckets: Sequence[tuple[int, int] | None]
) -> Ints:
    """Return the bytes of a row of each tensor in each bucket: [buckets, K]."""
    cells = [manifest.cells(bucket) if bucket else None for bucket in buckets]
    sizes = [[min(spec.row_bytes(size), MAX_ROW_BYTES + 1) for spec in specs] for size in cells]
    return np.array(sizes, np.int64).reshape(len(buckets), len(specs))


def _check_inside(index: LiveIndex, places: Places, row_bytes: Ints) -> None:
    """Raise DamagedStoreError unless each tensor lies inside of its file, as the commits state it.

    So that a read allocates no more than what the store really holds.
    """
    stated = {file.path: file.bytes for shard in index.shards.values() for file in shard.files}
    for k, files in enumerate(places.files):
        size = np.array([stated.get(path, -1) for path in files], np.int64)[places.shard]
        offsets = places.offsets[:, k]
        outside = (
            (offsets < 0) | (row_bytes[:, k] > MAX_ROW_BYTES) | (offsets > size - row_bytes[:, k])
        )
        if outside.any():
            path = files[places.shard[outside.argmax()]]
            raise DamagedStoreError(
                f"{index.root / path}: the index places a tensor outside of this file. "
                f"Run 'prebake store verify {index.root}'."
            )


def _text_row_of_each_text(index: LiveIndex) -> Ints:
    """Return, for each text of each sample, its text row."""
    keys = pc.list_flatten(index.samples["text_keys"])
    found = pc.index_in(keys, value_set=index.texts["text_key"].combine_chunks())
    if found.null_count:
        missing = keys.filter(pc.is_null(found))[0].as_py().hex()
        raise DamagedStoreError(
            f"{index.root}: a sample names text {missing}, which no text row holds. "
            f"Run 'prebake store verify {index.root}'."
        )
    return np.asarray(found.to_numpy(), np.int64)
