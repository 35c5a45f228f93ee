"""A plot of latency over request rate: a bar per rate from the median to the 99th percentile, on a log scale."""

from __future__ import annotations

import math
from pathlib import Path

from inflight.bench.compare.drawing import Drawing, Rect, Text, to_svg, write_png
from inflight.bench.report import Run, Spread
from inflight.bench.terminal import rate_name
from inflight.errors import ConfigError

WIDTH, LEFT, RIGHT, HEIGHT = 900, 70, 20, 170
P50, P90, P99 = "#1f5fa8", "#4f93d8", "#a9cbee"
THROUGHPUT = "#3c9a5f"
_PANELS = (("Time to first token", "ttft"), ("Inter-token latency", "itl"), ("End-to-end latency", "e2e"))


def write_plot(runs: list[Run], title: str, path: Path) -> None:
    """Write the plot as SVG or PNG, depending on the file's suffix."""
    drawing = draw(runs, title)
    try:
        if path.suffix == ".png":
            write_png(drawing, path)
        else:
            path.write_text(to_svg(drawing), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error


def draw(runs: list[Run], title: str) -> Drawing:
    drawing = Drawing(WIDTH, 0)
    drawing.items += [
        Text(LEFT, 34, "Latency and throughput over request rate", size=20, bold=True),
        Text(LEFT, 56, title, "muted", 13),
    ]
    _legend(drawing, 70)
    y = 96.0
    for name, field in _PANELS:
        spreads: list[Spread | None] = [getattr(run, field) for run in runs]
        if any(spreads):
            _latencies(drawing, y, f"{name}, ms", runs, spreads)
            y += HEIGHT + 74
    _throughput(drawing, y, runs)
    drawing.height = y + HEIGHT + 74
    return drawing


def _legend(drawing: Drawing, y: float) -> None:
    x = float(LEFT)
    for name, colour in (("median", P50), ("to p90", P90), ("to p99", P99)):
        drawing.items += [Rect(x, y, 26, 12, colour), Text(x + 33, y + 11, name, "muted")]
        x += 120


def _latencies(drawing: Drawing, y: float, title: str, runs: list[Run], spreads: list[Spread | None]) -> None:
    drawing.items.append(Text(LEFT, y + 20, title, size=15, bold=True))
    top = y + 32
    shown = [spread for spread in spreads if spread is not None]
    scale = _LogScale(
        min(spread.p50 for spread in shown) * 1e3, max(spread.p99 for spread in shown) * 1e3, top
    )
    for value in scale.ticks():
        tick_y = scale.y(value)
        drawing.items.append(Rect(LEFT, tick_y, WIDTH - LEFT - RIGHT, 1, "rule"))
        drawing.items.append(Text(LEFT - 8, tick_y + 4, _number(value), "muted", 10, "end"))
    for index, spread in enumerate(spreads):
        centre, width = _bar_position(index, len(runs))
        if spread is not None:
            _bar(drawing, scale, spread, centre, width)
        _rate(drawing, runs[index], centre, top)


def _bar(drawing: Drawing, scale: _LogScale, spread: Spread, centre: float, width: float) -> None:
    p50, p90, p99 = (scale.y(value * 1e3) for value in (spread.p50, spread.p90, spread.p99))
    values = (_number(value * 1e3) for value in (spread.p50, spread.p90, spread.p99))
    tooltip = "p50 {} ms, p90 {}, p99 {}".format(*values)
    x = centre - width / 2
    drawing.items += [
        Rect(x, p99, width, max(p90 - p99, 0.5), P99, tooltip),
        Rect(x, p90, width, max(p50 - p90, 0.5), P90, tooltip),
        Rect(x - 5, p50 - 1.5, width + 10, 3, P50, tooltip),
        Text(centre, p50 + 15, _number(spread.p50 * 1e3), size=11, anchor="middle"),
        Text(centre, p99 - 5, _number(spread.p99 * 1e3), "muted", 11, "middle"),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _throughput(drawing: Drawing, y: float, runs: list[Run]) -> None:
    drawing.items.append(Text(LEFT, y + 20, "Output tokens per second", size=15, bold=True))
    top = y + 32
    most = max(run.output_tokens_per_s for run in runs) or 1.0
    drawing.items.append(Rect(LEFT, top + HEIGHT, WIDTH - LEFT - RIGHT, 1, "rule"))
    for index, run in enumerate(runs):
        centre, width = _bar_position(index, len(runs))
        height = (HEIGHT - 20) * run.output_tokens_per_s / most
        bar_top = top + HEIGHT - height
        text = f"{run.output_tokens_per_s:,.0f}"
        drawing.items.append(Rect(centre - width / 2, bar_top, width, height, THROUGHPUT, text))
        drawing.items.append(Text(centre, bar_top - 5, text, size=11, anchor="middle"))
        _rate(drawing, run, centre, top)


def _bar_position(index: int, count: int) -> tuple[float, float]:
    """Return the centre and the width of a rate's bar."""
    share = (WIDTH - LEFT - RIGHT) / count
    return LEFT + share * (index + 0.5), min(share * 0.3, 40.0)


def _rate(drawing: Drawing, run: Run, centre: float, top: float) -> None:
    drawing.items.append(Text(centre, top + HEIGHT + 18, rate_name(run.rate), "muted", 11, "middle"))


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
