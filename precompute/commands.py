"""`prebake precompute`: the command line of stage 1."""

from typing import Any

import click

from prebake import StopRequest, config_options, resolve_model, validated
from precompute.config import BakeConfig


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
    from precompute.bake import bake
    from precompute.summary import describe_summary

    with StopRequest() as stop:
        summary = bake(config, say=click.echo, should_stop=stop, dry_run=dry_run)
    if not dry_run:
        describe_summary(summary, config, click.echo)
    stop.exit_if_requested()
