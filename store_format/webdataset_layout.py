"""Shards as WebDataset tars (FORMAT.md, section 7.2).

Members are appended as they come; the position of each tensor's data is noted, so that a reader
maps the tar into memory and goes straight to it. `tarfile` supplies the headers.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np

from store_format.commits import FileEntry, ShardEntry
from store_format.files import HashedFile
from store_format.folders import Folder
from store_format.manifest import TensorSpec
from store_format.rows import Place, SampleRow, TextRow, describe_sample
from store_format.zarr_layout import tensor_bytes

BLOCK_BYTES = 512
SHARD_LIST_NAME = "shards.txt"
_NAME, _CHECKSUM = slice(0, 100), slice(148, 156)  # in a tar header


def tar_file(shard: str) -> str:
    """Return the path, relative to the store, of a shard's tar."""
    return f"{shard}.tar"


class TarShard:
    """One shard in the making: rows are appended, then it is published whole."""

    def __init__(
        self,
        root: Folder,
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
        key, about, num_texts = describe(row, bool(self._text_specs))
        members = [(spec.name, spec) for spec in self._specs]
        for t in range(num_texts):
            suffix = f".{t}" if t else ""
            members += [(f"{spec.name}{suffix}", spec) for spec in self._text_specs]
        offsets, crcs = [], []
        for (member, spec), tensor in zip(members, tensors, strict=True):
            shape = spec.row_shape(self._cells)
            data = tensor_bytes(spec, shape, tensor)
            npy = npy_header(spec.numpy_dtype, shape)
            header = member_header(f".{member}.npy", len(npy) + len(data))
            self._file.write(header.of(key) + npy)
            offsets.append(self._file.write(data.data))
            self._pad()
            crcs.append(google_crc32c.value(data))
        text = row_json(about)
        self._file.write(member_header(".json", len(text)).of(key) + text)
        self._pad()
        self.num_rows += 1
        return Place(self.name, self.num_rows - 1, tuple(offsets), tuple(crcs))

    def finish(self) -> ShardEntry:
        """Complete, flush and publish the shard; it counts once a commit lists the result."""
        assert self.num_rows, "a shard without rows is not published"
        self._file.write(bytes(2 * BLOCK_BYTES))
        size, sha256 = self._file.size_bytes, self._file.close()
        path = tar_file(self.name)
        self._root.publish(self._staged, path)
        entry = FileEntry(path=path, bytes=size, sha256=sha256)
        return ShardEntry(name=self.name, kind=self.kind, rows=self.num_rows, files=(entry,))

    def abandon(self) -> None:
        """Close the file of a shard that will not be finished."""
        self._file.abandon()

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.size_bytes % BLOCK_BYTES))


def describe(row: SampleRow | TextRow, texts_inline: bool) -> tuple[str, dict[str, Any], int]:
    """Return a row's key, the content of its `KEY.json`, and how many texts it carries."""
    if isinstance(row, SampleRow):
        return row.key, describe_sample(row), len(row.texts) if texts_inline else 0
    about = asdict(row)
    del about["place"]
    return row.text_key, about, 0


def row_json(about: dict[str, Any]) -> bytes:
    """Return `KEY.json` of a row that is described so."""
    return json.dumps(about, ensure_ascii=False, sort_keys=True).encode("utf-8")


class _MemberHeader:
    """The tar headers of members of one size whose names are equal but for the key before."""

    def __init__(self, suffix: str, num_bytes: int) -> None:
        info = tarfile.TarInfo(suffix)  # its defaults: mode 0644, mtime 0, uid and gid 0, no names
        info.size = num_bytes
        block = info.tobuf(tarfile.USTAR_FORMAT)
        self._suffix = suffix.encode()
        self._between, self._behind = block[_NAME.stop : _CHECKSUM.start], block[_CHECKSUM.stop :]
        # The checksum is the sum of all bytes, its own taken for spaces.
        self._sum = sum(block) - sum(block[_CHECKSUM]) + sum(b" " * len(block[_CHECKSUM]))

    def of(self, key: str) -> bytes:
        """Return the header of the member of `key`."""
        name = (key.encode() + self._suffix).ljust(_NAME.stop, b"\0")
        checksum = b"%06o\0 " % (self._sum + sum(key.encode()))
        return b"".join((name, self._between, checksum, self._behind))


member_header = lru_cache(maxsize=4096)(_MemberHeader)  # as tarfile takes 50 us to make one


@lru_cache(maxsize=256)
def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what lies in a `.npy` file before the numbers."""
    sink = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        sink, {"descr": dtype.str, "fortran_order": False, "shape": shape}
    )
    return sink.getvalue()


def view_files(shards: Iterable[str]) -> dict[str, bytes]:
    """Return `shards.txt`, by its path in the store: the tars of `shards` for plain readers."""
    lines = sorted(f"{tar_file(shard)}\n" for shard in shards)
    return {SHARD_LIST_NAME: "".join(lines).encode()}
