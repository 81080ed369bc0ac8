"""The pictures that the bundled model learns from: captioned, and sorted by size.

Picture `index` of a seed is that of `sampling.shapes`, except that its size is one of
`SIZES_PX`, in turn. Those are sizes that `prebake` sorts pictures into at 64 px in steps
of 16 px, square ones most often. N pictures, H height and W width in pixels.

In a tenth of the captions a made-up word stands for the kind of shape, another one each time. So
the model learns to draw some shape for a word that it does not know, and all else as the caption
says. No such word is one of `NEW_SHAPES`.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from sampling.shapes import (
    COLOURS,
    NEW_SHAPES,
    PLACES,
    SHAPES,
    PictureSpec,
    caption,
    draw,
    picture_rng,
    random_spec,
)

SizePx = tuple[int, int]
"""(width, height)."""

SIZES_PX: Final[tuple[SizePx, ...]] = (
    *[(64, 64)] * 6,
    *[(48, 80), (80, 48)] * 2,
    *((48, 64), (64, 48), (64, 96), (96, 64), (80, 80), (96, 96)),
)
MADE_UP_SHARE: Final = 0.1
CONSONANTS: Final = "bcdfghjklmnprstvwxz"
VOWELS: Final = "aeiou"


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size with a caption each."""

    pixels: NDArray[np.uint8]
    """[N, H, W, 3]."""
    captions: tuple[str, ...]
    """N of them."""
    specs: tuple[PictureSpec, ...]
    """N of them."""


def draw_pictures(*, seed: int, count: int) -> dict[SizePx, Pictures]:
    """Draw pictures 0 to `count` - 1 of `seed`, by size."""
    pixels: dict[SizePx, list[NDArray[np.uint8]]] = {}
    captions: dict[SizePx, list[str]] = {}
    specs: dict[SizePx, list[PictureSpec]] = {}
    for index in range(count):
        size_px = SIZES_PX[index % len(SIZES_PX)]
        rng = picture_rng(seed, index)
        spec = random_spec(rng, size_px)
        pixels.setdefault(size_px, []).append(np.asarray(draw(spec)))
        captions.setdefault(size_px, []).append(_with_made_up_word(caption(spec, rng), spec, rng))
        specs.setdefault(size_px, []).append(spec)
    return {
        size: Pictures(np.stack(pixels[size]), tuple(captions[size]), tuple(specs[size]))
        for size in sorted(pixels)
    }


def made_up_word(rng: Random) -> str:
    """Return a word of three to five letters that no caption has, such as "tev" or "gosun"."""
    known = {*COLOURS, *SHAPES, *NEW_SHAPES, *" ".join(PLACES).split()}
    while True:
        word = rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)
        if rng.random() < 0.3:
            word += rng.choice(VOWELS) + rng.choice(CONSONANTS)
        if word not in known:
            return word


def _with_made_up_word(text: str, spec: PictureSpec, rng: Random) -> str:
    if rng.random() >= MADE_UP_SHARE:
        return text
    return re.sub(rf"\b{spec.shape}\b", made_up_word(rng), text)


def to_tensor(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Turn pixels [N, H, W, 3] u8 into [N, 3, H, W] f32 in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1


def to_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """Turn [N, 3, H, W] in [-1, 1] into pixels [N, H, W, 3] u8, clipping what is outside."""
    scaled = ((images.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
