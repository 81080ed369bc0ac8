"""Reading a store: samples by row or by id, straight from memory-mapped shards.

R live rows in the order of (sample_id, variant), B rows of a batch, T texts of a sample.
Both layouts read alike: the index knows the file and the offset of every tensor, the file is mapped
into memory, and each tensor's crc32c is checked on every read.
"""

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.errors import DamagedStoreError, PrebakeError
from store_format.index import LiveIndex
from store_format.manifest import Manifest, TensorSpec, read_manifest
from store_format.rows import SampleRow

MAX_MAPPED_FILES = 1024  # each holds one file descriptor


def open_store(path: str | PathLike[str]) -> "Store":
    """Open the last commit of the store at `path` for reading.

    Raises:
        NotAStoreError: no store, or one of another format version.
        DamagedStoreError: the index is damaged.
    """
    root = Path(path)
    return Store(root, read_manifest(root), LiveIndex(root))


class Store:
    """One store at one commit. Rows are 0 to len(store) - 1, sorted by (sample_id, variant)."""

    def __init__(self, root: Path, manifest: Manifest, index: LiveIndex) -> None:
        self.root = root
        self.manifest = manifest
        self.index = index
        self._maps: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "manifest": self.manifest, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def sample_ids(self) -> list[str]:
        """The id of each row, in hex."""
        return [row.tobytes().hex() for row in self.index.sample_ids()]

    @cached_property
    def bucket_px(self) -> NDArray[np.int32]:
        """The bucket of each row: [R, 2], (width, height)."""
        return self.index.buckets()

    def row_of(self, sample_id: str, variant: int = 0) -> int:
        """Return the row of a sample.

        Raises:
            KeyError: the store holds no such live sample.
        """
        wanted = np.frombuffer(bytes.fromhex(sample_id), np.uint8)
        rows = np.flatnonzero((self.index.sample_ids() == wanted).all(axis=1))
        for row in rows:
            if self._variants[row] == variant:
                return int(row)
        raise KeyError(f"{self.root}: no live sample {sample_id}, variant {variant}")

    def sample(self, row: int) -> SampleRow:
        """Return what the index says of a row."""
        return self.index.sample(row)

    def num_texts(self, row: int) -> int:
        """Return the number of texts of a row's sample."""
        return int(self._text_starts[row + 1] - self._text_starts[row])

    def text_weights(self, row: int) -> NDArray[np.float32]:
        """Return the weights of a row's texts: [T]."""
        return self._text_weights[self._text_starts[row] : self._text_starts[row + 1]]

    def read(
        self, rows: Sequence[int], texts: Sequence[int] | None = None
    ) -> dict[str, np.ndarray]:
        """Read a batch of rows of one bucket.

        Args:
            rows: B row numbers.
            texts: for each row which of its texts (default: the first); -1 is the empty prompt.

        Returns:
            For each declared tensor its array [B, *row_shape]; bfloat16 as raw uint16.

        Raises:
            DamagedStoreError: a file is missing, too short, or its bytes differ from the index.
        """
        bucket = self.bucket_px[rows[0]]
        if (self.bucket_px[list(rows)] != bucket).any():
            raise ValueError(f"rows {list(rows)} are not of one bucket")
        cells = self.manifest.cells((int(bucket[0]), int(bucket[1])))
        batch = {
            spec.name: np.empty((len(rows), *spec.row_shape(cells)), spec.numpy_dtype)
            for spec in self.manifest.tensors
        }
        for i, row in enumerate(rows):
            for k, spec in enumerate(self.manifest.variant_tensors):
                at = self._starts[row] + k
                self._copy(
                    self._shards[row], spec, self._offsets[at], self._crcs[at], batch[spec.name][i]
                )
            self._read_text(row, texts[i] if texts is not None else 0, batch, i)
        return batch

    def read_empty_text(self) -> dict[str, np.ndarray]:
        """Read the states of the empty prompt: for each text tensor [*row_shape]."""
        specs = self.manifest.text_tensors
        batch = {s.name: np.empty((1, *s.row_shape(None)), s.numpy_dtype) for s in specs}
        self._read_text_row(self._empty_text_row, batch, 0)
        return {name: array[0] for name, array in batch.items()}

    def read_text(self, text_key: str) -> dict[str, np.ndarray]:
        """Read a text of the text rows by its key: for each text tensor [*row_shape]."""
        specs = self.manifest.text_tensors
        batch = {s.name: np.empty((1, *s.row_shape(None)), s.numpy_dtype) for s in specs}
        self._read_text_row(self._text_row_of(text_key), batch, 0)
        return {name: array[0] for name, array in batch.items()}

    def _read_text(self, row: int, text: int, batch: dict[str, np.ndarray], i: int) -> None:
        if text < 0:
            self._read_text_row(self._empty_text_row, batch, i)
        elif self.manifest.texts_inline:
            specs = self.manifest.text_tensors
            at = self._starts[row] + len(self.manifest.variant_tensors) + text * len(specs)
            for k, spec in enumerate(specs):
                self._copy(
                    self._shards[row],
                    spec,
                    self._offsets[at + k],
                    self._crcs[at + k],
                    batch[spec.name][i],
                )
        else:
            self._read_text_row(int(self._text_rows[self._text_starts[row] + text]), batch, i)

    def _read_text_row(self, text_row: int, batch: dict[str, np.ndarray], i: int) -> None:
        shards, starts, offsets, crcs = self._text_places
        for k, spec in enumerate(self.manifest.text_tensors):
            at = starts[text_row] + k
            self._copy(shards[text_row], spec, offsets[at], crcs[at], batch[spec.name][i])

    def _copy(self, shard: str, spec: TensorSpec, offset: int, crc: int, out: NDArray[Any]) -> None:
        """Copy one tensor into `out`, checking its crc32c."""
        path = file_of(self.manifest, shard, spec)
        mapped = self._map(path)
        data = mapped[offset : offset + out.nbytes]
        if len(data) != out.nbytes:
            raise DamagedStoreError(
                f"{self.root / path} ends at byte {len(mapped)}, before the end of the "
                f"{spec.name} that the index places at {offset}. "
                f"Run 'prebake store verify {self.root}'."
            )
        if google_crc32c.value(data) != crc:
            raise DamagedStoreError(
                f"{self.root / path}: crc32c of {spec.name} at byte {offset} differs from the "
                f"index. The shard is damaged; run 'prebake store verify {self.root}'."
            )
        out.reshape(-1).view(np.uint8)[:] = data

    def _map(self, path: str) -> NDArray[np.uint8]:
        mapped = self._maps.get(path)
        if mapped is not None:
            self._maps.move_to_end(path)
            return mapped
        try:
            with (self.root / path).open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DamagedStoreError(
                f"{self.root / path} cannot be read ({error}). "
                f"Run 'prebake store verify {self.root}'."
            ) from None
        mapped = np.frombuffer(buffer, np.uint8)
        self._maps[path] = mapped
        if len(self._maps) > MAX_MAPPED_FILES:
            self._maps.popitem(last=False)
        return mapped

    # What every read needs, as flat arrays; made on first use.

    @cached_property
    def _shards(self) -> list[str]:
        return _shared_strings(self.index.samples["shard"])

    @cached_property
    def _variants(self) -> NDArray[np.int16]:
        return self.index.column("variant")

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return list_starts(self.index.samples["offsets"])

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return list_values(self.index.samples["offsets"])

    @cached_property
    def _crcs(self) -> NDArray[np.uint32]:
        return list_values(self.index.samples["crc32c"])

    @cached_property
    def _text_starts(self) -> NDArray[np.int64]:
        return list_starts(self.index.samples["text_keys"])

    @cached_property
    def _text_weights(self) -> NDArray[np.float32]:
        return list_values(self.index.samples["text_weights"])

    @cached_property
    def _text_rows(self) -> NDArray[np.int64]:
        """For each text of each sample, its text row (shared texts only)."""
        keys = pc.list_flatten(self.index.samples["text_keys"])
        found = pc.index_in(keys, value_set=self.index.texts["text_key"].combine_chunks())
        if found.null_count:
            missing = keys.filter(pc.is_null(found))[0].as_py().hex()
            raise DamagedStoreError(
                f"{self.root}: a sample names text {missing}, which no text row holds. "
                f"Run 'prebake store verify {self.root}'."
            )
        return np.asarray(found.combine_chunks().to_numpy(zero_copy_only=False), np.int64)

    @cached_property
    def _text_places(self) -> tuple[list[str], NDArray[Any], NDArray[Any], NDArray[Any]]:
        texts = self.index.texts
        return (
            _shared_strings(texts["shard"]),
            list_starts(texts["offsets"]),
            list_values(texts["offsets"]),
            list_values(texts["crc32c"]),
        )

    @cached_property
    def _empty_text_row(self) -> int:
        return self._text_row_of(self.manifest.empty_text_key)

    def _text_row_of(self, text_key: str) -> int:
        key = pa.scalar(bytes.fromhex(text_key), pa.binary(16))
        row = int(pc.index(self.index.texts["text_key"], key).as_py())
        if row < 0:
            raise PrebakeError(
                f"{self.root} holds no text row {text_key}. "
                f"Let 'prebake precompute' complete the store."
            )
        return row


def file_of(manifest: Manifest, shard: str, spec: TensorSpec) -> str:
    """Return the file, relative to the store, that holds a shard's tensor."""
    if manifest.layout == "zarr":
        return zarr_layout.tensor_file(shard, spec)
    return webdataset_layout.tar_file(shard)


def list_starts(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return where each row's list begins in the flattened values, and the end: [rows + 1]."""
    lengths = pc.list_value_length(column).combine_chunks().to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def list_values(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return the flattened values of a list column."""
    flat = pc.list_flatten(column)
    return np.asarray(flat.combine_chunks().to_numpy(zero_copy_only=False))


def _shared_strings(column: pa.ChunkedArray) -> list[str]:
    """Return a string column as a list that holds each distinct string once."""
    encoded = column.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    return [names[i] for i in encoded.indices.to_pylist()]
