"""The bundled model's files except for its weights: Stable Diffusion 1.x, only tiny.

`train_vae.py` and `train_unet.py` add the weights, and the folder then loads with
`StableDiffusionPipeline.from_pretrained(..., safety_checker=None)`. Shapes: latents are an
eighth of the picture's side and have 4 channels, text is 77 tokens of width 64.

Equal contents give equal bytes, on every machine: the configuration files hold only what
is written here, and the tokenizer is a pure function of the captions of `sampling.shapes`.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click
import torch
from safetensors.torch import save

from sampling.shapes import caption, picture_rng, random_spec

NUM_TOKENS: Final = 77
TEXT_WIDTH: Final = 64
NUM_LATENT_CHANNELS: Final = 4
NUM_TOKENIZER_CAPTIONS: Final = 2_000

BOS: Final = "<|startoftext|>"
EOS: Final = "<|endoftext|>"
END_OF_WORD: Final = "</w>"

# Old enough that every supported diffusers reads it, and new enough that
# StableDiffusionPipeline does not warn about a U-Net for less than 512 px: it takes that
# for a mistake in the files of diffusers before 0.9.
DIFFUSERS_VERSION: Final = "0.35.0"

# `train_vae.py` measures the `scaling_factor` and adds it. One group a norm: with as many
# groups as channels, as 8 of 8, each channel's mean is lost, and with it every flat colour.
VAE: Final[dict[str, Any]] = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": DIFFUSERS_VERSION,
    "act_fn": "silu",
    "block_out_channels": [8, 16, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": NUM_LATENT_CHANNELS,
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "out_channels": 3,
    "sample_size": 64,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}

# Two levels where SD 1.x has four, so that latents from 6 to 12 a side, odd ones too,
# survive the halving. Both have attention, for the lower one is where a shape is decided.
# As in SD 1.x, `attention_head_dim` means the number of heads.
UNET: Final[dict[str, Any]] = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": DIFFUSERS_VERSION,
    "act_fn": "silu",
    "attention_head_dim": 4,
    "block_out_channels": [64, 96],
    "center_input_sample": False,
    "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "downsample_padding": 1,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": NUM_LATENT_CHANNELS,
    "layers_per_block": 1,
    "mid_block_scale_factor": 1,
    "norm_eps": 1e-05,
    "norm_num_groups": 8,
    "out_channels": NUM_LATENT_CHANNELS,
    "sample_size": 8,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
}

TEXT_ENCODER: Final[dict[str, Any]] = {
    "architectures": ["CLIPTextModel"],
    "attention_dropout": 0.0,
    "hidden_act": "quick_gelu",
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 4 * TEXT_WIDTH,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": NUM_TOKENS,
    "model_type": "clip_text_model",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "projection_dim": TEXT_WIDTH,
    # What it is read as, as diffusers reads the others; transformers 5 would keep the
    # fp16 of the file, and a pipeline of mixed dtypes fails.
    "torch_dtype": "float32",
}

SPECIAL_TOKENS: Final = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}

TOKENIZER: Final[dict[str, Any]] = {
    "add_prefix_space": False,
    "do_lower_case": True,
    "errors": "replace",
    "model_max_length": NUM_TOKENS,
    "tokenizer_class": "CLIPTokenizer",
    **SPECIAL_TOKENS,
}

# The noise schedule of SD 1.x. DDIM, for it has a setting for each of these; the PNDM
# of the original folders warns about `clip_sample`.
SCHEDULER: Final[dict[str, Any]] = {
    "_class_name": "DDIMScheduler",
    "_diffusers_version": DIFFUSERS_VERSION,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "trained_betas": None,
}

MODEL_INDEX: Final[dict[str, Any]] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": DIFFUSERS_VERSION,
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_settings(folder: Path) -> dict[str, int]:
    """Write the index, the scheduler and the tokenizer; return the tokenizer's vocabulary."""
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    return write_tokenizer(folder / "tokenizer")


def text_encoder_config(vocab: dict[str, int]) -> dict[str, Any]:
    """Return the text encoder's configuration for a tokenizer of this vocabulary."""
    return TEXT_ENCODER | {
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
        "pad_token_id": vocab[EOS],
        "vocab_size": len(vocab),
    }


def train_bpe(words: Counter[str]) -> list[tuple[str, str]]:
    """Find the merges, most frequent pair first, that make one token of every word.

    Words are ASCII, each a key with its count. Ties go to the pair that sorts first.
    Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword
    Units", algorithm 1.
    """
    spellings = {word: (*word[:-1], word[-1] + END_OF_WORD) for word in words}
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in spellings.items():
            for pair in pairwise(symbols):
                pairs[pair] += words[word]
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spellings = {word: _merge(symbols, best) for word, symbols in spellings.items()}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write CLIP's tokenizer files, trained on captions of pictures; return the vocabulary.

    The vocabulary starts with all 256 bytes, inside and at the end of a word, so any text
    has tokens; as in CLIP's own, the start and the end token come last.
    """
    merges = train_bpe(Counter(_caption_words()))
    letters = byte_letters()
    tokens = [*letters, *(letter + END_OF_WORD for letter in letters)]
    tokens += [left + right for left, right in merges]
    tokens += [BOS, EOS]
    vocab = {token: number for number, token in enumerate(tokens)}
    write_json(folder / "vocab.json", vocab)
    write_json(folder / "special_tokens_map.json", SPECIAL_TOKENS)
    write_json(folder / "tokenizer_config.json", TOKENIZER)
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    _write_text(folder / "merges.txt", "\n".join(lines) + "\n")
    return vocab


def byte_letters() -> list[str]:
    """List the character that stands for each byte in a byte-level vocabulary.

    Source: Radford et al. 2019, GPT-2's `encoder.py`, `bytes_to_unicode`: printable
    Latin-1 characters first, for themselves; the other bytes are U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(0x100, 0x100 + 256 - len(printable))
    return [chr(code) for code in (*printable, *others)]


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write tensors in fp16, sorted by name."""
    halves = {name: weights[name].to(torch.float16).contiguous() for name in sorted(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(halves, metadata={"format": "pt"}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with its keys in the order given."""
    _write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _caption_words() -> Iterable[str]:
    for index in range(NUM_TOKENIZER_CAPTIONS):
        rng = picture_rng(seed=0, index=index)
        yield from caption(random_spec(rng), rng).split()


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
def main(out: Path) -> None:
    """Write the index, the scheduler and the tokenizer of the bundled model."""
    write_settings(out)
    click.echo(f"settings and tokenizer in {out}")


if __name__ == "__main__":
    main()
