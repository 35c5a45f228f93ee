"""Bounds the bytes of answers that clients have asked for and do not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Scope, Send

from inflight.server.access.keys import Caller
from inflight.server.anthropic.errors import error_at
from inflight.server.errors import ApiError

PIECE = 64 << 10  # bytes written at a time; answers that are no larger are not counted
PAID = "inflight.paid"  # in the scope of answers that the engine has worked for: they are never refused


class UnsentBytes:
    """Counts large answers from their first byte to their last. One key may have half of what is allowed; the only
    answer, of a key or of all, is let through whatever its size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_caller: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._by_caller.total()

    def take(self, caller: Caller, size: int) -> None:
        """Count an answer. Raises ApiError 429 where there is no room for it."""
        own, total = self._by_caller[caller.name], self.num_bytes
        if (own and own + size > self._max_bytes // 2) or (total and total + size > self._max_bytes):
            message = (
                f"{own or total} bytes of other answers are not read yet: there is no room for {size} more"
            )
            raise ApiError(429, message, code="too_many_unsent_bytes", retry_after=1)
        self._by_caller[caller.name] += size

    def release(self, caller: Caller, size: int) -> None:
        self._by_caller[caller.name] -= size
        if not self._by_caller[caller.name]:
            del self._by_caller[caller.name]


class PacedSend:
    """Passes messages of one response on, large bodies in pieces: each waits until those before it are read, so that no
    copy of the rest waits in the connection. `close` must be called at the end."""

    def __init__(
        self, scope: Scope, send: Send, unsent: UnsentBytes, started: Callable[[Message], None] | None = None
    ) -> None:
        """`started` is called with the first message before that is sent, and may change it."""
        self._scope = scope
        self._send = send
        self._unsent = unsent
        self._started = started
        self._caller = Caller()
        self._size = 0  # bytes that are counted
        self.refusal: ApiError | None = None  # sent in place of the response

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self.refusal is None:
            if self._size:
                await self._send_pieces(message)
            else:
                await self._send(message)

    async def _start(self, message: Message) -> None:
        size = 0 if PAID in self._scope else _content_length(message)
        if size > PIECE:
            self._caller = self._scope.get("inflight.caller") or self._caller
            try:
                self._unsent.take(self._caller, size)
            except ApiError as error:
                await error_at(self._scope["path"], error)(self._scope, _no_body, self)
                self.refusal = error
                return
            self._size = size
        if self._started is not None:
            self._started(message)
        await self._send(message)

    async def _send_pieces(self, message: Message) -> None:
        body, more_body = message.get("body", b""), message.get("more_body", False)
        for start in range(0, len(body) or 1, PIECE):
            is_last = start + PIECE >= len(body)
            piece = {"body": body[start : start + PIECE], "more_body": more_body or not is_last}
            await self._send({**message, **piece})

    def close(self) -> None:
        if self._size:
            self._unsent.release(self._caller, self._size)
            self._size = 0


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _content_length(message: Message) -> int:
    return next((int(value) for name, value in message.get("headers", ()) if name == b"content-length"), 0)
