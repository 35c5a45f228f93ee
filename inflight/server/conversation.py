"""Conversations that come in smaller pieces than messages, put together as chat templates read them."""

from __future__ import annotations

from typing import Any

from inflight.server.errors import ApiError

_TEXTS = ("reasoning_content", "content")
_ORDER = (*_TEXTS, "tool_calls")  # of what an assistant's message has


class Conversation:
    """Takes the pieces in their order; `messages` has them in the shape of OpenAI's chats."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # whose texts are lists of pieces: there may be thousands
        self._functions: dict[str, str] = {}  # by the id of their call

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {name: "\n\n".join(value) if name in _TEXTS else value for name, value in message.items()}
            for message in self._messages
        ]

    def system(self, text: str) -> None:
        """Many templates know one such message, at the beginning: several in a row are one."""
        self._say("system", text, joined=True)

    def user(self, text: str, joined: bool = False) -> None:
        """`joined` to the message before, if that is the user's too."""
        self._say("user", text, joined)

    def _say(self, role: str, text: str, joined: bool) -> None:
        if not (joined and self._messages and self._messages[-1]["role"] == role):
            self._messages.append({"role": role, "content": []})
        self._messages[-1]["content"].append(text)

    def reasoning(self, text: str) -> None:
        self._append("reasoning_content", text)

    def answer(self, text: str) -> None:
        self._append("content", text)

    def _append(self, name: str, text: str) -> None:
        self._assistant(name).setdefault(name, []).append(text)

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        self._functions[call_id] = name
        calls = self._assistant("tool_calls").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, text: str, param: str) -> None:
        """Raises ApiError where nothing was called by that id; `param` is where it says so."""
        if call_id not in self._functions:
            message = f"{param} is {call_id!r:.100}: there is no such call before it"
            raise ApiError(400, message, code="invalid_value", param=param)
        self._messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": self._functions[call_id], "content": [text]}
        )

    def _assistant(self, name: str) -> dict[str, Any]:
        """The assistant's message that the next piece belongs to: one that has nothing that comes after it."""
        last = self._messages[-1] if self._messages else {"role": None}
        later = _ORDER[_ORDER.index(name) + 1 :]
        if last["role"] != "assistant" or any(part in last for part in later):
            last = {"role": "assistant"}
            self._messages.append(last)
        return last
