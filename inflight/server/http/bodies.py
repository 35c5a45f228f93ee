"""Bodies: requests are read and validated within limits, and large responses are sent at the pace of their reader."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope, Send

from inflight.errors import clipped
from inflight.server.access.keys import Caller
from inflight.server.config import ServerConfig
from inflight.server.errors import ApiError, error_response, of_validation
from inflight.server.schemas import Body

T = TypeVar("T", bound=Body)

LARGE = 64 << 10  # bytes from which parsing would noticeably delay other streams
DISCARD_SECONDS = 1.0
# Parsing and listing validation errors hold the GIL throughout, whatever the thread, so both are bounded.
MAX_PARTS = 1 << 16  # keys, objects and lists; more than the longest conversation has
MAX_VALUES = 1 << 20  # mostly the token ids of prompts
MAX_MISTAKES = 1000

_OTHER_BYTES = bytes(set(range(256)) - set(b'":{['))
_STRING = re.compile(rb'"[^"]*+"')
_PART = re.compile(rb'"[^"]*+"(:)?|([\[{])')  # a string, perhaps a key, or an opening bracket


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the whole body. Raises ApiError 413 as soon as it is too large, 408 if it does not arrive in time."""
    _check_content_type(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        await _discard(request, max_bytes)
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    break
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {seconds:g} s", code="read_timeout", headers=_CLOSE
        ) from None
    if size > max_bytes:
        await _discard(request, max_bytes)
        raise _too_large(max_bytes)
    return b"".join(parts)


_CLOSE = {"connection": "close"}


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers=_CLOSE)


async def _discard(request: Request, max_bytes: int) -> None:
    """Read and drop data for a moment: most clients read the response only after sending everything."""
    size = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while size < max_bytes:
                message = await request.receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _check_content_type(request: Request) -> None:
    """Require JSON: pages of other origins can send text, or no type, without asking for permission (CORS)."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        what = (
            f"the content type is {clipped(content_type, 100)}"
            if content_type
            else "there is no content type"
        )
        message = f"{what}: it must be application/json (-H 'Content-Type: application/json')"
        raise ApiError(415, message, code="unsupported_media_type")


async def read_json(request: Request, schema: type[T], options: ServerConfig) -> T:
    """Return the validated body. Raises ApiError 400 that names what is wrong."""
    body = await read_body(request, options.max_body_size, options.read_timeout)
    ignore_unknown, replace_images = options.ignore_unknown_fields, options.replace_images
    if len(body) <= LARGE:
        return parse_body(schema, body, ignore_unknown, replace_images)
    parsed = await asyncio.to_thread(parse_body, schema, body, ignore_unknown, replace_images)
    parsed._is_large = True
    return parsed


def parse_body(schema: type[T], body: bytes, ignore_unknown: bool = False, replace_images: bool = False) -> T:
    """Return the validated body. Raises ApiError 400 that names what is wrong or, unless ignored, unknown."""
    if _has_too_many_parts(body):
        raise _too_complex(f"{MAX_PARTS} keys, objects and lists")
    if _has_too_many_values(body):
        raise _too_complex(f"{MAX_VALUES} values")
    try:
        context = {"replace_images": replace_images}
        return schema.model_validate_json(body, extra="ignore" if ignore_unknown else None, context=context)
    except ValidationError as error:
        if error.error_count() > MAX_MISTAKES:
            message = f"the body has {error.error_count()} unknown parameters or wrong values"
            raise ApiError(400, message, code="invalid_value") from None
        raise of_validation(
            error.errors(include_url=False, include_context=False), schema.unsupported()
        ) from None


def _too_complex(limit: str) -> ApiError:
    return ApiError(400, f"the body has more than {limit}", code="body_too_complex")


def _has_too_many_parts(body: bytes) -> bool:
    if sum(map(body.count, (b":", b"{", b"["))) <= MAX_PARTS:
        return False
    # Strings may be full of these characters, so count only those outside strings. Each step holds the GIL for a few
    # milliseconds.
    structure = _without_escapes(body).translate(None, _OTHER_BYTES)
    num_parts = 0
    for part in _PART.finditer(structure):
        num_parts += part.lastindex is not None
        if num_parts > MAX_PARTS:
            return True
    return False


def _has_too_many_values(body: bytes) -> bool:
    """Count the commas outside strings: every value but the last of an object or list has one."""
    if body.count(b",") < MAX_VALUES:
        return False
    return _STRING.sub(b"", _without_escapes(body)).count(b",") >= MAX_VALUES


def _without_escapes(body: bytes) -> bytes:
    """Remove escapes, so that every quotation mark left begins or ends a string."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


# ---- large responses ----

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
        by_caller, total = self._by_caller[caller.name], self.num_bytes
        if (by_caller and by_caller + size > self._max_bytes // 2) or (
            total and total + size > self._max_bytes
        ):
            message = f"{by_caller or total} bytes of other responses are unread: {size} more would exceed the limit"
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
                await error_response(self._scope, error)(self._scope, _no_body, self)
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
