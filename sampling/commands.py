"""`prebake sample`: look at what a LoRA does, in a process of its own."""

import math
import re
from pathlib import Path

import click

from prebake import announce, resolve_model
from sampling.lora import Lora
from store_format.errors import PrebakeError
from store_format.progress import Progress


@click.command()
@click.option("--model", required=True, help="A diffusers folder, a hub id, or 'bundled'.")
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="FILE[:WEIGHT]",
    help="A LoRA file, or the folder of a run; several are added up.",
)
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT", help="What to draw; repeatable."
)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A text file with one prompt a line.",
)
@click.option(
    "--seed", "seeds", type=int, multiple=True, metavar="N", help="Of the noise.  [default: 0]"
)
@click.option(
    "--weights",
    metavar="X,Y,...",
    help="A row for each: all LoRA weights times it.  [default: 0,1 with --lora]",
)
@click.option("--negative", default="", metavar="TEXT", help="What not to draw.")
@click.option("--size", metavar="WxH", help="Pixels, multiples of 8.  [default: the model's own]")
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True, metavar="N")
@click.option("--guidance", type=float, default=7.5, show_default=True, metavar="X")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The PNG file of the grid."
)
@click.option(
    "--pictures", type=click.Path(path_type=Path), help="Also a folder for each picture by itself."
)
def sample(
    model: str,
    loras: tuple[str, ...],
    prompts: tuple[str, ...],
    file: Path | None,
    seeds: tuple[int, ...],
    weights: str | None,
    negative: str,
    size: str | None,
    steps: int,
    guidance: float,
    device: str,
    out: Path,
    pictures: Path | None,
) -> None:
    """Draw prompts with a model and LoRA files, as a labelled grid.

    Each row is drawn from the same noise: with --lora, the first is the model alone, and the
    second the model with it. A sweep shows how strong a LoRA should be.

    \b
    prebake sample --model path/to/sd15 --prompt "a photo of a cat" --out cat.png
    prebake sample --model path/to/sd15 --lora runs/first --prompt "sks cat" --out grid.png
    prebake sample --model path/to/sd15 --lora runs/first:0.8 --weights 0,0.5,1,1.5 \\
        --prompt "sks cat" --seed 0 --seed 1 --out sweep.png
    """
    asked = [*prompts, *(_lines(file) if file else ())]
    if not asked:
        raise click.UsageError("Nothing to draw. Give --prompt TEXT, or --prompts FILE.")
    strengths = _strengths(weights, bool(loras))
    size_px = None if size is None else _size(size)
    if out.suffix.lower() != ".png":
        raise click.UsageError(f"--out {out}: expected the name of a .png file.")
    files = [Lora.parse(text) for text in loras]
    folder = resolve_model(model)
    columns = [(prompt, seed) for prompt in asked for seed in seeds or (0,)]
    announce(f"loading {model} ...")
    from sampling.grid import draw_grid
    from sampling.sampler import Sampler

    sampler = Sampler(folder, files, device)
    size_px = size_px or sampler.default_size_px()
    rows = []
    with Progress(len(strengths) * len(columns), "pictures", "drawing") as progress:
        for strength in strengths:
            row = sampler.draw(
                [prompt for prompt, _ in columns],
                [seed for _, seed in columns],
                strength=strength,
                negative=negative,
                size_px=size_px,
                num_steps=steps,
                guidance=guidance,
                advance=progress.advance,
            )
            rows.append(row)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for strength, row in zip(strengths, rows, strict=True):
            for number, picture in enumerate(row):
                picture.save(pictures / f"{number:04d}-weight-{strength:g}.png")
    labels = _labels(strengths, bool(loras), is_sweep=weights is not None)
    several = len(set(seeds)) > 1
    captions = [f"{prompt} (seed {seed})" if several else prompt for prompt, seed in columns]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_grid(rows, labels, captions).save(out)
    click.echo(f"{len(rows)} x {len(columns)} pictures of {size_px[0]}x{size_px[1]} px: {out}")


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise PrebakeError(f"--prompts {file}: no such file.") from None
    except UnicodeDecodeError:
        raise PrebakeError(f"--prompts {file}: not UTF-8 text.") from None


def _strengths(weights: str | None, has_loras: bool) -> list[float]:
    if weights is None:
        return [0.0, 1.0] if has_loras else [0.0]
    if not has_loras:
        raise click.UsageError("--weights is for LoRA files: give --lora too.")
    try:
        strengths = [float(part) for part in weights.split(",")]
    except ValueError:
        strengths = [math.nan]
    if not all(map(math.isfinite, strengths)):
        raise click.UsageError(
            f"--weights {weights}: expected numbers with commas between, such as 0,0.5,1."
        )
    return strengths


def _size(size: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", size)
    width, height = map(int, found.groups()) if found else (0, 0)
    if not width or not height or width % 8 or height % 8:
        raise click.UsageError(f"--size {size}: expected WIDTHxHEIGHT, each a multiple of 8.")
    return width, height


def _labels(strengths: list[float], has_loras: bool, *, is_sweep: bool) -> list[str]:
    if is_sweep:
        return [f"weight {strength:g}" for strength in strengths]
    return ["without", "with LoRA"] if has_loras else [""]
