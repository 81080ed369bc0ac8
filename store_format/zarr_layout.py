"""Shards as Zarr v3 groups (FORMAT.md, section 7.1).

The bytes of a sharded array of single-row chunks are so regular that they are written row by row as
they come, at the speed of the disk, where one assignment through zarr-python would hold a shard in
memory. zarr-python and tensorstore read the result; tests hold them to it.
"""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from store_format.commits import FileEntry, ShardEntry
from store_format.files import HashedFile, flush_all
from store_format.folders import Folder
from store_format.manifest import TensorSpec
from store_format.rows import Place, SampleRow, TextRow

CRC_BYTES = 4
_NAN_FILL: dict[str, Any] = {"float16": "NaN", "float32": "NaN", "bfloat16": 32704, "uint8": 0}
_GROUP = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}


def tensor_file(shard: str, spec: TensorSpec) -> str:
    """Return the path, relative to the store, of the file that holds a shard's tensor."""
    return f"{shard}/{spec.name}/c/{'/'.join('0' * (len(spec.shape) + 1))}"


def _array_json(
    shape: Sequence[int], dtype: str, fill_value: Any, codecs: list[dict[str, Any]]
) -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value,
            "codecs": codecs,
            "attributes": {},
            "storage_transformers": [],
        },
        indent=1,
    ).encode()


def _sharding(row_shape: tuple[int, ...], item_bytes: int) -> dict[str, Any]:
    data = _BYTES if item_bytes > 1 else {"name": "bytes"}
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *row_shape],
            "codecs": [data, _CRC32C],
            "index_codecs": [_BYTES, _CRC32C],
            "index_location": "end",
        },
    }


def _tensor_json(spec: TensorSpec, shape: tuple[int, ...], num_rows: int) -> bytes:
    """Return the metadata of the array of a tensor, whose rows have `shape`."""
    return _array_json(
        (num_rows, *shape),
        spec.numpy_dtype.name,
        _NAN_FILL[spec.dtype],
        [_sharding(shape, spec.numpy_dtype.itemsize)],
    )


def sharding_index(num_rows: int, chunk_bytes: int) -> bytes:
    """Return the end of a tensor's file: where each row's chunk lies, and the crc32c of that."""
    spans = np.empty((num_rows, 2), "<u8")  # [rows, (offset, bytes)]
    spans[:, 0] = np.arange(num_rows, dtype=np.uint64) * chunk_bytes
    spans[:, 1] = chunk_bytes
    footer = spans.tobytes()
    crc: int = google_crc32c.value(footer)
    return footer + crc.to_bytes(CRC_BYTES, "little")


