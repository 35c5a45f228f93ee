"""A comparison as one self-contained HTML page: table, picture, and the picture as text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from inflight.compare.drawing import DARK, FONTS, LIGHT, to_svg, to_swatch
from inflight.compare.picture import SAMPLE, TITLE, draw, legend_sample
from inflight.compare.timeline import ComparisonView, Span, SpanKind, Timeline

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
h1 {{ font-size: 26px; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 15px; margin: 14px 0 4px; }}
p {{ margin: 0 0 14px; max-width: 78ch; }}
.muted {{ color: var(--muted); }}
.beside {{ display: flex; flex-wrap: wrap; gap: 0 56px; align-items: center; }}
table {{ border-collapse: collapse; margin: 18px 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 0 4px 18px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }}
th[scope=row], td:first-child {{ padding-left: 0; text-align: left; white-space: normal; font-weight: inherit; }}
tr:last-child {{ font-weight: 600; }}
dl {{ flex: 1; min-width: min(300px, 100%); max-width: 60ch; color: var(--muted); font-size: 14px; }}
dt {{ color: var(--ink); }}
dd {{ margin: 0 0 8px; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 26px; list-style: none; margin: 18px 0 12px; padding: 0;
  color: var(--muted); font-size: 13px; }}
.legend li {{ display: flex; gap: 7px; align-items: center; }}
.wide {{ max-width: 100%; overflow-x: auto; }}
.wide:focus-visible, summary:focus-visible {{ outline: 2px solid var(--muted); outline-offset: 2px; }}
.wide > svg {{ display: block; width: 100%; height: auto; }}
.hint {{ display: none; margin: 0 0 6px; font-size: 13px; }}
details {{ margin-top: 24px; font-size: 14px; }}
summary {{ cursor: pointer; }}
details ul {{ margin: 0; padding-left: 20px; overflow-wrap: anywhere; }}
@media (max-width: 840px) {{
  h1 {{ font-size: 22px; }}
  .hint {{ display: block; }}
  .wide > svg {{ min-width: 1040px; }}
}}
@media (max-width: 480px) {{
  body {{ padding: 18px 14px 40px; }}
  table {{ font-size: 14px; }}
  th, td {{ padding-left: 10px; }}
}}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="muted">{subtitle}.</p>
<p>{headline} {verdict}</p>
<div class="beside">
<div class="wide">{table}</div>
<dl>
{definitions}
</dl>
</div>
<ul class="legend" aria-label="Legend">
{legend}
</ul>
<p class="hint muted">The picture is wider than the screen: swipe, or scroll with the arrow keys →</p>
<div class="wide" tabindex="0" role="region" aria-label="{picture_title}">{picture}</div>
<details>
<summary>The picture as text</summary>
{text_version}
</details>
</main>
</body>
</html>
"""


def to_html(comparison: ComparisonView) -> str:
    return _PAGE.format(
        title=escape(comparison.title),
        subtitle=escape(comparison.subtitle),
        headline=escape(comparison.headline),
        verdict=escape(comparison.verdict),
        definitions="\n".join(
            f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in comparison.definitions
        ),
        table=_table(comparison),
        legend=_legend(comparison),
        picture_title=TITLE,
        picture=to_svg(draw(comparison, heading=False), _label(comparison)),
        text_version=_text_version(comparison),
        fonts=FONTS,
        light=_variables(LIGHT),
        dark=_variables(DARK),
    )


def _variables(theme: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())


def _table(comparison: ComparisonView) -> str:
    head = "".join(f'<th scope="col">{escape(timeline.strategy)}</th>' for timeline in comparison.timelines)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in comparison.rows()
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _legend(comparison: ComparisonView) -> str:
    return "\n".join(
        f"<li>{to_swatch(legend_sample(entry.kind), *SAMPLE)}{escape(entry.text)}</li>"
        for entry in comparison.legend
    )


def _label(comparison: ComparisonView) -> str:
    summaries = (
        f"{timeline.strategy}: {comparison.summary(timeline.strategy)}" for timeline in comparison.timelines
    )
    return f"{TITLE}. {'. '.join(summaries)}. A text version follows."


def _text_version(comparison: ComparisonView) -> str:
    parts = ["<h2>Requests</h2>", _list(requests_as_text(comparison))]
    for timeline in comparison.timelines:
        parts += [f"<h2>{escape(timeline.strategy)}</h2>", _list(slots_as_text(comparison, timeline))]
    return "\n".join(parts)


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


# ---- the picture as text ----


def requests_as_text(comparison: ComparisonView) -> list[str]:
    """Describe each request in one line."""
    return [
        "; ".join(comparison.describe_request(number).splitlines())
        for number in range(comparison.num_requests)
    ]


def slots_as_text(comparison: ComparisonView, timeline: Timeline) -> list[str]:
    """List which requests held each slot, in order."""
    holders: dict[int, list[str]] = {}
    for (slot, request), spans in groupby(timeline.spans, key=lambda span: (span.slot, span.request)):
        holders.setdefault(slot, []).append(f"{comparison.label(request)} in {_steps(list(spans))}")
    lines = [f"slot {slot + 1}: {'; '.join(texts)}" for slot, texts in sorted(holders.items())]
    num_unused = timeline.num_slots - len(holders)
    return [*lines, f"never used: {num_unused} of {timeline.num_slots} slots"] if num_unused else lines


def _steps(spans: list[Span]) -> str:
    first, last = spans[0].first, spans[-1].last - 1
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if spans[-1].kind is not SpanKind.HELD:
        return steps
    return f"{steps}, finished before step {spans[-1].first}"
