"""How fast samples go into a store, against plain writes of as many bytes.

    OMP_NUM_THREADS=1 python tests/benchmarks/write_store.py

SD 1.x samples (151,040 bytes) go through `StoreWriter`, with its checksums, hashes, index and
fsyncs; the same bytes go into plain files of the sizes that the shards' files have, written sample
by sample with Python's buffered writes, each file flushed with fsync at its end. All ways in one
run, in turns, because only their ratios mean something: `fraction_of_plain` is the median over the
rounds. `cpu_s_per_gb` is the processor time of the whole process; `sha256_mb_per_s` is how fast one
core hashes, which happens beside the fsync if a second core is free. One line of JSON for each
layout.
"""

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from benchmarks.common import Baked, baked, report, sd1_manifest, write_baked

from store_format.manifest import Layout
from store_format.writer import StoreWriter


def write_store(root: Path, layout: Layout, everything: Sequence[Baked], rows: int) -> None:
    """Write through prebake, `rows` a shard, each shard with its commit."""
    with StoreWriter(root, sd1_manifest(layout)) as writer:
        write_baked(writer, everything, rows)


def write_plain(root: Path, layout: Layout, everything: Sequence[Baked], rows: int) -> None:
    """Write the bytes alone: in layout zarr latents and states to files of their own."""
    root.mkdir()
    for start in range(0, len(everything), rows):
        part = [each.tensors for each in everything[start : start + rows]]
        columns = list(zip(*part, strict=True)) if layout == "zarr" else [sum(part, ())]
        for number, arrays in enumerate(columns):
            with (root / f"{start}-{number}").open("wb") as file:
                for array in arrays:
                    file.write(array.data)
                file.flush()
                os.fsync(file.fileno())


def measure(write: Callable[[], None], root: Path) -> tuple[float, float]:
    """Return the seconds and the processor seconds that `write` takes; what it wrote is removed."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    write()
    seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    shutil.rmtree(root)
    os.sync()  # so that nobody pays for the other's pages
    return seconds


def sha256_mb_per_s() -> float:
    """Return how fast one core hashes."""
    block, num_blocks = bytes(1 << 20), 64
    start_s = time.perf_counter()
    digest = hashlib.sha256()
    for _ in range(num_blocks):
        digest.update(block)
    return num_blocks * len(block) / (time.perf_counter() - start_s) / 1e6


@click.command()
@click.option("--samples", "num_samples", metavar="N", default=1332, show_default=True)
@click.option("--rows-per-shard", "rows", metavar="N", default=444, show_default=True)
@click.option("--rounds", metavar="N", default=5, show_default=True, help="Median of so many.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; default: a temp.")
def main(num_samples: int, rows: int, rounds: int, folder: Path | None) -> None:
    """Compare writing prebake's layouts with plain writes."""
    everything = list(baked(num_samples))
    num_bytes = sum(array.nbytes for each in everything for array in each.tensors)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for layout in ("zarr", "webdataset"):
            measured: dict[str, list[tuple[float, float]]] = {"store": [], "plain": []}
            for _ in range(rounds):
                for way, write in (("plain", write_plain), ("store", write_store)):
                    root = Path(name, way)
                    found = measure(lambda: write(root, layout, everything, rows), root)  # noqa: B023
                    measured[way].append(found)
            ratios = [
                p[0] / s[0] for p, s in zip(measured["plain"], measured["store"], strict=True)
            ]
            figures = {
                "layout": layout,
                "fraction_of_plain": round(statistics.median(ratios), 3),
                "samples": num_samples,
                "rows_per_shard": rows,
                "sha256_mb_per_s": round(sha256_mb_per_s()),
            }
            for way, times in measured.items():
                wall_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
                figures[f"{way}_mb_per_s"] = round(num_bytes / wall_s / 1e6)
                figures[f"{way}_cpu_s_per_gb"] = round(cpu_s / num_bytes * 1e9, 2)
            report(figures, "google-crc32c", "pyarrow")


if __name__ == "__main__":
    main()
