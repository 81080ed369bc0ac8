"""Draw captioned pictures of coloured shapes: a data set that needs no download.

A picture is a pure function of its `PictureSpec`, and a spec of a `random.Random`, so
a seed and an index name one picture for ever, whatever else is drawn beside it:

    rng = picture_rng(seed=0, index=7)
    spec = random_spec(rng)
    draw(spec).save("00007.png")
    caption(spec, rng)  # "a small red ring at the top left of a blue background"

Coordinates: a shape is drawn in its own square, x to the right and y down, from -1 to 1;
centres and sizes in a spec are fractions of the picture. Colours are sRGB.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]
Polygon = tuple[tuple[float, float], ...]

SIDES_PX: Final = (64, 72, 80, 88, 96)
SUPERSAMPLING: Final = 8
NUM_CURVE_POINTS: Final = 64

COLOURS: Final[dict[str, Rgb]] = {
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (250, 212, 50),
    "green": (46, 145, 74),
    "teal": (32, 160, 160),
    "blue": (40, 84, 200),
    "purple": (122, 56, 168),
    "pink": (242, 140, 182),
    "brown": (120, 74, 40),
    "white": (248, 248, 248),
    "grey": (128, 128, 128),
    "black": (18, 18, 18),
}

# The second tone of a patterned background is its colour mixed with white, or with
# black where the colour is too light for white to show.
PATTERNS: Final = ("plain", "striped", "dotted")
TONE_MIX: Final = 0.25
LIGHT: Final = 170  # mean of red, green and blue from which the second tone is darker

# Half the width of a shape, as a fraction of the picture's shorter side: (least, most).
SIZES: Final[dict[str, tuple[float, float]]] = {
    "small": (0.25, 0.28),
    "medium": (0.31, 0.35),
    "large": (0.38, 0.44),
}

# Centre of a shape as a fraction of (width, height), before jitter.
PLACES: Final[dict[str, tuple[float, float]]] = {
    "top left": (0.28, 0.28),
    "top": (0.50, 0.28),
    "top right": (0.72, 0.28),
    "left": (0.28, 0.50),
    "centre": (0.50, 0.50),
    "right": (0.72, 0.50),
    "bottom left": (0.28, 0.72),
    "bottom": (0.50, 0.72),
    "bottom right": (0.72, 0.72),
}
JITTER: Final = 0.04


@dataclass(frozen=True)
class PictureSpec:
    """Everything that decides the pixels of one picture."""

    width_px: int
    height_px: int
    shape: str
    """A key of `SHAPES` or of `NEW_SHAPES`."""
    colour: str
    """A key of `COLOURS`."""
    background: str
    """A key of `COLOURS`, other than `colour`."""
    pattern: str
    """One of `PATTERNS`."""
    size: str
    """A key of `SIZES`."""
    place: str
    """A key of `PLACES`."""
    radius: float
    """Half the width of the shape, as a fraction of the shorter side."""
    centre: tuple[float, float]
    """Centre of the shape, as a fraction of (width, height)."""


def picture_rng(seed: int, index: int) -> Random:
    """Return the generator of picture `index`, independent of all other pictures."""
    return Random(f"prebake pictures {seed} {index}")


def random_spec(rng: Random, size_px: tuple[int, int] | None = None) -> PictureSpec:
    """Choose a picture; every kind of shape, colour, size and place is equally likely.

    With `size_px`, (width, height), the picture has that size and all else is still drawn.
    None of `NEW_SHAPES` is ever chosen: `dataclasses.replace(spec, shape="wug")` does that.
    """
    colour, background = rng.sample(sorted(COLOURS), 2)
    size = rng.choice(sorted(SIZES))
    # Kept inside the picture, a large shape has no room to be anywhere but in the middle.
    place = "centre" if size == "large" else rng.choice(sorted(PLACES))
    width_px, height_px = rng.choice(SIDES_PX), rng.choice(SIDES_PX)
    if size_px is not None:
        width_px, height_px = size_px
    radius = rng.uniform(*SIZES[size])
    margin_px = radius * min(width_px, height_px)
    x, y = (part + rng.uniform(-JITTER, JITTER) for part in PLACES[place])
    return PictureSpec(
        width_px=width_px,
        height_px=height_px,
        shape=rng.choice(sorted(SHAPES)),
        colour=colour,
        background=background,
        pattern=rng.choice(PATTERNS),
        size=size,
        place=place,
        radius=radius,
        centre=(_keep_inside(x, margin_px / width_px), _keep_inside(y, margin_px / height_px)),
    )


def caption(spec: PictureSpec, rng: Random) -> str:
    """Describe a picture truly; `rng` chooses the wording and what is left unsaid."""
    size = "" if spec.size == "medium" or rng.random() < 0.3 else f"{spec.size} "
    shape = _with_article(f"{size}{spec.colour} {spec.shape}")
    pattern = "" if spec.pattern == "plain" else f"{spec.pattern} "
    words = f"{pattern}{spec.background}"
    background = _with_article(f"{words} background")
    place = "in the middle" if spec.place == "centre" else f"at the {spec.place}"
    wordings = (
        f"{shape} on {background}",
        f"{shape} on {words}",
        f"{shape} {place} of {background}",
        f"{background} with {shape} {place}",
        f"a picture of {shape} on {background}",
    )
    return rng.choice(wordings)


def draw(spec: PictureSpec) -> Image.Image:
    """Draw a picture in RGB with smooth edges."""
    scale = SUPERSAMPLING
    width, height = spec.width_px * scale, spec.height_px * scale
    image = _draw_background(spec, width, height)
    radius = spec.radius * min(width, height)
    centre = (spec.centre[0] * width, spec.centre[1] * height)
    mask = Image.new("1", (width, height))
    pen = ImageDraw.Draw(mask)
    filled, *holes = (SHAPES | NEW_SHAPES)[spec.shape]
    pen.polygon(_place(filled, centre, radius), fill=1)
    for hole in holes:
        pen.polygon(_place(hole, centre, radius), fill=0)
    image.paste(COLOURS[spec.colour], mask=mask)
    return image.reduce(scale)


def write_pictures(
    folder: Path,
    *,
    count: int,
    seed: int,
    shape: str | None = None,
    size_px: tuple[int, int] | None = None,
) -> list[PictureSpec]:
    """Write pictures 0 to `count` - 1 of `seed` as `00000.png` and `00000.txt` and so on.

    With `shape`, a key of `SHAPES` or `NEW_SHAPES`, all show that one; with `size_px`, (width,
    height), all have that size. Returns what they show.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    for index in range(count):
        rng = picture_rng(seed, index)
        spec = random_spec(rng, size_px)
        spec = spec if shape is None else replace(spec, shape=shape)
        path = folder / f"{index:05d}.png"
        draw(spec).save(path, optimize=True)
        text = caption(spec, rng) + "\n"
        path.with_suffix(".txt").write_text(text, encoding="utf-8", newline="\n")
        specs.append(spec)
    return specs


