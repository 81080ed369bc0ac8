"""Shards as WebDataset tars (FORMAT.md, section 7.2).

Members are appended as they come; the position of each tensor's data is noted, so that a reader
maps the tar into memory and goes straight to it. `tarfile` supplies the headers.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np

from store_format.commits import FileEntry, ShardEntry
from store_format.files import HashedFile, make_folder, publish
from store_format.manifest import TensorSpec
from store_format.rows import Place, SampleRow, TextRow, describe_sample
from store_format.zarr_layout import tensor_bytes

BLOCK_BYTES = 512
SHARD_LIST_NAME = "shards.txt"


def tar_file(shard: str) -> str:
    """Return the path, relative to the store, of a shard's tar."""
    return f"{shard}.tar"


class TarShard:
    """One shard in the making: rows are appended, then it is published whole."""

    def __init__(
        self,
        root: Path,
        staging: Path,
        *,
        name: str,
        kind: Literal["samples", "texts"],
        specs: Sequence[TensorSpec],
        text_specs: Sequence[TensorSpec] = (),
        cells: tuple[int, int] | None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.num_rows = 0
        self._root = root
        self._staged = staging / f"{name.replace('/', '-')}.tar.part"
        self._specs = specs
        self._text_specs = text_specs
        self._cells = cells
        self._file = HashedFile(self._staged)

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._file.size_bytes

    def append(self, row: SampleRow | TextRow, tensors: Sequence[np.ndarray]) -> Place:
        """Add one row: the specs' tensors, then those of each of the row's texts."""
        key, about, num_texts = _describe(row, bool(self._text_specs))
        members = [(spec.name, spec) for spec in self._specs]
        for t in range(num_texts):
            suffix = f".{t}" if t else ""
            members += [(f"{spec.name}{suffix}", spec) for spec in self._text_specs]
        offsets, crcs = [], []
        for (member, spec), tensor in zip(members, tensors, strict=True):
            shape = spec.row_shape(self._cells)
            data = tensor_bytes(spec, shape, tensor)
            header = _npy_header(spec.numpy_dtype, shape)
            self._add_header(f"{key}.{member}.npy", len(header) + len(data))
            self._file.write(header)
            offsets.append(self._file.write(data.data))
            self._pad()
            crcs.append(google_crc32c.value(data))
        text = json.dumps(about, ensure_ascii=False, sort_keys=True).encode("utf-8")
        self._add_header(f"{key}.json", len(text))
        self._file.write(text)
        self._pad()
        self.num_rows += 1
        return Place(self.name, self.num_rows - 1, tuple(offsets), tuple(crcs))

    def finish(self) -> ShardEntry:
        """Complete, flush and publish the shard; it counts once a commit lists the result."""
        assert self.num_rows, "a shard without rows is not published"
        self._file.write(bytes(2 * BLOCK_BYTES))
        size, sha256 = self._file.size_bytes, self._file.close()
        path = tar_file(self.name)
        make_folder((self._root / path).parent)
        publish(self._staged, self._root / path)
        entry = FileEntry(path=path, bytes=size, sha256=sha256)
        return ShardEntry(name=self.name, kind=self.kind, rows=self.num_rows, files=(entry,))

    def abandon(self) -> None:
        """Close the file of a shard that will not be finished."""
        self._file.abandon()

    def _add_header(self, name: str, size_bytes: int) -> None:
        info = tarfile.TarInfo(name)  # its defaults: mode 0644, mtime 0, uid and gid 0, no names
        info.size = size_bytes
        self._file.write(info.tobuf(tarfile.USTAR_FORMAT))

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.size_bytes % BLOCK_BYTES))


def _describe(row: SampleRow | TextRow, texts_inline: bool) -> tuple[str, dict[str, Any], int]:
    if isinstance(row, SampleRow):
        return row.key, describe_sample(row), len(row.texts) if texts_inline else 0
    about = asdict(row)
    del about["place"]
    return row.text_key, about, 0


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    sink = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        sink, {"descr": dtype.str, "fortran_order": False, "shape": shape}
    )
    return sink.getvalue()


def view_files(shards: Iterable[str]) -> dict[str, bytes]:
    """Return `shards.txt`, by its path in the store: the tars of `shards` for plain readers."""
    lines = sorted(f"{tar_file(shard)}\n" for shard in shards)
    return {SHARD_LIST_NAME: "".join(lines).encode()}
