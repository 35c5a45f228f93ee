"""A comparison as one self-contained HTML page: a table, the timelines, and the timelines as text.

The timelines are recordings, drawn by the web application (`inflight.web`).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from inflight.bench.compare.timeline import ComparisonView, Span, Timeline, shown_seconds
from inflight.timeline.chunks import SlotKind
from inflight.web import comparison_document

_BEFORE = """<h2>{title}</h2>
<p class="soft">{subtitle}.</p>
<p>{headline} {verdict}</p>
<div class="beside">
<div class="table">{table}</div>
<dl>
{definitions}
</dl>
</div>
"""
_AFTER = """<details>
<summary>The picture as text</summary>
{text_version}
</details>
"""


def to_html(comparison: ComparisonView) -> str:
    definitions = (
        f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in comparison.definitions
    )
    before = _BEFORE.format(
        title=escape(comparison.title),
        subtitle=escape(comparison.subtitle),
        headline=escape(comparison.headline),
        verdict=escape(comparison.verdict),
        table=_table(comparison),
        definitions="\n".join(definitions),
    )
    view = {
        "titles": {name: f"{name}: {comparison.summary(name)}" for name in comparison.results},
        "seconds": shown_seconds(comparison.timelines),
        "padded": comparison.padded,
        "legend": [
            ("free" if entry.kind is None else entry.kind.name.lower(), entry.text)
            for entry in comparison.legend
        ],
    }
    chunks = [chunk for result in comparison.results.values() for chunk in result.chunks]
    after = _AFTER.format(text_version=_text_version(comparison))
    return comparison_document(escape(comparison.title), chunks, view, before, after)


def _table(comparison: ComparisonView) -> str:
    head = "".join(f'<th scope="col">{escape(timeline.strategy)}</th>' for timeline in comparison.timelines)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in comparison.rows()
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _text_version(comparison: ComparisonView) -> str:
    parts = ["<h3>Requests</h3>", _list(map(comparison.describe_request, range(comparison.num_requests)))]
    for timeline in comparison.timelines:
        parts += [f"<h3>{escape(timeline.strategy)}</h3>", _list(slots_as_text(comparison, timeline))]
    return "\n".join(parts)


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


# ---- the picture as text ----


def slots_as_text(comparison: ComparisonView, timeline: Timeline) -> list[str]:
    """List which requests held each slot, in order."""
    holders: dict[int, list[str]] = {}
    for (slot, request), spans in groupby(timeline.spans, key=lambda span: (span.slot, span.request)):
        holders.setdefault(slot, []).append(f"{comparison.label(request)} in {_steps(list(spans))}")
    lines = [f"slot {slot + 1}: {'; '.join(texts)}" for slot, texts in sorted(holders.items())]
    num_unused = timeline.num_slots - len(holders)
    return [*lines, f"never used: {num_unused} of {timeline.num_slots} slots"] if num_unused else lines


def _steps(spans: list[Span]) -> str:
    first, end = spans[0].first, spans[-1].last - 1
    steps = f"step {first}" if first == end else f"steps {first} to {end}"
    if spans[-1].kind is not SlotKind.HELD:
        return steps
    return f"{steps}, finished before step {spans[-1].first}"
