"""The messages between an API worker and the main process, in addition to those of a client and an engine process."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.engine.client import Health
from inflight.engine.remote.wire import Progress, Ready, ServiceMessage, StepOutputs
from inflight.processes.channel import Message, RemoteError, RpcCall, RpcPeer, RpcReply, Stop
from inflight.server.access.keys import KeyDigests
from inflight.server.errors import ApiError
from inflight.server.observability.metrics import MetricCounts
from inflight.server.observability.request_log import RequestKey, Selection
from inflight.server.openai.responses.store import PageQuery, StoredResponse

MAIN = -1  # the number of the main process; API workers have numbers from 0

# ---- RPC requests ----


class Enter(Message, frozen=True):
    """Admits a request, or raises ApiError if a limit is reached."""

    caller: str
    request_id: str | None


class FindResponse(Message, frozen=True):
    """Returns the content of a stored response, or only its version if the caller has that one."""

    caller: str
    response_id: str
    version: str | None


class FindConversation(Message, frozen=True):
    """Returns the items of the conversation that a stored response ends."""

    caller: str
    response_id: str


class FindInputPage(Message, frozen=True):
    caller: str
    response_id: str
    query: PageQuery


class FindItems(Message, frozen=True):
    """Returns the items with these ids. Raises ApiError if together they exceed `max_bytes`."""

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
    """Returns the number of the API worker that has the request, or None."""

    caller: str | None  # None: any
    request_id: str
    only_running: bool  # ignore requests that have ended


class SummarizeRequests(Message, frozen=True):
    """Returns summaries of the worker's requests as JSON, as `RequestSource` does."""

    keys: list[RequestKey]
    selection: Selection | None


class RelayedRequest(Message, frozen=True):
    """An HTTP request without a body, for another process to answer."""

    target: int
    method: str
    path: str
    query: bytes
    scheme: str
    headers: list[tuple[bytes, bytes]]


class TakeCounts(Message, frozen=True):
    """Returns the worker's metric counts."""


WorkerRequest = (
    Enter
    | FindResponse
    | FindConversation
    | FindInputPage
    | FindItems
    | KeepResponse
    | RemoveResponse
    | FindRequest
    | SummarizeRequests
    | RelayedRequest
    | TakeCounts
)


class RelayedResponse(msgspec.Struct, frozen=True):
    """The answer to a relayed request."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class RpcError(msgspec.Struct, array_like=True, frozen=True):
    """The exception that a call raised."""

    remote_error: RemoteError | None = None
    status: int = 500
    message: str = ""
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = {}

    @classmethod
    def from_exception(cls, error: Exception) -> RpcError:
        if isinstance(error, ApiError):
            return cls(None, error.status, error.message, error.code, error.param, error.headers)
        return cls(RemoteError.from_exception(error))

    def error(self) -> Exception:
        if self.remote_error is not None:
            return self.remote_error.error()
        return ApiError(self.status, self.message, code=self.code, param=self.param, headers=self.headers)


# ---- other messages ----


class Leave(Message, frozen=True):
    """An admitted request has ended."""

    caller: str
    request_id: str | None


class StartWorker(Message, frozen=True):
    """Tells a worker to listen, and to answer that the model is loading until it is loaded."""

    number: int
    launch: int  # unique among all workers that this server ever starts
    options: dict[str, Any]  # the arguments of ServerConfig.create
    keys: KeyDigests
    listener: int  # a file descriptor
    is_loaded: bool  # if the model is loaded, clients can wait until the worker is open


class Drain(Message, frozen=True):
    """Tells a worker to reject new requests, finish the running ones and exit; sent again, to exit now."""


class EngineHealth(Message, frozen=True):
    """The health of the engines, sent regularly."""

    health: Health


class Opened(Message, frozen=True):
    """The worker takes requests."""


class WorkerHeartbeat(Message, frozen=True):
    """A sign of life, with the worker's metric counts so far."""

    counts: MetricCounts | None  # None: the worker has not started to count


WorkerCall = RpcCall[WorkerRequest]
WorkerReply = RpcReply[RpcError]
Rpc = RpcPeer[WorkerRequest, RpcError]

FromWorker = ServiceMessage | WorkerCall | WorkerReply | Leave | Opened | WorkerHeartbeat
FromMain = (
    StartWorker | Progress | Ready | StepOutputs | EngineHealth | WorkerCall | WorkerReply | Drain | Stop
)
