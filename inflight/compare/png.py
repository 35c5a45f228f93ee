"""A drawing as a PNG, on light paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inflight.compare.drawing import LIGHT, Drawing, Rect, Text
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SCALE = 2  # pixels for one of the drawing's: sharp on dense screens
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError("a PNG needs Pillow: pip install 'inflight-llm[pictures]'") from None


def write_png(drawing: Drawing, path: Path) -> None:
    require_pillow()
    from PIL import Image, ImageDraw

    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", size, LIGHT["paper"])
    canvas = ImageDraw.Draw(image)
    for item in drawing.items:
        if isinstance(item, Rect):
            _rect(canvas, item)
        else:
            _text(canvas, item)
    image.save(path, "PNG", optimize=True)


def _paint(paint: str) -> str:
    return LIGHT.get(paint, paint)


def _rect(canvas: ImageDraw, rect: Rect) -> None:
    left, top = round(rect.x * SCALE), round(rect.y * SCALE)
    right, bottom = round((rect.x + rect.width) * SCALE), round((rect.y + rect.height) * SCALE)
    # Pillow's corners are both inside.
    canvas.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), fill=_paint(rect.paint))


def _text(canvas: ImageDraw, text: Text) -> None:
    from PIL import ImageFont

    canvas.text(
        (text.x * SCALE, text.y * SCALE),
        text.text,
        fill=_paint(text.paint),
        font=ImageFont.load_default(text.size * SCALE),
        anchor=_ANCHORS[text.anchor],
        stroke_width=0.5 if text.bold else 0,  # the one font that always is there has no bold
        stroke_fill=_paint(text.paint),
    )
