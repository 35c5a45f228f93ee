"""A colour and a letter for every request."""

from __future__ import annotations

import math

GOLDEN_ANGLE = 137.508  # degrees: neighbours in order are far apart in hue, however many there are
DECODE = (0.78, 0.115)  # lightness and chroma in OKLCH, readable on light and dark paper alike
PREFILL = (0.50, 0.13)


def label(index: int) -> str:
    """A to Z, then AA, AB and so on."""
    text = ""
    while index >= 0:
        text = chr(ord("A") + index % 26) + text
        index = index // 26 - 1
    return text


def decode_colour(index: int) -> str:
    return _hex(*DECODE, _hue(index))


def prefill_colour(index: int) -> str:
    """The same hue, darker."""
    return _hex(*PREFILL, _hue(index))


def _hue(index: int) -> float:
    return (25 + index * GOLDEN_ANGLE) % 360


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """OKLCH to #rrggbb. In OKLCH equal lightness looks equally light in every hue."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(channel)):02x}" for channel in linear)


def _gamma(channel: float) -> float:
    channel = min(max(channel, 0.0), 1.0)
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
