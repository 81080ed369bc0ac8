"""Reading a store: samples by row or by id, straight from the shards.

R live rows in the order of (sample_id, variant), B rows of a batch, T texts of a sample, K
tensors. Both layouts read alike: the index knows the file and the offset of every tensor,
so a read is one `pread` into the batch, whose crc32c is then checked. (Memory maps measured 1.15x
as fast, but a file that is cut short or lost under a map kills the process instead of raising.)
Numbers of single rows are Python's: numpy takes a microsecond to call, and a tensor 10 to read.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from store_format.errors import DamagedStoreError, PrebakeError
from store_format.folders import Folder, Location, folder_of
from store_format.index import LiveIndex, id_bytes, list_starts, list_values, rows_with_id
from store_format.manifest import Manifest, TensorSpec, read_manifest
from store_format.places import Places, Spot, sample_places, text_places, text_rows_of_texts
from store_format.rows import SampleRow, TextRow

EMPTY_PROMPT = -1  # in place of the number of a text
MAX_OPEN_FILES = 512  # of the 1024 that most systems allow a process
MAX_OPEN_CACHED_FILES = 16  # each may keep a file on the disk that the cache has removed

Allocate = Callable[[int], NDArray[np.uint8]]
"""Returns memory of so many bytes, at a multiple of 16 bytes."""


def new_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that nobody else has."""
    return np.empty(num_bytes, np.uint8)


def open_store(location: Location | Folder) -> "Store":
    """Open the last commit of the store at a path or URL for reading.

    As long as the result lives, `prebake store gc` removes nothing from under it.

    Raises:
        NotAStoreError: no store, or one of another format version.
        DamagedStoreError: the index is damaged.
    """
    root = folder_of(location)
    manifest = read_manifest(root)
    hold = root.hold()
    store = Store(root, manifest, LiveIndex(root), hold)
    store.prepare()
    pa.default_memory_pool().release_unused()  # what opening took besides
    return store


class _OpenFile:
    """A file descriptor that closes when nothing uses it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)


class _Tensor(NamedTuple):
    """One tensor of a row of one bucket: its name, and how its bytes become an array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int


_At = tuple[Places, int, int]  # where a row's tensors lie: its row there, and the first of them


