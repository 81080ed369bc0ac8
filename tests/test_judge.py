"""The judge of drawn pictures: it accepts right ones, sharp or blurred, and rejects wrong ones."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from shape_builders import CENTRED as CENTRED_WIDE

from sampling import judge
from sampling.judge import Reading, read
from sampling.shapes import (
    COLOURS,
    NEW_SHAPES,
    PATTERNS,
    SHAPES,
    PictureSpec,
    draw,
    picture_rng,
    random_spec,
)

ALL_SHAPES = sorted(SHAPES | NEW_SHAPES)

# What a VAE's reconstruction loses: edges a pixel and a half wide, and grain.
BLUR_PX = 0.8
NOISE = 8.0  # standard deviation, of 255

CENTRED = replace(CENTRED_WIDE, width_px=64)


def pixels_of(spec: PictureSpec) -> NDArray[np.uint8]:
    return np.asarray(draw(spec))  # [H, W, 3] u8


def degraded(spec: PictureSpec, seed: int) -> NDArray[np.uint8]:
    blurred = np.asarray(draw(spec).filter(ImageFilter.GaussianBlur(BLUR_PX)), dtype=float)
    noise = np.random.default_rng(seed).normal(0, NOISE, blurred.shape)
    return np.clip(blurred + noise, 0, 255).astype(np.uint8)


def some_specs(count: int) -> list[PictureSpec]:
    """Make random specs with every shape in turn, the new one among them."""
    return [
        replace(random_spec(picture_rng(31, index)), shape=ALL_SHAPES[index % len(ALL_SHAPES)])
        for index in range(count)
    ]


def truth(spec: PictureSpec) -> Reading:
    return Reading(spec.shape, spec.colour, spec.background)


def test_drawn_pictures_are_read_right() -> None:
    wrong = [spec for spec in some_specs(220) if read(pixels_of(spec)) != truth(spec)]
    assert wrong == []


def test_pictures_as_soft_and_grainy_as_a_reconstruction_are_read_right() -> None:
    specs = some_specs(220)
    wrong = [spec for n, spec in enumerate(specs) if read(degraded(spec, n)) != truth(spec)]
    assert wrong == []


@pytest.mark.parametrize("size_px", [(48, 80), (80, 48), (96, 96)])
def test_pictures_of_other_sizes_are_read_right(size_px: tuple[int, int]) -> None:
    specs = [random_spec(picture_rng(32, index), size_px) for index in range(20)]
    assert [read(pixels_of(spec)) for spec in specs] == [truth(spec) for spec in specs]


@pytest.mark.parametrize(("asked", "drawn"), list(permutations(ALL_SHAPES, 2)))
def test_another_shape_than_asked_is_rejected(asked: str, drawn: str) -> None:
    assert read(degraded(replace(CENTRED, shape=drawn), 0)).shape != asked


@pytest.mark.parametrize("pattern", PATTERNS)
def test_another_colour_or_background_than_asked_is_rejected(pattern: str) -> None:
    for colour, background in permutations(sorted(COLOURS), 2):
        spec = replace(CENTRED, colour=colour, background=background, pattern=pattern)
        found = read(degraded(spec, 0))
        assert (found.colour, found.background) == (colour, background)


def test_a_picture_without_a_shape_shows_its_background_alone() -> None:
    for pattern in PATTERNS:
        spec = replace(CENTRED, pattern=pattern, radius=0.001)
        assert read(pixels_of(spec)) == Reading(None, None, "blue")


def test_noise_shows_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert read(noise) == Reading(None, None, None)


def test_two_shapes_are_not_read_as_either() -> None:
    left = replace(CENTRED, shape="star", centre=(0.25, 0.5), radius=0.2)
    right = replace(left, shape="ring", centre=(0.75, 0.5))
    both = np.concatenate([pixels_of(left)[:, :32], pixels_of(right)[:, 32:]], axis=1)
    assert read(both).shape is None


def test_the_right_half_of_a_shape_is_rejected() -> None:
    for shape in ALL_SHAPES:
        pixels = pixels_of(replace(CENTRED, shape=shape, radius=0.3)).copy()
        pixels[:, :32] = COLOURS["blue"]
        assert read(pixels).shape != shape, shape


def test_an_overlap_is_1_for_the_shape_itself_and_less_for_the_others() -> None:
    # Worked out by geometry: a square of side sqrt(pi) and a circle of radius 1 about one
    # centre. Beyond each side the circle has a segment of half angle t, cos t = sqrt(pi) / 2,
    # of area t - sin t cos t; the four are all of it that the square lacks.
    t = np.arccos(np.sqrt(np.pi) / 2)
    common = np.pi - 4 * (t - np.sin(t) * np.cos(t))
    side_px = 113.0
    image = Image.new("L", (256, 256))
    start = round(128 - side_px / 2)
    image.paste(255, (start, start, start + 113, start + 113))
    found = judge.overlaps(np.asarray(image, dtype=float) / 255)
    assert found["square"] > 0.95
    assert found["circle"] == pytest.approx(common / (2 * np.pi - common), abs=0.02)
