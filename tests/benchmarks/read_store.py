"""How fast samples come out of a store, in random order, against the caches people have today.

    OMP_NUM_THREADS=1 python tests/benchmarks/read_store.py

SD 1.x samples (latents 4x64x64 and text 77x768 in float16: 151,040 bytes), in process, one thread,
page cache warm, checksums checked. All ways are measured in one run, in turns, because only their
ratios mean something: `times_npz` against `np.load` of a latents.npz and a text.npz a sample, and
`fraction_of_safetensors` against slices of memory-mapped safetensors files, which check nothing.
One line of JSON for each way and batch size.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import click
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from benchmarks.common import (
    LATENTS,
    ROWS_PER_SHARD,
    STATES,
    Tensors,
    baked,
    report,
    samples,
    sd1_manifest,
    write_baked,
)
from store_builders import Sample

from store_format import open_store
from store_format.writer import StoreWriter

Read = Callable[[list[int]], Tensors]  # sample numbers -> [B, 4, 64, 64], [B, 77, 768]


def store_reader(root: Path, layout: str, num_samples: int, stack: ExitStack) -> Read:
    """Read through prebake."""
    with mock.patch("os.fsync"), StoreWriter(root / layout, sd1_manifest(layout)) as writer:
        write_baked(writer, baked(num_samples), ROWS_PER_SHARD)
    store = open_store(root / layout)
    row_of = [store.row_of(Sample(f"{number}.png").sample_id) for number in range(num_samples)]

    def read(numbers: list[int]) -> Tensors:
        batch = store.read([row_of[number] for number in numbers])
        return batch["latents"], batch["encoder_hidden_states"]

    return read


def npz_reader(root: Path, layout: str, num_samples: int, stack: ExitStack) -> Read:
    """Read a pair of .npz files a sample."""
    for number, (latents, states) in enumerate(samples(num_samples)):
        folder = root / "npz" / str(number)
        folder.mkdir(parents=True)
        np.savez(folder / "latents.npz", latents=latents)
        np.savez(folder / "text.npz", encoder_hidden_states=states)

    def read(numbers: list[int]) -> Tensors:
        latents = np.empty((len(numbers), *LATENTS), np.float16)
        states = np.empty((len(numbers), *STATES), np.float16)
        for i, number in enumerate(numbers):
            folder = root / "npz" / str(number)
            with np.load(folder / "latents.npz") as file:
                latents[i] = file["latents"]
            with np.load(folder / "text.npz") as file:
                states[i] = file["encoder_hidden_states"]
        return latents, states

    return read


def safetensors_reader(root: Path, layout: str, num_samples: int, stack: ExitStack) -> Read:
    """Read slices of memory-mapped safetensors files: about what copying alone costs."""
    slices = []
    everything = list(samples(num_samples))
    for start in range(0, num_samples, ROWS_PER_SHARD):
        part = everything[start : start + ROWS_PER_SHARD]
        path = root / f"{start}.safetensors"
        save_file(
            {"latents": np.stack([x for x, _ in part]), "text": np.stack([x for _, x in part])},
            path,
        )
        file = stack.enter_context(safe_open(path, "np"))
        slices.append((file.get_slice("latents"), file.get_slice("text")))

    def read(numbers: list[int]) -> Tensors:
        latents = np.empty((len(numbers), *LATENTS), np.float16)
        states = np.empty((len(numbers), *STATES), np.float16)
        for i, number in enumerate(numbers):
            shard, row = divmod(number, ROWS_PER_SHARD)
            latents[i] = slices[shard][0][row : row + 1][0]
            states[i] = slices[shard][1][row : row + 1][0]
        return latents, states

    return read


WAYS = {
    "npz": npz_reader,
    "safetensors": safetensors_reader,
    "zarr": store_reader,
    "webdataset": store_reader,
}


def seconds_for(read: Read, order: list[int], batch_size: int) -> float:
    """Return the seconds that reading `order` in batches takes."""
    start_s = time.perf_counter()
    for i in range(0, len(order), batch_size):
        read(order[i : i + batch_size])
    return time.perf_counter() - start_s


@click.command()
@click.option("--samples", "num_samples", metavar="N", default=600, show_default=True)
@click.option("--rounds", metavar="N", default=5, show_default=True, help="Median of so many.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; default: a temp.")
def main(num_samples: int, rounds: int, folder: Path | None) -> None:
    """Compare reads from prebake's layouts with .npz pairs and with safetensors."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        reads = {name: make(root, name, num_samples, stack) for name, make in WAYS.items()}
        order = list(range(num_samples))
        truth = reads["npz"](order[:3])
        for name, read in reads.items():
            for found, expected in zip(read(order[:3]), truth, strict=True):
                assert (found == expected).all(), f"{name} reads other numbers than npz"
            seconds_for(read, order, 1)  # warms the page cache
        for batch_size in (1, 8):
            measured: dict[str, list[float]] = {name: [] for name in reads}
            for round_number in range(rounds):
                random.Random(round_number).shuffle(order)
                for name, read in reads.items():
                    measured[name].append(seconds_for(read, order, batch_size))
            print_ratios(measured, num_samples, batch_size)


def print_ratios(measured: dict[str, list[float]], num_samples: int, batch_size: int) -> None:
    """Print one line of JSON for each way; ratios are medians of the rounds' own ratios."""

    def ratio(to: str, name: str) -> float:
        pairs = zip(measured[to], measured[name], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    for name, seconds in measured.items():
        figures = {
            "way": name,
            "batch_size": batch_size,
            "samples_per_s": round(num_samples / statistics.median(seconds)),
            "times_npz": ratio("npz", name),
            "fraction_of_safetensors": ratio("safetensors", name),
            "samples": num_samples,
        }
        report(figures, "google-crc32c", "safetensors", "pyarrow")


if __name__ == "__main__":
    main()
