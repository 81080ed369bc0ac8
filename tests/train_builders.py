"""What the tests of stage 2 share: stores that fit the tiny model, short runs, comparisons."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from store_builders import Sample, build_store

import prebake
import train.checkpoint
from store_format.store import Store
from train.config import TrainConfig
from train.loop import Result
from train.loop import train as run_training
from train.metrics import read_metrics

TEXT_WIDTH = 32  # of tiny_models
TRAIN_TENSORS = (
    ("latents", "variant", (4, "h", "w")),
    ("encoder_hidden_states", "text", (5, TEXT_WIDTH)),
)
TRAIN_MOMENTS = (
    ("latents_mean", "variant", (4, "h", "w")),
    ("latents_std", "variant", (4, "h", "w")),
    ("encoder_hidden_states", "text", (5, TEXT_WIDTH)),
)
WIDE, TALL = (80, 48), (48, 64)


def some_samples(num_wide: int = 5, num_tall: int = 2) -> list[Sample]:
    """Return samples of two buckets, each with a caption of its own."""
    wide = [Sample(f"w{i}.png", [f"wide {i}"], WIDE) for i in range(num_wide)]
    return wide + [Sample(f"t{i}.png", [f"tall {i}"], TALL) for i in range(num_tall)]


def train_store(
    root: Path,
    samples: Sequence[Sample] | None = None,
    *,
    layout: str = "zarr",
    tensors: Sequence[tuple[str, str, tuple[Any, ...]]] = TRAIN_TENSORS,
    dtype: str = "float32",
) -> Store:
    """Write a small store whose tensors fit the tiny model."""
    held = some_samples() if samples is None else samples
    return build_store(root, layout, held, tensors, dtype=dtype)


class Said(list[str]):
    """Collects the lines that a run says."""

    def __call__(self, line: str) -> None:
        self.append(line)


class StopAfter:
    """Asks a run to stop once it has asked `num_steps` times."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def run(
    config: TrainConfig, *, stop_after: int | None = None, say: Callable[[str], None] | None = None
) -> Result:
    """Train in this process, without what an earlier run left in accelerate's singletons."""
    AcceleratorState._reset_state(True)
    should_stop = (lambda: False) if stop_after is None else StopAfter(stop_after)
    return run_training(config, say=Said() if say is None else say, should_stop=should_stop)


EQUAL_METRICS = ("step", "loss", "grad_norm", "grad_norm_clipped", "learning_rate")


def curve(run_folder: Path) -> list[tuple[float, ...]]:
    """Return for each step what does not depend on the clock."""
    return [tuple(m[name] for name in EQUAL_METRICS) for m in read_metrics(run_folder)]


def newest_checkpoint(run_folder: Path) -> Path:
    """Return the checkpoint of the highest step."""
    return max((run_folder / "checkpoints").glob("step-*"))


def assert_same_run(first: Path, second: Path) -> None:
    """Assert that two runs ended bit for bit alike: adapter, optimizer, curve, LoRA files."""
    assert curve(first) == curve(second)
    ours, theirs = newest_checkpoint(first), newest_checkpoint(second)
    assert ours.name == theirs.name
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert_same_tensors(ours / name, theirs / name)
    lora = "pytorch_lora_weights.safetensors"
    assert_same_tensors(first / lora, second / lora)


def assert_same_tensors(first: Path, second: Path) -> None:
    ours, theirs = load_file(first), load_file(second)
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not same_bits(ours[name], theirs[name])]
    assert not differing


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and np.array_equal(
        first.reshape(-1).view(torch.uint8).numpy(), second.reshape(-1).view(torch.uint8).numpy()
    )


def config_for(store: Path, model: Path, out: Path, **options: Any) -> TrainConfig:
    """Return a short run on the CPU that moves its adapter visibly."""
    defaults: dict[str, Any] = {
        "rank": 4,
        "alpha": 4,
        "learning_rate": 1e-2,
        "num_workers": 0,
        "attention": "sdpa",
        "device": "cpu",
    }
    if "max_epochs" not in options:
        defaults["max_steps"] = 6
    return TrainConfig(store=str(store), model=str(model), out=out, **(defaults | options))


def clean_process() -> Any:
    """Return a context whose processes fork from one that has imported training, but not run it.

    A child of the test process itself could not train: autograd refuses to go on after a fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_builders", "train.commands", "precompute.bake"])
    tests = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([tests, str(Path(__file__).parent.parent)])
    return context


def run_cli(
    arguments: Sequence[str],
    log: Path,
    place: Path = Path(),
    environment: Mapping[str, str] = {},
) -> None:
    """In a process of its own: be the command `prebake`, in a process group of its own."""
    multiprocessing.set_start_method("fork", force=True)  # loader workers, as in a real command
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell starts a command
    os.chdir(place)
    os.environ.update(environment)
    prebake.cli(list(arguments), prog_name="prebake")


def run_until_write(config: TrainConfig, at: int) -> None:
    """In a process of its own: train, and be killed half-way through the `at`-th file written."""
    original = train.checkpoint.write_file
    left = at

    def write(path: Path, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            original(path, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, data)

    with mock.patch("train.checkpoint.write_file", write):
        run(config)


def run_until_rename(config: TrainConfig, step: int, *, before: bool) -> None:
    """In a process of its own: train, and be killed just before or after a checkpoint counts."""
    original = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target.name != f"step-{step:08d}":
            return original(path, target)
        if not before:
            original(path, target)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    with mock.patch.object(Path, "rename", rename):
        run(config)


def run_as_rank(config: TrainConfig, rank: int, world_size: int, port: int) -> None:
    """In a process of its own: be one of several ranks, as `accelerate launch --cpu` starts it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    run(config)
