"""Commands and flags of the `vllm` command line, for `inflight serve` and `inflight bench serve`.

`python -m tools.from_vllm_page` writes them into docs/from-vllm.md.
"""

from __future__ import annotations

from inflight.vllm_options import ENGINE_RULES
from inflight.vllm_rules import ANY, IGNORED, CompatRule, CompatRules

_OFFLINE = "use `inflight compare` for a workload on this machine, or `inflight bench serve` for a server"
# Commands that do not exist here, and what to use instead.
COMMANDS = {
    "chat": "use `inflight generate --chat -p TEXT`, or the chat page of `inflight serve`",
    "complete": "use `inflight generate -p TEXT`",
    "run-batch": "use `inflight generate --prompts-file FILE --json`, with one prompt per line",
    "collect-env": "use `inflight --version`, or the server's /server_info",
    "launch": "use `inflight serve` to start a server, and `inflight replicas add` to add engines to it",
    "bench latency": _OFFLINE,
    "bench throughput": _OFFLINE,
    "bench sweep": "use `inflight bench serve --rate 1 2 4`, which measures one rate after the other",
    "bench mm-processor": "images, audio and video are not supported yet",
}

SERVE_RULES = CompatRules(
    (
        *ENGINE_RULES,
        # ---- different name ----
        CompatRule("-q METHOD", {ANY: "--quantization {}"}),
        CompatRule("data_parallel_size N, -dp N", {"1": "", ANY: "--replicas {}"}),
        CompatRule("api_server_count N, -asc N", {ANY: "--api-workers {}"}),
        CompatRule("disable_frontend_multiprocessing", {"true": "--in-process", "false": "--no-in-process"}),
        CompatRule(
            "uvicorn_log_level LEVEL",
            {"trace": "--log-level debug", "critical": "--log-level error", ANY: "--log-level {}"},
        ),
        CompatRule("enable_log_requests", {"true": "--log-requests", "false": "--no-log-requests"}),
        CompatRule(
            "disable_log_requests, disable_uvicorn_access_log",
            {"true": "--no-log-requests", "false": "--log-requests"},
        ),
        # ---- accepted without effect ----
        CompatRule(
            "enable_auto_tool_choice, exclude_tools_when_tool_choice_none, enable_prompt_tokens_details, "
            "enable_request_id_headers, log_error_stack, use_tqdm_on_load, enable_server_load_tracking",
            IGNORED,
            "it is always on, or has no equivalent",
        ),
        CompatRule("max_log_len N", IGNORED, note="prompts and answers are never logged"),
        # ---- accepted with values that have no effect, otherwise rejected ----
        CompatRule(
            "skip_tokenizer_init",
            {},
            "a server needs a tokenizer; skip_tokenizer_init is available in Python",
        ),
        CompatRule(
            "default_chat_template_kwargs JSON",
            {},
            "the server has no such defaults: send chat_template_kwargs with each request",
        ),
        CompatRule(
            "middleware NAME, tool_parser_plugin FILE", {}, "third-party code is not loaded into the server"
        ),
        CompatRule("chat_template_content_format NAME", {"auto": ""}, "templates receive text"),
        CompatRule(
            "trust_request_chat_template",
            {},
            "templates come from the checkpoint or $chat_template, never from a request",
        ),
        CompatRule("response_role NAME", {"assistant": ""}, "the role of answers is always assistant"),
        CompatRule("return_tokens_as_token_ids", {}, "set return_token_ids in the request"),
        CompatRule("enable_force_include_usage", {}, "set stream_options.include_usage in the request"),
        CompatRule(
            "enable_tokenizer_info_endpoint",
            {},
            "use /tokenize and /detokenize; the tokenizer's configuration is not exposed",
        ),
        CompatRule("tool_server HOST", {}, "tools are executed by the client, never by the server"),
        CompatRule("tokens_only, grpc", {}, "the server speaks HTTP, with all its routes"),
        CompatRule("log_config_file FILE", {}, "use $log_level and $log_format"),
        CompatRule("enable_log_outputs, enable_log_deltas", {}, "prompts and answers are never logged"),
        CompatRule("uds PATH", {}, "Unix sockets are not supported: use $host and $port"),
        CompatRule(
            "enable_ssl_refresh, ssl_ciphers TEXT",
            {},
            "certificates are read at startup and ciphers are the system's: use a reverse proxy for more",
        ),
        CompatRule(
            "disable_fastapi_docs, enable_offline_docs",
            {},
            "/docs works offline and is always on; its data requires an API key if the server does",
        ),
        CompatRule(
            "h11_max_incomplete_event_size BYTES, h11_max_header_count N",
            {},
            "$max_header_size bounds the request line and headers",
        ),
        CompatRule("fingerprint_mode NAME, fingerprint_value TEXT", {}, "there is no equivalent"),
    )
)

