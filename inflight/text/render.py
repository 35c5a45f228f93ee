"""Renders chat templates in child processes (`render_worker.py`), within limits of time, memory and output size."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import PromptError, QueueFullError, TemplateError, TemplateWorkerError
from inflight.text import render_worker

_START_SECONDS = 60.0  # Python and jinja2 on a very busy machine
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL")


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one rendering."""

    seconds: float = 2.0
    memory: int = 512 << 20  # bytes of the worker's address space, if the system enforces it
    max_characters: int = 16 << 20  # of the output
    max_input_bytes: int = 16 << 20  # of messages, tools and template, as JSON
    max_workers: int = 4  # concurrent processes, started when needed


class _Worker:
    """One child process. After an error on its socket it is unusable and must be killed."""

    def __init__(self, limits: RenderLimits) -> None:
        ours, theirs = socket.socketpair()
        # The whole sys.path is passed on, so the worker need not process site-packages or its script's folder.
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-S", "-P", render_worker.__file__, str(limits.memory)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
                )
        except OSError as error:
            ours.close()
            raise TemplateWorkerError(f"the chat template worker cannot be started: {error}") from error
        self._socket = ours
        try:
            self._receive(time.monotonic() + _START_SECONDS)
        except (OSError, EOFError) as error:
            self.kill()
            raise TemplateWorkerError(f"the chat template worker exited during startup: {error!r}") from error

    def ask(self, request: bytes, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(request)
        return self._receive(deadline)

    def _receive(self, deadline: float) -> Any:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        body = render_worker.receive(self._socket)
        if body is None:
            raise EOFError("the worker closed its connection")
        return render_worker.unpack(body)

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


class Renderer:
    """Thread-safe renderer. A worker that exceeds a limit is killed and replaced by a fresh one."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._idle: list[_Worker] = []
        self._slots = threading.BoundedSemaphore(self.limits.max_workers)
        weakref.finalize(self, _kill_all, self._idle)  # also at exit

    def close(self) -> None:
        """Stop the idle workers; a later rendering starts a new one."""
        _kill_all(self._idle)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        limits = self.limits
        request = self._request(source, variables)
        if not self._slots.acquire(timeout=limits.seconds):
            raise QueueFullError(
                f"all {limits.max_workers} chat template workers were busy for {limits.seconds:g} seconds: "
                "try again later"
            )
        try:
            reply = self._ask(request)
        finally:
            self._slots.release()
        if "rejected" in reply:
            raise TemplateError(f"the chat template rejects these messages: {reply['rejected']}")
        if "error" in reply:
            raise TemplateError(f"the chat template failed: {reply['error']}")
        text: str = reply["text"]
        return text

    def _request(self, source: str, variables: Mapping[str, Any]) -> bytes:
        limits = self.limits
        content = {
            "source": source,
            "variables": variables,
            "max_characters": limits.max_characters,
            "seconds": limits.seconds + 1,  # the worker's own alarm only matters if its parent is gone
        }
        try:
            request = render_worker.pack(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"the messages, tools or template arguments are not JSON data: {error}"
            ) from error
        if len(request) > limits.max_input_bytes:
            raise PromptError(
                f"the messages, tools and template have {len(request)} bytes as JSON: "
                f"at most {limits.max_input_bytes} are allowed"
            )
        return request

    def _ask(self, request: bytes) -> dict[str, str]:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self.limits)
        healthy = False
        try:
            reply: dict[str, str] = worker.ask(request, self.limits.seconds)
            healthy = "exhausted" not in reply
        except TimeoutError:
            return {"error": f"it ran longer than the limit of {self.limits.seconds:g} seconds"}
        except (OSError, EOFError) as error:  # probably not caused by the messages
            raise TemplateWorkerError("the process that renders the chat template died") from error
        finally:
            if healthy:
                self._idle.append(worker)
            else:
                worker.kill()
        return reply
