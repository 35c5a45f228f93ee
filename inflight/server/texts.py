"""The texts of a body, read by hand: how many there are and of what kind, before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.server.errors import ApiError

_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def read_inputs(given: Any, limit: int) -> list[str | list[int]]:
    """Texts, each as text or as token ids; or one of these."""
    allowed = "a text, a list of token ids, or a list of either"
    if not isinstance(given, str | list):
        raise _wrong("input", given, allowed)
    if (
        given
        and isinstance(given, list)
        and isinstance(given[0], int | float)
        and list not in map(type, given)
    ):
        return [given]  # token ids, or what was meant to be: whoever takes them looks at each
    items = [given] if isinstance(given, str) else given
    _check_items("input", items, limit, (str, list), allowed)
    return items


def read_texts(name: str, given: Any, limit: int) -> list[str]:
    """Texts, or one of them."""
    if isinstance(given, str):
        return [given]
    allowed = "a text, or a list of texts"
    if not isinstance(given, list):
        raise _wrong(name, given, allowed)
    _check_items(name, given, limit, (str,), allowed)
    return given


def read_documents(given: Any, limit: int) -> list[str]:
    """The texts of documents, which are texts themselves or objects that have one."""
    allowed = "a list of texts, or of objects with a text"
    if not isinstance(given, list):
        raise _wrong("documents", given, allowed)
    _check_items("documents", given, limit, (str, dict), allowed)
    return [_text_of(number, document) for number, document in enumerate(given)]


def _text_of(number: int, document: str | Mapping[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        message = f"documents[{number}] has no text: an object must have it under 'text'"
        raise ApiError(400, message, code="invalid_value", param="documents")
    return text


def _check_items(name: str, items: list[Any], limit: int, kinds: tuple[type, ...], allowed: str) -> None:
    if not items:
        raise ApiError(
            400, f"{name} is an empty list: it must be {allowed}", code="invalid_value", param=name
        )
    check_count(name, len(items), limit)
    if not {*map(type, items)} <= {*kinds}:
        number = next(number for number, item in enumerate(items) if type(item) not in kinds)
        raise _wrong(name, items[number], allowed, number)


def check_count(name: str, num_texts: int, limit: int) -> None:
    if num_texts > limit:
        message = f"{name} has {num_texts} items: at most {limit} are allowed in one request"
        raise ApiError(400, message, code="too_many_documents", param=name)


def _wrong(name: str, given: Any, allowed: str, number: int | None = None) -> ApiError:
    where = name if number is None else f"{name}[{number}]"
    what = _NAMES.get(type(given), "a number")
    return ApiError(400, f"{where} is {what}: {name} must be {allowed}", code="invalid_value", param=name)
