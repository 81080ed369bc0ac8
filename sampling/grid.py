"""Pictures in a labelled grid: a name beside each row, a text beneath each column."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

GAP_PX = 8
LEAST_CELL_PX = 128  # smaller pictures are shown enlarged, pixel by pixel
MAX_WIDTH_PX = 2_200  # where a grid would be wider, its columns go on beneath
FONT_PX = 13
LINE_PX = 18
LABEL_PX = 120
MAX_LINES = 5
PAPER, INK = (255, 255, 255), (30, 30, 30)


def draw_grid(
    rows: Sequence[Sequence[Image.Image]],
    row_labels: Sequence[str],
    captions: Sequence[str],
    notes: Sequence[str] | None = None,
) -> Image.Image:
    """Lay out R rows of C pictures of one size, with R labels at the left and C captions beneath.

    Each column's note, if there are any, is a line of its own under its caption, which is cut where
    it is long. Too many columns for one band of R rows make several. No column of labels is left
    free if all are empty.
    """
    assert len(rows) == len(row_labels)
    assert all(len(row) == len(captions) for row in rows)
    width, height = rows[0][0].size
    zoom = max(1, -(-LEAST_CELL_PX // min(width, height)))
    size_px = width * zoom, height * zoom
    left = LABEL_PX if any(row_labels) else GAP_PX
    num_columns = min(len(captions), max(1, (MAX_WIDTH_PX - left) // (size_px[0] + GAP_PX)))
    notes = notes or [""] * len(captions)
    texts = [
        "\n".join(line for line in (*_wrapped(caption, size_px[0]), note) if line)
        for caption, note in zip(captions, notes, strict=True)
    ]
    bands = []
    for start in range(0, len(texts), num_columns):
        part = slice(start, start + num_columns)
        bands.append(
            _draw_band([row[part] for row in rows], row_labels, texts[part], size_px, left)
        )
    grid = Image.new("RGB", (bands[0].width, sum(band.height for band in bands)), PAPER)
    top = 0
    for band in bands:
        grid.paste(band, (0, top))
        top += band.height
    return grid


def _draw_band(
    rows: Sequence[Sequence[Image.Image]],
    row_labels: Sequence[str],
    texts: Sequence[str],
    size_px: tuple[int, int],
    left: int,
) -> Image.Image:
    width, height = size_px
    foot = max(text.count("\n") + 1 for text in texts) * LINE_PX + GAP_PX
    total = left + len(texts) * (width + GAP_PX), GAP_PX + len(rows) * (height + GAP_PX) + foot
    band = Image.new("RGB", total, PAPER)
    pen = ImageDraw.Draw(band)
    font = _font()
    for r, (row, label) in enumerate(zip(rows, row_labels, strict=True)):
        top = GAP_PX + r * (height + GAP_PX)
        text = "\n".join(_wrapped(label, left - 2 * GAP_PX))
        pen.multiline_text((GAP_PX, top + height // 2), text, INK, font, anchor="lm", spacing=4)
        for c, picture in enumerate(row):
            shown = picture.convert("RGB").resize(size_px, Image.Resampling.NEAREST)
            band.paste(shown, (left + c * (width + GAP_PX), top))
    for c, text in enumerate(texts):
        at = left + c * (width + GAP_PX) + width // 2, total[1] - foot
        pen.multiline_text(at, text, INK, font, anchor="ma", align="center", spacing=4)
    return band


@cache
def _font() -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans, which comes with matplotlib: Pillow's own font has few accents."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(path, FONT_PX)


def _wrapped(text: str, width_px: int) -> list[str]:
    """Break a text into lines of at most `width_px`, and end it with an ellipsis if it is long."""
    font = _font()
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width_px:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:  # a word that is wider than a line goes on in the next
            if lines[-1] and font.getlength(lines[-1] + letter) > width_px:
                lines.append("")
            lines[-1] += letter
    if len(lines) > MAX_LINES:
        lines = lines[:MAX_LINES]
        while font.getlength(f"{lines[-1]} …") > width_px and " " in lines[-1]:
            lines[-1] = lines[-1].rpartition(" ")[0]
        lines[-1] += " …"
    return lines