class Store:
    """One store at one commit. Rows are 0 to len(store) - 1, sorted by (sample_id, variant).

    A store may be pickled to a spawned worker, used after a fork, and read by several threads.
    """

    def __init__(
        self, root: Folder, manifest: Manifest, index: LiveIndex, hold: object = None
    ) -> None:
        """Read `index` of the store at `root`; `open_store` is the way to get here.

        Args:
            root: the store's files.
            manifest: what the store is.
            index: its live rows.
            hold: kept as long as the store is, for what its end does.
        """
        self.root = root
        self._hold = hold
        self.manifest = manifest
        self.index = index
        self._variant_tensors: dict[tuple[int, int], list[_Tensor]] = {}  # as buckets are read
        self._text_tensors = _tensors(manifest.text_tensors, None)
        self._num_variant_tensors = len(manifest.variant_tensors)
        self._texts_inline = manifest.texts_inline
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()  # the oldest goes first

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "manifest": self.manifest, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state, hold=state["root"].hold())  # type: ignore[misc]

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
        is_id = len(sample_id) == 32 and not set(sample_id) - set("0123456789abcdef")
        for row in rows_with_id(self._ids, sample_id) if is_id else ():
            if self._variants[row] == variant:
                return row
        raise KeyError(f"{self.root}: no live sample {sample_id}, variant {variant}")

    def sample(self, row: int) -> SampleRow:
        """Return what the index says of a row."""
        return self.index.sample(row)

    def text_row(self, text_key: str) -> TextRow:
        """Return what the index says of a text row."""
        return self.index.text(self._text_row_of(text_key))

    def num_texts(self, row: int) -> int:
        """Return the number of texts of a row's sample."""
        return self._text_starts[row + 1] - self._text_starts[row]

    def bucket_of(self, row: int) -> tuple[int, int]:
        """Return the bucket of a row: (width, height)."""
        return self.index.bucket_codes[0][self._bucket_codes[row]]

    def rows_by_bucket(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        """Return the rows of each bucket (width, height), by bucket."""
        buckets, code_of_row = self.index.bucket_codes
        return {bucket: np.flatnonzero(code_of_row == i) for i, bucket in enumerate(buckets)}

    def files_of(self, row: int) -> set[str]:
        """Return the files that hold the tensors of a row and of its texts."""
        variant = (self._samples, row, 0)
        texts = (self._text_at(row, text) for text in range(EMPTY_PROMPT, self.num_texts(row)))
        found = [(variant, k) for k in range(self._num_variant_tensors)]
        found += [(at, k) for at in texts for k in range(len(self._text_tensors))]
        return {places.of(row, first, k)[0] for (places, row, first), k in found}

    def fetch(self, path: str) -> None:
        """Bring one of the store's files to this machine, as `read` would, to be read soon.

        Raises:
            DamagedStoreError: it is not what the index says.
            PrebakeError: it cannot be had.
        """
        entry = self.index.files[path]
        self.root.fetch(path, entry.bytes, entry.sha256)

    def prepare(self) -> None:
        """Make the arrays that reads need, so that workers forked later share them.

        Raises:
            DamagedStoreError: the index places a tensor outside of its file, or nowhere.
        """
        _ = self._samples, self._texts, self._text_rows, self._text_starts, self._text_weights

    def text_weights(self, row: int) -> NDArray[np.float32]:
        """Return the weights of a row's texts: [T]."""
        texts = slice(self._text_starts[row], self._text_starts[row + 1])
        return self._text_weights[texts].astype(np.float32)

    def read(
        self,
        rows: Sequence[int],
        texts: Sequence[int] | None = None,
        allocate: Allocate = new_memory,
    ) -> dict[str, np.ndarray]:
        """Read a batch of rows of one bucket.

        Args:
            rows: B row numbers.
            texts: for each row which of its texts (default: the first); -1 is the empty prompt.
            allocate: is asked for the memory of each array.

        Returns:
            For each declared tensor its array [B, *row_shape]; bfloat16 as raw uint16.

        Raises:
            DamagedStoreError: a file is missing, too short, or its bytes differ from the index.
            IndexError: there is no such row, or the row has no such text.
            ValueError: the rows are of several buckets, or `texts` are not as many as they.
        """
        bucket, requests = self._check_request(rows, texts)
        variants = [(self._samples, row, 0) for row, _ in requests]
        states = [self._text_at(row, text) for row, text in requests]
        batch = self._read_all(self._tensors_of(bucket), variants, allocate)
        batch.update(self._read_all(self._text_tensors, states, allocate))
        return batch

    def read_variant(self, row: int) -> dict[str, np.ndarray]:
        """Read the variant tensors of one row: for each [*row_shape]."""
        batch = self._read_all(self._tensors_of(self.bucket_of(row)), [(self._samples, row, 0)])
        return {name: array[0] for name, array in batch.items()}

    def read_texts(self, row: int) -> list[dict[str, np.ndarray]]:
        """Read all texts of one row: for each its text tensors [*row_shape]."""
        texts = [self._text_at(row, text) for text in range(self.num_texts(row))]
        batch = self._read_all(self._text_tensors, texts)
        return [{name: batch[name][i] for name in batch} for i in range(len(texts))]

    def read_empty_text(self) -> dict[str, np.ndarray]:
        """Read the states of the empty prompt: for each text tensor [*row_shape]."""
        return self.read_text(self.manifest.empty_text_key)

    def read_text(self, text_key: str) -> dict[str, np.ndarray]:
        """Read a text of the text rows by its key: for each text tensor [*row_shape]."""
        batch = self._read_all(self._text_tensors, [(self._texts, self._text_row_of(text_key), 0)])
        return {name: array[0] for name, array in batch.items()}

    def _check_request(
        self, rows: Sequence[int], texts: Sequence[int] | None
    ) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Return the bucket of a request, and its rows with their texts, after checking them."""
        at = np.asarray(rows, np.int64)
        chosen = np.zeros(at.shape, np.int64) if texts is None else np.asarray(texts, np.int64)
        if at.ndim != 1 or not at.size or at.shape != chosen.shape:
            raise ValueError(f"expected B > 0 rows and B texts, got {at.shape} and {chosen.shape}")
        num_rows, text_starts, bucket_codes = len(self), self._text_starts, self._bucket_codes
        requests = list(zip(at.tolist(), chosen.tolist(), strict=True))
        codes = set()
        for row, text in requests:
            if not 0 <= row < num_rows:
                raise IndexError(f"row {row} asked for; {self.root} has rows 0 to {num_rows - 1}")
            if not -1 <= text < text_starts[row + 1] - text_starts[row]:
                num_texts = self.num_texts(row)
                raise IndexError(f"text {text} of row {row} asked for; there are {num_texts}")
            codes.add(bucket_codes[row])
        if len(codes) > 1:
            raise ValueError(f"rows {at.tolist()} are not of one bucket")
        return self.bucket_of(requests[0][0]), requests

    def _text_at(self, row: int, text: int) -> _At:
        """Return where the tensors of a row's text lie; those of the empty prompt for -1."""
        if text == EMPTY_PROMPT:
            return self._texts, self._empty_text_row, 0
        if self._texts_inline:
            return self._samples, row, self._num_variant_tensors + text * len(self._text_tensors)
        return self._texts, self._text_rows[self._text_starts[row] + text], 0

    def _tensors_of(self, bucket: tuple[int, int]) -> list[_Tensor]:
        """Return the variant tensors of a row of a bucket."""
        if bucket not in self._variant_tensors:
            cells = self.manifest.cells(bucket)
            self._variant_tensors[bucket] = _tensors(self.manifest.variant_tensors, cells)
        return self._variant_tensors[bucket]

    def _read_all(
        self, tensors: Sequence[_Tensor], rows: Sequence[_At], allocate: Allocate = new_memory
    ) -> dict[str, np.ndarray]:
        """Read K tensors of B rows: for each an array [B, *row_shape]."""
        batch: dict[str, np.ndarray] = {}
        for k, (name, dtype, shape, num_bytes) in enumerate(tensors):
            data = allocate(len(rows) * num_bytes).reshape(len(rows), num_bytes)
            for out, (places, row, first) in zip(data, rows, strict=True):
                self._read_tensor(name, places.of(row, first, k), out)
            batch[name] = data.view(dtype).reshape(len(rows), *shape)
        return batch

    def _read_tensor(self, name: str, spot: Spot, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes of one tensor, and check their crc32c."""
        path, offset, crc = spot
        try:
            file = self._files.get(path) or self._open(path)
            num_bytes = os.preadv(file.descriptor, (out,), offset)  # type: ignore[arg-type]
        except OSError as error:
            raise self._damage(path, f"it cannot be read ({error.strerror or error})") from None
        if num_bytes != len(out):
            what = f"it ends before the end of the {name} that the index places at byte {offset}"
            raise self._damage(path, what)
        if google_crc32c.value(out) != crc:
            what = f"crc32c of the {name} at byte {offset} differs from the index"
            raise self._damage(path, what)

    def _open(self, path: str) -> _OpenFile:
        entry = self.index.files[path]
        file = _OpenFile(self.root.open(path, entry.bytes, entry.sha256))
        self._files[path] = file
        if len(self._files) > (MAX_OPEN_FILES if self.root.is_local else MAX_OPEN_CACHED_FILES):
            self._files.popitem(last=False)
        return file

    def _damage(self, path: str, what: str) -> DamagedStoreError:
        return DamagedStoreError(
            f"{self.root.at(path)}: {what}. The shard is damaged; "
            f"run 'prebake store verify {self.root}'."
        )

    def _text_row_of(self, text_key: str) -> int:
        for row in rows_with_id(id_bytes(self.index.texts["text_key"]), text_key):
            return row
        raise PrebakeError(
            f"{self.root} holds no text row {text_key}. "
            f"Let 'prebake precompute' complete the store."
        )

    # What reads need, as views of the index; made on first use. Where single numbers are wanted it
    # is a memoryview, out of which they come five times as fast as out of an array.

    @cached_property
    def _samples(self) -> Places:
        return sample_places(self.manifest, self.index)

    @cached_property
    def _texts(self) -> Places:
        return text_places(self.manifest, self.index)

    @cached_property
    def _text_rows(self) -> memoryview:
        """The text row of each text of each sample, where samples do not carry their texts."""
        if self.manifest.texts_inline:
            return np.zeros(0, np.int32).data
        return text_rows_of_texts(self.index).data

    @cached_property
    def _text_starts(self) -> memoryview:
        return list_starts(self.index.samples["text_keys"]).data

    @cached_property
    def _bucket_codes(self) -> memoryview:
        return self.index.bucket_codes[1].data

    @cached_property
    def _text_weights(self) -> NDArray[np.float64]:
        return list_values(self.index.samples["text_weights"])

    @cached_property
    def _empty_text_row(self) -> int:
        return self._text_row_of(self.manifest.empty_text_key)

    @cached_property
    def _ids(self) -> NDArray[np.uint8]:
        return self.index.sample_ids()

    @cached_property
    def _variants(self) -> NDArray[np.int16]:
        return self.index.column("variant")


def _tensors(specs: Sequence[TensorSpec], cells: tuple[int, int] | None) -> list[_Tensor]:
    return [
        _Tensor(spec.name, spec.numpy_dtype, spec.row_shape(cells), spec.row_bytes(cells))
        for spec in specs
    ]
