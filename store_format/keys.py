"""Ids and keys: what makes two samples the same sample, two artifacts the same bytes.

FORMAT.md, sections 1, 2 and 8. Ids and keys are 32 lower-case hex digits here (16 bytes).
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Return the one UTF-8 JSON form of `value`: sorted keys, no white space."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def hash16(value: Any) -> str:
    """Return the first 16 bytes of the SHA-256 of the canonical JSON of `value`, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]


def sample_id(source: str, path: str) -> str:
    """Return the stable id of the image at `path` (relative, posix, with extension) of `source`."""
    return hash16(["prebake.sample", 1, source, path])


def text_key(
    caption: str,
    *,
    encoders: Sequence[tuple[str, str]],
    max_token_length: int,
    clip_skip: int,
    compute_dtype: str,
    stored_dtype: str,
) -> str:
    """Return the key of a caption's states.

    Args:
        caption: the exact expanded caption.
        encoders: (encoder identity, tokenizer identity) of each text encoder, in order.
        max_token_length: tokens kept, begin and end tokens included.
        clip_skip: 1 = last layer.
        compute_dtype: dtype of the encoder's arithmetic.
        stored_dtype: dtype in the store.
    """
    return hash16(
        {
            "kind": "prebake.text",
            "version": 1,
            "caption": caption,
            "encoders": [list(pair) for pair in encoders],
            "max_token_length": max_token_length,
            "clip_skip": clip_skip,
            "compute_dtype": compute_dtype,
            "stored_dtype": stored_dtype,
        }
    )


def latent_key(
    image_sha256: str,
    *,
    decode_rules: int,
    bucket: tuple[int, int],
    resized: tuple[int, int],
    crop: tuple[int, int],
    flipped: bool,
    background: tuple[int, int, int],
    vae: str,
    scaling_factor: float,
    shift_factor: float,
    posterior: str,
    compute_dtype: str,
    stored_dtype: str,
) -> str:
    """Return the key of an image's latents; sizes (width, height), crop (left, top), in px."""
    return hash16(
        {
            "kind": "prebake.latent",
            "version": 1,
            "image_sha256": image_sha256,
            "decode_rules": decode_rules,
            "bucket": list(bucket),
            "resized": list(resized),
            "crop": list(crop),
            "flipped": flipped,
            "background": list(background),
            "vae": vae,
            "scaling_factor": scaling_factor,
            "shift_factor": shift_factor,
            "posterior": posterior,
            "compute_dtype": compute_dtype,
            "stored_dtype": stored_dtype,
        }
    )
