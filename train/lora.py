"""The LoRA adapter: where it goes, how it starts, and its weights in and out.

r rank, "in" and "out" widths of an adapted module. An adapted module acts as
W + (alpha / rank) * B A (Hu et al. 2021, LoRA, section 4.1), with A [r, in, ...] and
B [out, r, ...] in fp32 whatever the dtype of W.
"""

import math
from collections.abc import Mapping

import torch

import train.xformers_import  # noqa: F401  before diffusers, which imports xformers too

# isort: split
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from store_format.errors import PrebakeError
from train.draws import generator
from train.lora_files import LoraPair, module_path

ATTENTION = ("to_k", "to_out.0", "to_q", "to_v")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
PROJECTIONS = ("proj_in", "proj_out")
RESNETS = ("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv")
# `attn+ff+proj` is what kohya's networks.lora adapts in the U-Net, and with `conv` its
# conv_dim (without time_emb_proj). conv_in, conv_out and time_embedding are in none: older
# programs do not know their names.
TARGET_SETS: dict[str, tuple[str, ...]] = {
    "attn": ATTENTION,
    "attn+ff": ATTENTION + FEED_FORWARD,
    "attn+ff+proj": ATTENTION + FEED_FORWARD + PROJECTIONS,
    "attn+ff+proj+conv": ATTENTION + FEED_FORWARD + PROJECTIONS + RESNETS,
}
ADAPTER = "default"


def add_lora(
    unet: UNet2DConditionModel, *, rank: int, alpha: float, target_modules: str, seed: int
) -> tuple[str, ...]:
    """Add a trainable adapter to the frozen U-Net; return the adapted module paths, sorted.

    `target_modules` is a name in TARGET_SETS or suffixes separated by commas. B starts at
    zero, so the U-Net computes what it did. A depends on (seed, module path) only. The
    global random state is left alone.

    Raises: PrebakeError for a rank or alpha that is not positive, or a target that matches
    no module.
    """
    if rank < 1 or not (math.isfinite(alpha) and alpha > 0):
        raise PrebakeError(
            f"LoRA rank {rank} and alpha {alpha}: both must be above 0. Set rank to 4 to 128 and "
            f"alpha to the rank or less."
        )
    targets = matching_modules(unet, target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))
    with torch.random.fork_rng(devices=[]):  # peft's own start, replaced below, draws from it
        unet.add_adapter(config, adapter_name=ADAPTER)
    layers = _lora_layers(unet)
    assert tuple(layers) == targets, "peft adapted other modules than it was given"
    for path, layer in layers.items():
        weight = layer.lora_A[ADAPTER].weight
        initial = torch.empty(weight.shape)  # [r, in, ...] f32, on the CPU on every device
        # Source: peft 0.21.2, LoraLayer.reset_lora_parameters, as nn.Linear's own start.
        nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator(seed, "lora_A", path))
        weight.data = initial.to(weight.device)
        layer.lora_B[ADAPTER].weight.data = torch.zeros_like(
            layer.lora_B[ADAPTER].weight, dtype=torch.float32
        )
    return targets


def lora_warnings(*, rank: int, alpha: float) -> list[str]:
    """Say what is unusual about these settings, one line each, for the plan to print."""
    warnings = []
    if rank > 256:
        warnings.append(f"LoRA rank {rank} is above 256: the file and the optimizer get large.")
    if alpha > 2 * rank:
        warnings.append(
            f"LoRA alpha {alpha:g} is {alpha / rank:g} times the rank {rank}: the adapter acts, "
            f"and learns, that much faster. Usual is alpha = rank or half of it."
        )
    return warnings


