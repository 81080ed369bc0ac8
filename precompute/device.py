"""Where the encoders run and in which number format. Loads torch, but no model code."""

from typing import Literal

import torch

from store_format.errors import PrebakeError

ShortDtype = Literal["fp16", "bf16", "fp32"]
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Return the device that `--device` names; auto takes the first GPU, else the CPU.

    Raises:
        PrebakeError: the device does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise PrebakeError(
            f"--device {name} cannot be used here ({reason:.80}). Give auto, cpu, cuda or cuda:N."
        ) from None
    return device


def choose_compute_dtype(
    asked: Literal["auto", "fp16", "bf16", "fp32"], device: torch.device
) -> ShortDtype:
    """Return the encoders' dtype; auto: fp32 on a CPU (fp16 is slow there), else fp16."""
    if asked != "auto":
        return asked
    return "fp32" if device.type == "cpu" else "fp16"
