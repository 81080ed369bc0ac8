"""What plain readers see of a store, worked out from its index (FORMAT.md, sections 7.1 and 7.2).

Views (`live` and `text_key` of Zarr shards, `shards.txt`) are derived: lost or outdated, they are
written again.
"""

from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store_format import webdataset_layout, zarr_layout
from store_format.folders import Folder
from store_format.index import LiveIndex, id_bytes, list_starts
from store_format.manifest import Manifest


def shards_with_dead_rows(index: LiveIndex) -> dict[str, NDArray[np.int64]]:
    """Return the shards that hold live and dead sample rows, each with its live rows."""
    return {
        name: rows
        for name, rows in index.rows_by_shard().items()
        if len(rows) < index.shards[name].rows
    }


def used_texts(manifest: Manifest, index: LiveIndex) -> NDArray[np.int64]:
    """Return the text rows that a live sample has, and that of the empty prompt."""
    empty = pa.array([bytes.fromhex(manifest.empty_text_key)], pa.binary(16))
    keys = index.texts["text_key"]
    used = pc.equal(keys, empty[0])
    if not manifest.texts_inline:
        of_samples = pc.list_flatten(index.samples["text_keys"]).combine_chunks()
        used = pc.or_(used, pc.is_in(keys, value_set=of_samples))
    return np.flatnonzero(used.to_numpy())


def view_sizes(index: LiveIndex) -> dict[str, dict[str, int]]:
    """Return the bytes of the arrays in the views of Zarr shards, by shard and path.

    So that a view of another size need not be worked out: a commit may state any number of rows.
    """
    rows_by_shard = index.rows_by_shard()
    num_texts = np.diff(list_starts(index.samples["text_keys"]))
    sizes = {}
    for name, shard in index.shards.items():
        if shard.kind == "samples":
            rows = rows_by_shard.get(name, np.zeros(0, np.int64))
            most = int(num_texts[rows].max(initial=1))
            paths = zarr_layout.view_arrays(name)
            sizes[name] = dict(zip(paths, (shard.rows, shard.rows * most * 16), strict=True))
    return sizes


def view_files(
    manifest: Manifest, index: LiveIndex, only: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield what plain readers must see: (shard, or shard list; its files by path).

    Args:
        manifest: what the store is.
        index: its live rows.
        only: Zarr shards; default: all.
    """
    rows_by_shard = index.rows_by_shard()
    if manifest.layout == "webdataset":
        yield webdataset_layout.SHARD_LIST_NAME, webdataset_layout.view_files(rows_by_shard)
        return
    place = index.column("row")
    starts = list_starts(index.samples["text_keys"])
    num_texts = np.diff(starts)
    keys = id_bytes(pc.list_flatten(index.samples["text_keys"]))
    for name, shard in index.shards.items():
        if shard.kind != "samples" or (only is not None and name not in only):
            continue
        rows = rows_by_shard.get(name, np.zeros(0, np.int64))
        live = np.zeros(shard.rows, np.bool_)
        live[place[rows]] = True
        text_key = np.zeros((shard.rows, num_texts[rows].max(initial=1), 16), np.uint8)
        for text in range(text_key.shape[1]):
            having = rows[num_texts[rows] > text]
            text_key[place[having], text] = keys[starts[having] + text]
        yield name, zarr_layout.view_files(name, live, text_key)


def with_files(root: Folder, index: LiveIndex) -> set[str]:
    """Return the shards that plain readers can meet: a copy of a store leaves dead ones out."""
    live = index.rows_by_shard().keys() | index.text_rows_by_shard().keys()
    dead = {f"{name}/zarr.json": name for name in index.shards if name not in live}
    return {*live, *(dead[path] for path in root.sizes(dead))}


def outdated(root: Folder, files: dict[str, bytes]) -> Iterator[str]:
    """Yield the paths of those files that are missing or hold something else."""
    found = root.sizes(files.keys())
    same_size = [path for path, data in files.items() if found.get(path) == len(data)]
    contents = dict(zip(same_size, root.read_all(same_size), strict=True))
    yield from (path for path, data in files.items() if contents.get(path) != data)
