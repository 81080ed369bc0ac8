"""How fast the loader hands out batches of tensors: with worker processes, and without.

    OMP_NUM_THREADS=1 python tests/benchmarks/loader.py

SD 1.x samples (151,040 bytes) of a local store, page cache warm, in the batches and the order of
training (`train.readers.iterate_steps`). `workers`: the samples per second that come with worker
processes, against those that come in the training process itself; needs as many free cores as there
are workers, and one more. `cpu_ms_per_step` is the processor time of the training process, which
holds on a busy machine too. `data_wait`: the part of the time that a training loop waits for data
whose steps keep a core busy for 50 ms. One line of JSON for each figure.
"""

import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from benchmarks.common import ROWS_PER_SHARD, baked, report, sd1_manifest, write_baked

from store_format import open_store
from store_format.writer import StoreWriter
from train.loader import Samples, StepDataset
from train.order import BatchShape, Order
from train.readers import iterate_steps

BATCH_SIZE = 8
COMPUTE_S = 0.05
WARM_UP_STEPS = 60  # until each worker has used all of the memory that it shares


def make_dataset(root: Path, layout: str, num_samples: int) -> StepDataset:
    """Write a store and return what training reads of it."""
    with mock.patch("os.fsync"), StoreWriter(root, sd1_manifest(layout)) as writer:
        write_baked(writer, baked(num_samples), ROWS_PER_SHARD)
    store = open_store(root)
    samples = Samples(store)
    order = Order(samples.ids, samples.buckets, BatchShape(BATCH_SIZE), seed=0)
    return StepDataset(store, samples, order, rank=0, seed=0, caption_dropout=0.1)


def race(dataset: StepDataset, num_steps: int, num_workers: int) -> tuple[float, float]:
    """Return samples per second, and processor ms a step, of a loop that does nothing else."""
    num_all = WARM_UP_STEPS + num_steps
    steps = iterate_steps(dataset, 0, num_all, num_workers=num_workers, pin_memory=False)
    with closing(steps):
        for _ in range(WARM_UP_STEPS):
            next(steps)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in steps:
            pass
        cpu_ms_per_step = (time.process_time() - start_cpu_s) / num_steps * 1e3
        return num_steps * BATCH_SIZE / (time.perf_counter() - start_s), cpu_ms_per_step


def data_wait(dataset: StepDataset, num_steps: int, num_workers: int) -> float:
    """Return the fraction of its time that a loop waits whose steps compute for `COMPUTE_S`."""
    num_all = WARM_UP_STEPS + num_steps
    steps = iterate_steps(dataset, 0, num_all, num_workers=num_workers, pin_memory=False)
    waited_s = 0.0
    with closing(steps):
        for step in range(num_all):
            if step == WARM_UP_STEPS:
                waited_s, begin_s = 0.0, time.perf_counter()
            start_s = time.perf_counter()
            next(steps)
            waited_s += time.perf_counter() - start_s
            compute(COMPUTE_S)
    return waited_s / (time.perf_counter() - begin_s)


def compute(seconds: float) -> None:
    """Keep one core busy."""
    matrix, end_s = torch.ones(128, 128), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        matrix @ matrix


@click.command()
@click.option("--samples", "num_samples", metavar="N", default=800, show_default=True)
@click.option("--steps", "num_steps", metavar="N", default=1000, show_default=True)
@click.option("--workers", "num_workers", metavar="N", default=2, show_default=True)
@click.option("--rounds", metavar="N", default=5, show_default=True, help="Median of so many.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; default: a temp.")
def main(
    num_samples: int, num_steps: int, num_workers: int, rounds: int, folder: Path | None
) -> None:
    """Measure the loader of training."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for layout in ("zarr", "webdataset"):
            dataset = make_dataset(Path(place, layout), layout, num_samples)
            counts = (0, num_workers)
            found = [[race(dataset, num_steps, n) for n in counts] for _ in range(rounds)]
            ratios = [beside[0] / alone[0] for alone, beside in found]
            figures = {
                "figure": "workers",
                "layout": layout,
                "times_in_process": round(statistics.median(ratios), 3),
                "workers": num_workers,
                "batch_size": BATCH_SIZE,
            }
            for way, of_way in zip(
                ("in_process", "workers"), zip(*found, strict=True), strict=True
            ):
                rate, cpu_ms = (statistics.median(column) for column in zip(*of_way, strict=True))
                figures[f"{way}_samples_per_s"] = round(rate)
                figures[f"{way}_cpu_ms_per_step"] = round(cpu_ms, 2)
            report(figures, "torch")
            wait = data_wait(dataset, num_steps // 5, num_workers)
            figures = {
                "figure": "data_wait",
                "layout": layout,
                "fraction_of_time": round(wait, 4),
                "compute_ms": round(COMPUTE_S * 1e3),
                "workers": num_workers,
                "batch_size": BATCH_SIZE,
            }
            report(figures, "torch")


if __name__ == "__main__":
    main()
