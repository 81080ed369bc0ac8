"""Tell what a picture shows: kind of shape, its colour, the colour of the background.

For pictures as `sampling.shapes` draws them, as a VAE or a diffusion model gives them back:
one shape on a plain, striped or dotted background. Nothing is learned here, it is geometry
over pixels [H, W, 3] u8:

1. Background. The pixels of the rim vote for the colour whose tones (the colour itself,
   its pattern's second tone, and all mixtures of the two) they are nearest to.
2. Colour of the shape: the colour nearest to the median of the pixels that are far from
   those tones, edges left out.
3. Kind of shape. Each pixel's coverage a, 1 inside and 0 outside, is d / (d + e) from its
   distances d to the background's tones and e to the shape's colour. The coverage is moved
   and scaled into a frame where its centroid is 0 and its area is pi, and is compared with
   every kind of shape put there the same way, at several small shifts and sizes.

What a picture does not show clearly is read as None: a background on which too few pixels
of the rim agree, a shape too small to see, a coverage that is like no shape's.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sampling.shapes import COLOURS, NEW_SHAPES, SHAPES, Polygon, second_tone

Floats = NDArray[np.float64]

RIM_PX: Final = 3
MIN_VOTES: Final = 0.6
"""Share of the rim's pixels that must agree on the background."""
FAR: Final = 35.0
"""Distance in sRGB from which a pixel is not the background's: less is blur or noise."""
MIN_AREA_PX: Final = 30
"""Number of far pixels under which there is no shape."""
CORE: Final = 0.7
"""Share of a shape's full distance from the background from which a pixel is no edge."""
SURE: Final = (0.25, 0.75)
"""Coverage taken for none and for full, with a ramp between: cuts off noise and blur."""

FRAME_PX: Final = 48
FRAME_REACH: Final = 2.0
"""The frame shows -2 to 2, where a circle of the shape's area has radius 1."""
FRAME_SUPERSAMPLING: Final = 4
SHIFTS: Final = (-0.06, 0.0, 0.06)
SCALES: Final = (0.92, 0.97, 1.02, 1.07)
MIN_OVERLAP: Final = 0.75
"""Intersection over union under which a picture shows no known shape."""


@dataclass(frozen=True)
class Reading:
    """What a picture shows; None for what it does not show clearly."""

    shape: str | None
    """A key of `SHAPES` or of `NEW_SHAPES`."""
    colour: str | None
    """A key of `COLOURS`."""
    background: str | None
    """A key of `COLOURS`."""


def read(pixels: NDArray[np.uint8]) -> Reading:
    """Read a picture [H, W, 3] u8."""
    values = pixels.astype(np.float64)
    background = _read_background(values)
    if background is None:
        return Reading(None, None, None)
    distance = _distance_to_tones(values, background)  # [H, W]
    far = distance[distance > FAR]
    if far.size < MIN_AREA_PX:
        return Reading(None, None, background)
    core = values[distance > CORE * np.percentile(far, 90)]  # [pixels, 3]
    colour = _nearest_colour(np.median(core, axis=0), background)
    other = np.linalg.norm(values - np.array(COLOURS[colour]), axis=-1)  # [H, W]
    coverage = distance / np.maximum(distance + other, 1e-6)
    least, most = SURE
    coverage = np.clip((coverage - least) / (most - least), 0, 1)
    return Reading(_read_shape(coverage), colour, background)


def overlaps(coverage: Floats) -> dict[str, float]:
    """Return the best intersection over union of a coverage [H, W] in 0..1 with each shape."""
    framed = _frame(coverage)[None]  # [1, F, F], F = FRAME_PX
    return {
        shape: float(
            np.max(
                np.minimum(framed, variants).sum(axis=(1, 2))
                / np.maximum(framed, variants).sum(axis=(1, 2))
            )
        )
        for shape, variants in _templates().items()
    }