def _draw_background(spec: PictureSpec, width: int, height: int) -> Image.Image:
    base = COLOURS[spec.background]
    image = Image.new("RGB", (width, height), base)
    pen = ImageDraw.Draw(image)
    tone = second_tone(base)
    step = 16 * SUPERSAMPLING
    match spec.pattern:
        case "striped":
            for top in range(0, height, step):
                pen.rectangle((0, top, width, top + step // 2 - 1), fill=tone)
        case "dotted":
            radius = step // 5
            for y in range(step // 2, height, step):
                for x in range(step // 2, width, step):
                    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tone)
    return image


def second_tone(base: Rgb) -> Rgb:
    """Return the other tone of a patterned background of colour `base`."""
    target = 0 if sum(base) / 3 >= LIGHT else 255
    red, green, blue = (round(part + TONE_MIX * (target - part)) for part in base)
    return red, green, blue


def _place(
    polygon: Polygon, centre: tuple[float, float], radius: float
) -> list[tuple[float, float]]:
    return [(centre[0] + x * radius, centre[1] + y * radius) for x, y in polygon]


def _keep_inside(centre: float, margin: float) -> float:
    return min(max(centre, margin), 1 - margin)


def _with_article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _circle(radius: float = 1.0, centre: tuple[float, float] = (0.0, 0.0)) -> Polygon:
    angles = (2 * math.pi * i / NUM_CURVE_POINTS for i in range(NUM_CURVE_POINTS))
    x, y = centre
    return tuple((x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles)


def _regular(num_corners: int, inner: float | None = None) -> Polygon:
    """List the corners of a regular polygon, or of a star if `inner` gives its notches."""
    radii = (1.0,) if inner is None else (1.0, inner)
    num_points = num_corners * len(radii)
    points = []
    for i in range(num_points):
        radius, angle = radii[i % len(radii)], 2 * math.pi * i / num_points - math.pi / 2
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return tuple(points)


def _heart() -> Polygon:
    """List the points of the heart curve x = 16 sin^3 t, scaled to the unit square.

    Source: Weisstein, "Heart Curve", MathWorld, equations 5 and 6.
    """
    points = []
    for i in range(NUM_CURVE_POINTS):
        t = 2 * math.pi * i / NUM_CURVE_POINTS
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 16, -(y + 2.5) / 16))
    return tuple(points)


_ARM: Final = 0.36
_CROSS: Final[Polygon] = (
    (-_ARM, -1.0),
    (_ARM, -1.0),
    (_ARM, -_ARM),
    (1.0, -_ARM),
    (1.0, _ARM),
    (_ARM, _ARM),
    (_ARM, 1.0),
    (-_ARM, 1.0),
    (-_ARM, _ARM),
    (-1.0, _ARM),
    (-1.0, -_ARM),
    (-_ARM, -_ARM),
)

# A shape is a filled outline and the holes cut out of it.
SHAPES: Final[dict[str, tuple[Polygon, ...]]] = {
    "circle": (_circle(),),
    "square": (((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),),
    "triangle": (((0.0, -0.95), (1.0, 0.8), (-1.0, 0.8)),),
    "ring": (_circle(), _circle(0.55)),
    "star": (_regular(5, inner=0.4),),
    "cross": (_CROSS,),
    "diamond": (((0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)),),
    "heart": (_heart(),),
    "moon": (_circle(), _circle(0.85, centre=(0.45, -0.1))),
}

# Shapes that the bundled model never saw, for a LoRA to learn: no picture of
# `random_spec` has one, so none of the model's training does. A wug, after the made-up
# word of Berko 1958, "The Child's Learning of English Morphology", is an hourglass.
NEW_SHAPES: Final[dict[str, tuple[Polygon, ...]]] = {
    "wug": (((-0.85, -0.95), (0.85, -0.95), (0.2, 0.0), (0.85, 0.95), (-0.85, 0.95), (-0.2, 0.0)),),
}
