"""A drawing as SVG that follows the reader's light or dark mode."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from inflight.compare.drawing import DARK, LIGHT, Drawing, Rect, Text

FONTS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def to_svg(drawing: Drawing, label: str = "") -> str:
    """One `<svg>` element, complete in itself. The label is what a screen reader says in its place."""
    spoken = f' role="img" aria-label={quoteattr(label)}' if label else ""
    size = f"{drawing.width:g} {drawing.height:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="{FONTS}"{spoken}>',
        f"<style>{_style()}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    parts += [_rect(item) if isinstance(item, Rect) else _text(item) for item in drawing.items]
    return "\n".join([*parts, "</svg>\n"])


def to_swatch(items: list[Rect], width: float, height: float) -> str:
    """A small picture that says nothing by itself, for a page that has a whole one."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<svg {size} aria-hidden="true">{"".join(map(_rect, items))}</svg>'


def _style() -> str:
    def colours(theme: dict[str, str]) -> str:
        return "".join(f".{name}{{fill:{colour}}}" for name, colour in theme.items())

    return f"{colours(LIGHT)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"


def _paint(paint: str) -> str:
    return f'fill="{paint}"' if paint.startswith("#") else f'class="{paint}"'


def _rect(rect: Rect) -> str:
    where = f'x="{rect.x:.5g}" y="{rect.y:.5g}" width="{rect.width:.4g}" height="{rect.height:.4g}"'
    if not rect.title:
        return f"<rect {where} {_paint(rect.paint)}/>"
    return f"<rect {where} {_paint(rect.paint)}><title>{escape(rect.title)}</title></rect>"


def _text(text: Text) -> str:
    weight = ' font-weight="600"' if text.bold else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # Labels lie on the cells whose titles a reader hovers for.
    through = ' pointer-events="none"' if text.paint == "label" else ""
    return (
        f'<text x="{text.x:.5g}" y="{text.y:.5g}" font-size="{text.size}" {_paint(text.paint)}{weight}{anchor}'
        f"{through}>{escape(text.text)}</text>"
    )