def _read_background(values: Floats) -> str | None:
    rim = np.ones(values.shape[:2], dtype=bool)
    rim[RIM_PX:-RIM_PX, RIM_PX:-RIM_PX] = False
    names = sorted(COLOURS)
    distances = np.stack([_distance_to_tones(values[rim], name) for name in names])
    votes = np.bincount(distances.argmin(axis=0), minlength=len(names)) / rim.sum()
    return names[votes.argmax()] if votes.max() >= MIN_VOTES else None


def _distance_to_tones(values: Floats, colour: str) -> Floats:
    """Return each pixel's distance [...] to the line from a colour to its second tone."""
    base = np.array(COLOURS[colour], dtype=np.float64)
    along = np.array(second_tone(COLOURS[colour])) - base
    part = np.clip((values - base) @ along / (along @ along), 0, 1)
    distance: Floats = np.linalg.norm(values - base - part[..., None] * along, axis=-1)
    return distance


def _nearest_colour(value: Floats, background: str) -> str:
    others = sorted(set(COLOURS) - {background})
    return min(others, key=lambda name: float(np.linalg.norm(value - np.array(COLOURS[name]))))


def _read_shape(coverage: Floats) -> str | None:
    found = overlaps(coverage)
    best = max(found, key=lambda shape: found[shape])
    return best if found[best] >= MIN_OVERLAP else None


def _frame(coverage: Floats) -> Floats:
    """Move and scale a coverage to centroid 0 and area pi, and show it on [F, F]."""
    area = max(coverage.sum(), 1.0)
    rows, columns = np.indices(coverage.shape) + 0.5  # of the centres of the pixels
    x, y = (coverage * columns).sum() / area, (coverage * rows).sum() / area
    scale_px = math.sqrt(area / math.pi)
    step_px = 2 * FRAME_REACH * scale_px / FRAME_PX
    left, top = x - FRAME_REACH * scale_px, y - FRAME_REACH * scale_px
    image = Image.fromarray(coverage.astype(np.float32))
    moved = image.transform(
        (FRAME_PX, FRAME_PX),
        Image.Transform.AFFINE,
        (step_px, 0, left, 0, step_px, top),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(moved, dtype=np.float64)


@cache
def _templates() -> dict[str, Floats]:
    """Return each shape's coverage [V, F, F] at each of V shifts and scales in the frame."""
    return {
        shape: np.stack([_template(polygons, *v) for v in product(SHIFTS, SHIFTS, SCALES)])
        for shape, polygons in sorted((SHAPES | NEW_SHAPES).items())
    }


def _template(polygons: tuple[Polygon, ...], x: float, y: float, scale: float) -> Floats:
    """Draw a shape at `scale` times the area pi's size, `x` and `y` off the centre."""
    drawn = _draw(polygons, (0.0, 0.0), 1.0)
    # One pixel of the frame is 2 * reach / F wide; `drawn` says where its centroid lies.
    pitch = 2 * FRAME_REACH / FRAME_PX
    rows, columns = (np.indices(drawn.shape) + 0.5) * pitch - FRAME_REACH
    area = drawn.sum()
    centroid = (drawn * columns).sum() / area, (drawn * rows).sum() / area
    unit = scale * math.sqrt(math.pi / (area * pitch**2))
    return _draw(polygons, (x - unit * centroid[0], y - unit * centroid[1]), unit)


def _draw(polygons: tuple[Polygon, ...], centre: tuple[float, float], unit: float) -> Floats:
    """Draw a shape's coverage [F, F] with its own origin at `centre` and its 1 as `unit`."""
    side = FRAME_PX * FRAME_SUPERSAMPLING
    per_unit = side / (2 * FRAME_REACH)
    image = Image.new("L", (side, side))
    pen = ImageDraw.Draw(image)
    for number, polygon in enumerate(polygons):
        points = [
            (side / 2 + per_unit * (c + unit * p) for c, p in zip(centre, point, strict=True))
            for point in polygon
        ]
        pen.polygon([tuple(point) for point in points], fill=0 if number else 255)
    return np.asarray(image.reduce(FRAME_SUPERSAMPLING), dtype=np.float64) / 255
