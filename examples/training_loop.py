"""The loop that trains the parts of the bundled model: AdamW, a moving average, checkpoints.

A step's loss is a function of its number, and every random draw in it comes from
`step_generator`. So a run that was killed and started again with the same command goes on
from its last checkpoint to the same weights, bit for bit on one machine with one thread.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file

MAX_GRAD_NORM: Final = 1.0


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    seed: int
    num_steps: int
    schedule_steps: int
    """At which the learning rate would be 0: `num_steps`, or more to stop before that."""
    batch_size: int
    """Pictures a step."""
    learning_rate: float
    """At its peak, after `warmup_steps`; from there half a cosine down to 0."""
    warmup_steps: int
    weight_decay: float
    ema_decay: float
    """Of the average of the weights, which is what is kept; less in the first steps."""


def step_generator(seed: int, purpose: str, step: int) -> torch.Generator:
    """Return the generator of one step's draws for one purpose."""
    digest = hashlib.sha256(f"prebake {seed} {purpose} {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step; the first is step 0."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    decay = (1 + math.cos(math.pi * step / recipe.schedule_steps)) / 2
    return recipe.learning_rate * warmup * decay


def train(
    model: torch.nn.Module,
    loss_of_step: Callable[[int], torch.Tensor],
    recipe: Recipe,
    checkpoint: Path,
    *,
    checkpoint_every: int,
) -> dict[str, torch.Tensor]:
    """Train what of `model` asks for gradients; return the moving average of it, by name.

    Goes on from `checkpoint` if it is there. Raises ValueError if that is of another recipe.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Vectors, which are biases and scales, are not pulled to 0; nor are embeddings, for
    # the words that no caption has would be.
    decayed = [p for name, p in parameters.items() if p.ndim > 1 and "embedding" not in name]
    others = [p for name, p in parameters.items() if p.ndim <= 1 or "embedding" in name]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )
    ema = {name: weight.detach().clone() for name, weight in parameters.items()}
    first_step = 0
    if checkpoint.exists():
        first_step = _load(checkpoint, parameters, ema, optimizer, recipe)
        click.echo(f"going on at step {first_step} from {checkpoint}")
    start_s, losses = time.monotonic(), []
    for step in range(first_step, recipe.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM, error_if_nonfinite=True)
        optimizer.step()
        decay = min(recipe.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, weight in parameters.items():
                ema[name].lerp_(weight, 1 - decay)
        losses.append(loss.item())
        num_done = step + 1
        if num_done % 50 == 0 or num_done == recipe.num_steps:
            progress = f"step {num_done}/{recipe.num_steps}  loss {sum(losses) / len(losses):.5f}"
            click.echo(f"{progress}  {(time.monotonic() - start_s) / 60:.1f} min")
            losses.clear()
        if num_done % checkpoint_every == 0 or num_done == recipe.num_steps:
            _save(checkpoint, num_done, parameters, ema, optimizer, recipe)
    return ema


def _save(
    path: Path,
    num_done: int,
    parameters: dict[str, torch.nn.Parameter],
    ema: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
) -> None:
    tensors = {f"weight/{name}": weight.detach() for name, weight in parameters.items()}
    tensors |= {f"ema/{name}": weight for name, weight in ema.items()}
    for name, weight in parameters.items():
        state = optimizer.state[weight]
        tensors |= {f"optimizer/{key}/{name}": value for key, value in state.items()}
    metadata = {"num_done": str(num_done), "recipe": json.dumps(asdict(recipe))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata=metadata)
    partial.replace(path)


def _load(
    path: Path,
    parameters: dict[str, torch.nn.Parameter],
    ema: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
) -> int:
    """Take over a checkpoint in place; return how many steps it has behind it."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        found: dict[str, Any] = json.loads(metadata["recipe"])
        if found != asdict(recipe):
            raise ValueError(
                f"{path} is of the recipe {found}, and this run's is {asdict(recipe)}. "
                "Give the same options, or another --work folder."
            )
        with torch.no_grad():
            for name, weight in parameters.items():
                weight.copy_(file.get_tensor(f"weight/{name}"))
                ema[name].copy_(file.get_tensor(f"ema/{name}"))
                optimizer.state[weight] = {
                    key: file.get_tensor(f"optimizer/{key}/{name}")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
    return int(metadata["num_done"])
