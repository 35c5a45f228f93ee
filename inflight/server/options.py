"""Every option of `inflight serve`: the one table that flags, variables, files and documents are made from.

Light on purpose: the command line reads it before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MODEL, MEMORY, SCHEDULING, NETWORK = "Model", "Memory", "Scheduling", "Network"
ACCESS, LIMITS, WATCHING, LIFE = "Access", "Limits", "Watching", "Life"


def _option(default: Any, panel: str, text: str, *, show: str | None = None) -> Any:
    """A field with what its flag needs; `show` is the default in words."""
    return field(default=default, metadata={"panel": panel, "help": text, "show": show})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `inflight serve` was told, whatever way. Names are those of the flags, with underscores."""

    model: str | None = None

    served_model_name: tuple[str, ...] = _option(
        (), MODEL, "The name that clients use; may be repeated.", show="the model's"
    )
    tokenizer: str | None = _option(None, MODEL, "A folder or hub id to take the tokenizer from.")
    revision: str | None = _option(None, MODEL, "Of the hub's repository.")
    dtype: str = _option("auto", MODEL, "How weights are held: auto, float32, bfloat16 or float16.")
    load_format: str = _option("auto", MODEL, "auto, safetensors, or dummy for random weights.")
    device: str = _option("auto", MODEL, "auto, cpu, cuda or cuda:<index>. auto: a GPU where there is one.")
    enforce_eager: bool = _option(False, MODEL, "On a GPU: no captured graphs.")
    max_model_len: int | None = _option(
        None, MODEL, "Longest prompt and answer together.", show="what the checkpoint and the memory allow"
    )
    seed: int = _option(0, MODEL, "Of requests that give none.")

    gpu_memory_utilization: float = _option(0.9, MEMORY, "Share of the GPU's memory to use.")
    kv_cache_memory: int | None = _option(None, MEMORY, "Memory for keys and values, in bytes.")
    num_blocks: int | None = _option(None, MEMORY, "KV blocks, in place of the memory figures.")
    block_size: int = _option(16, MEMORY, "Tokens in a KV block.")
    enable_prefix_caching: bool = _option(True, MEMORY, "Compute shared beginnings once.")

    policy: str = _option(
        "continuous", SCHEDULING, "continuous, static, sequential, priority, fair, or module:Class."
    )
    max_num_seqs: int | None = _option(
        None, SCHEDULING, "Requests in the running batch.", show="512 on a GPU, 256 on a CPU"
    )
    max_num_batched_tokens: int | None = _option(None, SCHEDULING, "Tokens computed in one step.")
    target_step_ms: float | None = _option(
        None,
        SCHEDULING,
        "Cut prompts so that streams wait about so long for a token; 0: never for that.",
        show="14 on a GPU, 100 on a CPU",
    )
    max_kv_tokens: int | None = _option(None, SCHEDULING, "Tokens resident across all running requests.")
    pipeline_depth: int | None = _option(None, SCHEDULING, "Steps in flight, 1 or 2.")
    in_process: bool = _option(False, SCHEDULING, "Run the engine in a thread of the server.")
    max_restarts: int = _option(3, SCHEDULING, "Restarts of an engine that died, within ten minutes.")

    host: str = _option("127.0.0.1", NETWORK, "Address to listen on.")
    port: int = _option(8000, NETWORK, "0 takes a free one.")
    allowed_hosts: tuple[str, ...] = _option(
        (),
        NETWORK,
        "Names, without port, that clients may call it by (the Host header); may be repeated, * is all.",
        show="all; on a loopback address without keys only that, localhost, 127.0.0.1 and [::1]",
    )
    ssl_keyfile: str | None = _option(None, NETWORK, "Private key for TLS.")
    ssl_certfile: str | None = _option(None, NETWORK, "Certificate for TLS.")
    ssl_ca_certs: str | None = _option(
        None, NETWORK, "Authorities that clients' certificates must come from."
    )
    ssl_cert_reqs: int = _option(
        0, NETWORK, "Clients' certificates: 0 not asked for, 1 optional, 2 required."
    )
    allowed_origins: tuple[str, ...] = _option(
        (), NETWORK, "Origins of pages that may call (CORS); may be repeated."
    )
    allowed_methods: tuple[str, ...] = _option(("GET", "POST", "DELETE"), NETWORK, "Methods for such pages.")
    allowed_headers: tuple[str, ...] = _option(("*",), NETWORK, "Headers for such pages.")
    allow_credentials: bool = _option(False, NETWORK, "Cookies from such pages.")

    api_key: tuple[str, ...] = _option(
        (), ACCESS, "A key that clients must send; may be repeated. Better in INFLIGHT_API_KEY."
    )
    keys: str | None = _option(None, ACCESS, "A file with keys, each with weight, rate and concurrency.")

    max_queue: int = _option(1024, LIMITS, "Waiting requests; one more is refused at once with 429.")
    max_body_size: int = _option(8 << 20, LIMITS, "Bytes of a request's body.")
    max_header_size: int = _option(32 << 10, LIMITS, "Bytes of a request's line and headers.")
    max_prompt_tokens: int | None = _option(
        None, LIMITS, "Tokens of a prompt.", show="what --max-model-len allows"
    )
    max_answers: int = _option(128, LIMITS, "Answers of one request: prompts times n.")
    max_output_tokens: int | None = _option(
        None,
        LIMITS,
        "Longest answer; a request that asks for more is refused.",
        show="what the context allows",
    )
    max_logprobs: int = _option(20, LIMITS, "Most likely tokens reported for a position.")
    max_stop_strings: int = _option(16, LIMITS, "Stop strings of a request.")
    max_stop_length: int = _option(256, LIMITS, "Characters of a stop string or bad word.")
    max_connections: int = _option(4096, LIMITS, "Open connections.")
    read_timeout: float = _option(30.0, LIMITS, "Seconds for a client to send headers, and again its body.")
    first_token_timeout: float = _option(300.0, LIMITS, "Seconds to the first token.")
    request_timeout: float = _option(3600.0, LIMITS, "Seconds for a whole request.")

    metrics_compat: str = _option(
        "none", WATCHING, "vllm: also under the metric names that vLLM's dashboards read."
    )
    log_level: str = _option("info", WATCHING, "debug, info, warning or error.")
    log_format: str = _option("text", WATCHING, "text, or json: one object a line.")
    log_requests: bool = _option(True, WATCHING, "A line for every request.")
    otlp_traces_endpoint: str | None = _option(
        None, WATCHING, "Send OpenTelemetry spans there; needs the extra inflight-llm[otel]."
    )
    request_history: int = _option(1024, WATCHING, "Finished requests that /v1/requests remembers.")

    shutdown_timeout: float = _option(30.0, LIFE, "Seconds that streams may go on after SIGTERM.")

    def engine(self) -> dict[str, Any]:
        """The options that are the engine's own."""
        return {name: getattr(self, name) for name in ENGINE_OPTIONS}


ENGINE_OPTIONS = (
    "tokenizer",
    "revision",
    "dtype",
    "load_format",
    "device",
    "enforce_eager",
    "max_model_len",
    "seed",
    "gpu_memory_utilization",
    "kv_cache_memory",
    "num_blocks",
    "block_size",
    "enable_prefix_caching",
    "policy",
    "max_num_seqs",
    "max_num_batched_tokens",
    "target_step_ms",
    "max_kv_tokens",
    "pipeline_depth",
    "max_queue",
)

FIELDS = {item.name: item for item in fields(ServeOptions)}
