"""The load generator against a server whose answers, delays and faults are known."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from inflight.bench import client
from inflight.bench.client import Target
from inflight.bench.load_generator import LoadPlan, Record, drive
from inflight.bench.report import summarise
from tests.bench.fake import DONE, END, HEAD, Exchange, chunk, error_response, jobs, serving, token, usage
from tests.support.waiting import until

PAUSE = 0.02  # seconds; tests assert that at least this much is measured


async def three_tokens(exchange: Exchange) -> None:
    await exchange.stream(token("a"), token("b"), token("ü", "length"), usage(4, 3, 2))


def only(records: list[Record]) -> Record:
    (record,) = records
    return record


async def test_tokens_are_counted() -> None:
    async with serving(three_tokens) as fake:
        result = await drive(LoadPlan(fake.target, jobs(20)))
    assert [record.index for record in result.records] == list(range(20))
    assert sorted(exchange.body["prompt"][0] for exchange in fake.exchanges) == list(range(20))
    for record in result.records:
        assert (record.error, record.num_tokens, record.num_prompt_tokens) == (None, 3, 4)
        assert (record.num_cached_tokens, len(record.times)) == (2, 3)
        assert record.sent <= record.first <= record.last <= record.ended
    run = summarise(8.0, result)
    assert (run.num_complete, run.num_output_tokens, run.num_prompt_tokens) == (20, 60, 80)
    assert run.problems == {}


async def test_delays_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now, num_reads = 0.0, 0

    def clock() -> float:
        nonlocal num_reads
        num_reads += 1
        return now

    def has_read_since(num_before: int) -> bool:
        return num_reads > num_before

    async def slow(exchange: Exchange) -> None:
        nonlocal now
        now = time.perf_counter()
        for data in (HEAD, *map(chunk, (token("a"), token("b"), token("c", "length"), DONE))):
            num_before = num_reads
            await exchange.write(data)
            await until(partial(has_read_since, num_before), "the client's look at the clock")
            now += PAUSE
        await exchange.write(END)

    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=clock))
    async with serving(slow) as fake:
        record = only((await drive(LoadPlan(fake.target, jobs(1)))).records)
    assert record.first - record.sent >= PAUSE
    assert [later - earlier for earlier, later in pairwise(record.times)] == pytest.approx([PAUSE, PAUSE])
    assert record.ended - record.last == pytest.approx(2 * PAUSE)
    assert record.num_tokens == 3  # without usage, events are counted


async def test_open_loop_does_not_wait_for_answers() -> None:
    """No request is answered before all have arrived, so a closed loop would wait forever."""
    all_arrived = asyncio.Event()

    async def together(exchange: Exchange) -> None:
        if exchange.number == 9:
            all_arrived.set()
        await all_arrived.wait()
        await three_tokens(exchange)

    async with serving(together) as fake:
        result = await drive(LoadPlan(fake.target, jobs(10, at=0.002), timeout=60))
    assert {record.error for record in result.records} == {None}


async def test_requests_are_sent_when_due() -> None:
    async with serving(three_tokens) as fake:
        start = time.perf_counter() + PAUSE
        result = await drive(LoadPlan(fake.target, jobs(3, at=PAUSE)), start)
    for index, record in enumerate(result.records):
        assert record.sent - start >= PAUSE * index - 0.002  # the loop's clock is a millisecond coarse
        assert record.lag is not None
        assert record.lag >= 0


async def test_concurrency_limit_is_respected() -> None:
    have_come = asyncio.Event()

    async def together(exchange: Exchange) -> None:
        if exchange.number == 2:
            have_come.set()
        await have_come.wait()
        await exchange.stream(token("a", "length"))

    async with serving(together) as fake:
        result = await drive(LoadPlan(fake.target, jobs(12), concurrency=3))
    assert fake.max_concurrent == 3
    assert fake.num_connections == 3  # connections are reused
    assert sum(record.lag is None for record in result.records) >= 9  # waiting for the limit is not lag


async def test_slow_client_is_reported() -> None:
    async def block(exchange: Exchange) -> None:
        if exchange.number == 3:
            time.sleep(0.2)  # also blocks the client, which runs in the same loop
        await three_tokens(exchange)

    async with serving(block) as fake:
        result = await drive(LoadPlan(fake.target, jobs(20, at=0.01)))
    run = summarise(100.0, result)
    assert run.lag is not None
    assert run.lag.max >= 0.1
    assert any("sent" in warning for warning in run.warnings())
    assert "bottleneck" in run.warnings()[-1]


# ---- faults ----


async def fails_every_second(exchange: Exchange) -> None:
    if exchange.body["prompt"][0] % 2:
        await exchange.write(error_response(429, "come back later"))
    else:
        await three_tokens(exchange)


async def test_error_responses_are_counted_and_other_requests_continue() -> None:
    async with serving(fails_every_second) as fake:
        run = summarise(1.0, await drive(LoadPlan(fake.target, jobs(10))))
    assert (run.num_complete, run.num_failed, run.num_output_tokens) == (5, 5, 15)
    assert (run.problems["http_429"].count, run.problems["http_429"].example) == (5, "come back later")


async def broken_in_an_event(exchange: Exchange) -> None:
    await exchange.write(HEAD + chunk(token("a")) + chunk(token("b")[:9]))
    exchange.hang_up()


async def ended_without_an_end(exchange: Exchange) -> None:
    await exchange.write(HEAD + chunk(token("a")) + END)


async def hung_up_at_once(exchange: Exchange) -> None:
    exchange.hang_up()


async def not_http(exchange: Exchange) -> None:
    await exchange.write(b"what?\r\n\r\n")


async def an_error_event(exchange: Exchange) -> None:
    await exchange.write(HEAD + chunk(token("a")) + chunk(b'data: {"error": {"message": "died"}}\n\n') + END)


async def no_stream(exchange: Exchange) -> None:
    await exchange.write(error_response(200, ""))


async def an_html_page(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\n<p>")


async def silence(exchange: Exchange) -> None:
    await exchange.write(HEAD + chunk(token("a")))
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "kind", "num_tokens"),
    [
        (broken_in_an_event, "broken", 1),
        (ended_without_an_end, "broken", 1),
        (hung_up_at_once, "broken", 0),
        (not_http, "bad_response", 0),
        (an_error_event, "stream_error", 1),
        (no_stream, "not_streamed", 0),
        (an_html_page, "http_502", 0),
        (silence, "timeout", 1),
    ],
)
async def test_faults_are_classified(handler: object, kind: str, num_tokens: int) -> None:
    async def sometimes(exchange: Exchange) -> None:
        await (handler if exchange.body["prompt"] == [1] else three_tokens)(exchange)  # type: ignore[operator]

    async with serving(sometimes) as fake:
        seconds = 2.0 if kind == "timeout" else 60.0
        result = await drive(LoadPlan(fake.target, jobs(3), timeout=seconds, concurrency=1))
    assert [record.error for record in result.records] == [None, kind, None]
    failed = result.records[1]
    assert (failed.num_tokens, bool(failed.detail)) == (num_tokens, True)
    run = summarise(1.0, result)
    assert (run.num_complete, run.num_output_tokens) == (2, 6)


async def test_unreachable_server_is_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # but it does not listen
        target = Target("127.0.0.1", unused.getsockname()[1], "/")
        run = summarise(1.0, await drive(LoadPlan(target, jobs(3))))
    assert (run.num_complete, run.problems["connect"].count, run.ttft) == (0, 3, None)


async def test_connection_closed_while_idle_is_retried() -> None:
    async def closes(exchange: Exchange) -> None:
        await three_tokens(exchange)
        if exchange.number % 2 == 0:
            await asyncio.sleep(0)
            exchange.hang_up()

    async with serving(closes) as fake:
        result = await drive(LoadPlan(fake.target, jobs(8), concurrency=1))
    assert [record.error for record in result.records] == [None] * 8


async def test_unframed_answer_ends_with_its_connection() -> None:
    async def until_the_end(exchange: Exchange) -> None:
        head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        await exchange.write(head + token("a", "stop") + DONE)
        exchange.hang_up()

    async with serving(until_the_end) as fake:
        result = await drive(LoadPlan(fake.target, jobs(2), concurrency=1))
    assert [(record.error, record.num_tokens) for record in result.records] == [(None, 1)] * 2


async def test_chunks_can_be_split_anywhere() -> None:
    data = token("ä") + token("😀", "stop") + usage(1, 2) + DONE

    async def in_pieces(exchange: Exchange) -> None:
        size = exchange.number + 1
        await exchange.write(HEAD)
        wire = b"".join(chunk(data[at : at + size]) for at in range(0, len(data), size)) + END
        for at in range(0, len(wire), 7):
            await exchange.write(wire[at : at + 7])
            if at % 70 == 0:
                await asyncio.sleep(0)

    async with serving(in_pieces) as fake:
        result = await drive(LoadPlan(fake.target, jobs(24), concurrency=4))
    assert {(record.error, record.num_tokens) for record in result.records} == {(None, 2)}


async def test_headers_are_sent() -> None:
    async with serving(three_tokens) as fake:
        target = Target("127.0.0.1", fake.target.port, "/v1/x", headers=("Authorization: Bearer secret",))
        await drive(LoadPlan(target, jobs(1)))
    (exchange,) = fake.exchanges
    assert exchange.path == "/v1/x"
    assert exchange.headers["authorization"] == "bearer secret"
    assert exchange.headers["host"] == f"127.0.0.1:{target.port}"
