"""List the files that one request runs through: those in which a function was called between its start and its end.

    python -m tools.request_files              all three modes, as counts and lists
    python -m tools.request_files offline      `LLM.generate`
    python -m tools.request_files in_process   a streaming chat with tools over HTTP, engine in a server thread
    python -m tools.request_files process      the same with the engine in its own process

Loading and importing do not count. Files are listed in the order in which the request first reaches them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'inflight'}{os.sep}"
# Its process starts without site packages, so it cannot be traced.
TEMPLATE_WORKER = "inflight/frontend/text/render_worker.py"
WAIT = 30.0  # seconds for an engine process to answer a signal

BODY = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 12,
    "seed": 1,
    "temperature": 0.8,
    "stop": ["\n\n"],
}


class FileTrace:
    """Records the files whose functions are called, in all threads that are started after it."""

    def __init__(self, has_engine: bool) -> None:
        if has_engine:  # importing torch takes twice as long when it is traced
            import_module("torch")
        self._files: dict[str, None] = {}
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Bodies of modules and classes are not optimized code: they run when a file is imported.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
            self._files[code.co_filename] = None

    def clear(self) -> None:
        self._files.clear()

    def stop(self) -> None:
        """Stop recording, which must happen before the interpreter shuts down."""
        threading.setprofile(None)
        sys.setprofile(None)

    def files(self) -> list[str]:
        return [str(Path(name).relative_to(ROOT)) for name in list(self._files)]


def offline(trace: FileTrace, device: str) -> list[str]:
    from inflight import LLM, SamplingParams

    with LLM(device=device, show_progress=False) as llm:
        trace.clear()
        llm.generate(
            "Once upon a time", SamplingParams(max_tokens=12, seed=1, temperature=0.8), use_tqdm=False
        )
        return trace.files()


# ---- over HTTP ----


def over_http(trace: FileTrace, device: str, in_process: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "engine.json"
        if not in_process:
            from inflight.engine.remote import supervisor

            command = (sys.executable, "-P", __file__, "engine", "--written", str(written))
            supervisor.COMMAND = command
        return asyncio.run(_serve_one(trace, device, in_process, written))


async def _serve_one(trace: FileTrace, device: str, in_process: bool, written: Path) -> list[str]:
    from inflight.server.access.keys import load_keys
    from inflight.server.config import ServerConfig
    from inflight.server.observability.request_log import Tracer
    from inflight.server.run import Server, hosts_of, listen, start_state

    options = ServerConfig.create(port=0, in_process=in_process, device=device, shutdown_timeout=0.0)
    keys, listener = load_keys((), None), listen(options)
    server = Server(options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    hosts = hosts_of(options, keys, listener)
    engine, state = await start_state(options, keys, hosts, Tracer(), server.loading_app.progress)
    server.open(state)
    process_id: int | None = getattr(engine.client, "process_id", None)
    try:
        if process_id is not None:
            os.kill(process_id, signal.SIGUSR1)
            await _until(written.exists)
            written.unlink()
        trace.clear()
        await _chat(listener.getsockname()[1])
        await _until(lambda: not len(state.request_log))
        files = [*trace.files(), TEMPLATE_WORKER]
        if process_id is not None:
            os.kill(process_id, signal.SIGUSR1)
            await _until(written.exists)
            files += json.loads(written.read_text())
    finally:
        server.stop()
        await serving
        state.close()
        await engine.close()
        listener.close()
    return list(dict.fromkeys(files))


async def _chat(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"data: [DONE]\n\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    writer.close()
    await writer.wait_closed()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.01)


def engine(trace: FileTrace, written: Path) -> None:
    """Run the engine process; at every signal it writes the files it ran since the last one."""

    def write(*_: Any) -> None:
        part = written.with_suffix(".part")
        part.write_text(json.dumps(trace.files()))
        part.rename(written)
        trace.clear()

    signal.signal(signal.SIGUSR1, write)
    runpy.run_module("inflight.engine.remote.worker", run_name="__main__")


# ---- the command ----

MODES: dict[str, Callable[[FileTrace, str], list[str]]] = {
    "offline": offline,
    "in_process": lambda trace, device: over_http(trace, device, in_process=True),
    "process": lambda trace, device: over_http(trace, device, in_process=False),
}


def files_of(mode: str, device: str = "auto") -> list[str]:
    """Return the files of one mode, traced in a new process."""
    command = [sys.executable, "-m", "tools.request_files", mode, "--device", device, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    files: list[str] = json.loads(done.stdout.splitlines()[-1])
    return files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=[*MODES, "engine"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="one list, for programs")
    parser.add_argument("--written", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode == "engine":
        engine(FileTrace(has_engine=True), arguments.written)
    elif arguments.json:
        trace = FileTrace(has_engine=arguments.mode != "process")
        files = MODES[arguments.mode](trace, arguments.device)
        trace.stop()
        print(json.dumps(files))
    else:
        for mode in [arguments.mode] if arguments.mode else MODES:
            files = files_of(mode, arguments.device)
            print(f"{mode}: {len(files)} files", *(f"  {name}" for name in files), "", sep="\n")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
