"""Which attention kernel the U-Net uses, chosen by trying each on the model's own shapes.

An installed kernel is no promise: xformers has none for the CPU or for some head sizes,
and one built for another torch fails, or gives NaN, only when called. So each candidate
runs forward and backward in the real modules (adapters included) and is compared with
plain matrix products.

B batch, N=h*w positions, c channels of a level, L tokens, D text width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from train.xformers_import import XFORMERS_PROBLEM

# isort: split
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    XFormersAttnProcessor,
)

from store_format.errors import PrebakeError
from train.draws import generator

CANDIDATES = {"xformers": XFormersAttnProcessor, "sdpa": AttnProcessor2_0}
# Largest difference from the math kernel, relative to its largest value. About 8 units of
# rounding of the dtype; a wrong kernel is off by 1 or more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel in use, and in one line why: what was tried and how it compared."""

    name: Literal["xformers", "sdpa"]
    reason: str


# A module, the shape of its input [B, N, c], and of the text [B, L, D] (None: of itself).
_Call = tuple[Attention, tuple[int, ...], tuple[int, ...] | None]


class AttentionFailedError(Exception):
    """A candidate ran but its results are not those of the math kernel."""


def choose_attention(
    unet: UNet2DConditionModel,
    mode: Literal["auto", "sdpa", "xformers"],
    *,
    latent_shape: Sequence[int],
    text_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionChoice:
    """Set the fastest attention that works here; `auto` tries xformers, then SDPA.

    Call after the adapter has been added. latent_shape is [B, C, h, w] of the largest
    batch, text_shape [B, L, D], dtype the one of the forward pass (autocast, if not fp32).
    Gradients and the global random state are left alone.

    Raises: PrebakeError if no candidate works.
    """
    names = [mode] if mode != "auto" else list(CANDIDATES)
    failures = []
    calls = _attention_calls(unet, latent_shape, text_shape, dtype, device)
    for name in names:
        try:
            difference = max(_try(name, *call, dtype, device) for call in calls)
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            failures.append(f"{name} failed ({_why(name, error)})")
            continue
        except AttentionFailedError as error:
            failures.append(f"{name} is wrong here ({error})")
            continue
        unet.set_attn_processor(CANDIDATES[name]())
        compared = (
            f"{name} agrees with the math kernel on {len(calls)} shapes in {_name(dtype)}, forward "
            f"and backward (largest difference {difference:.1e}, allowed {TOLERANCES[dtype]:.0e})"
        )
        return AttentionChoice(name, "; ".join([*failures, compared]))  # type: ignore[arg-type]
    raise PrebakeError(
        f"attention {mode!r} does not work with this model on {device} in {_name(dtype)}: "
        f"{'; '.join(failures)}. Set attention to auto or sdpa, or mend the installation."
    )


def _attention_calls(
    unet: UNet2DConditionModel,
    latent_shape: Sequence[int],
    text_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Call]:
    """List one attention module for each kind of call that a forward pass makes.

    A kind is (heads, head size, queries, keys). One sample goes through the U-Net to find
    them.
    """
    calls: dict[tuple[int, ...], _Call] = {}
    batch = latent_shape[0]

    def record(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = tuple(args[0].shape if args else kwargs["hidden_states"].shape)
        text = kwargs.get("encoder_hidden_states")
        text_seen = None if text is None else (batch, *text.shape[1:])
        num_keys = hidden[1] if text_seen is None else text_seen[1]
        kind = (module.heads, module.inner_dim // module.heads, hidden[1], num_keys)
        calls.setdefault(kind, (module, (batch, *hidden[1:]), text_seen))

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in unet.modules()
        if isinstance(module, Attention)
    ]
    try:
        with torch.no_grad(), _autocast(dtype, device):
            latents = _normal((1, *latent_shape[1:]), device, unet.dtype)  # [1, C, h, w]
            text = _normal((1, *text_shape[1:]), device, unet.dtype)  # [1, L, D]
            unet(latents, torch.zeros(1, dtype=torch.int64, device=device), text)
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def _try(
    name: str,
    module: Attention,
    hidden_shape: tuple[int, ...],
    text_shape: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Run one module with a candidate; return its largest relative difference.

    The candidate runs the whole batch; the math kernel, which needs N*N values a head,
    only the last sample. Raises AttentionFailedError beyond the tolerance.
    """
    hidden = _normal(hidden_shape, device, dtype).requires_grad_()  # [B, N, c]
    text = None if text_shape is None else _normal(text_shape, device, dtype)  # [B, L, D]
    trained = [p for p in module.parameters() if p.requires_grad]
    with _autocast(dtype, device):
        output = CANDIDATES[name]()(module, hidden, text)  # [B, N, c]
    pull = _normal(hidden_shape, device, output.dtype)  # [B, N, c], the gradient from above
    gradients = torch.autograd.grad(output, [hidden, *trained], pull)
    last = hidden.detach()[-1:].requires_grad_()  # [1, N, c]
    with _autocast(dtype, device):
        expected = AttnProcessor()(module, last, None if text is None else text[-1:])
    (expected_gradient,) = torch.autograd.grad(expected, [last], pull[-1:])
    if not all(torch.isfinite(g).all() for g in (output, *gradients)):
        raise AttentionFailedError(f"nan or inf at input {list(hidden_shape)}")
    difference = max(
        _relative_difference(output[-1:], expected),
        _relative_difference(gradients[0][-1:], expected_gradient),
    )
    if not difference <= TOLERANCES[dtype]:
        raise AttentionFailedError(
            f"differs from the math kernel by {difference:.1e}, allowed "
            f"{TOLERANCES[dtype]:.0e}, at input {list(hidden_shape)} with {module.heads} heads"
        )
    return difference


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    largest = expected.float().abs().max().clamp_min(1e-12)
    return ((found.float() - expected.float()).abs().max() / largest).item()


def _normal(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.empty(tuple(shape)).normal_(generator=generator(0, "attention trial", *shape))
    return drawn.to(device, dtype)


def _autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def _why(name: str, error: Exception) -> str:
    """Give the cause in one line; a broken installation is the better explanation."""
    if name == "xformers" and XFORMERS_PROBLEM is not None:
        return XFORMERS_PROBLEM
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
