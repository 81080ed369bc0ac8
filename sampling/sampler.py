"""Pictures from a Stable Diffusion 1.x model and LoRA files, by the pipeline of diffusers."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError

from precompute.device import TORCH_DTYPES, choose_compute_dtype, choose_device
from precompute.model import open_model, variant_of, weights_file
from sampling.lora import Lora
from store_format.errors import PrebakeError
from train import xformers_import as xformers_import  # before diffusers, which it keeps quiet

from diffusers.utils import logging as diffusers_logging  # isort: skip
from transformers.utils import logging as transformers_logging  # isort: skip

for library in (diffusers_logging, transformers_logging):  # before the pipeline, which warns
    library.disable_progress_bar()
    library.set_verbosity(logging.CRITICAL)  # what goes wrong is raised too

from diffusers import StableDiffusionPipeline  # noqa: E402

BATCH_SIZE = 8


class Sampler:
    """A model with its LoRA files, ready to draw.

    Attributes:
        warnings: what a person should know about the files.
    """

    def __init__(self, model: str, loras: Sequence[Lora], device: str) -> None:
        """Load the model, in fp16 on a GPU, else in fp32.

        Raises:
            PrebakeError: the device is not there, the model cannot be loaded, or a file holds
                nothing that fits its U-Net.
        """
        place = choose_device(device)
        dtype = TORCH_DTYPES[choose_compute_dtype("auto", place)]
        variant = None
        if Path(model).is_dir():
            open_model(model)
            variant = variant_of(weights_file(Path(model) / "unet"))
        try:
            pipeline = StableDiffusionPipeline.from_pretrained(
                model,
                variant=variant,
                use_safetensors=True,
                safety_checker=None,
                requires_safety_checker=False,
            )
        except (OSError, ValueError, TypeError, RuntimeError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise PrebakeError(f"--model {model} cannot be loaded: {reason:.300}") from error
        try:
            self._pipeline = pipeline.to(place, dtype)
        except (RuntimeError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise PrebakeError(f"--device {device} cannot hold {model}: {reason:.300}") from error
        self._pipeline.set_progress_bar_config(disable=True)
        self.warnings: list[str] = []
        self._names: list[str] = []
        self._weights = [lora.weight for lora in loras]
        for number, lora in enumerate(loras):
            self._load(f"lora{number}", lora.path)

    def _load(self, name: str, path: Path) -> None:
        try:
            with warnings.catch_warnings():  # peft warns of a second adapter
                warnings.simplefilter("ignore")
                where: dict[str, Any] = {"weight_name": path.name, "use_safetensors": True}
                found = StableDiffusionPipeline.lora_state_dict(path.parent, **where)[0]
                self._pipeline.load_lora_weights(path.parent, adapter_name=name, **where)
        except SafetensorError as error:
            raise PrebakeError(f"--lora {path} is damaged, or no safetensors file.") from error
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise PrebakeError(f"--lora {path} does not fit the model: {reason:.300}") from error
        if name not in self._pipeline.get_list_adapters().get("unet", []):
            raise PrebakeError(f"--lora {path} holds nothing for the model's U-Net.")
        self._names.append(name)
        num_loaded = sum(
            f".{name}." in parameter
            for part in (self._pipeline.unet, self._pipeline.text_encoder)
            for parameter, _ in part.named_parameters()
        )
        num_found = sum(not key.endswith(".alpha") for key in found)
        if num_loaded < num_found:
            self.warnings.append(
                f"--lora {path}: {num_found - num_loaded} of its {num_found} tensors are of layers "
                f"that the model does not have, and are ignored"
            )

    def default_size_px(self) -> tuple[int, int]:
        """Return the (width, height) that the model was made for."""
        side = self._pipeline.unet.config.sample_size * self._pipeline.vae_scale_factor
        return side, side

    def num_cut(self, prompts: Sequence[str]) -> int:
        """Return how many prompts are longer than the text encoder reads."""
        tokenizer = self._pipeline.tokenizer
        lengths = [len(ids) for ids in tokenizer(list(prompts)).input_ids]
        return sum(length > tokenizer.model_max_length for length in lengths)

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

        Raises:
            PrebakeError: the pictures are not finite numbers.
        """
        if self._names:
            self._pipeline.set_adapters(self._names, [w * strength for w in self._weights])
        width, height = size_px
        pictures: list[Image.Image] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = list(prompts[start : start + BATCH_SIZE])
            images = self._pipeline(
                batch,
                negative_prompt=[negative] * len(batch),
                width=width,
                height=height,
                num_inference_steps=num_steps,
                guidance_scale=guidance,
                generator=[torch.Generator().manual_seed(s) for s in seeds[start:][: len(batch)]],
                output_type="np",
            ).images  # [B, H, W, 3] f32 in 0..1
            if not np.isfinite(images).all():
                raise PrebakeError(
                    f"with weight {strength:g} the model's pictures are not finite numbers: the "
                    f"weight is too high, or a file holds such numbers. Give a lower weight, or "
                    f"another file."
                )
            pictures += self._pipeline.image_processor.numpy_to_pil(images)
            advance(len(batch))
        return pictures
