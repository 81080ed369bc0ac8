"""Which bucket an image goes to, and how it is resized and cropped for it.

A bucket is a size in pixels whose sides are multiples of `step_px`. All arithmetic is on
integers, so that a plan is the same on every machine. Sizes are (width, height).

Standard buckets: for each width from half the resolution (rounded down to the step, at
least one step) to twice the resolution, the tallest height within the same two limits
for which width * height <= resolution ** 2; and the transpose of each.

1. Among the standard buckets that the image covers without upscaling, the one that crops
   the smallest fraction wins; of equals the larger area, then the smaller (width, height).
2. An image that covers none is not upscaled: its bucket is its own size, floored to the
   step, as long as both sides reach the lower limit. It loses less than one step a side.
3. A smaller image is TOO_SMALL; with `upscale` it is enlarged to the standard bucket that
   crops the smallest fraction.

Rule 2 cannot exceed the area or the upper limit: were its width w at most twice the
resolution and its height above the tallest height for w, the image would cover that
standard bucket; were it wider than that, it would cover (2 * resolution, resolution / 2).

Panoramas: 4:1 is the widest standard bucket. A wider image is not refused: it is cropped
to it, about its centre, and `cropped_fraction` says how much goes (76 % for 5000x300 at
512 px), for the plan to warn of. Where under 1/16 would be left it is TOO_NARROW: a ruler
is no picture, and enlarging one could take any amount of memory.

Worked example: 4000x3000 at 512 px, step 64. (576, 448) crops least: the image is resized
by 448/3000 to 597x448 (597.3 to the nearest pixel) and loses 21 of 597 columns, 10 of
them on the left. (512, 512) would lose a quarter, (640, 384) a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from precompute.problems import ImageProblem, Reason
from store_format.errors import PrebakeError

_VAE_STRIDE_PX = 8  # one latent covers 8x8 pixels in every SD and SDXL VAE
_MAX_RESOLUTION_PX = 8192
_MOST_CROPPED = Fraction(15, 16)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The plan for one image: resize all of it to `resized`, then take the centred crop.

    `resized` keeps the aspect ratio to the nearest pixel and covers the bucket. The crop
    has the bucket's size and its top left corner at (crop_left_px, crop_top_px).
    """

    bucket_width_px: int
    bucket_height_px: int
    resized_width_px: int
    resized_height_px: int
    crop_left_px: int
    crop_top_px: int


@lru_cache(maxsize=64)
def bucket_sizes(resolution_px: int, step_px: int) -> tuple[tuple[int, int], ...]:
    """Return the standard buckets as sorted (width, height).

    Raises:
        PrebakeError: where `step_px` is no multiple of 8 or `resolution_px` none of it.
    """
    if step_px < _VAE_STRIDE_PX or step_px % _VAE_STRIDE_PX:
        raise PrebakeError(
            f"bucket step: expected a multiple of {_VAE_STRIDE_PX} px (the VAE's stride), "
            f"got {step_px}. Use 64, or 32 or 8 for finer buckets."
        )
    if not step_px <= resolution_px <= _MAX_RESOLUTION_PX or resolution_px % step_px:
        raise PrebakeError(
            f"resolution: expected a multiple of the bucket step ({step_px} px) from {step_px} to "
            f"{_MAX_RESOLUTION_PX}, got {resolution_px}. Use 512 or 768 for SD, 1024 for SDXL."
        )
    shortest, longest = _shortest_side(resolution_px, step_px), 2 * resolution_px
    buckets = set()
    for width in range(shortest, longest + 1, step_px):
        height = min(resolution_px**2 // width // step_px * step_px, longest)
        if height >= shortest:
            buckets |= {(width, height), (height, width)}
    return tuple(sorted(buckets))


def choose_geometry(
    width_px: int, height_px: int, resolution_px: int, step_px: int, *, upscale: bool = False
) -> Geometry:
    """Return bucket, resize and crop for an upright image of `width_px` x `height_px`.

    Raises:
        ImageProblem: TOO_SMALL or TOO_NARROW, see the head of this file.
        PrebakeError: for a resolution or step that `bucket_sizes` refuses.
    """
    buckets = bucket_sizes(resolution_px, step_px)
    covered = [(w, h) for w, h in buckets if w <= width_px and h <= height_px]
    own = (width_px // step_px * step_px, height_px // step_px * step_px)
    shortest = _shortest_side(resolution_px, step_px)
    if not covered and min(own) >= shortest:
        return _crop_centre(own, (width_px, height_px))
    if not covered and not upscale:
        raise ImageProblem(
            Reason.TOO_SMALL,
            f"{width_px}x{height_px} px: each side must be at least {shortest} px at resolution "
            f"{resolution_px}; use a larger copy, a lower resolution, or --upscale",
        )
    geometry = min((_fit(b, width_px, height_px) for b in covered or buckets), key=_preference)
    if cropped_fraction(geometry) > _MOST_CROPPED:
        raise ImageProblem(
            Reason.TOO_NARROW,
            f"{width_px}x{height_px} px: bucket {geometry.bucket_width_px}x"
            f"{geometry.bucket_height_px} would keep under 1/16 of it; crop it by hand",
        )
    return geometry


def cropped_fraction(geometry: Geometry) -> Fraction:
    """Return the part of the image's area that the crop throws away, exact, in [0, 1)."""
    resized_area = geometry.resized_width_px * geometry.resized_height_px
    bucket_area = geometry.bucket_width_px * geometry.bucket_height_px
    return Fraction(resized_area - bucket_area, resized_area)


def _shortest_side(resolution_px: int, step_px: int) -> int:
    """Return the lower limit of a bucket's side."""
    return max(resolution_px // 2 // step_px, 1) * step_px


def _preference(geometry: Geometry) -> tuple[Fraction, int, int, int]:
    """Return the sort key of rule 1; the smallest is the best."""
    width, height = geometry.bucket_width_px, geometry.bucket_height_px
    return cropped_fraction(geometry), -width * height, width, height


def _fit(bucket: tuple[int, int], width_px: int, height_px: int) -> Geometry:
    """Scale the image to the smallest size that covers `bucket`, and crop."""
    bucket_width, bucket_height = bucket
    if bucket_width * height_px >= bucket_height * width_px:  # the width decides the scale
        resized = bucket_width, _divide_to_nearest(height_px * bucket_width, width_px)
    else:
        resized = _divide_to_nearest(width_px * bucket_height, height_px), bucket_height
    return _crop_centre(bucket, resized)


def _crop_centre(bucket: tuple[int, int], resized: tuple[int, int]) -> Geometry:
    """Centre the crop; an odd column or row too many goes at the right or bottom."""
    left, top = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Geometry(*bucket, *resized, left, top)


def _divide_to_nearest(numerator: int, denominator: int) -> int:
    """Return numerator / denominator to the nearest integer, a half upwards."""
    return (2 * numerator + denominator) // (2 * denominator)
