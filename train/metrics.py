"""What a run logs: one line a step in `metrics.jsonl`, TensorBoard, and a picture of the curve."""

import json
import math
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

METRICS_NAME = "metrics.jsonl"
PICTURE_NAME = "loss.png"


class MetricsLog:
    """Appends a step's metrics to `metrics.jsonl` and to TensorBoard; a context manager."""

    def __init__(self, run: Path, first_step: int) -> None:
        """Open the logs of a run that goes on at `first_step`; later lines are removed."""
        from torch.utils.tensorboard import SummaryWriter

        self._path = run / METRICS_NAME
        kept = [m for m in read_metrics(run) if m["step"] < first_step]
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(m) + "\n" for m in kept))
        part.replace(self._path)
        self._file = self._path.open("a")
        self._board = SummaryWriter(run / "tensorboard", purge_step=first_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._board.close()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Log one step (from 0). JSON has no infinity: a gradient that overflowed is null."""
        finite = {k: None if _is_infinite(value) else value for k, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"train/{name}", value, step)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics, in order; a torn last line is left out."""
    path = run / METRICS_NAME
    metrics = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            metrics.append(json.loads(line))
        except ValueError:
            break
    return metrics


def draw_curve(run: Path) -> None:
    """Draw loss (with its running mean), gradient norm and learning rate to `loss.png`."""
    from matplotlib.figure import Figure

    metrics = read_metrics(run)
    if not metrics:
        return
    steps = [m["step"] for m in metrics]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    losses = [m["loss"] for m in metrics]
    axes[0].plot(steps, losses, alpha=0.3, linewidth=0.8, label="loss of each step")
    axes[0].plot(steps, running_mean(losses, max(1, len(losses) // 20)), label="running mean")
    axes[0].set_ylabel("loss")
    axes[0].legend()
    axes[1].plot(steps, [m["grad_norm"] for m in metrics], linewidth=0.8)
    axes[1].set_ylabel("gradient norm")
    axes[2].plot(steps, [m["learning_rate"] for m in metrics], linewidth=0.8)
    axes[2].set_ylabel("learning rate")
    axes[2].set_xlabel("step")
    figure.suptitle(run.name)
    figure.savefig(run / PICTURE_NAME, dpi=100)


def running_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each position (fewer at the start)."""
    sums = [0.0, *accumulate(values)]
    return [
        (sums[stop] - sums[max(0, stop - width)]) / min(width, stop) for stop in range(1, len(sums))
    ]
