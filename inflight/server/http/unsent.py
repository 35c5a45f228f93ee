"""Bounds the bytes of large responses that clients have requested but not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Scope, Send

from inflight.server.access.keys import Caller
from inflight.server.anthropic.errors import error_at
from inflight.server.errors import ApiError

PIECE = 64 << 10  # bytes written at a time; smaller responses are not counted
ENGINE_RESPONSE = "inflight.engine_response"  # scope key of responses that the engine computed: never refused


class UnsentBytes:
    """Counts the bytes of large responses until they are sent.

    One API key may use half of the limit. A response that is the only one, of its key or of all, is always allowed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_caller: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._by_caller.total()

    def take(self, caller: Caller, size: int) -> None:
        """Count a response. Raises ApiError 429 if it exceeds the limit."""
        own, total = self._by_caller[caller.name], self.num_bytes
        if (own and own + size > self._max_bytes // 2) or (total and total + size > self._max_bytes):
            message = f"{own or total} bytes of other responses are still unread: {size} more would exceed the limit"
            raise ApiError(429, message, code="too_many_unsent_bytes", retry_after=1)
        self._by_caller[caller.name] += size

    def release(self, caller: Caller, size: int) -> None:
        self._by_caller[caller.name] -= size
        if not self._by_caller[caller.name]:
            del self._by_caller[caller.name]


class PacedSend:
    """An ASGI `send` that writes large bodies in pieces.

    Each piece waits until the ones before it are read, so that no copy of the rest sits in the connection's buffer.
    `close` must be called at the end.
    """

    def __init__(
        self, scope: Scope, send: Send, unsent: UnsentBytes, on_start: Callable[[Message], None] | None = None
    ) -> None:
        """`on_start` is called with the first message before it is sent, and may change it."""
        self._scope = scope
        self._send = send
        self._unsent = unsent
        self._on_start = on_start
        self._caller = Caller()
        self._size = 0  # bytes counted in `unsent`
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
        size = 0 if ENGINE_RESPONSE in self._scope else _content_length(message)
        if size > PIECE:
            self._caller = self._scope.get("inflight.caller") or self._caller
            try:
                self._unsent.take(self._caller, size)
            except ApiError as error:
                await error_at(self._scope["path"], error)(self._scope, _no_body, self)
                self.refusal = error
                return
            self._size = size
        if self._on_start is not None:
            self._on_start(message)
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
