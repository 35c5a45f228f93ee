"""Progress bars for loading a model and for running requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.events import Delta

Advance = Callable[[Sequence[Delta]], None]


def loading_bar(model: str, show: bool) -> AbstractContextManager[Callable[[int, int], None] | None]:
    return _LoadingBar(model) if show and sys.stderr.isatty() else nullcontext()


class _LoadingBar(AbstractContextManager[Callable[[int, int], None]]):
    def __init__(self, model: str) -> None:
        self._progress = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(model, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def request_bar(doing: str, total: int, show: bool) -> AbstractContextManager[Advance]:
    """Return a progress bar that is advanced by the deltas of each step. `doing` is its label."""
    return _RequestBar(doing, total) if show and sys.stderr.isatty() else nullcontext(lambda _: None)


class _RequestBar(AbstractContextManager[Advance]):
    """Shows finished requests and tokens per second: output tokens, or prompt tokens if nothing is generated."""

    def __init__(self, doing: str, total: int) -> None:
        self._progress = Progress(
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, speed="")
        self._num_tokens = 0

    def __enter__(self) -> Advance:
        self._progress.start()
        return self._advance

    def _advance(self, deltas: Sequence[Delta]) -> None:
        self._num_tokens += sum(map(_num_tokens, deltas))
        elapsed = self._progress.tasks[0].elapsed or 0.0
        speed = f"{self._num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        done = sum(delta.finish_reason is not None for delta in deltas)
        self._progress.update(self._task, advance=done, speed=speed)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def _num_tokens(delta: Delta) -> int:
    is_read = delta.vector is not None and delta.record is not None
    return delta.record.num_prompt_tokens if is_read and delta.record else len(delta.token_ids)
