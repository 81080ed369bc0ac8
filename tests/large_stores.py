"""Stores of millions of samples whose tensors are all zeros, written in seconds.

    build_large_store(tmp_path / "s", "zarr", 1_000_000)

The index is of full size and holds what an index of real images would: random ids and keys, paths,
captions of some sixty letters, thousands of shards. The files of the shards are holes of the stated
sizes, so every read works: the crc32c of zeros is known.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from store_builders import make_manifest, text_key

from store_format import webdataset_layout, zarr_layout
from store_format.commits import FileEntry, ShardEntry, write_commit
from store_format.files import write_file
from store_format.folders import LocalFolder
from store_format.manifest import Manifest, TensorSpec
from store_format.rows import SAMPLE_SCHEMA, TEXT_SCHEMA

WRITER = "0000000a"
BUCKETS_PX = ((64, 64), (80, 48), (48, 80), (96, 40))
ROWS_PER_SHARD = 560
ROWS_PER_COMMIT = 1 << 18
SAMPLES_PER_TEXT = 2.5  # in layout zarr, where equal captions are stored once
CAPTION_LETTERS = (45, 75)
TAR_HEAD_BYTES = 512 + 128  # tar header and npy header before a tensor
TAR_JSON_BYTES = 512 + 1024
ZEROS_SHA256 = "00" * 32  # no read of a local store looks at it

Columns = dict[str, pa.Array]


@dataclass
class _Shards:
    """Shards in the making: what the next commit will list."""

    root: Path
    manifest: Manifest
    num_made: int = 0
    new: list[ShardEntry] = field(default_factory=list)

    def place(self, folder: str, specs: Sequence[TensorSpec], cells: Any, num: int) -> Columns:
        """Place `num` rows in new shards; return the columns that say where they lie."""
        row_bytes = np.array([spec.row_bytes(cells) for spec in specs])
        row = np.arange(num) % ROWS_PER_SHARD
        if self.manifest.layout == "zarr":
            strides = row_bytes + 4
            offsets = row[:, None] * strides
            file_bytes = strides + 16  # a row; its entry in the index at the end
        else:
            members = -(-(TAR_HEAD_BYTES + row_bytes) // 512) * 512
            before = np.cumsum(members) - members + TAR_HEAD_BYTES
            file_bytes = members.sum(keepdims=True) + TAR_JSON_BYTES
            offsets = row[:, None] * file_bytes + before
        names = []
        for start in range(0, num, ROWS_PER_SHARD):
            names.append(self._add(folder, specs, file_bytes, min(ROWS_PER_SHARD, num - start)))
        crcs = np.array([google_crc32c.value(bytes(n)) for n in row_bytes.tolist()], np.uint32)
        return {
            "shard": pa.array(names, pa.string()).take(pa.array(np.arange(num) // ROWS_PER_SHARD)),
            "row": pa.array(row, pa.int32()),
            "offsets": lists(offsets, pa.int64()),
            "crc32c": lists(np.broadcast_to(crcs, offsets.shape), pa.uint32()),
        }

    def _add(
        self, folder: str, specs: Sequence[TensorSpec], row_bytes: NDArray[np.int64], rows: int
    ) -> str:
        """Make the files of one shard, all holes, and return its name."""
        self.num_made += 1
        kind = folder.split("/")[0]
        number = f"{WRITER}-{self.num_made:06d}"
        name = f"{folder}/{number}"
        if self.manifest.layout == "zarr":
            sizes = {f"{name}/zarr.json": 60}
            for spec, size in zip(specs, row_bytes.tolist(), strict=True):
                sizes[f"{name}/{spec.name}/zarr.json"] = 1200
                sizes[zarr_layout.tensor_file(name, spec)] = size * rows + 4
            plain = {"texts": {"text_key": 16}, "samples": {"sample_id": 16, "variant": 2}}[kind]
            for array, size in plain.items():
                sizes[f"{name}/{array}/zarr.json"] = 600
                sizes[f"{name}/{array}/c/0" + ("/0" if size == 16 else "")] = size * rows
        else:
            name = name if kind == "texts" else f"{folder}-{number}"
            sizes = {webdataset_layout.tar_file(name): int(row_bytes[0]) * rows + 1024}
        for path, size in sizes.items():
            os.makedirs(self.root / path.rpartition("/")[0], exist_ok=True)  # noqa: PTH103 - fast
            with (self.root / path).open("wb") as hole:
                hole.truncate(size)
        files = tuple(FileEntry(path=p, bytes=n, sha256=ZEROS_SHA256) for p, n in sizes.items())
        self.new.append(ShardEntry(name=name, kind=kind, rows=rows, files=files))
        return name


def build_large_store(
    root: Path,
    layout: str,
    num_samples: int,
    tensors: Sequence[tuple[str, str, tuple[int | str, ...]]] | None = None,
) -> None:
    """Write a store of `num_samples` samples, each with one text; in layout zarr some share one."""
    manifest = make_manifest(layout, tensors) if tensors else make_manifest(layout)
    rng = np.random.default_rng(0)
    shards = _Shards(root, manifest)
    (root / "index").mkdir(parents=True)
    write_file(root / "prebake.json", manifest.to_json())
    parents: tuple[str, ...] = ()
    for sequence, start in enumerate(range(0, num_samples, ROWS_PER_COMMIT), 1):
        num = min(ROWS_PER_COMMIT, num_samples - start)
        num_texts = num if manifest.texts_inline else int(num / SAMPLES_PER_TEXT)
        keys = rng.integers(0, 256, (num_texts, 16), np.uint8)
        captions = strings(rng, num_texts, CAPTION_LETTERS)
        chosen = rng.permutation(num) % num_texts  # each text at least once
        samples = _sample_table(shards, rng, keys[chosen], captions.take(pa.array(chosen)))
        num_stored = 0 if manifest.texts_inline else num_texts
        stored_keys, stored_captions = keys[:num_stored], captions[:num_stored]
        if sequence == 1:
            empty = np.frombuffer(bytes.fromhex(text_key("")), np.uint8)
            stored_keys = np.concatenate([stored_keys, empty[None]])
            stored_captions = pa.concat_arrays([stored_captions, pa.array([""])])
        with mock.patch("os.fsync"):
            commit = write_commit(
                LocalFolder(root),
                root,
                sequence=sequence,
                writer=WRITER,
                samples=samples,
                texts=_text_table(shards, rng, stored_keys, stored_captions),
                shards=shards.new,
                parents=parents,
            )
        parents, shards.new = (commit.name,), []


def _sample_table(
    shards: _Shards, rng: np.random.Generator, text_keys: NDArray[np.uint8], captions: pa.Array
) -> pa.Table:
    """Return sample rows with one text each, bucket by bucket, and make their shards."""
    manifest, num = shards.manifest, len(text_keys)
    specs = manifest.variant_tensors + (manifest.text_tensors if manifest.texts_inline else ())
    parts = []
    bounds = np.linspace(0, num, len(BUCKETS_PX) + 1).astype(int)
    for (width, height), count in zip(BUCKETS_PX, np.diff(bounds).tolist(), strict=True):
        cells = manifest.cells((width, height))
        columns = shards.place(f"samples/{width}x{height}", specs, cells, count)
        columns["bucket_width_px"] = pa.array(np.full(count, width, np.int32))
        columns["bucket_height_px"] = pa.array(np.full(count, height, np.int32))
        parts.append(pa.table(columns))
    placed = pa.concat_tables(parts).combine_chunks()
    one_each = pa.array(np.arange(num + 1, dtype=np.int32))
    nothing = pa.array(np.zeros(num + 1, np.int32))
    sizes = ("original_width_px", "original_height_px", "resized_width_px", "resized_height_px")
    columns = {name: placed[name].chunk(0) for name in placed.column_names}
    columns |= {name: pa.array(rng.integers(512, 4096, num, np.int32)) for name in sizes}
    columns |= {
        "sample_id": binary(rng.integers(0, 256, (num, 16), np.uint8)),
        "variant": pa.array(np.zeros(num, np.int16)),
        "dropped": pa.array(np.zeros(num, bool)),
        "source": pa.repeat("pictures", num),
        "path": strings(rng, num, (20, 40)),
        "image_sha256": binary(rng.integers(0, 256, (num, 32), np.uint8)),
        "image_bytes": pa.array(rng.integers(100_000, 5_000_000, num)),
        "image_mtime_ns": pa.array(rng.integers(16 * 10**17, 17 * 10**17, num)),
        "latent_key": binary(rng.integers(0, 256, (num, 16), np.uint8)),
        "crop_left_px": pa.array(rng.integers(0, 64, num, np.int32)),
        "crop_top_px": pa.array(np.zeros(num, np.int32)),
        "flipped": pa.array(np.zeros(num, bool)),
        "weight": pa.array(np.ones(num)),
        "tags": pa.MapArray.from_arrays(
            nothing, pa.array([], pa.string()), pa.array([], pa.string())
        ),
        "captions": pa.ListArray.from_arrays(one_each, captions),
        "text_keys": pa.ListArray.from_arrays(one_each, binary(text_keys)),
        "text_weights": lists(np.ones((num, 1)), pa.float64()),
    }
    return pa.table([columns[name] for name in SAMPLE_SCHEMA.names], schema=SAMPLE_SCHEMA)


def _text_table(
    shards: _Shards, rng: np.random.Generator, text_keys: NDArray[np.uint8], captions: pa.Array
) -> pa.Table:
    """Return text rows, and make their shards."""
    columns = shards.place("texts", shards.manifest.text_tensors, None, len(text_keys))
    columns |= {
        "text_key": binary(text_keys),
        "caption": captions,
        "num_tokens": pa.array(rng.integers(5, 77, len(text_keys), np.int32)),
    }
    return pa.table([columns[name] for name in TEXT_SCHEMA.names], schema=TEXT_SCHEMA)


def binary(data: NDArray[np.uint8]) -> pa.Array:
    """Return bytes [rows, width] as a fixed_size_binary(width) column."""
    rows, width = data.shape
    buffer = pa.py_buffer(np.ascontiguousarray(data))
    return pa.Array.from_buffers(pa.binary(width), rows, [None, buffer])


def strings(rng: np.random.Generator, num: int, letters: tuple[int, int]) -> pa.Array:
    """Return random texts of lower-case letters and spaces, `letters` (from, below) long."""
    offsets = np.concatenate([[0], np.cumsum(rng.integers(*letters, num))]).astype(np.int32)
    alphabet = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz etaoin", np.uint8)
    data = alphabet[rng.integers(0, len(alphabet), offsets[-1], np.uint8)]
    return pa.StringArray.from_buffers(num, pa.py_buffer(offsets), pa.py_buffer(data))


def lists(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return numbers [rows, K] as a list column."""
    rows, width = values.shape
    starts = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    return pa.ListArray.from_arrays(starts, pa.array(values.reshape(-1), kind))
