"""The files in a run's folder that people use: the configuration and the LoRA in two layouts."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from store_format.errors import PrebakeError
from train.checkpoint import LOCK_NAME, TrainingState, checkpoint_folder, replace_in
from train.config import TrainConfig
from train.lora_files import save_diffusers_lora, save_kohya_lora
from train.metrics import PICTURE_NAME, read_metrics
from train.setup import RunSetup, run_name

CONFIG_NAME = "config.json"
DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"
KOHYA_NAME = "kohya_lora.safetensors"
LORA_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLUSHED_WORTH_SAYING = 0.01
NUM_LAST_STEPS = 100


def lora_names(run: Path) -> dict[str, str]:
    """Return the LoRA files: name in a checkpoint to name in the run's folder."""
    return {DIFFUSERS_NAME: DIFFUSERS_NAME, KOHYA_NAME: f"{run_name(run)}.safetensors"}


def refuse_foreign_files(run: Path) -> None:
    """Refuse a folder that holds something else: a store, pictures, another program's results.

    Raises:
        PrebakeError: the folder is not empty and no run of ours; hidden files do not count.
    """
    if not run.is_dir() or (run / LOCK_NAME).exists():
        return
    found = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    if found:
        raise PrebakeError(
            f"{run} holds {found[0]} and is not a run of prebake. Give an --out that is empty or "
            "does not exist yet."
        )


def write_config(config: TrainConfig) -> None:
    """Save the resolved configuration beside the results."""
    text = json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
    (config.out / CONFIG_NAME).write_text(text)


def write_lora_files(
    folder: Path,
    state: TrainingState,
    config: TrainConfig,
    setup: RunSetup,
    say: Callable[[str], None],
) -> None:
    """Write the adapter of `state` in both layouts into `folder`."""
    about = {
        "ss_output_name": run_name(config.out),
        "ss_steps": str(state.step),
        "ss_max_train_steps": str(setup.total_steps),
        "ss_learning_rate": str(config.learning_rate),
        "ss_lr_scheduler": config.lr_scheduler,
        "ss_lr_warmup_steps": str(config.warmup_steps),
        "ss_optimizer": config.optimizer,
        "ss_seed": str(config.seed),
        "ss_mixed_precision": config.mixed_precision,
        "ss_batch_size_per_device": str(config.batch_size),
        "ss_gradient_accumulation_steps": str(config.gradient_accumulation),
        "ss_num_train_images": str(len(setup.samples)),
    }
    for name, save in ((DIFFUSERS_NAME, save_diffusers_lora), (KOHYA_NAME, save_kohya_lora)):
        num_flushed = save(
            folder / name,
            state.adapter,
            rank=config.rank,
            alpha=config.alpha,
            dtype=LORA_DTYPES[config.lora_dtype],
            metadata=about,
            prediction_type=setup.facts.prediction_type,
        )
        num_values = sum(p.lora_A.numel() + p.lora_B.numel() for p in state.adapter.values())
        if num_flushed > num_values * FLUSHED_WORTH_SAYING:
            share = 100 * num_flushed / num_values
            say(f"warning: {share:.1f} % of {name} became 0 in {config.lora_dtype}")


def publish_lora_files(run: Path, step: int) -> None:
    """Put the LoRA files of a checkpoint into the run's folder."""
    replace_in(run, checkpoint_folder(run, step), lora_names(run))


def describe_results(run: Path, step: int) -> str:
    """Say where the results are and how the last steps went."""
    files = ", ".join(str(run / name) for name in lora_names(run).values())
    last = read_metrics(run)[-NUM_LAST_STEPS:]
    loss = sum(m["loss"] for m in last) / len(last)
    seconds = sum(m["step_s"] for m in last) / len(last)
    return (
        f"LoRA after step {step}: {files}\n"
        f"mean loss of the last {len(last)} steps: {loss:.4f}, {seconds:.3g} s a step; "
        f"the curve: {run / PICTURE_NAME}"
    )
