"""`prebake precompute` and `prebake store repair`: the command line of stage 1."""

from pathlib import Path
from typing import Any

import click

from prebake import StopRequest, announce, config_options, resolve_model, validated
from precompute.config import BakeConfig
from store_format.errors import one_line
from store_format.wording import counted


@click.command()
@config_options(BakeConfig)
@click.option("--dry-run", is_flag=True, help="Print what would be done and why, and stop.")
def precompute(dry_run: bool, **options: Any) -> None:
    """Bake the captioned images in IMAGES into the store --out.

    \b
    Images:   png, jpg, webp, bmp, tiff, avif; folders are read recursively.
    Captions: NAME.txt or NAME.caption beside each image, or metadata.jsonl / metadata.csv.

    Run the same command again after adding, editing or removing images and captions: only what
    changed is computed. Interrupted, it goes on where it was. Files that cannot be baked are
    listed with a reason in STORE/report.jsonl.

    \b
    prebake precompute photos/ --model path/to/sd15 --out stores/photos --dry-run
    prebake precompute photos/ --model path/to/sd15 --out stores/photos
    """
    config = validated(BakeConfig, options)
    config = config.model_copy(update={"model": resolve_model(config.model)})
    announce(f"looking into {config.images} and {config.model} ...")
    from precompute.bake import bake
    from precompute.summary import describe_summary

    with StopRequest() as stop:
        summary = bake(config, say=click.echo, should_stop=stop, dry_run=dry_run)
    if not dry_run:
        describe_summary(summary, config, click.echo)
    stop.exit_if_requested()


@click.command()
@click.argument("store", metavar="STORE")
@click.option("--images", type=click.Path(path_type=Path), help="The folder of its images.")
@click.option("--model", help="The model that the store was baked with.")
@click.option("--source-name", default="", help="Which of several sources the images are.")
@click.option("--device", default="auto", show_default=True, help="Where the encoders run.")
@click.pass_context
def repair(
    context: click.Context,
    store: str,
    images: Path | None,
    model: str | None,
    source_name: str,
    device: str,
) -> None:
    """Mend a damaged store: encode anew only what cannot be read, copy the rest of its shards.

    Everything is read and checked, before and after. Lost or damaged files of the index are
    replaced by what is left of them. --images and --model are needed only where something must be
    encoded. The damaged shards stay on disk, unused, until 'prebake store gc'.

    \b
    prebake store repair stores/photos --images photos/ --model path/to/sd15
    """
    announce(f"looking into {store} ...")
    from precompute.repair import repair_store

    outcome = repair_store(
        store,
        images,
        resolve_model(model) if model else None,
        source_name=source_name,
        device=device,
        say=click.echo,
    )
    if outcome.num_damaged:
        click.echo(
            f"encoded {counted(outcome.num_images_encoded, 'image')} and "
            f"{counted(outcome.num_captions_encoded, 'caption')}, copied "
            f"{counted(outcome.num_rows_copied, 'healthy row')} out of damaged shards"
        )
    for problem in outcome.problems:
        click.echo(one_line(f"not encoded: {problem.path}: {problem.detail}"))
    for finding in outcome.left:
        click.echo(f"still damaged: {finding}")
    if outcome.left or outcome.problems:
        context.exit(1)
    any_more = " any more" if outcome.num_damaged else ""
    click.echo(f"nothing is wrong with {store}{any_more}")
