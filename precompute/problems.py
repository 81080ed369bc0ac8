"""Why an input is not in the store: reason codes, and the report line that carries one.

Every file that looks like an image ends up stored, reused, or as one `Problem`. The
codes are written to `report.jsonl`, so a code keeps its meaning for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why one input was not baked."""

    EMPTY_FILE = "empty_file"
    """The image file has 0 bytes."""
    NOT_AN_IMAGE = "not_an_image"
    """The first bytes are of no format that prebake reads, whatever the name says."""
    UNSUPPORTED_FORMAT = "unsupported_format"
    """The name says an image format that prebake does not read (.psd, .jxl, .svg, ...)."""
    NEEDS_EXTRA = "needs_extra"
    """A HEIC picture, and the optional `pillow-heif` is not installed."""
    ANIMATED = "animated"
    """A GIF or WebP with several frames: which one is meant cannot be known."""
    TRUNCATED = "truncated"
    """The file ends before its picture does."""
    UNDECODABLE = "undecodable"
    """The decoder refuses the file: damaged, or cut short where that cannot be told."""
    TOO_MANY_PIXELS = "too_many_pixels"
    """The header announces more pixels than the limit; nothing was decoded."""
    TOO_SMALL = "too_small"
    """A side is under half the resolution, and upscaling was not asked for."""
    TOO_NARROW = "too_narrow"
    """The crop to the best bucket would keep under 1/16 of the picture."""
    SIZE_MISMATCH = "size_mismatch"
    """The decoded size is not the size that the header announced when it was planned."""
    CAPTION_UNDECODABLE = "caption_undecodable"
    """The caption is not text: neither UTF-8 nor marked UTF-16, or it holds NUL."""
    MISSING_FILE = "missing_file"
    """A metadata row names a file that is not among the images of the folder."""
    NAME_NOT_UTF8 = "name_not_utf8"
    """The file's name is not UTF-8, so no portable sample id can be made of it."""
    UNREADABLE = "unreadable"
    """The operating system refuses to read the file (rights, broken link, device)."""
    CHANGED_WHILE_BAKING = "changed_while_baking"
    """The file's bytes changed between planning and encoding."""
    NON_FINITE = "non_finite"
    """The encoder returned NaN or infinity, in float32 as well."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One report line: the file (posix path relative to its source), the code, the story."""

    path: str
    reason: Reason
    detail: str


class ImageProblem(Exception):  # noqa: N818 - not an error of the program: a finding
    """One image cannot be baked; the job turns this into a report line and goes on."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
