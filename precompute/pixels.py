"""Encoded bytes to the pixels of one bucket: uint8 sRGB, [H, W, 3].

libvips decodes; Pillow reads BMP, and the optional pillow-heif HEIC, under the same rules:

- The first bytes decide the format, never the name: a JPEG named .png loads.
- Upright: EXIF orientation 1..8 is applied; in a PNG that of an eXIf chunk before the pixels
  (a later one is ignored, as in browsers: PNG third edition, 5.6). `read_size` and `decode`
  share one header reader: planned and decoded size agree, or it is a SIZE_MISMATCH.
- sRGB: an embedded ICC profile is converted (relative colorimetric, black point
  compensation); one that is broken or of another colour model counts as absent. Without a
  profile RGB and grey are sRGB, and CMYK has libvips's press profile.
- Alpha is composited over `background` at full size, which equals resizing premultiplied
  colours: what hides under alpha 0 cannot bleed. 16 bits become 8 by rounding x / 257.
- Resized by Lanczos-3 in sRGB values; a JPEG is first shrunk by 2, 4 or 8 while it is
  decoded, where that divides its sides and leaves twice the target size.
- A file that is damaged or ends early is refused, never filled in. Samples other than 8 or
  16 bit integers (float TIFF) are refused: their white is unknown.
- One still picture a file. TIFF, HEIF and animated PNG give the first, primary or default
  image that their formats define; GIF and WebP define none, so animated ones are ANIMATED.

A change that alters a pixel raises DECODE_RULES_VERSION, which is part of the latent key.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyvips
from PIL.BmpImagePlugin import BmpImageFile

from precompute.buckets import Geometry
from precompute.problems import ImageProblem, Reason
from store_format.errors import PrebakeError

DECODE_RULES_VERSION = 1
MAX_PIXELS = 200_000_000  # above the largest camera sensors; a progressive JPEG takes 0.6 to 1.2 GB

# libvips keeps its last operations, with their pixels, and starts a thread per core. Here no
# image is seen twice, and the caller decodes several at a time.
pyvips.cache_set_max(0)
pyvips.concurrency_set(1)
logging.getLogger("pyvips").setLevel(logging.CRITICAL)  # libvips's warnings, even with a root log

# First bytes and loader. Named, because libvips left to itself also opens SVG, CSV and more, and
# makes float of a phone's Ultra HDR JPEG.
_LOADERS = (
    (rb"\xff\xd8\xff", "jpegload"),
    (rb"\x89PNG\r\n\x1a\n", "pngload"),
    (rb"RIFF....WEBP", "webpload"),
    (rb"II[*+]\x00|MM\x00[*+]", "tiffload"),
    (rb"GIF8[79]a", "gifload"),
    (rb"....ftyp", "heifload"),  # AVIF and HEIC
    (rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\x00\x00\x00", "bmp"),  # with its 2nd header's size
)
# What the decoders raise on bad data; all but the first are Pillow's and pillow-heif's.
_DECODER_ERRORS = (pyvips.Error, OSError, SyntaxError, ValueError, EOFError, RuntimeError)
_HEAD_BYTES = 32


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size of an image as a viewer shows it, after its EXIF orientation."""

    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class _Picture:
    """An image whose header is read.

    `stored` is (width, height) before orientation. `load` takes the (width, height) that is
    wanted of it and returns the image at that size or any larger one of the same shape.
    """

    stored: tuple[int, int]
    orientation: int
    load: Callable[[tuple[int, int]], pyvips.Image]

    def turned(self, size: tuple[int, int]) -> tuple[int, int]:
        """Swap a stored size to upright, or back, where the image lies on its side."""
        return size[::-1] if self.orientation >= 5 else size


