"""A plot of latency over request rate: a bar per rate from the median to the 99th percentile, on a log scale."""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

from inflight.bench.report import Run, Spread
from inflight.bench.terminal import rate_name
from inflight.errors import ConfigError

WIDTH, LEFT, RIGHT, HEIGHT = 900, 70, 20, 170
FONTS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
STYLE = (
    ".p50{fill:#1f5fa8}.p90{fill:#4f93d8}.p99{fill:#a9cbee}.throughput{fill:#3c9a5f}"
    ".paper{fill:#fff}.ink{fill:#1c2024}.muted{fill:#687076}.rule{fill:#c9ced3}@media(prefers-color-scheme:dark)"
    "{.paper{fill:#15181b}.ink{fill:#eceef0}.muted{fill:#9ba1a6}.rule{fill:#3f464c}}"
)
_PANELS = (("Time to first token", "ttft"), ("Inter-token latency", "itl"), ("End-to-end latency", "e2e"))


def write_plot(runs: list[Run], title: str, path: Path) -> None:
    try:
        path.write_text(draw(runs, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error


def draw(runs: list[Run], title: str) -> str:
    """Return a self-contained `<svg>` element that follows the reader's light or dark mode."""
    shapes = [
        '<rect class="paper" width="100%" height="100%"/>',
        _text(LEFT, 34, "Latency and throughput over request rate", size=20, weight=600),
        _text(LEFT, 56, title, "muted", 13),
    ]
    _legend(shapes, 70)
    y = 96.0
    for name, field in _PANELS:
        spreads: list[Spread | None] = [getattr(run, field) for run in runs]
        if any(spreads):
            _latencies(shapes, y, f"{name}, ms", runs, spreads)
            y += HEIGHT + 74
    _throughput(shapes, y, runs)
    size = f'viewBox="0 0 {WIDTH} {y + HEIGHT + 74:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}"><style>{STYLE}</style>'
    return "\n".join([head, *shapes, "</svg>\n"])


def _rect(x: float, y: float, width: float, height: float, paint: str, title: str = "") -> str:
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{paint}" x="{x:.5g}" y="{y:.5g}" width="{width:.4g}" height="{height:.4g}">{tooltip}</rect>'


def _text(
    x: float,
    y: float,
    text: str,
    paint: str = "ink",
    size: int = 12,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    """Return a text whose baseline is at y."""
    font = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text class="{paint}" x="{x:.5g}" y="{y:.5g}" {font}>{escape(text)}</text>'


def _legend(shapes: list[str], y: float) -> None:
    x = float(LEFT)
    for name, colour in (("median", "p50"), ("to p90", "p90"), ("to p99", "p99")):
        shapes += [_rect(x, y, 26, 12, colour), _text(x + 33, y + 11, name, "muted")]
        x += 120


def _latencies(
    shapes: list[str], y: float, title: str, runs: list[Run], spreads: list[Spread | None]
) -> None:
    shapes.append(_text(LEFT, y + 20, title, size=15, weight=600))
    top = y + 32
    shown = [spread for spread in spreads if spread is not None]
    scale = _LogScale(
        min(spread.p50 for spread in shown) * 1e3, max(spread.p99 for spread in shown) * 1e3, top
    )
    for value in scale.ticks():
        tick_y = scale.y(value)
        shapes.append(_rect(LEFT, tick_y, WIDTH - LEFT - RIGHT, 1, "rule"))
        shapes.append(_text(LEFT - 8, tick_y + 4, _number(value), "muted", 10, "end"))
    for index, spread in enumerate(spreads):
        centre, width = _bar_position(index, len(runs))
        if spread is not None:
            _bar(shapes, scale, spread, centre, width)
        _rate(shapes, runs[index], centre, top)


def _bar(shapes: list[str], scale: _LogScale, spread: Spread, centre: float, width: float) -> None:
    p50, p90, p99 = (scale.y(value * 1e3) for value in (spread.p50, spread.p90, spread.p99))
    values = (_number(value * 1e3) for value in (spread.p50, spread.p90, spread.p99))
    tooltip = "p50 {} ms, p90 {}, p99 {}".format(*values)
    x = centre - width / 2
    shapes += [
        _rect(x, p99, width, max(p90 - p99, 0.5), "p99", tooltip),
        _rect(x, p90, width, max(p50 - p90, 0.5), "p90", tooltip),
        _rect(x - 5, p50 - 1.5, width + 10, 3, "p50", tooltip),
        _text(centre, p50 + 15, _number(spread.p50 * 1e3), size=11, anchor="middle"),
        _text(centre, p99 - 5, _number(spread.p99 * 1e3), "muted", 11, "middle"),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _throughput(shapes: list[str], y: float, runs: list[Run]) -> None:
    shapes.append(_text(LEFT, y + 20, "Output tokens per second", size=15, weight=600))
    top = y + 32
    most = max(run.output_tokens_per_s for run in runs) or 1.0
    shapes.append(_rect(LEFT, top + HEIGHT, WIDTH - LEFT - RIGHT, 1, "rule"))
    for index, run in enumerate(runs):
        centre, width = _bar_position(index, len(runs))
        height = (HEIGHT - 20) * run.output_tokens_per_s / most
        bar_top = top + HEIGHT - height
        text = f"{run.output_tokens_per_s:,.0f}"
        shapes.append(_rect(centre - width / 2, bar_top, width, height, "throughput", text))
        shapes.append(_text(centre, bar_top - 5, text, size=11, anchor="middle"))
        _rate(shapes, run, centre, top)


def _bar_position(index: int, count: int) -> tuple[float, float]:
    """Return the centre and the width of a rate's bar."""
    share = (WIDTH - LEFT - RIGHT) / count
    return LEFT + share * (index + 0.5), min(share * 0.3, 40.0)


def _rate(shapes: list[str], run: Run, centre: float, top: float) -> None:
    shapes.append(_text(centre, top + HEIGHT + 18, rate_name(run.rate), "muted", 11, "middle"))


class _LogScale:
    """Maps values to pixels. It spans at least a decade, so that small differences look small."""

    def __init__(self, low: float, high: float, top: float) -> None:
        low = max(low, 1e-3)
        middle = math.sqrt(low * max(high, low))
        self._low = min(low / 1.5, middle / math.sqrt(10))  # leaves space for the numbers below and above
        self._high = max(high * 1.5, middle * math.sqrt(10))
        self._top = top

    def y(self, value: float) -> float:
        share = math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        return self._top + HEIGHT * (1 - share)

    def ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        values = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)]
        return [value for value in values if self._low <= value <= self._high]
