"""Whether and from where a run goes on: what `--resume` means."""

from collections.abc import Callable
from pathlib import Path

from store_format.errors import PrebakeError
from train.checkpoint import (
    TrainingState,
    check_settings,
    checkpoint_folder,
    list_checkpoints,
    newest_valid,
    read_checkpoint,
)
from train.config import TrainConfig
from train.metrics import METRICS_NAME
from train.setup import OF_BLOCKS, RunSetup


def state_to_continue(
    config: TrainConfig, setup: RunSetup, say: Callable[[str], None]
) -> TrainingState | None:
    """Return the checkpoint that `--resume` means, after comparing its settings.

    Raises:
        PrebakeError: it is damaged, of other settings, or there should be none.
    """
    held = list_checkpoints(config.out)
    if config.resume == "never":
        if held or (config.out / METRICS_NAME).exists():
            raise PrebakeError(
                f"{config.out} holds a run. Give --resume auto to continue it, or another --out."
            )
        return None
    if config.resume == "auto":
        state = newest_valid(config.out, say)
    else:
        chosen = Path(config.resume)
        if not chosen.is_dir():
            raise PrebakeError(
                f"--resume {chosen}: no such checkpoint. Give auto, never, or a folder such as "
                f"{checkpoint_folder(config.out, 100)}."
            )
        state = read_checkpoint(chosen)
        if held and held[0].resolve() != chosen.resolve():
            raise PrebakeError(
                f"{config.out} holds another checkpoint than {chosen}: {held[0].name}. "
                "Give --resume auto to continue that, or another --out to branch off."
            )
    if state is None:
        return None
    before = dict(state.settings)
    total_before = before.pop("total_steps")
    before.pop("base U-Net")
    now = setup.settings
    if before.get("order") != now["order"]:  # which says it; the rest follows
        before, now = (
            {k: v for k, v in each.items() if k not in OF_BLOCKS} for each in (before, now)
        )
    check_settings(before, now, config.out)
    if setup.total_steps < total_before:
        check_settings(
            {"total steps": total_before}, {"total steps": setup.total_steps}, config.out
        )
    if setup.total_steps > total_before and config.lr_scheduler == "cosine":
        say(
            f"the cosine is stretched from {total_before} to {setup.total_steps} steps: the "
            f"learning rate of step {state.step} is recomputed"
        )
    say(f"continuing after step {state.step}")
    return state