def read_size(file: Path, max_pixels: int = MAX_PIXELS) -> ImageSize:
    """Return the upright size of `file` from its header; no pixel is decoded.

    Raises:
        ImageProblem: for a file that cannot be read, is no image, or is over `max_pixels`.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        with _as_image_problems(file.read_bytes):
            picture = _open(str(file), head)
    except OSError as error:
        raise ImageProblem(Reason.UNREADABLE, error.strerror or str(error)) from error
    size = ImageSize(*picture.turned(picture.stored))
    if size.width_px * size.height_px > max_pixels:
        raise ImageProblem(
            Reason.TOO_MANY_PIXELS,
            f"the header says {size.width_px}x{size.height_px} px; the limit is {max_pixels} "
            "pixels; make a smaller copy, or raise --max-megapixels",
        )
    return size


def decode(
    data: bytes, expected: ImageSize, geometry: Geometry, background: tuple[int, int, int]
) -> npt.NDArray[np.uint8]:
    """Return the pixels of the bucket that `geometry` plans, [H, W, 3] uint8 sRGB.

    Args:
        data: The whole file.
        expected: What `read_size` said when `geometry` was made.
        geometry: Resize and crop, in upright pixels.
        background: sRGB colour that transparent parts get.

    Raises:
        ImageProblem: where the data cannot be decoded whole, or to `expected`.
    """
    target = geometry.resized_width_px, geometry.resized_height_px
    with _as_image_problems(lambda: data):
        picture = _open(data, data[:_HEAD_BYTES])
        _check_size(ImageSize(*picture.turned(picture.stored)), expected)
        stored_target = picture.turned(target)
        image = picture.load(stored_target)
        if image.width * picture.stored[1] != image.height * picture.stored[0]:
            _check_size(ImageSize(image.width, image.height), ImageSize(*picture.stored))
        # The whole picture is resized and cropped afterwards: libvips would not decode the
        # rows that nobody asks for, and a file cut short there would pass.
        pixels = _resize_to_srgb(image, stored_target, background).numpy()  # [h, w, 3] u8
    pixels = _turn_upright(pixels, picture.orientation)
    assert pixels.shape == (target[1], target[0], 3), (pixels.shape, target)
    bottom = geometry.crop_top_px + geometry.bucket_height_px
    right = geometry.crop_left_px + geometry.bucket_width_px
    cropped = pixels[geometry.crop_top_px : bottom, geometry.crop_left_px : right]
    return np.ascontiguousarray(cropped)


def parse_background(text: str) -> tuple[int, int, int]:
    """Return the sRGB colour of 'white', 'black' or '#rrggbb'.

    Raises:
        PrebakeError: for any other text.
    """
    code = {"white": "#ffffff", "black": "#000000"}.get(text.lower(), text)
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", code):
        raise PrebakeError(f"background: expected white, black or #rrggbb, got {text!r}.")
    red, green, blue = bytes.fromhex(code[1:])
    return red, green, blue


def _open(source: str | bytes, head: bytes) -> _Picture:
    """Read the header of a file (its path or all its bytes), given its first bytes."""
    if not head:
        raise ImageProblem(Reason.EMPTY_FILE, "the file has 0 bytes")
    for magic, loader in _LOADERS:
        if re.match(magic, head, re.DOTALL):
            return _open_bmp(source) if loader == "bmp" else _open_vips(source, loader)
    raise ImageProblem(
        Reason.NOT_AN_IMAGE, f"it starts with {head[:8]!r}, as no image that prebake reads does"
    )


def _open_vips(source: str | bytes, loader: str) -> _Picture:
    operation = loader if isinstance(source, str) else f"{loader}_buffer"

    def load(shrink: int = 1) -> pyvips.Image:
        # fail_on: "truncated" lets half a TIFF pass, "warning" refuses sound camera JPEGs.
        options = {"shrink": shrink} if shrink > 1 else {}
        return pyvips.Operation.call(
            operation, source, access="sequential", fail_on="error", **options
        )

    image = load()  # lazy: the header only
    stored = (image.width, image.height)
    if image.format not in ("uchar", "ushort"):
        raise ImageProblem(
            Reason.UNDECODABLE, f"its samples are {image.format}; save it with 8 or 16 bit samples"
        )
    num_frames = _field(image, "n-pages", 1)
    if loader in ("gifload", "webpload") and num_frames > 1:
        raise ImageProblem(
            Reason.ANIMATED, f"it has {num_frames} frames; save the one you mean as a PNG"
        )
    if _field(image, "heif-compression", "av1") != "av1":  # HEVC: no decoder in the wheel
        if importlib.util.find_spec("pillow_heif") is None:
            raise ImageProblem(
                Reason.NEEDS_EXTRA, "it is HEIC; run pip install 'prebake[heic]' or save it as JPEG"
            )
        return _Picture(stored, 1, lambda _: _decode_heic(source))
    orientation = _field(image, "orientation", 1)
    if not 1 <= orientation <= 8:
        orientation = 1
    if loader == "jpegload":
        return _Picture(stored, orientation, lambda wanted: load(_jpeg_shrink(stored, wanted)))
    return _Picture(stored, orientation, lambda _: image)


def _open_bmp(source: str | bytes) -> _Picture:
    def open_again() -> BmpImageFile:
        # Not PIL.Image.open: its own pixel limit warns, and `max_pixels` is ours.
        return BmpImageFile(io.BytesIO(source) if isinstance(source, bytes) else source)

    def load(_: tuple[int, int]) -> pyvips.Image:
        picture = open_again()
        return _from_array(
            np.asarray(picture if picture.mode == "RGBA" else picture.convert("RGB"))
        )

    with open_again() as picture:
        return _Picture(picture.size, 1, load)


def _decode_heic(source: str | bytes) -> pyvips.Image:
    import pillow_heif

    picture = pillow_heif.open_heif(source if isinstance(source, str) else io.BytesIO(source))
    image = _from_array(np.asarray(picture))
    if picture.info.get("icc_profile"):
        image = image.copy()
        image.set_type(pyvips.GValue.blob_type, "icc-profile-data", picture.info["icc_profile"])
    return image


def _from_array(array: npt.NDArray[np.uint8]) -> pyvips.Image:
    """Wrap [H, W] or [H, W, C] uint8 as a grey (C <= 2) or sRGB image."""
    num_bands = 1 if array.ndim == 2 else array.shape[2]
    return pyvips.Image.new_from_array(array, interpretation="srgb" if num_bands > 2 else "b-w")


def _field(image: pyvips.Image, name: str, default: Any) -> Any:
    return image.get(name) if image.get_typeof(name) else default


def _jpeg_shrink(stored: tuple[int, int], wanted: tuple[int, int]) -> int:
    """Return by how much a JPEG is shrunk while decoding.

    Twice the wanted size must remain (Source: libvips 8.18, `thumbnail.c`), and the stored
    size be a multiple, as that of a camera is: otherwise the last pixel, which covers less,
    is stretched (43 to 50 dB against Pillow instead of 53).
    """
    for shrink in (8, 4, 2):
        if all(
            s % shrink == 0 and s >= 2 * shrink * w for s, w in zip(stored, wanted, strict=True)
        ):
            return shrink
    return 1


def _resize_to_srgb(
    image: pyvips.Image, target: tuple[int, int], background: tuple[int, int, int]
) -> pyvips.Image:
    """Return `image` as opaque 8 bit sRGB of exactly `target` (width, height)."""
    if image.hasalpha():
        image = image.copy_memory()  # looked at twice
        opaque = 255 if image.format == "uchar" else 65535
        if image[image.bands - 1].min() < opaque:
            # In float, because on integers `flatten` rounds down, and a resized flat area can
            # be off by one: it must be exactly the background.
            image = _to_srgb(image).cast("float")
            image = image.flatten(background=list(background), max_alpha=255)
            return _resize(image, target).rint().cast("uchar")
        image = image.extract_band(0, n=image.bands - 1)
    return _to_srgb(_resize(image, target))  # colours last: fewer pixels to convert


def _resize(image: pyvips.Image, target: tuple[int, int]) -> pyvips.Image:
    return image.resize(target[0] / image.width, vscale=target[1] / image.height)


def _to_srgb(image: pyvips.Image) -> pyvips.Image:
    """Convert to 8 bit sRGB; alpha, where there is one, stays as a fourth band."""
    if image.interpretation == "cmyk" or image.get_typeof("icc-profile-data"):
        # libvips itself falls back on its sRGB, grey or CMYK profile where `embedded` is unfit.
        image = image.icc_transform(
            "srgb", embedded=True, intent="relative", black_point_compensation=True, depth=8
        )
    elif image.format == "ushort":
        interpretation = "b-w" if image.bands <= 2 else "srgb"
        image = (image / 257).rint().cast("uchar").copy(interpretation=interpretation)
    image = image.colourspace("srgb")
    if image.bands - image.hasalpha() != 3:
        raise ImageProblem(
            Reason.UNDECODABLE, f"{image.bands} channels; save it as grey, RGB or CMYK"
        )
    return image


def _turn_upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Undo an EXIF orientation of 1..8. Source: Exif 2.32, 4.6.4 A, tag 0x0112."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def _check_size(found: ImageSize, expected: ImageSize) -> None:
    if found != expected:
        raise ImageProblem(
            Reason.SIZE_MISMATCH,
            f"found {found.width_px}x{found.height_px} px, expected {expected.width_px}x"
            f"{expected.height_px}; the file changed or its header is wrong",
        )


@contextmanager
def _as_image_problems(read_data: Callable[[], bytes]) -> Iterator[None]:
    """Turn a decoder's refusal into TRUNCATED or UNDECODABLE.

    libvips's own words are left out: its message buffer is shared by all threads.
    """
    try:
        yield
    except _DECODER_ERRORS as error:
        if _is_cut_short(read_data()):
            raise ImageProblem(
                Reason.TRUNCATED, "the file ends before its picture does; copy it again"
            ) from error
        raise ImageProblem(
            Reason.UNDECODABLE, "the decoder refuses it: damaged or cut short; save it anew"
        ) from error


def _is_cut_short(data: bytes) -> bool:
    """Say whether the data visibly stops early, in the formats that mark their end."""
    if data.startswith(b"\xff\xd8"):  # no end-of-image marker after the last start of scan
        return data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")
    if data.startswith(b"\x89PNG"):
        return data.rfind(b"IEND") < 0
    if data.startswith(b"RIFF"):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return data.startswith(b"BM") and len(data) < int.from_bytes(data[2:6], "little")
