"""The two encoders of a bake: pixels to scaled latents, captions to hidden states.

B batch, H, W image height and width, C latent channels, h=H/8, w=W/8, L tokens, D text width.
Each batch has one fixed size, short ones are padded: then an item's bytes do not depend on its
neighbours (design: measured on convolutions, where another batch size does change bits).
"""

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from precompute.device import TORCH_DTYPES
from precompute.model import ModelParts, variant_of, weights_file
from store_format.errors import PrebakeError

# diffusers imports xformers, which stage 1 does not use: keep its banner and its faults out.
logging.getLogger("xformers").setLevel(logging.ERROR)
try:
    importlib.import_module("xformers.ops")
except (ImportError, OSError, RuntimeError, AttributeError):
    sys.modules["xformers"] = None  # type: ignore[assignment]

from diffusers import AutoencoderKL  # noqa: E402
from transformers import CLIPTextModel, CLIPTokenizer  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

transformers_logging.disable_progress_bar()

TEXT_BATCH = 16

Report = Callable[[str], None]


def to_stored(tensor: torch.Tensor, dtype: str) -> NDArray[np.generic]:
    """Return a tensor as numpy in its stored dtype; bfloat16 as raw uint16."""
    tensor = tensor.to("cpu", TORCH_DTYPES[dtype]).contiguous()
    if dtype == "bf16":
        return np.asarray(tensor.view(torch.uint16).numpy())
    return np.asarray(tensor.numpy())


