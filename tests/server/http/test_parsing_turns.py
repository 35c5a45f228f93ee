"""Connections that parse in turns leave time in the event loop for others."""

from __future__ import annotations

import asyncio
from time import perf_counter

from inflight.server.http.limits import PARSING_SECONDS, ParsingTurns


async def test_other_callbacks_run_between_parsing_turns() -> None:
    turns = ParsingTurns(asyncio.get_running_loop())
    order: list[str] = []

    def parse(name: str, num_more: int) -> None:
        order.append(name)
        end = perf_counter() + PARSING_SECONDS
        while perf_counter() < end:
            pass
        if num_more:
            turns.wait(lambda: parse(name, num_more - 1))

    for name in "ab":
        turns.wait(lambda name=name: parse(name, 1))  # type: ignore[misc]
    while len(order) < 8:
        await asyncio.sleep(0)
        order.append("others")
    assert order == ["a", "others", "b", "others"] * 2


async def test_parser_that_fails_does_not_stop_others() -> None:
    loop = asyncio.get_running_loop()
    turns, seen = ParsingTurns(loop), asyncio.Event()
    loop.set_exception_handler(lambda _loop, _context: None)
    turns.wait(lambda: [].pop())
    turns.wait(seen.set)
    async with asyncio.timeout(60):
        await seen.wait()
