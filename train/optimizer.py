"""The optimizer, its learning-rate schedule, and its state as plain tensors.

The schedule counts optimizer steps: neither micro-batches nor ranks.
"""

import importlib.util
import math
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from store_format.errors import PrebakeError

BNB_BLOCK = 4096  # bitsandbytes keeps the state of smaller parameters in fp32


def make_optimizer(
    name: Literal["adamw", "adamw8bit"],
    params: Iterable[torch.nn.Parameter],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-2,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov & Hutter 2019), with its state in fp32 or in 8 bits.

    8 bits: Dettmers et al. 2022; parameters below BNB_BLOCK values keep an fp32 state.

    Raises: PrebakeError if bitsandbytes is asked for and cannot take a step here.
    """
    params = list(params)
    settings: dict[str, Any] = {"betas": betas, "weight_decay": weight_decay, "eps": eps}
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, **settings)
    if name == "adamw8bit":
        try:
            return _make_adamw8bit(params, lr, settings)
        except (ImportError, OSError, RuntimeError, AttributeError, NameError) as error:
            raise PrebakeError(_bitsandbytes_report(error)) from error
    raise PrebakeError(f"optimizer {name!r} is not one of adamw, adamw8bit. Choose one of these.")


def _make_adamw8bit(
    params: list[torch.nn.Parameter], lr: float, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    # Not at the top: only runs that ask for it shall need it. Its native library is loaded
    # apart from the package and fails only when used, hence one step on a stand-in.
    from bitsandbytes.optim import AdamW8bit

    stand_in = torch.nn.Parameter(torch.zeros(BNB_BLOCK, device=params[0].device))
    stand_in.grad = torch.ones_like(stand_in)
    AdamW8bit([stand_in], lr=lr, **settings).step()
    optimizer: torch.optim.Optimizer = AdamW8bit(params, lr=lr, **settings)
    return optimizer


def _bitsandbytes_report(error: Exception) -> str:
    """Say in one line which interpreter, package and versions did not work together."""
    spec = importlib.util.find_spec("bitsandbytes")
    where = spec.origin if spec is not None else "not installed"
    try:
        installed = version("bitsandbytes")
    except PackageNotFoundError:
        installed = "none"
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"optimizer 'adamw8bit' cannot be used: bitsandbytes {installed} ({where}) with torch "
        f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}) under {sys.executable} failed "
        f"({reason}). Reinstall bitsandbytes for this interpreter, or set the optimizer to adamw."
    )


def learning_rate_factor(
    step: int, *, schedule: Literal["constant", "cosine"], warmup_steps: int, total_steps: int
) -> float:
    """Return what the learning rate is multiplied by in optimizer step `step` (0 is the first).

    During warm-up step / warmup_steps, so the first update of a warm-up has 0; then 1
    (`constant`), or half a cosine from 1 to 0 at total_steps (`cosine`), and 0 after it.
    Source: diffusers 0.42.1, `optimization.py`: `get_constant_schedule_with_warmup`,
    `get_cosine_schedule_with_warmup` (which rises again after total_steps; this does not).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    raise PrebakeError(
        f"schedule {schedule!r} is not one of constant, cosine. Choose one of these."
    )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Take an optimizer's state apart: its tensors (copies, on the CPU) and the rest for JSON.

    Tensors are named by their place, "<parameter index>/<state name>[/...]". Copies,
    because bitsandbytes shares one table among parameters, which safetensors refuses.
    """
    state_dict = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {"param_groups": state_dict["param_groups"], "state": {}}
    for index, state in state_dict["state"].items():
        rest["state"][str(index)] = _take_tensors(state, str(index), tensors)
    return tensors, rest


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], meta: dict[str, Any]
) -> None:
    """Put a state back exactly as `optimizer_tensors` took it, also after a pass through JSON.

    Raises: PrebakeError if it is of other parameters than this optimizer's.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved_shapes = {
        name: list(tensor.shape)
        for name, tensor in tensors.items()
        if name.split("/")[-1] in ("exp_avg", "exp_avg_sq", "state1", "state2")
    }
    differing = sorted(
        name
        for name, shape in saved_shapes.items()
        if int(name.split("/")[0]) >= len(parameters)
        or shape != list(parameters[int(name.split("/")[0])].shape)
    )
    num_saved = sum(len(group["params"]) for group in meta["param_groups"])
    if num_saved != len(parameters) or differing:
        raise PrebakeError(
            f"optimizer state is of {num_saved} parameters, this run has {len(parameters)}; "
            f"{len(differing)} tensors differ in shape (first: {differing[:1]}). Resume with the "
            f"rank and target modules of the run that saved it."
        )
    state = {int(index): _put_tensors(entry, tensors) for index, entry in meta["state"].items()}
    groups = [group | {"betas": tuple(group["betas"])} for group in meta["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _take_tensors(entry: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Move the tensors of a nested dictionary to `tensors`; leave their names."""
    if isinstance(entry, torch.Tensor):
        tensors[name] = entry.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(entry, dict):
        return {
            "dict": {key: _take_tensors(e, f"{name}/{key}", tensors) for key, e in entry.items()}
        }
    return {"value": entry}


def _put_tensors(entry: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if "tensor" in entry:
        return tensors[entry["tensor"]].clone()
    if "dict" in entry:
        return {key: _put_tensors(e, tensors) for key, e in entry["dict"].items()}
    return entry["value"]
