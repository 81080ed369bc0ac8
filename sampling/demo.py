"""The demo: a LoRA learns a shape that the bundled model never saw, and is judged.

Its stages are ordinary commands, each in a process of its own; what is here draws the pictures
that they begin with, and judges those that they end with.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from sampling.grid import draw_grid
from sampling.judge import Reading, read
from sampling.shapes import PictureSpec, caption, picture_rng, random_spec, write_pictures
from store_format.errors import PrebakeError

CONCEPT = "wug"  # an hourglass
NUM_PICTURES = 24  # of the new shape, and as many of others, lest the model forget those
SIZE_PX = (64, 64)
PICTURES_SEED, KNOWN_SEED, CONCEPT_SEED, OLD_SEED = 4_000_000, 5_000_000, 6_000_000, 7_000_000
NOISE_SEEDS = (0, 1)  # each prompt is drawn from the noise of each
NUM_SHOWN = 5, 3  # in the grid: prompts for the concept, and for what the model knew


@dataclass(frozen=True)
class Scores:
    """Fractions of the pictures that show what their prompts ask for."""

    concept_before: float
    """Pictures of the bare model, for prompts with the new word, that show the new shape."""
    concept_after: float
    """The same with the LoRA."""
    old_concepts_before: float
    """Pictures for other prompts: shape, colour and background are all right."""
    old_concepts_after: float
    """The same with the LoRA."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what it asks for."""

    text: str
    spec: PictureSpec


def check_folder(out: Path) -> None:
    """Raise `PrebakeError` unless the folder is missing, empty, or of an earlier demo."""
    if out.exists() and not out.is_dir():
        raise PrebakeError(f"--out {out}: a file is there. Give a folder.")
    if out.is_dir() and any(out.iterdir()) and not (out / "pictures" / CONCEPT).is_dir():
        raise PrebakeError(f"--out {out}: not empty, and no earlier demo's. Give another folder.")


def make_pictures(folder: Path) -> None:
    """Draw what the LoRA is to learn from."""
    for name, seed, shape in ((CONCEPT, PICTURES_SEED, CONCEPT), ("known", KNOWN_SEED, None)):
        write_pictures(folder / name, count=NUM_PICTURES, seed=seed, shape=shape, size_px=SIZE_PX)


def make_prompts(count: int) -> list[Prompt]:
    """Return `count` prompts for the new shape, then as many for old ones."""
    prompts = []
    for seed, shape in ((CONCEPT_SEED, CONCEPT), (OLD_SEED, None)):
        for index in range(count):
            rng = picture_rng(seed, index)
            spec = random_spec(rng, SIZE_PX)
            spec = spec if shape is None else replace(spec, shape=shape)
            prompts.append(Prompt(caption(spec, rng), spec))
    return prompts


def read_pictures(folder: Path, weight: int) -> list[Image.Image]:
    """Read what `prebake sample --pictures` has drawn with a weight of the LoRA."""
    pictures = []
    for path in sorted(folder.glob(f"*-weight-{weight}.png")):
        with Image.open(path) as picture:
            pictures.append(picture.convert("RGB"))
    return pictures


def judge(
    asked: Sequence[Prompt], before: Sequence[Image.Image], after: Sequence[Image.Image]
) -> Scores:
    """Say how many pictures show what is asked; the first half asks for the new shape."""
    half = len(asked) // 2
    wanted = [Reading(p.spec.shape, p.spec.colour, p.spec.background) for p in asked]
    shows_concept, is_right = [], []
    for pictures in (before, after):
        found = [read(np.asarray(picture)) for picture in pictures]
        shows_concept.append([reading.shape == CONCEPT for reading in found[:half]])
        is_right.append([f == w for f, w in zip(found[half:], wanted[half:], strict=True)])
    return Scores(*(float(np.mean(flags)) for flags in (*shows_concept, *is_right)))


def write_results(out: Path, prompts: Sequence[Prompt], drawn: Path) -> Scores:
    """Write `demo.png`, a grid of some of the pictures, and `demo.json`, the scores of all."""
    before, after = read_pictures(drawn, 0), read_pictures(drawn, 1)
    scores = judge([p for p in prompts for _ in NOISE_SEEDS], before, after)
    half = len(prompts) // 2
    shown = [*range(half)][: NUM_SHOWN[0]] + [*range(half, len(prompts))][: NUM_SHOWN[1]]
    rows = [[pictures[n * len(NOISE_SEEDS)] for n in shown] for pictures in (before, after)]
    grid = draw_grid(rows, ["before", "after"], [prompts[n].text for n in shown])
    grid.save(out / "demo.png", optimize=True)
    (out / "demo.json").write_text(json.dumps(asdict(scores), indent=2) + "\n", encoding="utf-8")
    return scores
