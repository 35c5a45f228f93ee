"""Calls between special tokens: a section of calls, and in it each call as a header and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from inflight.agents.calls import Calls
from inflight.agents.events import ContentDelta
from inflight.agents.source import Markers, Reading, Source


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What stands before the arguments."""

    name: str
    id: str | None = None


class CallSections:
    """Reads messages with such sections."""

    def __init__(
        self,
        section: tuple[str, str],  # what it begins and ends with
        call: tuple[str, str],
        header: Callable[[Source], Reading[CallHeader | None]],
        fence: str = "",  # that may stand around the arguments too, and so before the end of a call
    ) -> None:
        self._section, self._call = section, call
        self._openings = Markers(section[0], call[0])  # models forget the section now and then
        breaks = product(("\n", ""), repeat=2) if fence else ()  # lines that a fence begins and ends
        fenced = [f"{before}{fence}{after}{call[1]}" for before, after in breaks]
        self._endings = Markers(*fenced, call[1])
        self._header = header

    def read(self, source: Source, calls: Calls) -> Reading[None]:
        while (opening := (yield from source.until(self._openings, ContentDelta, trim=True))) is not None:
            if opening.endswith(self._call[0]):
                source.back(len(self._call[0]))
                opening = opening[: -len(self._call[0])]
            if not (yield from self._read_calls(source, calls)):
                yield ContentDelta(opening + ((yield from source.accept(self._call[0])) or ""))

    def _read_calls(self, source: Source, calls: Calls) -> Reading[bool]:
        if not (yield from self._read_call(source, calls)):
            return False
        while (yield from self._read_call(source, calls)):
            pass
        yield from source.accept_after_space(self._section[1])
        yield from source.skip_last_space()
        return True

    def _read_call(self, source: Source, calls: Calls) -> Reading[bool]:
        source.hold()
        yield from source.skip_space()
        opened = yield from source.accept(self._call[0])
        header = (yield from self._header(source)) if opened else None
        if header is None or not header.name:
            source.rewind()
            return False
        source.release()
        yield calls.begin(header.name, header.id)
        ending = yield from source.until(self._endings, calls.arguments)
        yield from calls.end(ending is not None)
        return True