def matching_modules(unet: nn.Module, target_modules: str) -> tuple[str, ...]:
    """List the Linear and Conv2d modules whose path is, or ends in a dot and, a target."""
    paths = [
        path for path, module in unet.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    suffixes = TARGET_SETS.get(target_modules) or [
        suffix.strip() for suffix in target_modules.split(",")
    ]
    matches = {s: [path for path in paths if f".{path}".endswith(f".{s}")] for s in suffixes}
    # A set names modules that a U-Net may lack (an SD 1.x without conv_shortcut): no error.
    unmatched = [suffix for suffix in suffixes if not matches[suffix]]
    if unmatched and (target_modules not in TARGET_SETS or len(unmatched) == len(matches)):
        named = ", ".join(f"'{suffix}'" for suffix in unmatched)
        raise PrebakeError(
            f"LoRA target {named} matches no module of the U-Net. Suffixes that do: "
            f"{', '.join(sorted({_suffix(path) for path in paths}))}. Sets: "
            f"{', '.join(TARGET_SETS)}."
        )
    return tuple(sorted(set().union(*matches.values())))


def trainable_parameters(unet: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List (name, parameter) of all that is trained, sorted by name.

    Raises: PrebakeError if there is none, if a parameter of the base model is trainable,
    or if one is not fp32, which the gradient scaler cannot handle.
    """
    trainable = sorted(
        ((name, p) for name, p in unet.named_parameters() if p.requires_grad), key=lambda t: t[0]
    )
    base = [name for name, _ in trainable if ".lora_A." not in name and ".lora_B." not in name]
    if base or not trainable:
        raise PrebakeError(
            f"{len(base)} parameters of the base U-Net are trainable (first: {base[:1]}), and "
            f"{len(trainable) - len(base)} of the adapter. Freeze the U-Net, then add the adapter."
        )
    not_fp32 = [name for name, parameter in trainable if parameter.dtype != torch.float32]
    if not_fp32:
        raise PrebakeError(
            f"{len(not_fp32)} adapter parameters are not fp32 (first: {not_fp32[0]}). Do not cast "
            f"the U-Net after the adapter has been added."
        )
    return trainable


def lora_weights(unet: nn.Module) -> dict[str, LoraPair]:
    """Copy the adapter's weights, unscaled, to fp32 on the CPU, sorted by module path."""
    return {
        path: LoraPair(_fp32_copy(layer.lora_A), _fp32_copy(layer.lora_B))
        for path, layer in _lora_layers(unet).items()
    }


def load_lora_weights_into(unet: nn.Module, pairs: Mapping[str, LoraPair]) -> None:
    """Set the adapter's weights to exactly these.

    Raises: PrebakeError, before anything is changed, if modules or shapes differ.
    """
    layers = _lora_layers(unet)
    found = {path: (pair.lora_A.shape, pair.lora_B.shape) for path, pair in pairs.items()}
    expected = {
        path: (layer.lora_A[ADAPTER].weight.shape, layer.lora_B[ADAPTER].weight.shape)
        for path, layer in layers.items()
    }
    differing = sorted(p for p in found.keys() | expected.keys() if found.get(p) != expected.get(p))
    if differing:
        raise PrebakeError(
            f"{len(differing)} LoRA modules differ from the adapter (first: {differing[0]}, found "
            f"{found.get(differing[0])}, expected {expected.get(differing[0])}). Use the rank and "
            f"target modules the weights were trained with."
        )
    with torch.no_grad():
        for path, layer in layers.items():
            layer.lora_A[ADAPTER].weight.copy_(pairs[path].lora_A)
            layer.lora_B[ADAPTER].weight.copy_(pairs[path].lora_B)


def check_every_adapter_has_gradient(unet: nn.Module) -> None:
    """After the first backward pass: refuse to go on if a part of the adapter has no gradient.

    lora_A's is zero then (B is zero), but it exists.
    """
    missing = [name for name, p in trainable_parameters(unet) if p.grad is None]
    if missing:
        raise PrebakeError(
            f"{len(missing)} adapter parameters got no gradient: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}. Use non-reentrant gradient checkpointing, and "
            f"targets that the forward pass uses."
        )


def _lora_layers(unet: nn.Module) -> dict[str, LoraLayer]:
    layers = {
        module_path(path): module
        for path, module in unet.named_modules()
        if isinstance(module, LoraLayer)
    }
    return dict(sorted(layers.items()))


def _fp32_copy(factor: nn.ModuleDict) -> torch.Tensor:
    weight: torch.Tensor = factor[ADAPTER].weight  # type: ignore[assignment]
    return weight.detach().to("cpu", torch.float32, copy=True)


def _suffix(path: str) -> str:
    """Return the last name of a path, with the one before it where the last is a number."""
    names = path.split(".")
    return ".".join(names[-2:]) if names[-1].isdigit() else names[-1]
