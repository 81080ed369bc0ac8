"""Decoding against Pillow and against values worked out by hand; every kind of bad file."""

from __future__ import annotations

import base64
import importlib.util
import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pyvips
from PIL import Image, ImageCms

from precompute.buckets import Geometry, choose_geometry
from precompute.pixels import ImageSize, decode, parse_background, read_size
from precompute.problems import ImageProblem, Reason
from store_format.errors import PrebakeError

Pixels = npt.NDArray[np.uint8]
WHITE = (255, 255, 255)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF", "GIF")


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def own_size(width: int, height: int) -> Geometry:
    return Geometry(width, height, width, height, 0, 0)


def size_of(data: bytes, folder: Path) -> ImageSize:
    file = folder / "image.dat"
    file.write_bytes(data)
    return read_size(file)


def decode_whole(data: bytes, folder: Path, background: tuple[int, int, int] = WHITE) -> Pixels:
    size = size_of(data, folder)
    return decode(data, size, own_size(size.width_px, size.height_px), background)


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    """A photo-like picture: structure at every scale, and fine grain. [H, W, 3]."""
    rng = np.random.default_rng(seed)
    total = np.full((height, width, 3), 128.0, dtype=np.float32)
    for octave in range(1, 8):
        n = 2**octave
        for channel in range(3):
            coarse = Image.fromarray(rng.normal(0, 50 / octave, (n, n)).astype(np.float32))
            total[..., channel] += np.asarray(
                coarse.resize((width, height), Image.Resampling.BICUBIC)
            )
    total += rng.normal(0, 3, (height, width, 1))
    return total.clip(0, 255).astype(np.uint8)


def psnr_db(found: Pixels, expected: Pixels) -> float:
    error = np.mean((found.astype(np.float64) - expected) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-10)))


def png_chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + name + content + checksum


