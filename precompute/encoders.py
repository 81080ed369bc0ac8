"""The two encoders of a bake: pixels to scaled latents, captions to hidden states.

B batch, H, W image height and width, C latent channels, h=H/8, w=W/8, L tokens, D text width.
Each batch has one fixed size, short ones are padded: then an item's bytes do not depend on its
neighbours (design: measured on convolutions, where another batch size does change bits). On a CPU
that size is 1, which costs nothing there: in a larger batch an item's bytes depend on its place,
because each thread takes a part of the batch and ends it with scalar instructions, which round
differently (measured with 3 threads: 10 of 20 images). The number of threads still matters.
"""

import gc
import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from precompute.device import TORCH_DTYPES
from precompute.model import ModelParts, load_tokenizer, variant_of, weights_file
from store_format.errors import PrebakeError

# diffusers imports what stage 1 does not use: keep out the banner and the faults of xformers, and
# what bitsandbytes says of 4-bit matrices.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
logging.getLogger("xformers").setLevel(logging.ERROR)
try:
    importlib.import_module("xformers.ops")
except (ImportError, OSError, RuntimeError, AttributeError):
    sys.modules["xformers"] = None  # type: ignore[assignment]

from diffusers import AutoencoderKL  # noqa: E402
from diffusers.utils import logging as diffusers_logging  # noqa: E402
from transformers import CLIPTextModel  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

for library in (diffusers_logging, transformers_logging):
    library.disable_progress_bar()
    library.set_verbosity_error()  # what they warn of while loading is an error here, see `_load`

TEXT_BATCH = 16

_DECODER = ("decoder", "post_quant_conv")  # the half of a VAE that a bake does not need


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
    ) -> None:
        self._facts = parts.encoders.vae
        self._posterior = posterior
        self._batch_size = _at_once(batch_size, device)
        self._stored_dtype = stored_dtype
        self._device = device
        self._vae = _load(AutoencoderKL, parts.folder / "vae", compute_dtype, device, _DECODER)
        self.num_retried = 0  # images encoded in float32, after an overflow
        self.notes: list[str] = []  # what a person should know; the caller takes them out

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
                start = stop
                continue
            except torch.OutOfMemoryError:
                pass  # handled below: here the exception still holds the tensors of the attempt
            if self._batch_size == 1:
                raise PrebakeError(
                    f"out of memory while encoding one image of {pixels[0].shape[1]}x"
                    f"{pixels[0].shape[0]} px on {self._device}. Bake at a lower --resolution."
                )
            self._batch_size //= 2
            gc.collect()
            torch.cuda.empty_cache()
            self.notes.append(f"out of memory: images are now encoded {self._batch_size} at once")
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
        dtype = self._vae.dtype
        if bad and dtype != torch.float32:
            self._vae.to(torch.float32)
            try:
                moments[bad] = self._moments(images)[bad]
            finally:
                self._vae.to(dtype)
            self.num_retried += len(bad)
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
        self._model = _load(CLIPTextModel, parts.folder / "text_encoder", compute_dtype, device)
        self._tokenizer = load_tokenizer(parts.folder / "tokenizer")
        self._max_token_length = parts.max_token_length
        self._clip_skip = clip_skip
        self._stored_dtype = stored_dtype
        self._device = device
        self._batch_size = _at_once(TEXT_BATCH, device)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[EncodedText]:
        """Encode captions, each padded or cut to L tokens."""
        results: list[EncodedText] = []
        for start in range(0, len(captions), self._batch_size):
            results += self._encode_batch(captions[start : start + self._batch_size])
        return results

    def _encode_batch(self, captions: Sequence[str]) -> list[EncodedText]:
        padded = [*captions, *[""] * (self._batch_size - len(captions))]
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


def _at_once(batch_size: int, device: torch.device) -> int:
    return 1 if device.type == "cpu" else batch_size


def _load(
    kind: Any, folder: Path, dtype: str, device: torch.device, unused: Sequence[str] = ()
) -> Any:
    """Load a frozen model part without its `unused` modules.

    Raises:
        PrebakeError: the weights are not those of the configuration, or do not fit the device.
    """
    try:
        model, info = kind.from_pretrained(
            folder,
            torch_dtype=TORCH_DTYPES[dtype],
            variant=variant_of(weights_file(folder)),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        missing = sorted(k for k in info["missing_keys"] if k.split(".")[0] not in unused)
        if missing:  # the libraries only warn, and make up random weights
            raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
        for name in unused:
            setattr(model, name, torch.nn.Identity())
        return model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError:
        raise PrebakeError(f"{folder} does not fit into the memory of {device}.") from None
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PrebakeError(
            f"{folder}: its weights do not load as its config.json says ({reason:.200}). "
            "Copy the model again."
        ) from error


def _as_torch(array: NDArray[np.generic]) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
