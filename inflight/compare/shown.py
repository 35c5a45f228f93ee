"""A comparison as tables, pictures and pages see it, whatever was compared."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from inflight.compare.layout import Span, SpanKind, Timeline


class LegendEntry(NamedTuple):
    kind: SpanKind | None  # None: an empty slot
    words: str  # beside a picture
    word: str  # beside the lines of a terminal, or "" where none tells it


class Shown(Protocol):
    @property
    def title(self) -> str:
        """Of a page."""

    @property
    def subtitle(self) -> str:
        """What was run, in a line."""

    @property
    def headline(self) -> str:
        """What came out, in a sentence."""

    @property
    def verdict(self) -> str:
        """Whether it is a comparison of like with like."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def timelines(self) -> list[Timeline]:
        """One for each strategy, in the order of the runs."""

    @property
    def close_steps(self) -> int:
        """How many steps the closer look shows."""

    @property
    def legend(self) -> tuple[LegendEntry, ...]: ...

    @property
    def definitions(self) -> tuple[tuple[str, str], ...]:
        """Terms of the table, and what they mean."""

    def rows(self) -> list[tuple[str, list[str]]]:
        """The table: a name and a cell for every strategy, row by row."""

    def told(self, strategy: str) -> str:
        """A strategy's figures in a line."""

    def told_briefly(self, strategy: str) -> str: ...

    def label(self, request: int) -> str:
        """A request's letter."""

    def told_of(self, request: int) -> str:
        """A request's letter, and what it is."""

    def about(self, span: Span) -> str:
        """What hovering over a span tells."""


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
