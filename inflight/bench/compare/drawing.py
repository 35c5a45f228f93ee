"""Drawings made of rectangles and texts in pixels, and how they are written as SVG and PNG.

A paint is either a colour (#rrggbb) or a name from the themes below. Names are resolved when the file is displayed if
the format supports light and dark mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

from inflight.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2024",
    "muted": "#687076",
    "rule": "#c9ced3",
    "slot": "#f0f2f4",
    "held": "#d5d9dd",
    "label": "#16181a",
}
DARK = {
    "paper": "#15181b",
    "ink": "#eceef0",
    "muted": "#9ba1a6",
    "rule": "#3f464c",
    "slot": "#22272b",
    "held": "#454c53",
    "label": "#16181a",
}
FONTS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
SCALE = 2  # PNG pixels per pixel of the drawing, for sharp text on dense screens
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    paint: str
    title: str = ""  # tooltip


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # baseline
    text: str
    paint: str = "ink"
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(slots=True)
class Drawing:
    width: float
    height: float
    items: list[Rect | Text] = field(default_factory=list)


# ---- SVG ----


def to_svg(drawing: Drawing) -> str:
    """Return a self-contained `<svg>` element that follows the reader's light or dark mode."""
    size = f"{drawing.width:g} {drawing.height:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="{FONTS}">',
        f"<style>{_svg_style()}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    parts += [_svg_rect(item) if isinstance(item, Rect) else _svg_text(item) for item in drawing.items]
    return "\n".join([*parts, "</svg>\n"])


def _svg_style() -> str:
    def colours(theme: dict[str, str]) -> str:
        return "".join(f".{name}{{fill:{colour}}}" for name, colour in theme.items())

    return f"{colours(LIGHT)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"


def _svg_paint(paint: str) -> str:
    return f'fill="{paint}"' if paint.startswith("#") else f'class="{paint}"'


def _svg_rect(rect: Rect) -> str:
    box = f'x="{rect.x:.5g}" y="{rect.y:.5g}" width="{rect.width:.4g}" height="{rect.height:.4g}"'
    if not rect.title:
        return f"<rect {box} {_svg_paint(rect.paint)}/>"
    return f"<rect {box} {_svg_paint(rect.paint)}><title>{escape(rect.title)}</title></rect>"


def _svg_text(text: Text) -> str:
    weight = ' font-weight="600"' if text.bold else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # Labels lie on top of cells; they must not swallow the hover that shows a cell's title.
    events = ' pointer-events="none"' if text.paint == "label" else ""
    return (
        f'<text x="{text.x:.5g}" y="{text.y:.5g}" font-size="{text.size}" {_svg_paint(text.paint)}{weight}{anchor}'
        f"{events}>{escape(text.text)}</text>"
    )


# ---- PNG ----


def require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError("PNG output needs Pillow: pip install 'inflight-llm[pictures]'") from None


def write_png(drawing: Drawing, path: Path) -> None:
    """Write a PNG in the light theme."""
    require_pillow()
    from PIL import Image, ImageDraw

    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", size, LIGHT["paper"])
    canvas = ImageDraw.Draw(image)
    for item in drawing.items:
        if isinstance(item, Rect):
            _png_rect(canvas, item)
        else:
            _png_text(canvas, item)
    image.save(path, "PNG", optimize=True)


def _png_paint(paint: str) -> str:
    return LIGHT.get(paint, paint)


def _png_rect(canvas: ImageDraw, rect: Rect) -> None:
    left, top = round(rect.x * SCALE), round(rect.y * SCALE)
    right, bottom = round((rect.x + rect.width) * SCALE), round((rect.y + rect.height) * SCALE)
    # In Pillow both corners belong to the rectangle.
    canvas.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), fill=_png_paint(rect.paint))


def _png_text(canvas: ImageDraw, text: Text) -> None:
    from PIL import ImageFont

    canvas.text(
        (text.x * SCALE, text.y * SCALE),
        text.text,
        fill=_png_paint(text.paint),
        font=ImageFont.load_default(text.size * SCALE),
        anchor=_ANCHORS[text.anchor],
        stroke_width=0.5 if text.bold else 0,  # Pillow's built-in font has no bold variant
        stroke_fill=_png_paint(text.paint),
    )
