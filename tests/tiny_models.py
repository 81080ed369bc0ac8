"""A complete Stable Diffusion 1.x pipeline of about 200 000 random weights, for tests.

Everything a user's model folder has is there, in the real layout and with the real
classes: byte-level BPE tokenizer, CLIP text encoder, VAE of factor 8 with 4 latent
channels, U-Net with attention on the way down, in the middle and on the way up, and
the scheduler of SD 1.x. The weights depend on `seed` only.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
MERGES = (("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>"), ("a", "n"), ("t", "h"))


def make_tiny_sd(
    folder: Path,
    *,
    prediction_type: str = "epsilon",
    seed: int = 0,
    cross_attention_dim: int = 32,
    block_out_channels: tuple[int, ...] = (16, 24),
    scaling_factor: float = 0.18215,
) -> Path:
    """Write a tiny Stable Diffusion 1.x pipeline to `folder` and return it.

    `StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)` loads it.
    Latents from 6x6 to 16x16 (any even size) fit. The global random state is restored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny_unet(cross_attention_dim, block_out_channels).save_pretrained(folder / "unet")
        tiny_vae(scaling_factor).save_pretrained(folder / "vae")
        vocab = write_tokenizer(folder / "tokenizer")
        tiny_text_encoder(vocab, cross_attention_dim).save_pretrained(folder / "text_encoder")
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler_config(prediction_type))
    _write_json(folder / "model_index.json", MODEL_INDEX)
    return folder


def tiny_unet(
    cross_attention_dim: int = 32, block_out_channels: tuple[int, ...] = (16, 24), **overrides: Any
) -> UNet2DConditionModel:
    """Make a U-Net of the SD 1.x kind; the last level has no attention, as there."""
    plain = len(block_out_channels) - 1
    settings: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D",) * plain + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * plain,
        "block_out_channels": block_out_channels,
        "layers_per_block": 1,
        "cross_attention_dim": cross_attention_dim,
        "attention_head_dim": 2,  # SD 1.x means the number of heads by it
        "norm_num_groups": 8,
    }
    return UNet2DConditionModel(**(settings | overrides))


def tiny_vae(scaling_factor: float = 0.18215) -> AutoencoderKL:
    """Make a VAE with 4 levels, so that 8x8 pixels become one latent position."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=scaling_factor,
    )


def tiny_text_encoder(vocab: dict[str, int], hidden_size: int = 32) -> CLIPTextModel:
    """Make a CLIP text encoder of 3 layers, so that clip-skip has layers to skip."""
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        bos_token_id=vocab[BOS],
        eos_token_id=vocab[EOS],
        pad_token_id=vocab[EOS],
    )
    return CLIPTextModel(config)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write CLIP tokenizer files over all bytes and a few merges; return the vocabulary."""
    byte_symbols = byte_level_alphabet()
    tokens = byte_symbols + [symbol + "</w>" for symbol in byte_symbols]
    tokens += [left + right for left, right in MERGES] + [BOS, EOS]
    vocab = {token: index for index, token in enumerate(tokens)}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "vocab.json", vocab)
    merges = ["#version: 0.2", *(f"{left} {right}" for left, right in MERGES)]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "do_lower_case": True}
        | {"add_prefix_space": False, "errors": "replace"}
        | special,
    )
    return vocab


def byte_level_alphabet() -> list[str]:
    """List one printable character for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the rest take the code points from
    256 on. Source: Radford et al. 2019, GPT-2 `encoder.py`, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    num_others = 256 - len(printable)
    return [chr(code) for code in [*printable, *range(256, 256 + num_others)]]


def scheduler_config(prediction_type: str) -> dict[str, Any]:
    """Return the scheduler settings SD 1.x ships with (`scaled_linear` betas)."""
    return {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.6.0",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "prediction_type": prediction_type,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }


MODEL_INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.6.0",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