def posterior_noise(latent_key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the standard normal noise [*shape] f32 of a latent key: the same on every machine."""
    generator = torch.Generator("cpu").manual_seed(int(latent_key[:16], 16) % 2**63)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


class ImageEncoder:
    """The encoder half of a model's VAE; the decoder is not kept."""

    def __init__(
        self,
        parts: ModelParts,
        *,
        posterior: str,
        batch_size: int,
        compute_dtype: str,
        stored_dtype: str,
        device: torch.device,
        report: Report,
    ) -> None:
        self._facts = parts.encoders.vae
        self._posterior = posterior
        self._batch_size = batch_size
        self._stored_dtype = stored_dtype
        self._device = device
        self._report = report
        folder = parts.folder / "vae"
        vae = AutoencoderKL.from_pretrained(
            folder,
            torch_dtype=TORCH_DTYPES[compute_dtype],
            variant=variant_of(weights_file(folder)),
            use_safetensors=True,
            local_files_only=True,
        )
        vae.decoder = torch.nn.Identity()
        vae.post_quant_conv = torch.nn.Identity()
        self._vae = vae.to(device).eval().requires_grad_(False)
        self.num_encoded = 0

    @torch.no_grad()
    def encode(
        self, pixels: Sequence[NDArray[np.uint8]], latent_keys: Sequence[str]
    ) -> list[list[NDArray[np.generic]] | None]:
        """Encode images of one size.

        Args:
            pixels: uint8 [H, W, 3] each.
            latent_keys: decide the noise of each posterior sample.

        Returns:
            For each image its stored tensors, `latents` [C, h, w] or (`latents_mean`,
            `latents_std`); None if they are not finite even in float32.
        """
        results: list[list[NDArray[np.generic]] | None] = []
        start = 0
        while start < len(pixels):
            stop = min(start + self._batch_size, len(pixels))
            try:
                results += self._encode_batch(pixels[start:stop], latent_keys[start:stop])
            except torch.OutOfMemoryError:
                if self._batch_size == 1:
                    raise PrebakeError(
                        f"out of memory while encoding one image of {pixels[0].shape[1]}x"
                        f"{pixels[0].shape[0]} px on {self._device}. Bake at a lower --resolution."
                    ) from None
                self._batch_size //= 2
                gc.collect()
                torch.cuda.empty_cache()
                self._report(f"out of memory: images are now encoded {self._batch_size} at once")
                continue
            start = stop
        self.num_encoded += len(pixels)
        return results

    def _encode_batch(
        self, pixels: Sequence[NDArray[np.uint8]], keys: Sequence[str]
    ) -> list[list[NDArray[np.generic]] | None]:
        batch = np.zeros((self._batch_size, *pixels[0].shape), np.uint8)
        batch[: len(pixels)] = np.stack(pixels)
        images = torch.from_numpy(batch).to(self._device).permute(0, 3, 1, 2)  # [B, 3, H, W] u8
        images = images.to(torch.float32) / 127.5 - 1.0  # [B, 3, H, W] f32 in [-1, 1]
        moments = self._moments(images.to(self._vae.dtype))  # [B, 2C, h, w] f32
        bad = [i for i in range(len(pixels)) if not torch.isfinite(moments[i]).all()]
        if bad and self._vae.dtype != torch.float32:
            dtype = self._vae.dtype
            retried = self._vae.to(torch.float32)
            exact = self._moments(images)
            retried.to(dtype)
            moments[bad] = exact[bad]
            self._report(f"{len(bad)} images overflowed {dtype} and were encoded in float32")
        results: list[list[NDArray[np.generic]] | None] = []
        for i, key in enumerate(keys):
            tensors = [to_stored(t, self._stored_dtype) for t in self._latents(moments[i], key)]
            finite = all(bool(torch.isfinite(_as_torch(t)).all()) for t in tensors)
            results.append(tensors if finite else None)
        return results

    def _moments(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self._vae.encoder(images)
        if self._vae.quant_conv is not None:
            hidden = self._vae.quant_conv(hidden)
        return torch.as_tensor(hidden).to("cpu", torch.float32)

    def _latents(self, moments: torch.Tensor, key: str) -> list[torch.Tensor]:
        """Return scaled latents of one image from its moments [2C, h, w].

        Source: Kingma & Welling 2013, eq. 10 (z = mean + std * noise); the clamp of the log
        variance to [-30, 20] as in the LDM reference code (Rombach et al. 2022) and diffusers.
        """
        mean, log_variance = moments.chunk(2)
        std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        scale, shift = self._facts.scaling_factor, self._facts.shift_factor
        if self._posterior == "moments":
            return [(mean - shift) * scale, std * scale]
        if self._posterior == "sample":
            mean = mean + std * posterior_noise(key, tuple(mean.shape))
        return [(mean - shift) * scale]


@dataclass(frozen=True)
class EncodedText:
    """A caption's states; `num_tokens` counts before truncation, begin and end tokens included."""

    num_tokens: int
    tensors: list[NDArray[np.generic]]  # [encoder_hidden_states [L, D]]


class TextEncoder:
    """A CLIP text model with its tokenizer."""

    def __init__(
        self,
        parts: ModelParts,
        *,
        clip_skip: int,
        compute_dtype: str,
        stored_dtype: str,
        device: torch.device,
    ) -> None:
        folder = parts.folder / "text_encoder"
        self._model = (
            CLIPTextModel.from_pretrained(
                folder,
                torch_dtype=TORCH_DTYPES[compute_dtype],
                variant=variant_of(weights_file(folder)),
                use_safetensors=True,
                local_files_only=True,
            )
            .to(device)
            .eval()
            .requires_grad_(False)
        )
        self._tokenizer = load_tokenizer(parts.folder)
        self._max_token_length = parts.max_token_length
        self._clip_skip = clip_skip
        self._stored_dtype = stored_dtype
        self._device = device
        num_layers = self._model.config.num_hidden_layers
        if clip_skip > num_layers:
            raise PrebakeError(
                f"--clip-skip {clip_skip}: the text encoder has {num_layers} layers."
            )
        self.num_encoded = 0

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[EncodedText]:
        """Encode captions, each padded or cut to L tokens."""
        results: list[EncodedText] = []
        for start in range(0, len(captions), TEXT_BATCH):
            results += self._encode_batch(captions[start : start + TEXT_BATCH])
        self.num_encoded += len(captions)
        return results

    def _encode_batch(self, captions: Sequence[str]) -> list[EncodedText]:
        padded = [*captions, *[""] * (TEXT_BATCH - len(captions))]
        tokens = self._tokenizer(
            padded,
            padding="max_length",
            max_length=self._max_token_length,
            truncation=True,
            return_tensors="pt",
        )
        mask = None
        if getattr(self._model.config, "use_attention_mask", False):
            mask = tokens.attention_mask.to(self._device)
        states = self._hidden_states(tokens.input_ids.to(self._device), mask)  # [B, L, D]
        lengths = [len(ids) for ids in self._tokenizer(list(captions), verbose=False).input_ids]
        stored = [to_stored(states[i], self._stored_dtype) for i in range(len(captions))]
        for caption, tensor in zip(captions, stored, strict=True):
            if not torch.isfinite(_as_torch(tensor)).all():
                raise PrebakeError(
                    f"the text encoder gives non-finite states for caption {caption[:80]!r}. "
                    "Bake with --compute-dtype fp32 --dtype bf16."
                )
        return [EncodedText(n, [t]) for n, t in zip(lengths, stored, strict=True)]

    def _hidden_states(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the states of the chosen layer after the final layer norm, as SD 1.x takes them.

        Source: CompVis latent-diffusion uses the last hidden state; with a skip, the layer norm
        is applied to the earlier layer (kohya numbering, 1 = last layer).
        """
        output = self._model(ids, attention_mask=mask, output_hidden_states=self._clip_skip > 1)
        if self._clip_skip == 1:
            return torch.as_tensor(output.last_hidden_state)
        inner = getattr(self._model, "text_model", self._model)  # transformers 4 nests it
        return torch.as_tensor(inner.final_layer_norm(output.hidden_states[-self._clip_skip]))


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Load the CLIP tokenizer of a model folder."""
    return CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)


def _as_torch(array: NDArray[np.generic]) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
