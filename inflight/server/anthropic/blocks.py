"""The content blocks of a message, and the events that tell of them."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.server.part_writer import PartKind, PartWriter

_encode, _decode = msgspec.json.encode, msgspec.json.decode
# A block of thoughts must have one to be sent back; no one here looks at it.
SIGNATURE = "unsigned"


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


class MessageBlocks(PartWriter):
    """Each part is a block."""

    def __init__(self, shows_thinking: bool) -> None:
        """Unless it is shown, of thoughts there is only a block without text."""
        super().__init__()
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _begun(self, kind: PartKind, name: str, call_id: str) -> bytes:
        if kind == "reasoning":
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "text":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self.blocks.append(block)
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: PartKind, text: str) -> bytes:
        if kind == "reasoning":
            return self._told({"type": "thinking_delta", "thinking": text}) if self._shows_thinking else b""
        if kind == "text":
            return self._told({"type": "text_delta", "text": text})
        return self._told({"type": "input_json_delta", "partial_json": text})

    def _told(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _ended(self, kind: PartKind, text: str, complete: bool) -> bytes:  # noqa: ARG002
        block, signed = self.blocks[-1], b""
        if kind == "reasoning":
            block |= {"thinking": text if self._shows_thinking else "", "signature": SIGNATURE}
            signed = self._told({"type": "signature_delta", "signature": SIGNATURE})
        elif kind == "text":
            block["text"] = text
        else:
            block["input"] = _object(text)
        return signed + event("content_block_stop", index=self._index)


def _object(arguments: str) -> dict[str, Any]:
    """Arguments that broke off are none: the reason of the message's end says why."""
    try:
        found = _decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
