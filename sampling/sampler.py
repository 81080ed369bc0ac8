"""Pictures from a Stable Diffusion 1.x model and LoRA files, by the pipeline of diffusers."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError

from precompute.device import TORCH_DTYPES, choose_compute_dtype, choose_device
from sampling.lora import Lora
from store_format.errors import PrebakeError
from train import xformers_import as xformers_import  # before diffusers, which it keeps quiet

from diffusers.utils import logging as diffusers_logging  # isort: skip
from transformers.utils import logging as transformers_logging  # isort: skip

for library in (diffusers_logging, transformers_logging):  # before the pipeline, which warns
    library.disable_progress_bar()
    library.set_verbosity_error()

from diffusers import StableDiffusionPipeline  # noqa: E402

BATCH_SIZE = 8


class Sampler:
    """A model with its LoRA files, ready to draw."""

    def __init__(self, model: str, loras: Sequence[Lora], device: str) -> None:
        """Load the model, in fp16 on a GPU, else in fp32.

        Raises:
            PrebakeError: the device is not there, the model cannot be loaded, or a file holds
                nothing that fits its U-Net.
        """
        place = choose_device(device)
        dtype = TORCH_DTYPES[choose_compute_dtype("auto", place)]
        try:
            self._pipeline = StableDiffusionPipeline.from_pretrained(
                model, use_safetensors=True, safety_checker=None, requires_safety_checker=False
            ).to(place, dtype)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise PrebakeError(
                f"--model {model} cannot be loaded on {place}: {reason:.300}"
            ) from error
        self._pipeline.set_progress_bar_config(disable=True)
        self._names: list[str] = []
        self._weights = [lora.weight for lora in loras]
        for number, lora in enumerate(loras):
            self._load(f"lora{number}", lora.path)

    def _load(self, name: str, path: Path) -> None:
        try:
            with warnings.catch_warnings():  # peft warns of a second adapter
                warnings.simplefilter("ignore")
                self._pipeline.load_lora_weights(
                    path.parent,
                    weight_name=path.name,
                    adapter_name=name,
                    use_safetensors=True,
                )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise PrebakeError(f"--lora {path} does not fit the model: {reason:.300}") from error
        if name not in self._pipeline.get_list_adapters().get("unet", []):
            raise PrebakeError(f"--lora {path} holds nothing for the model's U-Net.")
        self._names.append(name)

    def default_size_px(self) -> tuple[int, int]:
        """Return the (width, height) that the model was made for."""
        side = self._pipeline.unet.config.sample_size * self._pipeline.vae_scale_factor
        return side, side

    def draw(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        strength: float,
        negative: str,
        size_px: tuple[int, int],
        num_steps: int,
        guidance: float,
        advance: Callable[[int], object],
    ) -> list[Image.Image]:
        """Draw each prompt from the noise of its seed, with all LoRA weights times `strength`.

        The noise is drawn on the CPU, so that a seed means the same on every machine. `advance`
        is told the number of pictures finished.
        """
        if self._names:
            self._pipeline.set_adapters(self._names, [w * strength for w in self._weights])
        width, height = size_px
        pictures: list[Image.Image] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = list(prompts[start : start + BATCH_SIZE])
            pictures += self._pipeline(
                batch,
                negative_prompt=[negative] * len(batch),
                width=width,
                height=height,
                num_inference_steps=num_steps,
                guidance_scale=guidance,
                generator=[torch.Generator().manual_seed(s) for s in seeds[start:][: len(batch)]],
            ).images
            advance(len(batch))
        return pictures
