"""The configuration of `inflight serve`: the server's own options, declared here, and those of its engine.

Imports are light on purpose: the command line reads this before anything heavy is loaded.
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
    """The options of a server. `create` builds it from flat names."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    served_model_name: tuple[str, ...] = option(
        (), MODEL, "Model name in the API; may be repeated.", unset="the name of the model"
    )
    in_process: bool = option(
        False, SCHEDULING, "Run the engine in a thread of the server process instead of its own process."
    )

    host: str = option("127.0.0.1", NETWORK, "Address to listen on.")
    port: int = option(8000, NETWORK, "Port to listen on; 0 picks a free port.", at_least=0, at_most=65535)
    allowed_hosts: tuple[str, ...] = option(
        (),
        NETWORK,
        "Host names, without port, to accept in the Host header; may be repeated, * accepts all.",
        unset="all; on a loopback address without API keys only --host, localhost, 127.0.0.1 and [::1]",
    )
    root_path: str | None = option(
        None, NETWORK, "Path prefix under which a reverse proxy exposes the server, for example /llm."
    )
    api_workers: int = option(
        1,
        NETWORK,
        "Number of processes that handle HTTP in front of the same engine or replicas.",
        at_least=1,
        at_most=64,
    )
    ssl_keyfile: str | None = option(None, NETWORK, "Private key file for TLS.")
    ssl_certfile: str | None = option(None, NETWORK, "Certificate file for TLS.")
    ssl_ca_certs: str | None = option(
        None, NETWORK, "CA certificates file to verify client certificates with."
    )
    ssl_cert_reqs: int = option(
        0, NETWORK, "Client certificates: 0 not requested, 1 optional, 2 required.", choices=(0, 1, 2)
    )
    ping_interval: float = option(
        10.0,
        NETWORK,
        "Seconds of silence after which a stream sends a ping, so that proxies keep its connection open.",
        above=0,
        unit="seconds",
    )
    allowed_origins: tuple[str, ...] = option(
        (), NETWORK, "Origins whose web pages may call the API (CORS); may be repeated."
    )
    allowed_methods: tuple[str, ...] = option(
        ("GET", "POST", "DELETE"), NETWORK, "HTTP methods that such pages may use."
    )
    allowed_headers: tuple[str, ...] = option(("*",), NETWORK, "Headers that such pages may send.")
    ignore_unknown_fields: bool = option(
        False, NETWORK, "Accept unknown request fields and ignore them instead of rejecting the request."
    )
    replace_images: bool = option(
        False,
        NETWORK,
        "Replace images in messages and tool results by a note instead of rejecting the request.",
    )
    allow_credentials: bool = option(False, NETWORK, "Let such pages send cookies.")

    api_key: tuple[str, ...] = option(
        (),
        ACCESS,
        "API key that clients must send; may be repeated. Prefer INFLIGHT_API_KEY, which ps does not show.",
    )
    keys: str | None = option(
        None, ACCESS, "YAML file of API keys, each with a name, weight, rate limit and concurrency limit."
    )

    admin_key: str | None = option(
        None,
        ACCESS,
        "Key for changing replicas, putting the engine to sleep and resetting its prefix cache. Prefer "
        "INFLIGHT_ADMIN_KEY, which ps does not show.",
        unset="these routes are disabled",
    )

    max_body_size: int = option(8 << 20, LIMITS, "Maximum size of a request body in bytes.", at_least=1024)
    max_header_size: int = option(
        32 << 10, LIMITS, "Maximum size of the request line and headers in bytes.", at_least=1024
    )
    max_prompt_tokens: int | None = option(
        None, LIMITS, "Maximum number of prompt tokens.", at_least=1, unset="what --max-model-len allows"
    )
    max_answers: int = option(
        128, LIMITS, "Maximum number of answers per request: prompts times n.", at_least=1
    )
    max_documents: int = option(
        2048,
        LIMITS,
        "Maximum number of texts to embed or classify, or documents to score, per request.",
        at_least=1,
    )
    max_output_tokens: int | None = option(
        None,
        LIMITS,
        "Maximum number of output tokens; a request for more is rejected.",
        at_least=1,
        unset="what the context allows",
    )
    strict: bool = option(
        False,
        LIMITS,
        "Reject requests whose max_tokens exceed the context length instead of shortening the answer.",
    )
    max_logprobs: int = option(
        20, LIMITS, "Maximum number of logprobs per position that a request may ask for.", at_least=0
    )
    max_answer_logprobs: int = option(
        1 << 20,
        LIMITS,
        "Maximum number of logprobs per request: answers times tokens times (logprobs + 1); the same for prompts.",
        at_least=0,
    )
    max_stop_strings: int = option(16, LIMITS, "Maximum number of stop strings per request.", at_least=0)
    max_stop_length: int = option(
        256, LIMITS, "Maximum length of a stop string or bad word in characters.", at_least=1
    )
    max_listed_tokens: int = option(
        16384,
        LIMITS,
        "Maximum number of tokens in bad words, stop ids, biases and allowed ids together, times the answers.",
        at_least=0,
    )
    max_tokenize_size: int = option(
        1 << 20,
        LIMITS,
        "Maximum number of characters for /tokenize, and of token ids for /detokenize.",
        at_least=1,
    )
    max_stored_responses: int = option(
        1024, LIMITS, "Maximum number of stored responses of /v1/responses.", at_least=0
    )
    max_stored_bytes: int = option(
        64 << 20,
        LIMITS,
        "Maximum size of stored responses in bytes, including the conversations before them.",
        at_least=0,
    )
    max_unsent_bytes: int = option(
        128 << 20,
        LIMITS,
        "Maximum unread bytes of responses over 64 KiB, other than the engine's; one API key may use half.",
        at_least=0,
    )
    max_connections: int = option(
        4096,
        LIMITS,
        "Maximum number of open connections; a few are reserved for /health and /ready.",
        at_least=1,
    )
    read_timeout: float = option(
        30.0,
        LIMITS,
        "Seconds a client may take to send the headers, the body and (with TLS) for the handshake, each.",
        above=0,
        unit="seconds",
    )
    write_timeout: float = option(
        60.0,
        LIMITS,
        "Seconds after which a client that does not read its response is disconnected.",
        above=0,
        unit="seconds",
    )
    first_token_timeout: float = option(
        300.0, LIMITS, "Seconds until the first token after which a request fails.", above=0, unit="seconds"
    )
    request_timeout: float = option(
        3600.0, LIMITS, "Seconds after which a request fails.", above=0, unit="seconds"
    )

    metrics_compat: str = option(
        "gateway",
        WATCHING,
        "Metrics to export under vLLM's names too: none, those of Kubernetes inference gateways, or all (vllm).",
        choices=("none", "gateway", "vllm"),
    )
    timeline_text: bool = option(
        False, WATCHING, "Show the text of prompts in the timeline, to callers who may see the request."
    )
    log_level: str = option(
        "info", WATCHING, "Minimum level of log messages.", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = option(True, WATCHING, "Log every request.")
    otlp_traces_endpoint: str | None = option(
        None, WATCHING, "OTLP endpoint to send OpenTelemetry spans to; needs inflight-llm[otel]."
    )
    request_history: int = option(
        1024, WATCHING, "Number of finished requests that /v1/requests remembers.", at_least=0
    )

    shutdown_timeout: float = option(
        30.0,
        LIFE,
        "Seconds that running requests may take to finish after SIGTERM or SIGHUP.",
        at_least=0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile must be set together: one of them is missing")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise ConfigError(
                "ssl_ca_certs and ssl_cert_reqs need ssl_certfile and ssl_keyfile, which turn on TLS"
            )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs}: it needs ssl_ca_certs to verify client certificates with"
            )
        tls_context(self)  # raises if the files cannot be used
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("allowed_origins has '*': with allow_credentials, list each origin")
        if self.root_path is not None and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path is {self.root_path!r}: it must start with /")
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("an api_key is empty")
        if self.in_process and self.router.is_enabled:
            raise ConfigError("in_process cannot be combined with replicas, which run in their own processes")

    @classmethod
    def create(cls, **values: Any) -> ServerConfig:
        """Build a config from flat option names of the engine, its process, the router and the server."""
        values = _DEFAULTS | values
        engine = {name: values.pop(name) for name in ENGINE_OPTIONS if name in values}
        process = {name: values.pop(name) for name in options_of(ProcessConfig) if name in values}
        router = RouterConfig.taken_from(values)
        return cls(
            engine=EngineConfig.create(**engine), process=ProcessConfig(**process), router=router, **values
        )

    def flat(self) -> dict[str, Any]:
        """Return the options by flat name, as `create` takes them."""
        server = {name: getattr(self, name) for name in options_of(ServerConfig)}
        process = {name: getattr(self.process, name) for name in options_of(ProcessConfig)}
        return server | self.engine.options() | process | asdict(self.router)

    @property
    def model(self) -> str | None:
        return self.engine.model.model

    @property
    def policy(self) -> str | Callable[[], Any]:
        return self.engine.scheduler.policy

    @property
    def max_queue(self) -> int:
        limit = self.engine.scheduler.max_queue
        assert limit is not None  # guaranteed by _DEFAULTS
        return limit


# Defaults that differ from the engine's: a target step time, and a bounded queue.
_DEFAULTS: dict[str, Any] = {"target_step_ms": None, "max_queue": 1024}


def _serve_options() -> dict[str, Option]:
    options = {
        **ENGINE_OPTIONS,
        **options_of(ServerConfig),
        **options_of(ProcessConfig),
        **options_of(RouterConfig),
    }
    for name, default in _DEFAULTS.items():
        options[name] = replace(options[name], default=default, optional=default is None)
    flags = [item for item in options.values() if item.panel != PYTHON]
    return {item.name: item for item in sorted(flags, key=lambda item: PANELS.index(item.panel))}


# Every option of `inflight serve` by name, in the order of the panels.
SERVE_OPTIONS = _serve_options()


def tls_context(config: ServerConfig) -> SSLContext | None:
    """Return the TLS context, or None without TLS. Raises ConfigError if the files are unreadable or do not match."""
    if config.ssl_certfile is None:
        return None
    import ssl  # slow to import, and rarely needed

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a callback, OpenSSL would prompt for the password of an encrypted key.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # includes ssl.SSLError
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else str(error)
        raise ConfigError(f"the TLS files ({files}) cannot be used: {reason}") from error
    return context
