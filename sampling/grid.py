"""Pictures in a labelled grid: a name beside each row, a text beneath each column."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

GAP_PX = 8
LEAST_CELL_PX = 128  # smaller pictures are shown enlarged, pixel by pixel
FONT_PX = 14
LINE_PX = 18
LABEL_PX = 120
MAX_LINES = 5
PAPER, INK = (255, 255, 255), (30, 30, 30)


def draw_grid(
    rows: Sequence[Sequence[Image.Image]], row_labels: Sequence[str], captions: Sequence[str]
) -> Image.Image:
    """Lay out R rows of C pictures of one size, with R labels at the left and C captions beneath.

    No column of labels is left free if all are empty.
    """
    assert len(rows) == len(row_labels)
    assert all(len(row) == len(captions) for row in rows)
    width, height = rows[0][0].size
    zoom = max(1, -(-LEAST_CELL_PX // min(width, height)))
    width, height = width * zoom, height * zoom
    font = ImageFont.load_default(FONT_PX)
    left = LABEL_PX if any(row_labels) else GAP_PX
    texts = [_wrapped(caption, width, font) for caption in captions]
    foot = max(text.count("\n") + 1 for text in texts) * LINE_PX + GAP_PX
    size = left + len(captions) * (width + GAP_PX), GAP_PX + len(rows) * (height + GAP_PX) + foot
    grid = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(grid)
    for r, (row, label) in enumerate(zip(rows, row_labels, strict=True)):
        top = GAP_PX + r * (height + GAP_PX)
        text = _wrapped(label, left - 2 * GAP_PX, font)
        pen.multiline_text((GAP_PX, top + height // 2), text, INK, font, anchor="lm", spacing=4)
        for c, picture in enumerate(row):
            shown = picture.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
            grid.paste(shown, (left + c * (width + GAP_PX), top))
    for c, text in enumerate(texts):
        at = left + c * (width + GAP_PX) + width // 2, size[1] - foot
        pen.multiline_text(at, text, INK, font, anchor="ma", align="center", spacing=4)
    return grid


def _wrapped(text: str, width_px: int, font: "ImageFont.FreeTypeFont | ImageFont.ImageFont") -> str:
    """Break a text into lines of at most `width_px`, and end it with an ellipsis if it is long."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width_px:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], lines[MAX_LINES - 1] + " …"]
    return "\n".join(lines)
