"""Ids, keys and index rows of what one bake makes."""

import os

from precompute.buckets import Geometry
from precompute.config import BakeConfig
from precompute.pixels import DECODE_RULES_VERSION, parse_background
from precompute.work import Work
from store_format import keys
from store_format.errors import PrebakeError
from store_format.manifest import Dtype, Encoders
from store_format.rows import SampleRow, Text

FULL_NAMES: dict[str, Dtype] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


class BakeKeys:
    """Ids and keys under one bake's configuration."""

    def __init__(self, config: BakeConfig, encoders: Encoders, compute_dtype: str, length: int):
        self.source = _checked_source(config)
        self.background = parse_background(config.background)
        self._posterior = config.posterior
        self._dtypes = {
            "compute_dtype": FULL_NAMES[compute_dtype],
            "stored_dtype": FULL_NAMES[config.dtype],
        }
        self._encoders = encoders
        self._text_encoders = [(e.identity, e.tokenizer_identity) for e in encoders.text]
        self._clip_skip = config.clip_skip
        self._length = length

    def sample_id(self, path: str) -> str:
        """Return the id of the image at `path` of this source."""
        return keys.sample_id(self.source, path)

    def text(self, caption: str) -> Text:
        """Return a caption with its key."""
        key = keys.text_key(
            caption,
            encoders=self._text_encoders,
            max_token_length=self._length,
            clip_skip=self._clip_skip,
            **self._dtypes,
        )
        return Text(caption, key)

    def latent_key(self, image_sha256: str, geometry: Geometry) -> str:
        """Return the key of an image's latents."""
        vae = self._encoders.vae
        return keys.latent_key(
            image_sha256,
            decode_rules=DECODE_RULES_VERSION,
            bucket=(geometry.bucket_width_px, geometry.bucket_height_px),
            resized=(geometry.resized_width_px, geometry.resized_height_px),
            crop=(geometry.crop_left_px, geometry.crop_top_px),
            flipped=False,
            background=self.background,
            vae=vae.identity,
            scaling_factor=vae.scaling_factor,
            shift_factor=vae.shift_factor,
            posterior=self._posterior,
            **self._dtypes,
        )

    def sample_row(self, work: Work, image_sha256: str) -> SampleRow:
        """Return the index row of a sample, without its place."""
        geometry = work.geometry
        return SampleRow(
            sample_id=work.sample_id,
            source=self.source,
            path=work.image.path,
            image_sha256=image_sha256,
            image_bytes=work.image.size_bytes,
            image_mtime_ns=work.image.mtime_ns,
            latent_key=self.latent_key(image_sha256, geometry),
            original_px=(work.size.width_px, work.size.height_px),
            resized_px=(geometry.resized_width_px, geometry.resized_height_px),
            crop_px=(geometry.crop_left_px, geometry.crop_top_px),
            bucket_px=work.bucket_px,
            texts=(self.text(work.image.caption),),
        )


def _checked_source(config: BakeConfig) -> str:
    """Return the source's name, which is part of ids: some text in UTF-8."""
    name = config.source
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")
    if not name or shown != name:
        raise PrebakeError(
            f"the folder's name {shown!r} cannot name a source: it must be text in UTF-8. "
            "Give --source-name."
        )
    return name
