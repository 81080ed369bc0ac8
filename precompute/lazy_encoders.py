"""The two encoders of a bake, loaded when they are first used: a bake without work loads none."""

import time
from functools import cached_property
from typing import TYPE_CHECKING

from precompute.bake_keys import FULL_NAMES
from precompute.config import BakeConfig
from precompute.device import choose_device
from precompute.model import ModelParts
from store_format.manifest import Manifest

if TYPE_CHECKING:
    from precompute.encoders import ImageEncoder, TextEncoder


class Encoders:
    """The two encoders of a bake, each loaded when it is first used, which took `loading_s`."""

    def __init__(self, config: BakeConfig, parts: ModelParts, manifest: Manifest) -> None:
        self.loading_s = 0.0
        self._config = config
        self._parts = parts
        self._compute_dtype = next(
            short for short, full in FULL_NAMES.items() if full == manifest.config["compute_dtype"]
        )

    def load(self) -> None:
        """Load both now."""
        _ = self.text, self.image

    @cached_property
    def image(self) -> "ImageEncoder":
        """The VAE's encoder."""
        start_s = time.monotonic()
        from precompute.encoders import ImageEncoder

        encoder = ImageEncoder(
            self._parts,
            posterior=self._config.posterior,
            batch_size=self._config.batch_size,
            compute_dtype=self._compute_dtype,
            stored_dtype=self._config.dtype,
            device=choose_device(self._config.device),
        )
        self.loading_s += time.monotonic() - start_s
        return encoder

    @cached_property
    def text(self) -> "TextEncoder":
        """The text encoder with its tokenizer."""
        start_s = time.monotonic()
        from precompute.encoders import TextEncoder

        encoder = TextEncoder(
            self._parts,
            clip_skip=self._config.clip_skip,
            compute_dtype=self._compute_dtype,
            stored_dtype=self._config.dtype,
            device=choose_device(self._config.device),
        )
        self.loading_s += time.monotonic() - start_s
        return encoder
