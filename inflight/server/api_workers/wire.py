"""What a front process and the main process say to each other, beside what a client and an engine process do."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.engine import Health
from inflight.engine.remote.wire import (
    Abort,
    Ack,
    Add,
    Describe,
    Progress,
    Ready,
    RunCommand,
    StepOutputs,
    Watch,
)
from inflight.processes.channel import Message, RemoteError, Stop
from inflight.server.access.keys import KeyDigests
from inflight.server.errors import ApiError
from inflight.server.observability.metrics import MetricCounts
from inflight.server.openai.responses.input_listing import PageQuery
from inflight.server.openai.responses.store import StoredResponse

MAIN = -1  # the number of the main process, where front processes have theirs

# ---- questions, each of which is answered ----


class Enter(Message, frozen=True):
    """May a request begin?"""

    caller: str
    request_id: str | None


class FindResponse(Message, frozen=True):
    """Which content has a stored response? It is left out where the asker has this version."""

    caller: str
    response_id: str
    version: str | None


class FindConversation(Message, frozen=True):
    """Which items has a stored response, its own included?"""

    caller: str
    response_id: str


class FindInputPage(Message, frozen=True):
    caller: str
    response_id: str
    query: PageQuery


class FindItems(Message, frozen=True):
    """Which items have these ids? Refused where together they have more bytes than allowed."""

    caller: str
    item_ids: list[str]
    max_bytes: int


class KeepResponse(Message, frozen=True):
    caller: str
    stored: StoredResponse


class RemoveResponse(Message, frozen=True):
    caller: str
    response_id: str


class FindRequest(Message, frozen=True):
    """Which front process has the request? Its number, or None."""

    caller: str
    request_id: str
    only_running: bool  # else it may have ended


class RelayedRequest(Message, frozen=True):
    """An HTTP request without a body, for another process to answer."""

    target: int
    method: str
    path: str
    query: bytes
    scheme: str
    headers: list[tuple[bytes, bytes]]


class TakeCounts(Message, frozen=True):
    """What have you counted?"""


Question = (
    Enter
    | FindResponse
    | FindConversation
    | FindInputPage
    | FindItems
    | KeepResponse
    | RemoveResponse
    | FindRequest
    | RelayedRequest
    | TakeCounts
)


class RelayedResponse(msgspec.Struct, frozen=True):
    """The answer to a relayed request."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ToldError(msgspec.Struct, array_like=True, frozen=True):
    """What was raised instead of an answer."""

    remote_error: RemoteError | None = None
    status: int = 500
    message: str = ""
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = {}

    @classmethod
    def of(cls, error: Exception) -> ToldError:
        if isinstance(error, ApiError):
            return cls(None, error.status, error.message, error.code, error.param, error.headers)
        return cls(RemoteError.of(error))

    def error(self) -> Exception:
        if self.remote_error is not None:
            return self.remote_error.error()
        return ApiError(self.status, self.message, code=self.code, param=self.param, headers=self.headers)


# ---- messages ----


class Ask(Message, frozen=True):
    call: int
    question: Question


class AskReply(Message, frozen=True):
    call: int
    value: Any = None
    error: ToldError | None = None


class Leave(Message, frozen=True):
    """A request that had entered has ended."""

    caller: str
    request_id: str | None


class StartFront(Message, frozen=True):
    """Begin to listen, and say so while the model loads."""

    number: int
    launch: int  # no other front process of this server ever has it
    options: dict[str, Any]  # of ServerConfig.create
    keys: KeyDigests
    listener: int  # a descriptor
    is_loaded: bool  # the model is there: until the front is open, clients may wait


class Drain(Message, frozen=True):
    """Refuse new requests, let those that run finish within the time that there is, and end. Told again: end now."""


class EngineHealth(Message, frozen=True):
    """How the engines do, once in a while."""

    health: Health


class Opened(Message, frozen=True):
    """The front takes requests."""


class FrontHeartbeat(Message, frozen=True):
    """The front process lives, and this is what it has counted so far."""

    counts: MetricCounts | None  # None: nothing yet


FromFront = (
    Add | Abort | Describe | RunCommand | Ack | Watch | Ask | AskReply | Leave | Opened | FrontHeartbeat
)
FromMain = StartFront | Progress | Ready | StepOutputs | EngineHealth | Ask | AskReply | Drain | Stop
