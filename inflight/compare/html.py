"""The table and the picture as one page that needs nothing else."""

from __future__ import annotations

from html import escape

from inflight.compare.drawing import DARK, LIGHT, draw
from inflight.compare.shown import Shown
from inflight.compare.svg import FONTS, to_svg

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ margin: 0 auto; max-width: 1240px; padding: 24px 20px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 {fonts}; }}
h1 {{ font-size: 26px; margin: 0 0 4px; }}
p {{ margin: 0 0 14px; max-width: 78ch; }}
.muted {{ color: var(--muted); }}
table {{ border-collapse: collapse; margin: 18px 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 18px 4px 0; text-align: right; border-bottom: 1px solid var(--rule); }}
th:first-child, td:first-child {{ text-align: left; }}
tr:last-child td {{ font-weight: 600; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 0 56px; align-items: center; }}
dl {{ flex: 1; min-width: 300px; max-width: 60ch; color: var(--muted); font-size: 14px; }}
dt {{ color: var(--ink); }}
dd {{ margin: 0 0 8px; }}
.wide {{ overflow-x: auto; }}
svg {{ display: block; width: 100%; min-width: 760px; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="muted">{subtitle}.</p>
<p>{headline} {verdict}</p>
<div class="beside">
<div>{table}</div>
<dl>
{definitions}
</dl>
</div>
<div class="wide">{picture}</div>
</body>
</html>
"""


def to_html(comparison: Shown) -> str:
    return _PAGE.format(
        title=escape(comparison.title),
        subtitle=escape(comparison.subtitle),
        headline=escape(comparison.headline),
        verdict=escape(comparison.verdict),
        definitions="\n".join(
            f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in comparison.definitions
        ),
        table=_table(comparison),
        picture=to_svg(draw(comparison, heading=False)),
        fonts=FONTS,
        light=_variables(LIGHT),
        dark=_variables(DARK),
    )


def _variables(theme: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())


def _table(comparison: Shown) -> str:
    head = "".join(
        f"<th>{escape(name)}</th>" for name in ("", *(timeline.strategy for timeline in comparison.timelines))
    )
    body = "\n".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in comparison.rows()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
