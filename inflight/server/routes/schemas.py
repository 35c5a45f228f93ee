"""Bodies and answers of the service routes: tokens, models, health, requests, replicas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from inflight.events import TimeBreakdown
from inflight.router.replica import ReplicaState
from inflight.scoring import Scale, Task
from inflight.server.openai.schemas import Messages, TemplateArguments, Tools
from inflight.server.schemas import Body, Items, Unset, missing, optional


class TokenizeBody(Body):
    """Either a prompt, as for completions, or messages, as for chats."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = optional("Add special tokens to the prompt; true by default.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    chat_template: Unset = missing("templates come with the checkpoint, never with a request")
    mm_processor_kwargs: Unset = missing("only text input is supported")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Items[int]


class DetokenizedText(BaseModel):
    prompt: str


class PoolingHead(BaseModel):
    """The output that a model with a pooling head computes for a text."""

    size: int
    scale: Scale  # the default for scores and classes
    labels: list[str]
    dimensions: list[int] | None  # to which embeddings may be truncated; null: the checkpoint does not say
    prompts: list[str]  # their names


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inflight"
    max_model_len: int
    tasks: list[Task]
    pooling: PoolingHead | None = None


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class HealthStatus(BaseModel):
    """The health of the server: `status` is "ok" or the reason why not, `degraded` names the replicas that do not work
    while others do, and `progress` is the fraction of the weights that is loaded."""

    status: str
    seconds_since_step: float
    num_running: int
    num_waiting: int
    degraded: list[str] = []
    progress: float | None = None


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    server_load: int


class ServerInfo(BaseModel):
    version: str
    models: list[str]
    config: dict[str, Any]  # the engine's options


class Sleeping(BaseModel):
    is_sleeping: bool


class Done(BaseModel):
    """The command was executed."""

    success: bool = True


class AnswerReport(BaseModel):
    """The progress of one answer of a request. Times are in seconds, and null if not reached yet."""

    index: int
    status: Literal["queued", "running", "finished"]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_drafted_tokens: int  # tokens that speculation guessed
    num_accepted_tokens: int  # those of them that were right
    replica: str  # the last one that computed it; empty without replicas
    number: int | None  # on the timeline of that replica ("0" without replicas)
    waiting_reason: str | None  # while it waits: step, memory, slots, budget or policy
    num_ahead: int  # while it waits: requests that arrived before it and wait too
    num_failovers: int  # how many replicas died under it
    queued_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    breakdown: TimeBreakdown


class Waited(BaseModel):
    """The requests in the engine while this one waited: how many, and the ids of those with the same key."""

    num_requests: int
    ids: list[str]


class NeighbourReport(BaseModel):
    """A request that cost another one time: by its prompt, or by running while the other waited or was preempted."""

    number: int | None  # on the timeline; null: it belongs to another key
    id: str | None  # null: it belongs to another key
    seconds: float
    why: Literal["prompt", "queue", "preemption"]


Status = Literal["queued", "running", "finished", "failed", "cancelled"]


class RequestSummary(BaseModel):
    """The history of a request, with totals of its answers."""

    id: str
    object: Literal["request"] = "request"
    route: str
    status: Status
    created: int
    task: Task
    num_answers: int  # or texts
    stream: bool
    priority: int
    tenant: str
    total_seconds: float
    first_token_seconds: float | None
    client_seconds: float  # spent waiting for the client to read
    num_prompt_tokens: int  # of all answers together, as are the next three
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    waiting_reason: str | None  # while it waits: step, memory, slots, budget or policy
    num_ahead: int  # while it waits: requests that arrived before it and wait too
    why: str  # about the answer that took longest


class RequestReport(RequestSummary):
    """The summary of a request, a page of its answers, and the requests that delayed it."""

    answers: list[AnswerReport]  # of many texts, there are only the first ones
    has_more: bool  # there are answers after these
    waited_for: Waited
    neighbours: list[NeighbourReport] | None = None  # the ones that cost it most; null if `after` is given


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestSummary]
    has_more: bool


class Cancelled(BaseModel):
    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: bool
    freed_blocks: int


class ReplicaReport(BaseModel):
    """The state and load of one engine."""

    id: str
    object: Literal["replica"] = "replica"
    state: ReplicaState
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens still to be computed
    kv_usage: float = 0.0  # fraction of the KV blocks in use
    num_cached_blocks: int = 0  # unused blocks that prefix hits can find
    prefix_hit_rate: float = 0.0  # fraction of the prompt tokens since its start
    num_output_tokens: int = 0  # since its start
    num_restarts: int = 0
    seconds_since_step: float = 0.0


class ReplicaReports(BaseModel):
    object: Literal["list"] = "list"
    routing: str | None  # how a replica is chosen; null: there is one engine and no router
    data: list[ReplicaReport]
