"""What the server says about itself: models, life, requests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from inflight.scoring import Scale, Task


class PoolingHead(BaseModel):
    """What a model that embeds, classifies or scores returns for a text."""

    size: int
    scale: Scale  # of scores and classes, unless asked for another
    labels: list[str]
    dimensions: list[int] | None  # to which embeddings may be cut; null: the checkpoint does not say
    prompts: list[str]  # by name


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
    """`status` is "ok", or says why not; `degraded` names the replicas that do not work while others do; `progress` is
    the share of the weights that is there, while they load."""

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
    """It was done."""

    success: bool = True


class Breakdown(BaseModel):
    """Where an answer's time in the engine went, in seconds. The parts add up to it."""

    queue: dict[str, float]  # by cause: step, memory, slots, budget, policy
    prefill: float
    prefill_of_others: float
    decode: float
    preempted: float
    held: float
    lost: float  # with engines that died, and until another one had it


class AnswerReport(BaseModel):
    """What happened to one answer of a request; times in seconds, null where it has not come so far."""

    index: int
    status: Literal["queued", "running", "finished"]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    replica: str  # that it is or was on, the last one; empty where there are none
    num_failovers: int  # replicas that it outlived
    queued_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    breakdown: Breakdown


class Waited(BaseModel):
    """Who was in the engine while this one waited: how many, and those of the same key by id."""

    num_requests: int
    ids: list[str]


Status = Literal["queued", "running", "finished", "failed", "cancelled"]


class RequestReport(BaseModel):
    id: str
    object: Literal["request"] = "request"
    route: str
    status: Status
    created: int
    task: Task
    num_answers: int  # or texts; of texts, `answers` has the first ones
    stream: bool
    priority: int
    tenant: str
    total_seconds: float
    first_token_seconds: float | None
    client_seconds: float  # that the server waited for the client to take in what it sent
    answers: list[AnswerReport]
    waited_for: Waited
    why: str


class Cancelled(BaseModel):
    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: bool
    freed_blocks: int


class ReplicaReport(BaseModel):
    """One engine: how it does, and what it has to do."""

    id: str
    object: Literal["replica"] = "replica"
    state: Literal["starting", "running", "draining", "stalled", "restarting", "dead", "closing", "closed"]
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0  # of prompts, to be computed
    kv_usage: float = 0.0  # used share of the KV blocks
    num_cached_blocks: int = 0  # that a prefix hit finds, used ones not among them
    prefix_hit_rate: float = 0.0  # of the prompt tokens since its start
    num_output_tokens: int = 0  # since its start
    num_restarts: int = 0
    seconds_since_step: float = 0.0


class ReplicaReports(BaseModel):
    object: Literal["list"] = "list"
    routing: str | None  # how one is chosen; null: there is one engine, and no router
    data: list[ReplicaReport]
