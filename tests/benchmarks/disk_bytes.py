"""How many bytes a store takes on disk, against the tensors it holds.

    python tests/benchmarks/disk_bytes.py

SD 1.x samples (151,040 bytes), each with its own caption. `times_worked_count` compares all files
of the store's shards with the worked byte counts of FORMAT.md, section 7; `overhead` is what they
take beyond shapes x item size; the index has `index_bytes_per_sample`. One line of JSON for each
layout.
"""

import sys
import tempfile
from pathlib import Path
from unittest import mock

import click

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from benchmarks.common import (
    LATENTS_BYTES,
    STATES_BYTES,
    baked,
    report,
    sd1_manifest,
    write_baked,
)

from store_format.writer import StoreWriter


def tensor_bytes(num_samples: int) -> int:
    """Return shapes x item size of all tensors: those of the samples, and of the empty prompt."""
    return num_samples * (LATENTS_BYTES + STATES_BYTES) + STATES_BYTES


def worked_bytes(layout: str, num_samples: int, num_shards: int) -> int:
    """Return what FORMAT.md works out for shards of samples, and of texts where these have some."""
    states, about, end = 119_296, 1_536, 1_024  # members of a tar, and what ends it
    if layout == "webdataset":
        samples = num_samples * (33_792 + states + about) + num_shards * end
        return samples + states + about + end
    num_rows = num_samples + num_samples + 1  # of latents and of states
    crc, entry, metadata = 4, 4 + 16, 9_000  # of a shard's index; of a row; with ids, of a shard
    return tensor_bytes(num_samples) + num_rows * entry + 2 * num_shards * (crc + metadata)


def stored_bytes(root: Path) -> dict[str, int]:
    """Return the bytes of all files in `samples/` and `texts/`, and in `index/`."""
    sizes = {"shards": 0, "index": 0}
    for path in root.rglob("*"):
        if path.is_file() and path.parent != root:
            sizes["index" if path.parent.name == "index" else "shards"] += path.stat().st_size
    return sizes


def measure(root: Path, layout: str, num_samples: int, rows_per_shard: int) -> dict[str, float]:
    """Write a store and return its figures."""
    with mock.patch("os.fsync"), StoreWriter(root, sd1_manifest(layout)) as writer:
        write_baked(writer, baked(num_samples), rows_per_shard)
        writer.refresh_views()
    found = stored_bytes(root)
    worked = worked_bytes(layout, num_samples, -(-num_samples // rows_per_shard))
    return {
        "times_worked_count": round(found["shards"] / worked, 4),
        "overhead": round(found["shards"] / tensor_bytes(num_samples) - 1, 4),
        "bytes": found["shards"],
        "index_bytes_per_sample": round(found["index"] / num_samples, 1),
    }


@click.command()
@click.option("--samples", "num_samples", metavar="N", default=1000, show_default=True)
@click.option("--rows-per-shard", metavar="N", default=200, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; default: a temp.")
def main(num_samples: int, rows_per_shard: int, folder: Path | None) -> None:
    """Count the bytes of both layouts."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for layout in ("zarr", "webdataset"):
            figures = measure(Path(name, layout), layout, num_samples, rows_per_shard)
            about = {"layout": layout, "samples": num_samples, "rows_per_shard": rows_per_shard}
            report(about | figures, "pyarrow")


if __name__ == "__main__":
    main()
