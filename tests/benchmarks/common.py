"""What the benchmarks share: samples of SD 1.x, stores of them, and how a figure is printed.

A sample is latents 4x64x64 and text states 77x768 in float16: 151,040 bytes.
"""

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from store_builders import Sample, make_manifest, text_key

from store_format.manifest import Manifest
from store_format.rows import SampleRow, TextRow
from store_format.writer import StoreWriter

LATENTS, STATES = (4, 64, 64), (77, 768)
TENSORS = (("latents", "variant", (4, "h", "w")), ("encoder_hidden_states", "text", STATES))
LATENTS_BYTES, STATES_BYTES = 4 * 64 * 64 * 2, 77 * 768 * 2
ROWS_PER_SHARD = 200

Tensors = tuple[np.ndarray, np.ndarray]


def samples(num_samples: int) -> Iterator[Tensors]:
    """Yield the tensors of each sample, always the same."""
    rng = np.random.default_rng(0)
    for _ in range(num_samples):
        latents = rng.standard_normal(LATENTS, np.float32).astype(np.float16)
        yield latents, rng.standard_normal(STATES, np.float32).astype(np.float16)


def sd1_manifest(layout: str) -> Manifest:
    """Return the manifest of a store of such samples."""
    return make_manifest(layout, TENSORS)


@dataclass(frozen=True)
class Baked:
    """A sample as a bake hands it to a writer."""

    row: SampleRow
    text: TextRow
    tensors: Tensors


def baked(num_samples: int) -> Iterator[Baked]:
    """Yield samples, each with a caption of its own."""
    for number, tensors in enumerate(samples(num_samples)):
        caption = f"caption {number}"
        row = Sample(f"{number}.png", [caption], (512, 512)).row()
        yield Baked(row, TextRow(text_key(caption), caption, 5), tensors)


def write_baked(writer: StoreWriter, everything: Iterable[Baked], rows_per_shard: int) -> None:
    """Write samples; each shard of them is a commit."""
    inline = writer.manifest.texts_inline
    empty = Baked(Sample("").row(), TextRow(text_key(""), "", 2), next(samples(1)))
    remaining, stored = iter(everything), [empty]
    while part := list(islice(remaining, rows_per_shard)):
        shard, drafts, rows, texts = writer.new_sample_shard((512, 512)), [], [], []
        for each in part:
            tensors = each.tensors if inline else each.tensors[:1]
            rows.append(each.row.placed(shard.append(each.row, tensors)))
        stored += [] if inline else part
        if stored:
            drafts.append(writer.new_text_shard())
        for each in stored:
            place = drafts[0].append(each.text, each.tensors[1:])
            texts.append(replace(each.text, place=place))
        writer.commit([*drafts, shard], rows, texts)
        stored = []


def report(figures: dict[str, Any], *packages: str) -> None:
    """Print one line of JSON: figures, and what they were measured with."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    versions["python"] = platform.python_version()
    click.echo(json.dumps(figures | {"versions": versions, "cpu": cpu_name()}))


def cpu_name() -> str:
    """Return the processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
