"""Renders chat templates in child processes (`render_worker.py`), within limits of time, memory and output size."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.errors import PromptError, QueueFullError, TemplateError, TemplateWorkerError
from inflight.processes.sandbox import SandboxPool, SandboxWorker
from inflight.processes.sandbox_worker import pack
from inflight.text import render_worker


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one rendering."""

    seconds: float = 2.0
    memory: int = 512 << 20  # bytes of the worker's address space, if the system enforces it
    max_characters: int = 16 << 20  # of the output
    max_input_bytes: int = 16 << 20  # of messages, tools and template, as JSON
    max_workers: int = 4  # concurrent processes, started when needed


class Renderer:
    """Thread-safe renderer. A worker that exceeds a limit is killed and replaced by a fresh one."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        memory = self.limits.memory
        self._pool = SandboxPool(lambda: _start_worker(memory))  # which must not keep this object alive
        self._slots = threading.BoundedSemaphore(self.limits.max_workers)

    def close(self) -> None:
        """Stop the idle workers; a later rendering starts a new one."""
        self._pool.close()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        limits = self.limits
        request = self._request(source, variables)
        if not self._slots.acquire(timeout=limits.seconds):
            raise QueueFullError(
                f"all {limits.max_workers} chat template workers were busy for {limits.seconds:g} seconds: "
                "try again later"
            )
        try:
            reply = self._call(request)
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
            request = pack(content)
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

    def _call(self, request: bytes) -> dict[str, str]:
        worker = self._pool.take()
        try:
            try:
                worker.wait_until_ready()
            except (OSError, EOFError) as error:
                raise TemplateWorkerError(
                    f"the chat template worker exited during startup: {error!r}"
                ) from error
            reply: dict[str, str]
            reply, _ = worker.call(request, self.limits.seconds)
            if "exhausted" in reply:
                worker.interrupt()
        except TimeoutError:
            return {"error": f"it ran longer than the limit of {self.limits.seconds:g} seconds"}
        except (OSError, EOFError) as error:  # probably not caused by the messages
            raise TemplateWorkerError("the process that renders the chat template died") from error
        finally:
            self._pool.put_back(worker)
        return reply


def _start_worker(memory: int) -> SandboxWorker:
    try:
        return SandboxWorker(render_worker.__file__, memory)
    except OSError as error:
        raise TemplateWorkerError(f"the chat template worker cannot be started: {error}") from error