class ZarrShard:
    """One shard in the making: rows are appended, then it is published whole."""

    def __init__(
        self,
        root: Folder,
        staging: Path,
        *,
        name: str,
        kind: Literal["samples", "texts"],
        specs: Sequence[TensorSpec],
        cells: tuple[int, int] | None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.size_bytes = 0
        self._root = root
        self._staged = staging / name.replace("/", "-")
        self._specs = [(spec, spec.row_shape(cells)) for spec in specs]
        self._files = [
            HashedFile(self._staged / tensor_file("x", spec).removeprefix("x/")) for spec in specs
        ]
        self._rows: list[SampleRow | TextRow] = []

    @property
    def num_rows(self) -> int:
        """Rows appended so far."""
        return len(self._rows)

    def append(self, row: SampleRow | TextRow, tensors: Sequence[np.ndarray]) -> Place:
        """Add one row; `tensors` in the order of the specs, each of its row shape and dtype."""
        offsets, crcs = [], []
        for (spec, shape), file, tensor in zip(self._specs, self._files, tensors, strict=True):
            data = tensor_bytes(spec, shape, tensor)
            crc = google_crc32c.value(data)
            offsets.append(file.write(data.data))
            file.write(crc.to_bytes(CRC_BYTES, "little"))
            crcs.append(crc)
            self.size_bytes += len(data) + CRC_BYTES
        self._rows.append(row)
        return Place(self.name, len(self._rows) - 1, tuple(offsets), tuple(crcs))

    def finish(self) -> ShardEntry:
        """Complete, flush and publish the shard; it counts once a commit lists the result."""
        num_rows = len(self._rows)
        assert num_rows, "a shard without rows is not published"
        files: dict[str, HashedFile] = {}
        for (spec, shape), file in zip(self._specs, list(self._files), strict=True):
            chunk_bytes = file.size_bytes // num_rows
            file.write(sharding_index(num_rows, chunk_bytes))
            files[tensor_file(self.name, spec)] = file
            meta = _tensor_json(spec, shape, num_rows)
            files |= self._add({f"{self.name}/{spec.name}/zarr.json": meta})
        files |= self._add({f"{self.name}/zarr.json": group_json()})
        for name, array in self._plain_arrays().items():
            files |= self._add(_plain_array_files(f"{self.name}/{name}", array))
        if self.kind == "samples":
            nothing = np.zeros(num_rows, np.bool_), np.zeros((num_rows, 1, 16), np.uint8)
            self._add(view_files(self.name, *nothing))  # which no commit lists
        flush_all(self._files)
        sha256 = {file: file.close() for file in self._files}
        entries = [
            FileEntry(path=path, bytes=file.size_bytes, sha256=sha256[file])
            for path, file in files.items()
        ]
        _publish_groups(self._root, self._staged.parent, self.name)
        self._root.publish(self._staged, self.name)
        return ShardEntry(name=self.name, kind=self.kind, rows=num_rows, files=tuple(entries))

    def abandon(self) -> None:
        """Close the files of a shard that will not be finished."""
        for file in self._files:
            file.abandon()

    def _plain_arrays(self) -> dict[str, np.ndarray]:
        if self.kind == "texts":
            keys = [row.text_key for row in self._rows if isinstance(row, TextRow)]
            return {"text_key": _ids(keys)}
        rows = [row for row in self._rows if isinstance(row, SampleRow)]
        return {
            "sample_id": _ids([row.sample_id for row in rows]),
            "variant": np.array([row.variant for row in rows], "<i2"),
        }

    def _add(self, contents: dict[str, bytes]) -> dict[str, HashedFile]:
        """Begin small files, by their paths in the store."""
        files = {}
        for path, data in contents.items():
            files[path] = HashedFile(self._staged / path.removeprefix(f"{self.name}/"))
            self._files.append(files[path])
            files[path].write(data)
        return files


def tensor_bytes(spec: TensorSpec, shape: tuple[int, ...], tensor: np.ndarray) -> NDArray[np.uint8]:
    """Return a tensor's bytes in C order, flat, after checking shape and dtype against the spec."""
    assert tensor.shape == shape, f"{spec.name}: shape {tensor.shape}, declared {shape}"
    assert tensor.dtype == spec.numpy_dtype, f"{spec.name}: dtype {tensor.dtype}"
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def view_files(
    shard: str, live: NDArray[np.bool_], text_key: NDArray[np.uint8]
) -> dict[str, bytes]:
    """Return the files, by path in the store, of a sample shard's view for plain readers.

    Args:
        shard: the shard's name.
        live: [rows].
        text_key: [rows, texts, 16]; zeros where a row has fewer texts, and for dead rows.
    """
    files: dict[str, bytes] = {}
    for name, array in (("text_key", text_key), ("live", live)):
        files.update(_plain_array_files(f"{shard}/{name}", array))
    return files


def view_arrays(shard: str) -> tuple[str, str]:
    """Return the paths of the chunks of `live` and `text_key` in a sample shard's view."""
    return plain_array_file(f"{shard}/live", (1,)), plain_array_file(f"{shard}/text_key", (1,) * 3)


def _plain_array_files(path: str, array: NDArray[Any]) -> dict[str, bytes]:
    """Return the two files of a small array that is one chunk."""
    codec = _BYTES if array.dtype.itemsize > 1 else {"name": "bytes"}
    fill = False if array.dtype == np.bool_ else 0
    return {
        f"{path}/zarr.json": _array_json(array.shape, array.dtype.name, fill, [codec]),
        plain_array_file(path, array.shape): array.tobytes(),
    }


def group_json() -> bytes:
    """Return the metadata of every group."""
    return json.dumps(_GROUP).encode()


def metadata_files(
    shard: str,
    kind: Literal["samples", "texts"],
    specs: Sequence[TensorSpec],
    cells: tuple[int, int] | None,
    num_rows: int,
) -> dict[str, bytes]:
    """Return the `zarr.json` files of a shard, by path in the store, but for those of its view."""
    files = {f"{shard}/zarr.json": group_json()}
    for spec in specs:
        path = f"{shard}/{spec.name}/zarr.json"
        files[path] = _tensor_json(spec, spec.row_shape(cells), num_rows)
    for name, (shape, dtype) in plain_arrays(kind, num_rows).items():
        codec = _BYTES if dtype.itemsize > 1 else {"name": "bytes"}
        files[f"{shard}/{name}/zarr.json"] = _array_json(shape, dtype.name, 0, [codec])
    return files


def plain_arrays(
    kind: Literal["samples", "texts"], num_rows: int
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of the arrays of a shard that say which rows it has."""
    if kind == "texts":
        return {"text_key": ((num_rows, 16), np.dtype("u1"))}
    return {
        "sample_id": ((num_rows, 16), np.dtype("u1")),
        "variant": ((num_rows,), np.dtype("<i2")),
    }


def plain_array_file(path: str, shape: Sequence[int]) -> str:
    """Return the path of the one chunk of such an array at `path`."""
    return f"{path}/c/{'/'.join('0' * len(shape))}"


def group_files(shard: str) -> list[str]:
    """Return the group metadata of the folders above a shard, outermost first."""
    return [(folder / "zarr.json").as_posix() for folder in reversed(PurePosixPath(shard).parents)]


def _publish_groups(root: Folder, staging: Path, shard: str) -> None:
    """Write the group metadata above a shard, where it is missing."""
    paths = group_files(shard)
    for path in [path for path in paths if path not in root.sizes(paths)]:
        root.replace(path, group_json(), staging)


def _ids(ids: Sequence[str]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex("".join(ids)), np.uint8).reshape(-1, 16)
