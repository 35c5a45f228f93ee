"""Reads and validates a request body within limits of size, time and complexity."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from inflight.server.config import ServerConfig
from inflight.server.errors import ApiError, of_validation
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
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        what = f"the content type is {kind:.100}" if kind else "there is no content type"
        message = f"{what}: it must be application/json (-H 'Content-Type: application/json')"
        raise ApiError(415, message, code="unsupported_media_type")


async def read_json(request: Request, schema: type[T], options: ServerConfig) -> T:
    """Return the validated body. Raises ApiError 400 that names what is wrong."""
    body = await read_body(request, options.max_body_size, options.read_timeout)
    ignore_unknown = options.ignore_unknown_fields
    if len(body) <= LARGE:
        return parse_body(schema, body, ignore_unknown)
    parsed = await asyncio.to_thread(parse_body, schema, body, ignore_unknown)
    parsed._is_large = True
    return parsed


def parse_body(schema: type[T], body: bytes, ignore_unknown: bool = False) -> T:
    """Return the validated body. Raises ApiError 400 that names what is wrong or, unless ignored, unknown."""
    if _has_too_many_parts(body):
        message = f"the body has more than {MAX_PARTS} keys, objects and lists"
        raise ApiError(400, message, code="body_too_complex")
    if _has_too_many_values(body):
        message = f"the body has more than {MAX_VALUES} values"
        raise ApiError(400, message, code="body_too_complex")
    try:
        return schema.model_validate_json(body, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        if error.error_count() > MAX_MISTAKES:
            message = f"the body has {error.error_count()} unknown parameters or wrong values"
            raise ApiError(400, message, code="invalid_value") from None
        raise of_validation(
            error.errors(include_url=False, include_context=False), schema.unsupported()
        ) from None


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
