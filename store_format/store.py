"""Reading a store: samples by row or by id, straight from the shards.

R live rows in the order of (sample_id, variant), B rows of a batch, T texts of a sample, K
tensors. Both layouts read alike: the index knows the file and the offset of every tensor,
so a read is one `pread` into the batch, whose crc32c is then checked. (Memory maps measured 1.15x
as fast, but a file that is cut short or lost under a map kills the process instead of raising.)
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.index import LiveIndex, id_words, list_starts, list_values
from store_format.manifest import Manifest, TensorSpec, read_manifest
from store_format.places import Places, TextPlaces, text_places, variant_places
from store_format.rows import SampleRow, TextRow, text_row

MAX_OPEN_FILES = 512  # of the 1024 that most systems allow a process


def open_store(path: str | PathLike[str]) -> "Store":
    """Open the last commit of the store at `path` for reading.

    Raises:
        NotAStoreError: no store, or one of another format version.
        DamagedStoreError: the index is damaged.
    """
    root = Path(path)
    store = Store(root, read_manifest(root), LiveIndex(root))
    store.prepare()
    return store


class _OpenFile:
    """A file descriptor that closes when nothing uses it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


class Store:
    """One store at one commit. Rows are 0 to len(store) - 1, sorted by (sample_id, variant).

    A store may be pickled to a spawned worker, used after a fork, and read by several threads.
    """

    def __init__(self, root: Path, manifest: Manifest, index: LiveIndex) -> None:
        self.root = root
        self.manifest = manifest
        self.index = index
        self._variant_specs = manifest.variant_tensors
        self._text_specs = manifest.text_tensors
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()  # the oldest goes first

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
        for row in _rows_with_id(self._id_words, sample_id):
            if self._variants[row] == variant:
                return row
        raise KeyError(f"{self.root}: no live sample {sample_id}, variant {variant}")

    def sample(self, row: int) -> SampleRow:
        """Return what the index says of a row."""
        return self.index.sample(row)

    def text_row(self, text_key: str) -> TextRow:
        """Return what the index says of a text row."""
        return text_row(self.index.texts.slice(self._text_row_of(text_key), 1).to_pylist()[0])

    def num_texts(self, row: int) -> int:
        """Return the number of texts of a row's sample."""
        return int(self._text_starts[row + 1] - self._text_starts[row])

    def prepare(self) -> None:
        """Make the arrays that reads need, so that workers forked later share them.

        Raises:
            DamagedStoreError: the index places a tensor outside of its file, or nowhere.
        """
        _ = self._variant_places, self._texts, self._text_starts, self._text_weights
        _ = self._buckets, self._text_key_words

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
            IndexError: there is no such row, or the row has no such text.
            ValueError: the rows are of several buckets, or `texts` are not as many as they.
        """
        at = np.asarray(rows, np.int64)  # [B]
        chosen = np.zeros_like(at) if texts is None else np.asarray(texts, np.int64)  # [B]
        cells = self.manifest.cells(self._check_request(at, chosen))
        entries = self._texts.entry_of_text[self._text_starts[at] + np.maximum(chosen, 0)]
        if (chosen < 0).any():
            empty = self._text_row_of(self.manifest.empty_text_key)
            entries[chosen < 0] = self._texts.first_text_row + empty
        batch = self._read_places(self._variant_specs, self._variant_places, at, cells)
        batch.update(self._read_places(self._text_specs, self._texts.places, entries, None))
        return batch

    def read_variant(self, row: int) -> dict[str, np.ndarray]:
        """Read the variant tensors of one row: for each [*row_shape]."""
        width, height = self.bucket_px[row].tolist()
        cells = self.manifest.cells((width, height))
        at = np.array([row])
        batch = self._read_places(self._variant_specs, self._variant_places, at, cells)
        return {name: array[0] for name, array in batch.items()}

    def read_texts(self, row: int) -> list[dict[str, np.ndarray]]:
        """Read all texts of one row: for each its text tensors [*row_shape]."""
        texts = slice(self._text_starts[row], self._text_starts[row + 1])
        entries = self._texts.entry_of_text[texts]
        batch = self._read_places(self._text_specs, self._texts.places, entries, None)
        return [{name: batch[name][i] for name in batch} for i in range(len(entries))]

    def read_empty_text(self) -> dict[str, np.ndarray]:
        """Read the states of the empty prompt: for each text tensor [*row_shape]."""
        return self.read_text(self.manifest.empty_text_key)

    def read_text(self, text_key: str) -> dict[str, np.ndarray]:
        """Read a text of the text rows by its key: for each text tensor [*row_shape]."""
        entry = np.array([self._texts.first_text_row + self._text_row_of(text_key)])
        batch = self._read_places(self._text_specs, self._texts.places, entry, None)
        return {name: array[0] for name, array in batch.items()}

    def _check_request(self, at: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[int, int]:
        """Return the bucket of the rows `at`, after checking that these and their texts exist."""
        if at.ndim != 1 or not at.size or at.shape != chosen.shape:
            raise ValueError(f"expected B > 0 rows and B texts, got {at.shape} and {chosen.shape}")
        rows = at.tolist()
        if min(rows) < 0 or max(rows) >= len(self):
            raise IndexError(f"rows {rows} asked for; {self.root} has rows 0 to {len(self) - 1}")
        buckets, bucket_of_row = self._buckets
        codes: list[int] = bucket_of_row[at].tolist()
        if codes.count(codes[0]) < len(codes):
            raise ValueError(f"rows {rows} are not of one bucket")
        num_texts = self._text_starts[at + 1] - self._text_starts[at]
        if ((chosen < -1) | (chosen >= num_texts)).any():
            raise IndexError(f"texts {chosen.tolist()} asked for; there are {num_texts.tolist()}")
        return buckets[codes[0]]

    def _read_places(
        self,
        specs: Sequence[TensorSpec],
        places: Places,
        entries: NDArray[np.int64],
        cells: tuple[int, int] | None,
    ) -> dict[str, np.ndarray]:
        """Read K tensors of B entries of `places`: for each tensor an array [B, *row_shape]."""
        shards = places.shard[entries].tolist()
        offsets = places.offsets[entries].T.tolist()  # [K][B]
        crcs = places.crc32c[entries].T.tolist()  # [K][B]
        batch: dict[str, np.ndarray] = {}
        for k, spec in enumerate(specs):
            array = np.empty((len(entries), *spec.row_shape(cells)), spec.numpy_dtype)
            batch[spec.name] = array
            rows = array.reshape(len(entries), -1).view(np.uint8)  # [B, row_bytes]
            files = places.files[k]
            for out, shard, offset, crc in zip(rows, shards, offsets[k], crcs[k], strict=True):
                self._read_tensor(files[shard], spec.name, offset, crc, out)
        return batch

    def _read_tensor(
        self, path: str, name: str, offset: int, crc: int, out: NDArray[np.uint8]
    ) -> None:
        """Fill `out` with the bytes at `offset` of a file, and check their crc32c."""
        try:
            file = self._files.get(path) or self._open(path)
            num_bytes = os.preadv(file.descriptor, (out.data,), offset)
        except OSError as error:
            raise self._damage(path, f"it cannot be read ({error.strerror})") from None
        if num_bytes != len(out):
            what = f"it ends before the end of the {name} that the index places at byte {offset}"
            raise self._damage(path, what)
        if google_crc32c.value(out) != crc:
            what = f"crc32c of the {name} at byte {offset} differs from the index"
            raise self._damage(path, what)

    def _open(self, path: str) -> _OpenFile:
        file = self._files[path] = _OpenFile(self.root / path)
        if len(self._files) > MAX_OPEN_FILES:
            self._files.popitem(last=False)
        return file

    def _damage(self, path: str, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.root / path}: {what}. The shard is damaged; "
            f"run 'prebake store verify {self.root}'."
        )

    def _text_row_of(self, text_key: str) -> int:
        for row in _rows_with_id(self._text_key_words, text_key):
            return row
        raise PrebakeError(
            f"{self.root} holds no text row {text_key}. "
            f"Let 'prebake precompute' complete the store."
        )

    # What every read needs, as arrays; made on first use.

    @cached_property
    def _variant_places(self) -> Places:
        return variant_places(self.manifest, self.index)

    @cached_property
    def _texts(self) -> TextPlaces:
        return text_places(self.manifest, self.index)

    @cached_property
    def _buckets(self) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
        """The distinct buckets, and for each row the position of its own."""
        return self.index.distinct_buckets()

    @cached_property
    def _variants(self) -> NDArray[np.int16]:
        return self.index.column("variant")

    @cached_property
    def _text_starts(self) -> NDArray[np.int64]:
        return list_starts(self.index.samples["text_keys"])

    @cached_property
    def _text_weights(self) -> NDArray[np.float32]:
        return list_values(self.index.samples["text_weights"]).astype(np.float32)

    @cached_property
    def _id_words(self) -> NDArray[np.uint64]:
        return np.ascontiguousarray(id_words(self.index.samples["sample_id"]).T, np.uint64)

    @cached_property
    def _text_key_words(self) -> NDArray[np.uint64]:
        return np.ascontiguousarray(id_words(self.index.texts["text_key"]).T, np.uint64)


def _rows_with_id(words: NDArray[np.uint64], wanted: str) -> Iterator[int]:
    """Yield the rows of an id in `words` [2, rows], which are sorted."""
    high, low = np.frombuffer(bytes.fromhex(wanted), ">u8").astype(np.uint64)
    first, end = np.searchsorted(words[0], high, "left"), np.searchsorted(words[0], high, "right")
    for row in range(int(first), int(end)):
        if words[1, row] == low:
            yield row
