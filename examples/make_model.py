"""Write the bundled model: Stable Diffusion 1.x in every class and name, in under 1 MB.

The folder loads with `StableDiffusionPipeline.from_pretrained(..., safety_checker=None)`.
Its weights are random, so it paints noise; what it is for is to run the whole of prebake
in seconds and without a download. Shapes: latents are an eighth of the picture's side
and have 4 channels, text is 77 tokens of width 32.

The same seed gives the same bytes on every machine and with every version of torch: a
tensor is drawn by `random.Random` from the seed and its own name, and the configuration
files hold only what is written here.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import click
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from make_pictures import caption, picture_rng, random_spec
from safetensors.torch import save
from transformers import CLIPTextConfig, CLIPTextModel

NUM_TOKENS: Final = 77
TEXT_WIDTH: Final = 32
NUM_LATENT_CHANNELS: Final = 4
NUM_TOKENIZER_CAPTIONS: Final = 2_000

BOS: Final = "<|startoftext|>"
EOS: Final = "<|endoftext|>"
END_OF_WORD: Final = "</w>"

# Old enough that every supported diffusers reads it, and new enough that
# StableDiffusionPipeline does not warn about a U-Net for less than 512 px: it takes that
# for a mistake in the files of diffusers before 0.9.
DIFFUSERS_VERSION: Final = "0.35.0"

VAE: Final[dict[str, Any]] = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": DIFFUSERS_VERSION,
    "act_fn": "silu",
    "block_out_channels": [8, 8, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": NUM_LATENT_CHANNELS,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "out_channels": 3,
    "sample_size": 64,
    "scaling_factor": 0.18215,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}

# One level less than SD 1.x, so that latents from 6 to 12 a side, odd ones too, survive
# the halving. As there, the last level has no attention and `attention_head_dim` means
# the number of heads.
UNET: Final[dict[str, Any]] = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": DIFFUSERS_VERSION,
    "act_fn": "silu",
    "attention_head_dim": 2,
    "block_out_channels": [16, 32],
    "center_input_sample": False,
    "cross_attention_dim": TEXT_WIDTH,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
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
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}

TEXT_ENCODER: Final[dict[str, Any]] = {
    "architectures": ["CLIPTextModel"],
    "attention_dropout": 0.0,
    "hidden_act": "quick_gelu",
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 2 * TEXT_WIDTH,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": NUM_TOKENS,
    "model_type": "clip_text_model",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
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

# Constant log variance of the VAE's posterior: its noise stays far below its mean.
LOG_VARIANCE: Final = -10.0


def write_model(folder: Path, *, seed: int) -> None:
    """Write the whole pipeline of `seed` into `folder`."""
    vocab = write_tokenizer(folder / "tokenizer")
    text_encoder = TEXT_ENCODER | {
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
        "pad_token_id": vocab[EOS],
        "vocab_size": len(vocab),
    }
    _write_json(folder / "model_index.json", MODEL_INDEX)
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(folder / "text_encoder" / "config.json", text_encoder)
    _write_json(folder / "unet" / "config.json", UNET)
    _write_json(folder / "vae" / "config.json", VAE)
    with torch.device("meta"):  # only names and shapes are wanted
        vae = AutoencoderKL.from_config(VAE)
        unet = UNet2DConditionModel.from_config(UNET)
        clip = CLIPTextModel(CLIPTextConfig(**text_encoder))
    vae_weights = draw_weights(tensor_shapes(vae), seed)
    _shape_posterior(vae_weights)
    clip_shapes = {_with_prefix(name): shape for name, shape in tensor_shapes(clip).items()}
    _write_weights(folder / "vae" / "diffusion_pytorch_model.safetensors", vae_weights)
    _write_weights(
        folder / "unet" / "diffusion_pytorch_model.safetensors",
        draw_weights(tensor_shapes(unet), seed),
    )
    _write_weights(folder / "text_encoder" / "model.safetensors", draw_weights(clip_shapes, seed))


def tensor_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """List the shape of every tensor that a model saves."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def draw_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Draw fp32 weights that keep the variance of what passes through them.

    Matrices, kernels and embeddings are uniform with variance 1 / fan-in, scales are 1
    and biases 0. Source: LeCun et al. 1998, "Efficient BackProp", section 4.6.
    """
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            rng = Random(f"prebake model {seed} {name}")
            bound = math.sqrt(3 / math.prod(shape[1:]))
            values = [bound * (2 * rng.random() - 1) for _ in range(math.prod(shape))]
            weights[name] = torch.tensor(values, dtype=torch.float32).reshape(shape)
    return weights


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
    _write_json(folder / "vocab.json", vocab)
    _write_json(folder / "special_tokens_map.json", SPECIAL_TOKENS)
    _write_json(folder / "tokenizer_config.json", TOKENIZER)
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


def _shape_posterior(weights: dict[str, torch.Tensor]) -> None:
    """Make scaled latents of about unit variance, with little noise, as a trained VAE does."""
    mean, log_variance = weights["quant_conv.weight"].chunk(2)
    mean /= VAE["scaling_factor"]
    log_variance.zero_()
    weights["quant_conv.bias"][NUM_LATENT_CHANNELS:] = LOG_VARIANCE


def _with_prefix(name: str) -> str:
    """Name a text encoder's tensor as SD 1.x folders do; transformers 5 drops the prefix."""
    return name if name.startswith("text_model.") else f"text_model.{name}"


def _write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    halves = {name: weights[name].to(torch.float16) for name in sorted(weights)}
    path.write_bytes(save(halves, metadata={"format": "pt"}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the weights."
)
def main(out: Path, seed: int) -> None:
    """Write a tiny Stable Diffusion 1.x model with random weights."""
    write_model(out, seed=seed)
    click.echo(f"model in {out}")


if __name__ == "__main__":
    main()
