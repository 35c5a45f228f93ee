"""Faults and bad input that a server meets, each with a neighbour whose tokens must not change.

| fault | tests |
| --- | --- |
| the engine process dies | test_an_engine_that_is_killed; engine/test_process.py |
| the loop hangs while /health stays 200 | test_a_step_that_hangs, test_a_process_that_falls_silent |
| KV memory runs out | test_kv_memory_that_runs_out |
| the client goes away | test_a_client_that_goes_away, test_aborts_take_effect_with_the_next_step; test_life.py |
| a client reads slowly | test_a_client_that_does_not_read; test_life.py, engine/test_process.py |
| overload | test_overload; test_limits.py, test_openai.py (Retry-After) |
| SIGTERM | test_sigterm; test_life.py, test_command.py |
| a step raises | test_a_step_that_raises; test_life.py |

| input | tests |
| --- | --- |
| pickle over a socket | test_nothing_can_unpickle; engine/test_wire.py, engine/test_process.py (malformed frames) |
| unsafe weights, code in a model folder | test_code_in_a_model_folder_is_not_run; models/test_checkpoint.py |
| chat template | text/test_chat.py (hostile templates, arguments), test_bad_input.py (none from requests) |
| numbers, token ids, prompts, stop strings | test_bad_input.py, beside a neighbour; test_large_lists_stall_no_one |
| special tokens in user content | test_chat.py, text/test_conversation.py |
| prefix cache | test_hashes_are_no_hashes_of_python; test_keys.py (prefixes), e2e/test_bad_input.py (salts) |
| request ids, auth | test_keys.py |
| body, headers | test_limits.py |
| errors | test_bad_input.py, and every test here: no path, address or trace in what a client reads |
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import socket
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import inflight
from inflight import LLM, SamplingParams
from inflight.errors import InflightError
from inflight.events import StepRecord
from inflight.kv import ChainHashCache
from inflight.models.builtin import checkpoint_folder
from tests.server.faulty import HANG, RAISE, SLOW
from tests.server.live import Backend, Live, ProcessBackend, live_server
from tests.server.test_command import serving

PATH = "/v1/completions"
NUM_SLOTS, NUM_PLACES = 4, 8


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessBackend]:
    found = ProcessBackend(num_blocks=1024, max_num_seqs=NUM_SLOTS, max_queue=NUM_PLACES)
    yield found
    found.close()


@pytest.fixture(scope="module")
def _server(process: ProcessBackend) -> Iterator[Live]:
    with live_server(process, max_queue=NUM_PLACES) as live:
        yield live


@pytest.fixture
def server(_server: Live, threads: ThreadPoolExecutor) -> Iterator[Live]:  # noqa: ARG001
    yield _server
    _server.wait_until_idle()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as found:
        yield found


class Told:
    """What a client was told: the status, the text, the error, and whether the stream had its end mark."""

    def __init__(self, live: Live, body: dict[str, Any]) -> None:
        self.text, self.done = "", False
        self.errors: list[Any] = []
        with live.http.stream("POST", PATH, json=body) as response:
            self.status, self.headers = response.status_code, response.headers
            if response.headers["content-type"] == "application/json":
                self._take(json.loads(response.read()))
                return
            for line in filter(None, response.iter_lines()):
                assert not self.errors, "something came after the error"
                self.done = line == "data: [DONE]"
                if not self.done:
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            for word in ("Error", "/", "Traceback", "0x"):
                assert word not in event["error"]["message"]
        else:
            self.text += event["choices"][0]["text"]


class Case:
    """A request, and what it must give whatever happens around it."""

    def __init__(self, llm: LLM, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.text = llm.generate(prompt, params)[0].outputs[0].text
        self.body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def send(self, threads: ThreadPoolExecutor, live: Live, stream: bool = True) -> Future[Told]:
        return threads.submit(Told, live, {**self.body, "stream": stream})

    def right(self, told: Told) -> bool:
        return told.status == 200 and told.text == self.text and not told.errors


@pytest.fixture(scope="module")
def slow(llm: LLM) -> list[Case]:
    """Each takes seconds, with the faulty engine."""
    return [Case(llm, [SLOW, number], 200) for number in range(NUM_SLOTS + NUM_PLACES)]


@pytest.fixture(scope="module")
def quick(llm: LLM) -> Case:
    return Case(llm, [5, 6], 40)


def wait_for_running(live: Live, number: int, waiting: int = 0) -> None:
    async def found() -> bool:
        stats = await live.backend.engine.stats()
        return (stats.num_running, stats.num_waiting) == (number, waiting)

    live.wait_until(f"{number} running, {waiting} waiting", found)


def health(live: Live) -> tuple[int, str]:
    response = live.http.get("/health")
    return response.status_code, response.json()["status"]


# ---- the engine ----


def test_an_engine_that_is_killed(
    server: Live, process: ProcessBackend, threads: ThreadPoolExecutor, slow: list[Case], quick: Case
) -> None:
    streams = [case.send(threads, server) for case in slow[:3]]
    whole = slow[3].send(threads, server, stream=False)
    wait_for_running(server, 4)
    server.wait_until("first tokens", lambda: all(entry.first_token_at for entry in server.state.ledger))
    first = process.client.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    for case, stream in zip(slow, streams, strict=False):
        told = stream.result()
        assert (told.status, told.done) == (200, False)
        assert [error["code"] for error in told.errors] == ["engine_unavailable"]
        assert case.text.startswith(told.text)
    for refused in (whole.result(), Told(server, quick.body)):  # then, and meanwhile
        assert refused.status == 503
        assert refused.errors[0]["type"] == "service_unavailable_error"
        assert int(refused.headers["retry-after"]) > 0
    assert health(server) == (503, "restarting")
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/metrics").status_code == 200
    server.wait_until("a new process", lambda: process.client.process_id != first)
    while health(server) != (200, "ok"):
        time.sleep(0.01)
    assert quick.right(Told(server, quick.body))
    assert slow[0].right(Told(server, {**slow[0].body, "stream": True}))
    restarts = [
        line for line in server.http.get("/metrics").text.splitlines() if "engine_restarts_total{" in line
    ]
    assert restarts[0].endswith(" 1.0")


def test_a_step_that_hangs(
    server: Live, threads: ThreadPoolExecutor, llm: LLM, slow: list[Case], quick: Case
) -> None:
    neighbour = slow[0].send(threads, server)
    wait_for_running(server, 1)
    hanging = Case(llm, [HANG, 1], 8)
    stuck = hanging.send(threads, server)
    server.wait_until("its sign", lambda: health_of(server))
    assert health(server) == (503, "stalled")
    told = Told(server, quick.body)
    assert (told.status, told.errors[0]["code"]) == (503, "engine_unavailable")
    assert hanging.right(stuck.result())
    assert slow[0].right(neighbour.result())
    assert health(server) == (200, "ok")
    assert quick.right(Told(server, quick.body))


async def health_of(live: Live) -> bool:
    return not (await live.backend.engine.health()).healthy


def test_a_process_that_falls_silent(
    server: Live, process: ProcessBackend, threads: ThreadPoolExecutor, slow: list[Case]
) -> None:
    neighbour = slow[0].send(threads, server)
    wait_for_running(server, 1)
    number = process.client.process_id
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    try:
        server.wait_until("its sign", lambda: health_of(server))
        assert health(server) == (503, "stalled")
    finally:
        os.kill(number, signal.SIGCONT)
    assert slow[0].right(neighbour.result())
    assert health(server) == (200, "ok")


def test_a_step_that_raises(server: Live, threads: ThreadPoolExecutor, slow: list[Case], quick: Case) -> None:
    batch = [case.send(threads, server, stream=number > 0) for number, case in enumerate(slow[:3])]
    wait_for_running(server, 3)
    bad = threads.submit(Told, server, {**quick.body, "prompt": [RAISE, 1], "stream": True})
    neighbour = slow[4].send(threads, server)
    assert [error["code"] for error in bad.result().errors] == ["engine_error"]
    assert all(case.right(future.result()) for case, future in zip(slow, batch, strict=False))
    assert slow[4].right(neighbour.result())
    assert health(server) == (200, "ok")
    assert quick.right(Told(server, quick.body))


def test_kv_memory_that_runs_out(llm: LLM, threads: ThreadPoolExecutor) -> None:
    cases = [Case(llm, [20 + number] * 8, 160 + number) for number in range(8)]
    small = Backend(num_blocks=26, max_model_len=256, max_num_seqs=8, max_queue=64)
    try:
        with live_server(small) as live:
            first = threads.submit(Told, live, {**cases[0].body, "request_id": "oldest"})
            wait_for_running(live, 1)
            futures = [first, *(case.send(threads, live) for case in cases[1:])]
            assert all(case.right(future.result()) for case, future in zip(cases, futures, strict=True))
            live.wait_until_idle()
            assert small.core.stats().num_preemptions > 0
            assert next(iter(live.state.ledger._finished.values())).request_id == "oldest"
    finally:
        small.close()


# ---- clients ----


def connect(live: Live) -> socket.socket:
    host, _, port = live.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


def send(connection: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def test_a_client_that_goes_away(server: Live, threads: ThreadPoolExecutor, slow: list[Case]) -> None:
    metrics = server.state.metrics
    before = metrics.num_disconnects, metrics.num_freed_blocks
    neighbour = slow[0].send(threads, server)
    for stream in (True, False):
        with connect(server) as connection:
            send(connection, {**slow[1].body, "stream": stream, "max_tokens": 2000})
            wait_for_running(server, 2)
        wait_for_running(server, 1)
    assert metrics.num_disconnects == before[0] + 2
    server.wait_until("its blocks", lambda: metrics.num_freed_blocks >= before[1] + 2)
    assert slow[0].right(neighbour.result())


def test_aborts_take_effect_with_the_next_step(
    live: Live, backend: Backend, threads: ThreadPoolExecutor, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepRecord] = []
    num_before: dict[str, int] = {}  # steps before the abort, by request
    abort = backend.engine.client.abort

    async def noted(request_id: str, reason: str = "abort") -> int:
        num_before[request_id] = len(steps)
        return await abort(request_id, reason)

    monkeypatch.setattr(backend.engine.client, "abort", noted)
    neighbour = Case(llm, [9, 9], 600)
    backend.core.observers.append(steps.append)
    try:
        told = neighbour.send(threads, live)
        with connect(live) as connection:
            send(connection, {**neighbour.body, "max_tokens": 2000, "stream": True})
            wait_for_running(live, 2)
        assert neighbour.right(told.result())
    finally:
        backend.core.observers.remove(steps.append)
    ((name, number),) = num_before.items()
    later = [step for step in steps[number:] if any(slot.request_id == name for slot in step.slots)]
    assert len(later) <= 2  # the one that ran just then, and one that may have begun


def test_a_client_that_does_not_read(server: Live, llm: LLM, quick: Case) -> None:
    """The engine computes all of its answer meanwhile, and no token is lost."""
    case = Case(llm, [11, 12], 600)
    with connect(server) as connection:
        send(connection, {**case.body, "stream": True, "logprobs": 20})
        server.wait_until("its start", lambda: len(server.state.ledger) == 1)
        assert quick.right(Told(server, quick.body))
        server.wait_until("its end in the engine", server.backend.idle)
        with connection.makefile("rb") as file:
            lines = [line[6:] for line in file if line.startswith(b"data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == case.text


def test_overload(server: Live, threads: ThreadPoolExecutor, slow: list[Case], quick: Case) -> None:
    neighbours = [case.send(threads, server) for case in slow[:NUM_SLOTS]]
    wait_for_running(server, NUM_SLOTS)
    neighbours += [case.send(threads, server) for case in slow[NUM_SLOTS:]]
    wait_for_running(server, NUM_SLOTS, NUM_PLACES)
    for told in threads.map(
        lambda stream: Told(server, {**quick.body, "stream": stream}), [True, False] * 20
    ):
        assert (told.status, told.errors[0]["code"]) == (429, "queue_full")
        assert 1 <= int(told.headers["retry-after"]) <= 60
    wait_for_running(server, NUM_SLOTS, NUM_PLACES)  # the refusals came at once: none of these has ended
    assert health(server) == (200, "ok")
    assert server.http.get("/ready").json()["status"] == "queue full"
    assert all(case.right(future.result()) for case, future in zip(slow, neighbours, strict=True))


def test_sigterm(llm: LLM) -> None:
    case = Case(llm, [5, 6], 800)
    found = [""] * 4
    with serving("--shutdown-timeout", "60") as (process, http, _):
        with http.stream("POST", PATH, json={**case.body, "n": 4, "stream": True}) as response:
            process.send_signal(signal.SIGTERM)
            while (refused := http.post(PATH, json={"prompt": "x", "max_tokens": 1})).status_code == 200:
                pass
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert http.get("/health").status_code == http.get("/ready").status_code == 503
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    found[choice["index"]] += choice["text"]
        assert process.wait(60) == 0
    assert found == [case.text] * 4


# ---- input ----


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(Path(inflight.__file__).parent.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_nothing_can_unpickle() -> None:
    unsafe = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "joblib"}
    for path, tree in modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not unsafe & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
                assert node.attr != "recv_pyobj", path


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    """A folder that asks for its own code gets none of it, and the model is the one that is built in here."""
    for file in checkpoint_folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trap = tmp_path / "ran"
    for name in ("modeling.py", "tokenization.py", "configuration.py", "sitecustomize.py", "conftest.py"):
        (tmp_path / name).write_text(f"open({str(trap)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(InflightError):  # a refusal is as good
        LLM(str(tmp_path), num_blocks=128).generate([5, 6], SamplingParams(max_tokens=2))
    assert not trap.exists()


def test_hashes_are_no_hashes_of_python(llm: LLM) -> None:
    """Whoever can make two prefixes collide reads another's: names are SHA-256, chained from the salt."""
    llm.generate([3] * 64, SamplingParams(max_tokens=1))
    cache = llm._engine.core.scheduler.blocks.cache
    assert isinstance(cache, ChainHashCache)
    name = sha256(b"").digest()
    for _ in range(4):  # blocks
        name = sha256(name + array("q", [3] * 16).tobytes()).digest()
        assert name in cache._block_of


def test_large_lists_stall_no_one(server: Live, threads: ThreadPoolExecutor, slow: list[Case]) -> None:
    """Megabytes of nonsense are refused, while a neighbour streams on."""
    neighbour = slow[0].send(threads, server)
    wait_for_running(server, 1)
    numbers = ",".join(["5"] * 1_000_000)
    contents = (
        f'{{"prompt": [{numbers}]}}',
        f'{{"prompt": "x", "allowed_token_ids": [{numbers}]}}',
        '{"prompt": "x", "stop_token_ids": [' + ",".join(['"a"'] * 1_000_000) + "]}",
        json.dumps({"prompt": "word " * 1_000_000}),
        json.dumps({"prompt": "x", "bad_words": ["word " * 1000] * 1000}),
        json.dumps({"prompt": "x", **{f"k{number}": 1 for number in range(100_000)}}),
    )
    for content in contents:
        response = server.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert len(response.content) < 1000
    assert slow[0].right(neighbour.result())