def png(width: int, height: int, bits: int, colour_type: int, rows: bytes, *more: bytes) -> bytes:
    """A PNG by hand; `rows` with the filter byte 0 before each."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    parts = (png_chunk(b"IHDR", header), *more, pixels, png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# What decodes, and to which values.


@pytest.mark.parametrize("format", FORMATS)
def test_each_format_decodes_as_pillow_does(format: str, tmp_path: Path) -> None:
    options = {"subsampling": "4:4:4"} if format == "AVIF" else {}
    data = encode(Image.fromarray(picture(120, 80)), format, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert size_of(data, tmp_path) == ImageSize(120, 80)
    found = decode_whole(data, tmp_path)
    assert found.dtype == np.uint8
    assert found.shape == (80, 120, 3)
    assert found.flags.c_contiguous
    # JPEG and AVIF decoders may round chroma differently.
    assert np.abs(found.astype(int) - expected).max() <= (3 if format in ("JPEG", "AVIF") else 0)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp", ".weird"])
def test_the_content_and_not_the_name_decides(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a [page=1]{suffix}"  # and libvips options in a name are a name
    file.write_bytes(encode(Image.new("RGB", (40, 30), (9, 8, 7)), "JPEG"))
    assert read_size(file) == ImageSize(40, 30)


@pytest.mark.parametrize(
    ("mode", "format", "colour"),
    [
        ("1", "PNG", 255), ("1", "TIFF", 255), ("1", "BMP", 255),
        ("L", "PNG", 77), ("L", "JPEG", 77), ("L", "BMP", 77), ("L", "TIFF", 77),
        ("LA", "PNG", (77, 255)), ("RGB", "PNG", (9, 8, 7)), ("RGBA", "PNG", (9, 8, 7, 255)),
        ("RGBA", "WEBP", (9, 8, 7, 255)), ("RGBA", "TIFF", (9, 8, 7, 255)),
    ],
)  # fmt: skip
def test_every_mode_becomes_rgb(mode: str, format: str, colour: Any, tmp_path: Path) -> None:
    image = Image.new(mode, (16, 16), colour)
    options = {"lossless": True} if format == "WEBP" else {}
    expected = np.asarray(image.convert("RGB"))
    assert (decode_whole(encode(image, format, **options), tmp_path) == expected).all()


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "GIF"])
def test_palettes_become_rgb(format: str, tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) % 3, "P")
    image.putpalette([255, 0, 0, 10, 200, 30, 0, 0, 255])
    expected = np.asarray(image.convert("RGB"))
    assert (decode_whole(encode(image, format), tmp_path) == expected).all()


def test_16_bit_grey_is_divided_by_257_and_rounded(tmp_path: Path) -> None:
    values = np.array([0, 128, 129, 257, 32767, 65406, 65407, 65535], dtype=">u2")
    data = png(8, 1, 16, 0, b"\0" + values.tobytes())
    # 128/257 = 0.498, 129/257 = 0.502, 32767/257 = 127.498, 65406/257 = 254.498
    assert decode_whole(data, tmp_path)[0, :, 0].tolist() == [0, 0, 1, 1, 127, 254, 255, 255]


def test_16_bit_colour_with_alpha_is_composited(tmp_path: Path) -> None:
    pixels = np.array([[65535, 0, 257 * 40, 0], [65535, 0, 257 * 40, 65535]], dtype=">u2")
    data = png(2, 1, 16, 6, b"\0" + pixels.tobytes())
    assert decode_whole(data, tmp_path, (1, 2, 3)).tolist() == [[[1, 2, 3], [255, 0, 40]]]


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (12, 34, 56)])
def test_hidden_colours_become_exactly_the_background(
    format: str, background: tuple[int, int, int], tmp_path: Path
) -> None:
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    data = encode(Image.new("RGBA", (64, 64), (255, 0, 0, 0)), format, **options)
    assert (decode_whole(data, tmp_path, background) == background).all()
    for side in (9, 17, 31, 200):
        resized = decode(data, ImageSize(64, 64), own_size(side, side), background)
        assert (resized == background).all()


def test_alpha_is_composited_with_rounding(tmp_path: Path) -> None:
    rgba = [(255, 0, 0, 128), (255, 0, 0, 1), (0, 0, 0, 254)]
    data = png(3, 1, 8, 6, b"\0" + bytes(v for pixel in rgba for v in pixel))
    # (255*128 + 10*127)/255 = 132.98, 20*127/255 = 9.96, 30*127/255 = 14.94;
    # (255 + 10*254)/255 = 10.96, 20*254/255 = 19.92, 30*254/255 = 29.88; 10/255, 20/255, 30/255
    assert decode_whole(data, tmp_path, (10, 20, 30)).tolist() == [
        [[133, 10, 15], [11, 20, 30], [0, 0, 0]]
    ]


def test_hidden_colours_do_not_bleed_when_shrunk(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64, 4), dtype=np.uint8)
    stripes[:, ::2] = (0, 0, 255, 255)
    stripes[:, 1::2] = (255, 0, 0, 0)  # red that nobody may see
    data = encode(Image.fromarray(stripes), "PNG")
    found = decode(data, ImageSize(64, 64), Geometry(8, 8, 8, 8, 0, 0), (0, 0, 0))
    assert found[..., 0].max() == 0
    assert abs(found[2:-2, 2:-2, 2].astype(int) - 128).max() <= 2


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_key_is_composited(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    image.putpalette([10, 10, 10, 20, 20, 20])
    key = {"P": 1, "L": 20, "RGB": (20, 20, 20)}[mode]
    data = encode(image if mode == "P" else image.convert(mode), "PNG", transparency=key)
    assert decode_whole(data, tmp_path, (1, 2, 3)).tolist() == [[[10, 10, 10], [1, 2, 3]]]


def test_grey_with_alpha_is_composited(tmp_path: Path) -> None:
    data = png(2, 1, 8, 4, b"\0" + bytes([200, 0, 200, 255]))
    assert decode_whole(data, tmp_path, (1, 2, 3)).tolist() == [[[1, 2, 3], [200, 200, 200]]]


# Orientation.


def marked() -> Image.Image:
    """48x32 in four colours, so that every orientation looks different."""
    image = Image.new("RGB", (48, 32), (255, 0, 0))
    image.paste((0, 255, 0), (24, 0, 48, 16))
    image.paste((0, 0, 255), (0, 16, 24, 32))
    image.paste((255, 255, 255), (24, 16, 48, 32))
    return image


# Source: Exif 2.32 4.6.4 A, "Orientation": where row 0 and column 0 of the stored image are.
UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda a: a,  # top, left
    2: np.fliplr,  # top, right
    3: lambda a: np.rot90(a, 2),  # bottom, right
    4: np.flipud,  # bottom, left
    5: lambda a: a.swapaxes(0, 1),  # left, top
    6: lambda a: np.rot90(a, -1),  # right, top: turn by 90 degrees clockwise
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),  # right, bottom
    8: np.rot90,  # left, bottom
    0: lambda a: a,  # not a legal value: ignored
    9: lambda a: a,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_every_orientation_is_upright_in_size_and_pixels(
    format: str, orientation: int, tmp_path: Path
) -> None:
    if format == "TIFF" and orientation not in range(1, 9):
        pytest.skip("libtiff refuses the whole file")
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    data = encode(marked(), format, exif=exif, **options.get(format, {}))
    expected = UPRIGHT[orientation](np.asarray(marked()))
    assert size_of(data, tmp_path) == ImageSize(expected.shape[1], expected.shape[0])
    found = decode_whole(data, tmp_path)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= (2 if format == "JPEG" else 0)


def test_an_orientation_behind_the_pixels_of_a_png_is_ignored(tmp_path: Path) -> None:
    # PNG third edition, 5.6: eXIf comes before IDAT. Browsers ignore a later one (w3c/png #146).
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encode(marked(), "PNG", exif=exif)
    start = turned.index(b"eXIf") - 4
    chunk = turned[start : start + 12 + int.from_bytes(turned[start : start + 4], "big")]
    end = turned.rindex(b"IEND") - 4
    late = turned[:start] + turned[start + len(chunk) : end] + chunk + turned[end:]
    assert size_of(turned, tmp_path) == ImageSize(32, 48)
    assert (decode_whole(late, tmp_path) == np.asarray(marked())).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_avif_turned_by_its_container_is_upright(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation  # Pillow writes it as the boxes irot and imir
    data = encode(marked(), "AVIF", exif=exif, quality=100, subsampling="4:4:4")
    expected = UPRIGHT[orientation](np.asarray(marked()))
    found = decode_whole(data, tmp_path)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 4


def test_the_crop_is_taken_from_the_upright_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(marked(), "PNG", exif=exif)  # upright 32x48, blue at the top left
    found = decode(data, ImageSize(32, 48), Geometry(16, 8, 32, 48, 0, 40), WHITE)
    assert found.tolist() == np.rot90(np.asarray(marked()), -1)[40:48, 0:16].tolist()


# Colour.


def profile(name: str) -> bytes:
    return bytes(pyvips.Image.profile_load(name))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_a_display_p3_picture_is_converted_to_srgb(format: str, tmp_path: Path) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    image = Image.new("RGB", (16, 16), (200, 120, 60))
    data = encode(image, format, icc_profile=profile("p3"), **options)
    # Source: CSS Color 4, section 17: both have the sRGB curve and D65; the matrix from linear
    # Display P3 to linear sRGB.
    matrix = np.array(
        [
            [1.2249401, -0.2249401, 0],
            [-0.0420569, 1.0420569, 0],
            [-0.0196376, -0.0786361, 1.0982736],
        ]
    )
    encoded = np.array([200, 120, 60]) / 255
    linear = matrix @ np.where(
        encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4
    )
    expected = 255 * np.where(
        linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055
    )
    assert np.abs(decode_whole(data, tmp_path)[0, 0] - expected).max() < 1.5


def test_a_profile_under_alpha_and_16_bits_is_converted_too(tmp_path: Path) -> None:
    chunk = png_chunk(b"iCCP", b"p3\0\0" + zlib.compress(profile("p3")))
    opaque = np.array([[200, 120, 60, 255]], dtype=np.uint8)
    narrow = png(1, 1, 8, 2, b"\0" + opaque[:, :3].tobytes(), chunk)
    wide = png(1, 1, 16, 6, b"\0" + (opaque.astype(">u2") * 257).tobytes(), chunk)
    expected = decode_whole(narrow, tmp_path)
    assert np.abs(decode_whole(wide, tmp_path).astype(int) - expected).max() <= 1
    assert tuple(expected[0, 0]) != (200, 120, 60)


def test_cmyk_with_and_without_a_profile_is_converted_as_littlecms_does(tmp_path: Path) -> None:
    image = Image.new("CMYK", (16, 16), (200, 40, 20, 10))
    press = ImageCms.ImageCmsProfile(io.BytesIO(profile("cmyk")))
    expected = ImageCms.profileToProfile(
        image, press, ImageCms.createProfile("sRGB"),
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC, outputMode="RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )  # fmt: skip
    assert expected is not None
    for options in ({}, {"icc_profile": profile("cmyk")}):
        found = decode_whole(encode(image, "JPEG", quality=100, **options), tmp_path)
        assert np.abs(found.astype(int) - np.asarray(expected)).max() <= 2


def unfit_profiles() -> dict[str, bytes]:
    p3 = profile("p3")
    return {
        "garbage": b"garbage" * 50,
        "zeros": bytes(500),
        "cut short": p3[:200],
        "no colorants": p3.replace(b"rXYZ", b"zzzz"),
        "another colour model": profile("cmyk"),
    }


@pytest.mark.parametrize("name", unfit_profiles())
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_an_unfit_profile_counts_as_absent(name: str, mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (200, 120, 60)).convert(mode)
    data = encode(image, "TIFF", icc_profile=unfit_profiles()[name])
    expected = np.asarray(image.convert("RGB"))
    assert np.abs(decode_whole(data, tmp_path).astype(int) - expected).max() <= 1


def test_an_rgb_profile_on_a_grey_picture_counts_as_absent(tmp_path: Path) -> None:
    data = encode(Image.new("L", (16, 16), 100), "PNG", icc_profile=profile("p3"))
    assert (decode_whole(data, tmp_path) == 100).all()


# Resizing.


@pytest.mark.parametrize(
    ("format", "size", "resolution"),
    [
        ("JPEG", (640, 480), 512),  # not shrunk while decoding
        ("JPEG", (1202, 806), 128),  # by 2
        ("JPEG", (1204, 804), 128),  # by 4
        ("JPEG", (2400, 1608), 128),  # by 8
        ("JPEG", (2403, 1607), 128),  # not shrunk: the eighths would not be whole
        ("PNG", (1201, 803), 128), ("WEBP", (1201, 803), 256), ("BMP", (1201, 803), 256),
        ("TIFF", (1201, 803), 512),
    ],
)  # fmt: skip
def test_shrinking_agrees_with_pillow_lanczos(
    format: str, size: tuple[int, int], resolution: int
) -> None:
    options = {"quality": 92} if format == "JPEG" else {}
    data = encode(Image.fromarray(picture(*size)), format, **options)
    plan = choose_geometry(*size, resolution, 64)
    resized = plan.resized_width_px, plan.resized_height_px
    left, top = plan.crop_left_px, plan.crop_top_px
    box = (left, top, left + plan.bucket_width_px, top + plan.bucket_height_px)
    expected = Image.open(io.BytesIO(data)).resize(resized, Image.Resampling.LANCZOS).crop(box)
    assert psnr_db(decode(data, ImageSize(*size), plan, WHITE), np.asarray(expected)) > 48


def test_an_opaque_picture_with_alpha_equals_one_without() -> None:
    plain = Image.fromarray(picture(801, 603))
    geometry = choose_geometry(801, 603, 256, 64)
    size = ImageSize(801, 603)
    expected = decode(encode(plain, "PNG"), size, geometry, WHITE)
    opaque = decode(encode(plain.convert("RGBA"), "PNG"), size, geometry, WHITE)
    assert (opaque == expected).all()


def test_a_resized_transparent_picture_agrees_with_compositing_in_pillow() -> None:
    alpha = Image.fromarray(picture(801, 603, seed=1)[..., 0])
    image = Image.fromarray(picture(801, 603))
    image.putalpha(alpha)
    plan = choose_geometry(801, 603, 256, 64)
    backdrop = Image.new("RGBA", image.size, (12, 34, 56, 255))
    resized = (plan.resized_width_px, plan.resized_height_px)
    whole = Image.alpha_composite(backdrop, image).convert("RGB")
    expected = np.asarray(whole.resize(resized, Image.Resampling.LANCZOS))
    data = encode(image, "PNG")
    found = decode(data, ImageSize(801, 603), own_size(*resized), (12, 34, 56))
    assert psnr_db(found, expected) > 50


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(1, 1), (3, 1000), (17, 33), (999, 1001), (4097, 31)])
@pytest.mark.parametrize("target", [(8, 8), (601, 257), (1, 1)])
def test_the_result_has_exactly_the_planned_size(
    format: str, size: tuple[int, int], target: tuple[int, int]
) -> None:
    options = {"quality": 100} if format == "JPEG" else {}
    data = encode(Image.new("RGB", size, (50, 100, 150)), format, **options)
    found = decode(data, ImageSize(*size), own_size(*target), WHITE)
    assert found.shape == (target[1], target[0], 3)
    assert np.abs(found.astype(int) - (50, 100, 150)).max() <= 2


def test_the_same_bytes_give_the_same_pixels_on_every_thread() -> None:
    data = [encode(Image.fromarray(picture(900, 700, seed)), "JPEG") for seed in range(3)]
    data.append(encode(Image.fromarray(picture(900, 700)).convert("RGBA"), "PNG"))
    geometry = choose_geometry(900, 700, 256, 64)
    alone = [decode(each, ImageSize(900, 700), geometry, WHITE) for each in data]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda d: decode(d, ImageSize(900, 700), geometry, WHITE), data * 8)
        for index, found in enumerate(together):
            assert (found == alone[index % len(data)]).all()


# What is refused.


def refusal(action: Callable[[], object]) -> ImageProblem:
    with pytest.raises(ImageProblem) as caught:
        action()
    return caught.value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.EMPTY_FILE),
        (b"a photo of a cat\n", Reason.NOT_AN_IMAGE),
        (b"BMW is a car, and this is a text that begins as a BMP\n", Reason.NOT_AN_IMAGE),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Reason.NOT_AN_IMAGE),
        (b"1,2,3\n4,5,6\n", Reason.NOT_AN_IMAGE),
        (b"\0" * 5000, Reason.NOT_AN_IMAGE),
        (b"\xff\xd8\xff\xe0 and then nonsense", Reason.UNDECODABLE),
        (b"\x89PNG\r\n\x1a\n", Reason.TRUNCATED),
        (b"\0\0\0\x18ftypmp42 a film", Reason.UNDECODABLE),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(
    data: bytes, reason: Reason, tmp_path: Path
) -> None:
    assert refusal(lambda: size_of(data, tmp_path)).reason is reason
    assert refusal(lambda: decode(data, ImageSize(8, 8), own_size(8, 8), WHITE)).reason is reason


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_is_refused(format: str, part: float, tmp_path: Path) -> None:
    whole = encode(Image.fromarray(picture(300, 200)), format)
    data = whole[: int(len(whole) * part)]
    # The bottom is cropped away: what is missing is not even needed.
    crop = Geometry(300, 8, 300, 200, 0, 0)
    problem = refusal(
        lambda: (size_of(data, tmp_path), decode(data, ImageSize(300, 200), crop, WHITE))
    )
    marks_its_end = format in ("JPEG", "PNG", "WEBP", "BMP")
    assert problem.reason is (Reason.TRUNCATED if marks_its_end else Reason.UNDECODABLE)


def test_a_progressive_jpeg_and_an_interlaced_png_cut_short_are_refused(tmp_path: Path) -> None:
    image = Image.fromarray(picture(300, 200))
    interlaced = pyvips.Image.new_from_array(picture(300, 200)).pngsave_buffer(interlace=True)
    for whole in (encode(image, "JPEG", progressive=True), interlaced):
        assert decode_whole(whole, tmp_path).shape == (200, 300, 3)
        half = whole[: len(whole) // 2]
        problem = refusal(lambda half=half: decode_whole(half, tmp_path))
        assert problem.reason is Reason.TRUNCATED


def test_a_damaged_png_is_refused(tmp_path: Path) -> None:
    data = bytearray(encode(Image.fromarray(picture(300, 200)), "PNG"))
    data[len(data) // 2] ^= 0xFF
    assert refusal(lambda: decode_whole(bytes(data), tmp_path)).reason is Reason.UNDECODABLE


def test_a_header_that_promises_more_rows_than_follow_is_refused(tmp_path: Path) -> None:
    data = png(4, 4000, 8, 2, (b"\0" + bytes(12)) * 3)
    assert size_of(data, tmp_path) == ImageSize(4, 4000)
    assert refusal(lambda: decode_whole(data, tmp_path)).reason is Reason.UNDECODABLE


def test_a_decoder_that_returns_another_shape_than_its_header_is_a_size_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode(Image.new("RGB", (40, 30)), "BMP")
    squashed = pyvips.Image.black(40, 29, bands=3).copy(interpretation="srgb")
    monkeypatch.setattr("precompute.pixels._from_array", lambda array: squashed)
    problem = refusal(lambda: decode(data, ImageSize(40, 30), own_size(8, 8), WHITE))
    assert problem.reason is Reason.SIZE_MISMATCH


def test_a_file_that_changed_its_size_since_the_plan_is_a_size_mismatch() -> None:
    data = encode(Image.new("RGB", (40, 30)), "PNG")
    problem = refusal(lambda: decode(data, ImageSize(30, 40), own_size(8, 8), WHITE))
    assert problem.reason is Reason.SIZE_MISMATCH
    assert "found 40x30 px, expected 30x40" in problem.detail


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_an_animation_is_refused(format: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    problem = refusal(lambda: size_of(data, tmp_path))
    assert problem.reason is Reason.ANIMATED
    assert "it has 3 frames" in problem.detail


@pytest.mark.parametrize("format", ["TIFF", "PNG", "AVIF"])
def test_the_first_of_several_pictures_is_taken_where_the_format_says_so(
    format: str, tmp_path: Path
) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(decode_whole(data, tmp_path).astype(int) - (255, 0, 0)).max() <= 2


def test_float_samples_are_refused(tmp_path: Path) -> None:
    data = encode(Image.fromarray(np.ones((8, 8), dtype=np.float32)), "TIFF")
    problem = refusal(lambda: size_of(data, tmp_path))
    assert problem.reason is Reason.UNDECODABLE
    assert "its samples are float" in problem.detail


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    bombs = [
        png(30_000, 30_000, 8, 2, b""),
        b"BM"
        + struct.pack(
            "<IHHIIiiHHIIiiII", 70, 0, 0, 54, 40, 30_000, -30_000, 1, 24, 0, 0, 0, 0, 0, 0
        ),
    ]
    for bomb in bombs:
        problem = refusal(lambda data=bomb: size_of(data, tmp_path))
        assert problem.reason is Reason.TOO_MANY_PIXELS
        assert "30000x30000 px; the limit is 200000000" in problem.detail


def test_the_pixel_limit_is_inclusive(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encode(Image.new("RGB", (40, 30)), "PNG"))
    assert read_size(file, max_pixels=1200) == ImageSize(40, 30)
    assert refusal(lambda: read_size(file, max_pixels=1199)).reason is Reason.TOO_MANY_PIXELS


def test_a_file_that_is_gone_is_unreadable(tmp_path: Path) -> None:
    problem = refusal(lambda: read_size(tmp_path / "gone.png"))
    assert problem.reason is Reason.UNREADABLE
    assert problem.detail == "No such file or directory"


# 64x64, the upper half (20, 40, 200), the lower (200, 120, 60), by libheif 1.23.6 with x265: a
# file because nothing in the test environment can write one.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAVZtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAA"
    "AAAAAAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABegABAAAAAAAAAKgAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAA"
    "AAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA1mlwcnAAAAC3aXBjbwAAAHhodmNDAQNwAAAAkAAAAAAAHvAA/P34"
    "+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbqSSmu"
    "bgIaDAgAAAMAyAAAAwAIQGIAAQAHRAHBcrAiQAAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAA"
    "QAAAABBwaXhpAAAAAAMICAgAAAAXaXBtYQAAAAAAAAABAAEEgQIDBAAAALBtZGF0AAAApCgBrwY4Wvz9N/veB/kf"
    "5P13//qLEqvg3Or/EZE///Yw5zf77Hqecs6AdY/Gfkvr8cP2P6ipaYB1j8Z+S+vxw/Y/qP/oE9AAVH9WqsaRlcTY"
    "/cE3QAFXgBf5BdVmaJOCAcsFVBRirsAA9xAnJWuN2hXTgchlQAceNISlmMkjXWjau2E6IANUUl8Tpm6YzLlNhnwA"
    "LMZCGRnqXJQiST7cCcEvqOIO"
)


def test_heic_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = refusal(lambda: size_of(HEIC, tmp_path))
    assert problem.reason is Reason.NEEDS_EXTRA
    assert "pip install 'prebake[heic]'" in problem.detail


def test_heic_decodes_with_the_extra(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    found = decode_whole(HEIC, tmp_path).astype(int)
    assert np.abs(found[:30] - (20, 40, 200)).max() <= 6
    assert np.abs(found[34:] - (200, 120, 60)).max() <= 6


def test_half_a_heic_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    problem = refusal(lambda: decode_whole(HEIC[:480], tmp_path))
    assert problem.reason is Reason.UNDECODABLE


def test_nothing_reaches_stderr_or_a_root_logger(tmp_path: Path) -> None:
    tags = encode(Image.fromarray(picture(300, 200)), "TIFF", icc_profile=b"garbage" * 50)
    files = {
        "half.jpg": encode(Image.fromarray(picture(300, 200)), "JPEG")[:9000],
        "half.png": encode(Image.fromarray(picture(300, 200)), "PNG")[:9000],
        "half.avif": encode(Image.fromarray(picture(300, 200)), "AVIF")[:4000],
        "half.tif": tags[:90_000],
        "profile.tif": tags,
        "text.jpg": b"\xff\xd8\xff no jpeg",
        "film.avif": b"\0\0\0\x18ftypmp42 a film",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    program = """if True:
        import logging, pathlib, sys
        logging.basicConfig(level=logging.INFO)
        from precompute.buckets import Geometry
        from precompute.pixels import decode, read_size
        from precompute.problems import ImageProblem
        for file in pathlib.Path(sys.argv[1]).iterdir():
            try:
                decode(file.read_bytes(), read_size(file), Geometry(8, 8, 9, 9, 0, 0), (0, 0, 0))
            except ImageProblem as problem:
                print(problem.reason)
        """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() != []
    assert done.stderr == ""


def test_backgrounds_are_named_or_hexadecimal() -> None:
    assert parse_background("white") == (255, 255, 255)
    assert parse_background("Black") == (0, 0, 0)
    assert parse_background("#0a80FF") == (10, 128, 255)
    for text in ("", "red", "#fff", "0a80ff", "#0a80fg", "#0a80ff0", "#0a80ff\n"):
        with pytest.raises(PrebakeError, match="background: expected white, black or #rrggbb"):
            parse_background(text)
