"""Build the messages of a chat from the smaller pieces of other APIs: texts, reasoning, calls, results."""

from __future__ import annotations

from typing import Any

from inflight.errors import shown
from inflight.server.errors import invalid

_TEXTS = ("reasoning_content", "content")
_ORDER = (*_TEXTS, "tool_calls")  # the order of fields in an assistant's message


class Conversation:
    """Takes the pieces in order. `messages` has the result in the format of OpenAI's chats."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # texts are lists of pieces, since there may be thousands
        self._functions: dict[str, str] = {}  # the called function, by call id

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {name: "\n\n".join(value) if name in _TEXTS else value for name, value in message.items()}
            for message in self._messages
        ]

    @property
    def has_begun(self) -> bool:
        """Whether there is a message other than the system's."""
        return any(message["role"] != "system" for message in self._messages)

    def system(self, text: str) -> None:
        """Add a system text. Many templates allow only one system message, so consecutive ones are joined."""
        self._say("system", text, joined=True)

    def user(self, text: str, joined: bool = False) -> None:
        """Add a text of the user, `joined` to the previous message if that is the user's too."""
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
        """Add the result of a call. Raise ApiError, naming `param`, if no earlier call has this id."""
        if call_id not in self._functions:
            raise invalid(param, f"{param} is {shown(call_id)}: no earlier call has this id")
        self._messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": self._functions[call_id], "content": [text]}
        )

    def _assistant(self, name: str) -> dict[str, Any]:
        """Return the message for the assistant's next piece: a new one if the last already has a later field."""
        message = self._messages[-1] if self._messages else {"role": None}
        later = _ORDER[_ORDER.index(name) + 1 :]
        if message["role"] != "assistant" or any(part in message for part in later):
            message = {"role": "assistant"}
            self._messages.append(message)
        return message
