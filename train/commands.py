"""`prebake train`: the command line of stage 2."""

from typing import Any

import click

from prebake import StopRequest, announce, config_options, resolve_model, validated
from train.config import TrainConfig


@click.command()
@config_options(TrainConfig)
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, and stop.")
def train(dry_run: bool, **options: Any) -> None:
    """Train a LoRA from STORE; of the model only the U-Net is loaded.

    Results are in --out: pytorch_lora_weights.safetensors (diffusers), NAME.safetensors (ComfyUI,
    AUTOMATIC1111, Forge, kohya), metrics.jsonl, loss.png, TensorBoard logs, checkpoints.

    Run the same command again to continue an interrupted run; it goes on exactly where it was.

    \b
    prebake train stores/photos --model path/to/sd15 --out runs/first --max-steps 1000
    """
    config = validated(TrainConfig, options)
    config = config.model_copy(update={"model": resolve_model(config.model)})
    announce("loading PyTorch and what training needs ...")
    from train.loop import train as run_training

    with StopRequest() as stop:
        run_training(config, say=click.echo, should_stop=stop, dry_run=dry_run)
    stop.exit_if_requested()
