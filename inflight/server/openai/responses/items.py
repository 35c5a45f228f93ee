"""The items of a response, and the events that tell of them."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from inflight.server.part_writer import PartKind, PartWriter

_encode = msgspec.json.encode
_PREFIXES: dict[PartKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}


class EventNumbers:
    """Events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        body = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


class ResponseItems(PartWriter):
    """Each part is an item. Its id is the same in every event and in the response at the end."""

    def __init__(self, numbers: EventNumbers) -> None:
        super().__init__()
        self.items: list[dict[str, Any]] = []
        self._event = numbers.event
        self._place: dict[str, Any] = {}  # of the open item, as its events tell it

    def finish(self, complete: bool) -> bytes:
        """The end of the last item. An answer without any is an empty message: clients look for one."""
        begun = b"" if self.items else self._switch("text")
        return begun + super().finish(complete)

    def _begun(self, kind: PartKind, name: str, call_id: str) -> bytes:
        item_id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        item = _item(kind, item_id, name, call_id)
        self._place = {"item_id": item_id, "output_index": len(self.items)}
        self.items.append(item)
        added = self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if kind == "call":
            return added
        self._place["content_index"] = 0
        return added + self._event("response.content_part.added", **self._place, part=_part(kind, ""))

    def _delta(self, kind: PartKind, text: str) -> bytes:
        if kind == "text":
            return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])
        name = "reasoning_text" if kind == "reasoning" else "function_call_arguments"
        return self._event(f"response.{name}.delta", **self._place, delta=text)

    def _ended(self, kind: PartKind, text: str, complete: bool) -> bytes:
        item = self.items[-1]
        item["status"] = "completed" if complete else "incomplete"
        if kind == "call":
            item["arguments"] = text
            done = self._event(
                "response.function_call_arguments.done", **self._place, name=item["name"], arguments=text
            )
        else:
            item["content"] = [part] = [_part(kind, text)]
            if kind == "text":
                done = self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            else:
                done = self._event("response.reasoning_text.done", **self._place, text=text)
            done += self._event("response.content_part.done", **self._place, part=part)
        return done + self._event(
            "response.output_item.done", output_index=self._place["output_index"], item=item
        )

    def so_far(self) -> list[dict[str, Any]]:
        """The items, the open one with what it has by now."""
        if self._open is None:
            return self.items
        *items, last = self.items
        text = "".join(self._pieces)
        if self._open == "call":
            return [*items, {**last, "arguments": text}]
        return [*items, {**last, "content": [_part(self._open, text)]}]


def _item(kind: PartKind, item_id: str, name: str, call_id: str) -> dict[str, Any]:
    head = {"id": item_id, "status": "in_progress"}
    if kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": []}
    if kind == "call":
        return {"type": "function_call", **head, "call_id": call_id, "name": name, "arguments": ""}
    return {"type": "message", **head, "role": "assistant", "content": []}


def _part(kind: PartKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
