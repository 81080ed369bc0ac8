"""Let a model draw random prompts, and count how often it draws what is asked.

The prompts are captions of `sampling.shapes`, of a seed that no training uses; prompt
`index` is drawn from its own noise, so the pictures do not depend on how many there are.
`sampling.judge.read` says what each picture shows.

    python examples/score_model.py --model examples/bundled/model --grid drawn.png
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from sampling.judge import read
from sampling.shapes import PictureSpec, caption, picture_rng, random_spec

PROMPT_SEED: Final = 1_000_000
NUM_PROMPTS: Final = 200
NUM_INFERENCE_STEPS: Final = 30
GUIDANCE_SCALE: Final = 4.0
SIDE_PX: Final = 64
BATCH_SIZE: Final = 40
GRID_COLUMNS: Final = 20


@dataclass(frozen=True)
class Scores:
    """The fractions of pictures that show what their prompt asks for."""

    shape: float
    colour: float
    background: float
    all: float
    """Those in which shape, colour and background are right."""


def random_prompts(count: int) -> tuple[list[str], list[PictureSpec]]:
    """Return prompts 0 to `count` - 1, and what each asks for."""
    prompts, specs = [], []
    for index in range(count):
        rng = picture_rng(PROMPT_SEED, index)
        specs.append(random_spec(rng, (SIDE_PX, SIDE_PX)))
        prompts.append(caption(specs[-1], rng))
    return prompts, specs


def draw_prompts(
    pipeline: StableDiffusionPipeline, prompts: Sequence[str], *, seed: int
) -> NDArray[np.uint8]:
    """Draw each prompt from noise of its own; return pixels [N, H, W, 3] u8."""
    pipeline.set_progress_bar_config(disable=True)
    pictures = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = list(prompts[start : start + BATCH_SIZE])
        generators = [
            torch.Generator().manual_seed(seed + start + number) for number in range(len(batch))
        ]
        images = pipeline(
            batch,
            width=SIDE_PX,
            height=SIDE_PX,
            num_inference_steps=NUM_INFERENCE_STEPS,
            guidance_scale=GUIDANCE_SCALE,
            generator=generators,
        ).images
        pictures += [np.asarray(image) for image in images]
    return np.stack(pictures)


def score(pictures: NDArray[np.uint8], specs: Sequence[PictureSpec]) -> Scores:
    """Judge pictures [N, H, W, 3] u8 by what each should show."""
    right = np.zeros((len(specs), 3), dtype=bool)  # shape, colour, background
    for row, picture, spec in zip(right, pictures, specs, strict=True):
        found = read(picture)
        row[:] = (
            found.shape == spec.shape,
            found.colour == spec.colour,
            found.background == spec.background,
        )
    shape, colour, background = (float(part) for part in right.mean(axis=0))
    return Scores(shape, colour, background, float(right.all(axis=1).mean()))


def grid(pictures: NDArray[np.uint8]) -> Image.Image:
    """Lay pictures [N, H, W, 3] u8 out in rows of `GRID_COLUMNS`, the last filled with black."""
    missing = -len(pictures) % GRID_COLUMNS
    filled = np.concatenate([pictures, np.zeros((missing, *pictures.shape[1:]), np.uint8)])
    height, width = pictures.shape[1:3]
    rows = filled.reshape(-1, GRID_COLUMNS, height, width, 3).transpose(0, 2, 1, 3, 4)
    return Image.fromarray(rows.reshape(-1, GRID_COLUMNS * width, 3))


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Model folder.")
@click.option(
    "--count", type=click.IntRange(1), metavar="N", default=NUM_PROMPTS, show_default=True
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of the noise.")
@click.option("--grid", "grid_path", type=click.Path(path_type=Path), help="PNG to write.")
def main(model: Path, count: int, seed: int, grid_path: Path | None) -> None:
    """Print, as JSON, how often MODEL draws what random prompts ask for."""
    torch.set_num_threads(1)
    prompts, specs = random_prompts(count)
    pipeline = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    pictures = draw_prompts(pipeline, prompts, seed=seed)
    if grid_path is not None:
        grid(pictures).save(grid_path)
    click.echo(json.dumps(asdict(score(pictures, specs))))


if __name__ == "__main__":
    main()
