"""One sample of a plan: what happens to it, and why."""

from dataclasses import dataclass, field
from enum import StrEnum

from precompute.buckets import Geometry
from precompute.pixels import ImageSize
from precompute.source import SourceImage


class Action(StrEnum):
    """What happens to one sample."""

    REUSE = "reuse"
    """Nothing: image and texts are stored."""
    TEXT_ONLY = "text only"
    """Its texts changed; its latents are kept."""
    COPY = "copy"
    """A new or changed sample whose latents the store (or this run) holds under another name."""
    ADD = "add"
    """A new sample: encode."""
    REENCODE = "re-encode"
    """Its image changed: encode."""


@dataclass(slots=True)
class Work:
    """One sample of the plan.

    `row` is a live row that holds its latents, where there is one: of the store itself, or of the
    one that the bake may take from (`is_taken_over`).
    """

    image: SourceImage
    sample_id: str
    action: Action
    why: str
    size: ImageSize
    geometry: Geometry
    image_sha256: str | None
    row: int | None = None
    is_taken_over: bool = False
    is_touched: bool = False
    same_pixels: "list[Work]" = field(default_factory=list)

    @property
    def bucket_px(self) -> tuple[int, int]:
        """(width, height)."""
        return self.geometry.bucket_width_px, self.geometry.bucket_height_px
