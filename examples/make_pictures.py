"""Draw the bundled pictures: captioned pictures of coloured shapes, by `sampling.shapes`."""

from pathlib import Path

import click

from sampling.shapes import write_pictures


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option(
    "--count", type=click.IntRange(1), metavar="N", default=24, show_default=True, help="Pictures."
)
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of all choices."
)
def main(out: Path, count: int, seed: int) -> None:
    """Draw COUNT captioned pictures of coloured shapes."""
    write_pictures(out, count=count, seed=seed)
    click.echo(f"{count} pictures with captions in {out}")


if __name__ == "__main__":
    main()