_IN_BODY = "--parameters '{\"top_p\": 0.9}' adds it to every request"
_ONE_FILE = "--json FILE writes the figures of every run"

BENCH_RULES = CompatRules(
    (
        # ---- different name ----
        CompatRule("--base-url URL", {ANY: "--url {}"}),
        CompatRule("--num-prompts N", {ANY: "--num-requests {}"}),
        CompatRule("--request-rate RATE", {ANY: "--rate {}"}),
        CompatRule("--max-concurrency N", {ANY: "--concurrency {}"}),
        CompatRule("--random-input-len N, --input-len N", {ANY: "--prompt-len {}"}),
        CompatRule("--random-output-len N, --sharegpt-output-len N", {ANY: "--output-len {}"}),
        CompatRule("--num-warmups N", {ANY: "--warmup {}"}),
        CompatRule("--dataset-path FILE", {ANY: "--dataset {}"}),
        CompatRule("--extra-body JSON", {ANY: "--parameters {}"}),
        CompatRule("--served-model-name NAME", {ANY: "--model {}"}),
        # ---- same name, different values ----
        CompatRule(
            "--endpoint PATH",
            {
                "/v1/completions": "--endpoint completions",
                "/v1/chat/completions": "--endpoint chat",
                "completions": "--endpoint completions",
                "chat": "--endpoint chat",
            },
            "completions and chat are supported",
        ),
        # ---- accepted without effect ----
        CompatRule(
            "--tokenizer NAME, --tokenizer-mode NAME, --trust-remote-code, --skip-tokenizer-init, "
            "--ready-check-timeout-sec N, --disable-tqdm, --percentile-metrics NAMES, "
            "--metric-percentiles N, --save-detailed, --request-id-prefix TEXT, --label TEXT, --disable-shuffle, "
            "--no-oversample",
            IGNORED,
        ),
        # ---- accepted with values that have no effect, otherwise rejected ----
        CompatRule(
            "--backend NAME, --endpoint-type NAME",
            {"openai": "", "vllm": "", "openai-chat": "--endpoint chat"},
            "completions (openai, vllm) and chat (openai-chat) are supported",
        ),
        CompatRule(
            "--dataset-name NAME",
            {"random": "", "custom": "", "sharegpt": ""},
            "prompts are random, or come from --dataset FILE, a ShareGPT or JSON Lines file",
        ),
        CompatRule(
            "--hf-name NAME, --hf-subset NAME, --hf-split NAME, --hf-output-len N, "
            "--custom-output-len N, --sonnet-input-len N, --sonnet-output-len N, --sonnet-prefix-len N, "
            "--prefix-repetition-prefix-len N, --prefix-repetition-suffix-len N, "
            "--prefix-repetition-num-prefixes N, --prefix-repetition-output-len N",
            {},
            "use --dataset FILE, a JSON Lines file with prompt or messages, and max_tokens",
        ),
        CompatRule("--random-batch-size N", {"1": ""}, "each request has one prompt"),
        CompatRule(
            "--skip-chat-template, --custom-skip-chat-template",
            {},
            "completions prompts are sent unchanged; --endpoint chat sends messages",
        ),
        CompatRule("--n N, --best-of N", {"1": ""}, "each request has one answer"),
        CompatRule("--no-stream", {}, "answers are always streamed, since token latencies are measured"),
        CompatRule("--random-prefix-len N", {}, "use --dataset FILE with prompts that share a prefix"),
        CompatRule("--append-result, --metadata TEXT...", {}, _ONE_FILE),
        CompatRule("--plot-timeline, --plot-dataset-stats", {}, "--plot FILE plots latency over rate"),
        CompatRule(
            "--top-p N, --top-k N, --min-p N, --frequency-penalty N, --presence-penalty N, "
            "--repetition-penalty N, --logprobs N, --chat-template-kwargs JSON",
            {},
            _IN_BODY,
        ),
        CompatRule("--use-beam-search", {}, "the server does not support beam search"),
        CompatRule(
            "--ramp-up-strategy NAME, --ramp-up-start-rps N, --ramp-up-end-rps N",
            {},
            "--ramp SECONDS makes the rate grow from zero",
        ),
        CompatRule("--lora-modules NAME, --lora-assignment NAME", {}, "LoRA adapters are not supported yet"),
        CompatRule("--profile", {}, "there is no built-in profiler"),
        CompatRule("--header TEXT", {}, "--api-key is the only header that can be set"),
        CompatRule(
            "--insecure",
            {},
            "certificates are always verified; SSL_CERT_FILE can name another certificate authority",
        ),
        CompatRule("--probe-request-rate N", {}, "run a second `inflight bench serve` at the same time"),
    )
)
