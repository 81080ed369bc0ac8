"""`prebake sample` and `prebake demo`: look at what a LoRA does."""

import math
import re
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prebake import announce, call, resolve_model
from sampling.lora import Lora
from store_format.errors import PrebakeError
from store_format.progress import Progress

if TYPE_CHECKING:
    from PIL import Image

BAKE_OPTIONS = ["--resolution", "64"]
TRAIN_OPTIONS = [
    "--rank", "16", "--alpha", "16", "--batch-size", "8", "--learning-rate", "2e-3",
    "--lr-scheduler", "cosine", "--target-modules", "attn+ff+proj+conv", "--num-workers", "0",
]  # fmt: skip
SAMPLE_OPTIONS = ["--guidance", "4", "--steps", "15"]
_PICTURE = re.compile(r"\d{5,}-weight-[-+.e\d]+\.png")


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
    "--seed",
    "seeds",
    type=click.IntRange(0, 2**64 - 1),
    multiple=True,
    metavar="N",
    help="Of the noise; repeatable.  [default: 0]",
)
@click.option(
    "--weights",
    metavar="X,Y,...",
    help="A row for each: all LoRA weights times it.  [default: 0,1 with --lora]",
)
@click.option("--negative", default="", metavar="TEXT", help="What not to draw.")
@click.option("--size", metavar="WxH", help="Pixels, multiples of 8.  [default: the model's own]")
@click.option("--steps", type=click.IntRange(1, 999), default=30, show_default=True, metavar="N")
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
    asked = [*prompts, *(_lines(file) if file is not None else ())]
    if not asked:
        raise click.UsageError("Nothing to draw. Give --prompt TEXT, or --prompts FILE.")
    strengths = _strengths(weights, bool(loras))
    size_px = None if size is None else _size(size)
    if out.suffix.lower() != ".png" or out.is_dir():
        raise click.UsageError(f"--out {out}: expected the name of a .png file.")
    if not math.isfinite(guidance):
        raise click.UsageError(f"--guidance {guidance}: expected a finite number.")
    files = [Lora.parse(text) for text in loras]
    folder = resolve_model(model)
    columns = [(prompt, seed) for prompt in asked for seed in seeds or (0,)]
    _make_folder("--out", out.parent)
    if pictures is not None:
        _make_folder("--pictures", pictures)
    announce(f"loading {model} ...")
    from sampling.grid import draw_grid
    from sampling.sampler import Sampler

    sampler = Sampler(folder, files, device)
    size_px = size_px or sampler.default_size_px()
    for warning in sampler.warnings:
        click.echo(f"warning: {warning}", err=True)
    if num_cut := sampler.num_cut([*asked, negative]):
        click.echo(
            f"warning: {num_cut} of the prompts are longer than the text encoder reads; their ends "
            f"are ignored",
            err=True,
        )
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
        _save_each(pictures, strengths, rows)
    labels = _labels(strengths, bool(loras), is_sweep=weights is not None)
    several = len(set(seeds)) > 1
    notes = [f"seed {seed}" if several else "" for _, seed in columns]
    draw_grid(rows, labels, [prompt for prompt, _ in columns], notes).save(out)
    click.echo(f"{len(rows)} x {len(columns)} pictures of {size_px[0]}x{size_px[1]} px: {out}")


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise PrebakeError(f"--prompts {file}: no such file.") from None
    except UnicodeDecodeError:
        raise PrebakeError(f"--prompts {file}: not UTF-8 text.") from None
    if not (found := [line for line in lines if line.strip()]):
        raise PrebakeError(f"--prompts {file}: no prompt in it. Write one a line.")
    return found


def _make_folder(option: str, folder: Path) -> None:
    """Make a folder for results, and try it, before the work whose results it is to hold."""
    if folder.exists() and not folder.is_dir():
        raise click.UsageError(f"{option}: {folder} is a file, not a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(folder)
        raise


def _save_each(folder: Path, strengths: list[float], rows: "list[list[Image.Image]]") -> None:
    """Write each picture by itself, in place of those that an earlier run has left there."""
    for path in folder.iterdir():
        if _PICTURE.fullmatch(path.name):
            path.unlink()
    for strength, row in zip(strengths, rows, strict=True):
        for number, picture in enumerate(row):
            picture.save(folder / f"{number:05d}-weight-{_number(strength)}.png")


def _number(value: float) -> str:
    """Return the shortest text that is this number and no other."""
    return repr(value).removesuffix(".0")


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
        return [f"weight {_number(strength)}" for strength in strengths]
    return ["without", "with LoRA"] if has_loras else [""]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("prebake-demo"),
    show_default=True,
    help="Folder for the results.",
)
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Prompts to judge by with the new word, and as many without it.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=500, show_default=True, help="Of the training."
)
def demo(out: Path, num_prompts: int, steps: int) -> None:
    """See a LoRA learn a shape that the bundled model never saw.

    Draws 24 captioned pictures of a "wug" (and 24 of shapes that the model knows, so that it keeps
    them), bakes them, trains a LoRA, samples before and after from the same noise, and judges what
    the pictures show. The stages are ordinary commands, and are printed, to be repeated with files
    of your own.
    """
    from sampling import demo as stages

    stages.check_folder(out)
    pictures, store, run = out / "pictures", out / "store", out / f"run-{steps}"
    stages.make_pictures(pictures)
    click.echo(f"{2 * stages.NUM_PICTURES} pictures with captions: {pictures}")
    prompts = stages.make_prompts(num_prompts)
    file = out / "prompts.txt"
    file.write_text("".join(f"{prompt.text}\n" for prompt in prompts), encoding="utf-8")
    bake = [str(pictures), "--model", "bundled", "--out", str(store), *BAKE_OPTIONS]
    train = [str(store), "--model", "bundled", "--out", str(run), "--max-steps", str(steps)]
    drawn = out / "drawn"
    sample = ["--model", "bundled", "--lora", str(run), "--prompts", str(file)]
    sample += ["--out", str(out / "all.png"), "--pictures", str(drawn), *SAMPLE_OPTIONS]
    sample += [part for seed in stages.NOISE_SEEDS for part in ("--seed", str(seed))]
    # More threads only get in each other's way on so small a model.
    call("precompute", bake, num_threads=1)
    call("train", [*train, *TRAIN_OPTIONS], num_threads=1)
    call("sample", sample, num_threads=1)
    scores = stages.write_results(out, prompts, drawn)
    click.echo(
        f"pictures that show a wug where one is asked for: {scores.concept_before:.0%} before, "
        f"{scores.concept_after:.0%} after"
    )
    click.echo(
        f"pictures of what the model knew that are right: {scores.old_concepts_before:.0%} before, "
        f"{scores.old_concepts_after:.0%} after"
    )
    click.echo(f"look at: {out / 'demo.png'}   scores: {out / 'demo.json'}")
    click.echo(f"the store: {store}   (prebake store inspect {shlex.quote(str(store))})")
    click.echo(f"the LoRA:  {run / 'pytorch_lora_weights.safetensors'}   loss: {run / 'loss.png'}")
