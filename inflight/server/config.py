"""What `inflight serve` is told at start: the options of the server, declared here, and those of its engine.

Light on purpose: the command line reads it before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inflight.config import ENGINE_OPTIONS, EngineConfig, ProcessConfig, RouterConfig
from inflight.errors import ConfigError
from inflight.option import (
    ACCESS,
    LIFE,
    LIMITS,
    MODEL,
    NETWORK,
    PANELS,
    PYTHON,
    SCHEDULING,
    WATCHING,
    Option,
    check,
    option,
    options_of,
)

if TYPE_CHECKING:
    from ssl import SSLContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """All that a server was told, whatever way. `create` makes it from flat names."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    served_model_name: tuple[str, ...] = option(
        (), MODEL, "The name that clients use; may be repeated.", unset="the model's"
    )
    in_process: bool = option(False, SCHEDULING, "Run the engine in a thread of the server.")

    host: str = option("127.0.0.1", NETWORK, "Address to listen on.")
    port: int = option(8000, NETWORK, "Port to listen on; 0 takes a free one.", at_least=0, at_most=65535)
    allowed_hosts: tuple[str, ...] = option(
        (),
        NETWORK,
        "Names, without port, that clients may call it by (the Host header); may be repeated, * is all.",
        unset="all; on a loopback address without keys only that, localhost, 127.0.0.1 and [::1]",
    )
    root_path: str | None = option(None, NETWORK, "Path under which a proxy in front has the server: /llm.")
    api_workers: int = option(
        1,
        NETWORK,
        "Processes that speak HTTP, before the same engine or replicas: for where one is the limit.",
        at_least=1,
        at_most=64,
    )
    ssl_keyfile: str | None = option(None, NETWORK, "Private key for TLS.")
    ssl_certfile: str | None = option(None, NETWORK, "Certificate for TLS.")
    ssl_ca_certs: str | None = option(None, NETWORK, "Authorities that clients' certificates must come from.")
    ssl_cert_reqs: int = option(
        0, NETWORK, "Clients' certificates: 0 not asked for, 1 optional, 2 required.", choices=(0, 1, 2)
    )
    allowed_origins: tuple[str, ...] = option(
        (), NETWORK, "Origins of pages that may call (CORS); may be repeated."
    )
    allowed_methods: tuple[str, ...] = option(
        ("GET", "POST", "DELETE"), NETWORK, "Methods that such pages may use."
    )
    allowed_headers: tuple[str, ...] = option(("*",), NETWORK, "Headers that such pages may send.")
    ignore_unknown_fields: bool = option(
        False,
        NETWORK,
        "Take requests with fields that no one knows, and ignore these; else they are refused.",
    )
    allow_credentials: bool = option(False, NETWORK, "Let such pages send cookies.")

    api_key: tuple[str, ...] = option(
        (), ACCESS, "A key that clients must send; may be repeated. Better in INFLIGHT_API_KEY."
    )
    keys: str | None = option(None, ACCESS, "A file with keys, each with weight, rate and concurrency.")

    admin_key: str | None = option(
        None,
        ACCESS,
        "The key of those who may change replicas, put the engine to sleep and reset its prefix cache. Better in "
        "INFLIGHT_ADMIN_KEY.",
        unset="no one may",
    )

    max_body_size: int = option(8 << 20, LIMITS, "Most bytes of a request's body.", at_least=1024)
    max_header_size: int = option(
        32 << 10, LIMITS, "Most bytes of a request's line and headers.", at_least=1024
    )
    max_prompt_tokens: int | None = option(
        None, LIMITS, "Most tokens of a prompt.", at_least=1, unset="what --max-model-len allows"
    )
    max_answers: int = option(128, LIMITS, "Most answers of one request: prompts times n.", at_least=1)
    max_documents: int = option(
        2048,
        LIMITS,
        "Most texts of one request to embed or classify, and most documents to score.",
        at_least=1,
    )
    max_output_tokens: int | None = option(
        None,
        LIMITS,
        "Longest answer; a request that asks for more is refused.",
        at_least=1,
        unset="what the context allows",
    )
    strict: bool = option(
        False,
        LIMITS,
        "Refuse a request that asks for a longer answer than the context has room for; else it gets that room.",
    )
    max_logprobs: int = option(
        20, LIMITS, "Most likely tokens that a request may ask for at each position.", at_least=0
    )
    max_answer_logprobs: int = option(
        1 << 20,
        LIMITS,
        "Most logprobs of one request: answers times tokens times (logprobs + 1); the same again for prompts.",
        at_least=0,
    )
    max_stop_strings: int = option(16, LIMITS, "Most stop strings of a request.", at_least=0)
    max_stop_length: int = option(256, LIMITS, "Most characters of a stop string or bad word.", at_least=1)
    max_listed_tokens: int = option(
        16384,
        LIMITS,
        "Most tokens of bad words, stop ids, biases and allowed ids, together and times the answers.",
        at_least=0,
    )
    max_tokenize_size: int = option(
        1 << 20, LIMITS, "Most characters that /tokenize takes, and ids that /detokenize takes.", at_least=1
    )
    max_stored_responses: int = option(
        1024, LIMITS, "Responses that /v1/responses keeps for those who go on from them.", at_least=0
    )
    max_stored_bytes: int = option(
        64 << 20, LIMITS, "Bytes that these may take, with the conversations before them.", at_least=0
    )
    max_unsent_bytes: int = option(
        128 << 20,
        LIMITS,
        "Bytes of answers over 64 KiB, other than the engine's, that clients have not read yet; a key may have half.",
        at_least=0,
    )
    max_connections: int = option(
        4096, LIMITS, "Most open connections; a few of them are kept for /health and /ready.", at_least=1
    )
    read_timeout: float = option(
        30.0,
        LIMITS,
        "Seconds for a client to send headers, and again its body; over TLS also to shake hands.",
        above=0,
        unit="seconds",
    )
    write_timeout: float = option(
        60.0,
        LIMITS,
        "Seconds that a client may read nothing of what it is sent.",
        above=0,
        unit="seconds",
    )
    first_token_timeout: float = option(300.0, LIMITS, "Seconds to the first token.", above=0, unit="seconds")
    request_timeout: float = option(3600.0, LIMITS, "Seconds for a whole request.", above=0, unit="seconds")

    metrics_compat: str = option(
        "none",
        WATCHING,
        "vllm: show the metrics also under the names that vLLM's dashboards read.",
        choices=("none", "vllm"),
    )
    log_level: str = option(
        "info",
        WATCHING,
        "What is logged: debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"),
    )
    log_requests: bool = option(True, WATCHING, "Log a line for every request.")
    otlp_traces_endpoint: str | None = option(
        None, WATCHING, "Send OpenTelemetry spans there; needs the extra inflight-llm[otel]."
    )
    request_history: int = option(
        1024, WATCHING, "Finished requests that /v1/requests remembers.", at_least=0
    )

    shutdown_timeout: float = option(
        30.0, LIFE, "Seconds that streams may go on after SIGTERM or SIGHUP.", at_least=0, unit="seconds"
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: one of them is missing")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs and ssl_cert_reqs need ssl_certfile: without it there is no TLS")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs}: it needs ssl_ca_certs, whose certificates are taken"
            )
        tls_context(self)  # raises where the files cannot be used
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("allowed_origins has '*': with allow_credentials each origin must be named")
        if self.root_path is not None and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path is {self.root_path!r}: it must begin with /")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("an api_key is empty")
        if self.in_process and self.router.is_wanted:
            raise ConfigError(
                "in_process and replicas do not go together: replicas are processes of their own"
            )

    @classmethod
    def create(cls, **values: Any) -> ServerConfig:
        """From flat names: each is the engine's, its process's, the router's or the server's own."""
        values = _DEFAULTS | values
        engine = {name: values.pop(name) for name in ENGINE_OPTIONS if name in values}
        process = {name: values.pop(name) for name in options_of(ProcessConfig) if name in values}
        router = RouterConfig.taken_from(values)
        return cls(
            engine=EngineConfig.create(**engine), process=ProcessConfig(**process), router=router, **values
        )

    def flat(self) -> dict[str, Any]:
        """What `create` makes it from."""
        own = {name: getattr(self, name) for name in options_of(ServerConfig)}
        process = {name: getattr(self.process, name) for name in options_of(ProcessConfig)}
        return own | self.engine.options() | process | asdict(self.router)

    @property
    def model(self) -> str | None:
        return self.engine.model.model

    @property
    def policy(self) -> str | Callable[[], Any]:
        return self.engine.scheduler.policy

    @property
    def max_queue(self) -> int:
        limit = self.engine.scheduler.max_queue
        assert limit is not None  # a server always has one
        return limit


# What a server has otherwise than an engine without one: time for others' tokens, and an end to its queue.
_DEFAULTS: dict[str, Any] = {"target_step_ms": None, "max_queue": 1024}


def _serve_options() -> dict[str, Option]:
    found = {
        **ENGINE_OPTIONS,
        **options_of(ServerConfig),
        **options_of(ProcessConfig),
        **options_of(RouterConfig),
    }
    for name, default in _DEFAULTS.items():
        found[name] = replace(found[name], default=default, optional=default is None)
    flags = [item for item in found.values() if item.panel != PYTHON]
    return {item.name: item for item in sorted(flags, key=lambda item: PANELS.index(item.panel))}


# Every option of `inflight serve` by name, in the order of the panels.
SERVE_OPTIONS = _serve_options()


def tls_context(config: ServerConfig) -> SSLContext | None:
    """For a server that speaks TLS. Raises ConfigError where the files cannot be read, or do not belong together."""
    if config.ssl_certfile is None:
        return None
    import ssl  # takes a while, which most do not need

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password is nothing that a server could ask for.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl's own too
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        why = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else str(error)
        raise ConfigError(f"the files for TLS ({files}) cannot be used: {why}") from error
    return context
