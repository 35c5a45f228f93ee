"""Flags of `vllm serve`: those of its engine, and here those of its server that are none, or not with every value."""

from __future__ import annotations

from inflight.habits.engine_options import ENGINE_HABITS
from inflight.habits.habit import ANY, TAKEN, Habit, Habits

SERVE_HABITS = Habits(
    (
        *ENGINE_HABITS,
        # ---- the same under another name ----
        Habit("data_parallel_size N, -dp N", {"1": "", ANY: "--replicas {}"}),
        Habit("api_server_count N, -asc N", {ANY: "--api-workers {}"}),
        Habit("disable_frontend_multiprocessing", {"true": "--in-process", "false": "--no-in-process"}),
        Habit(
            "uvicorn_log_level LEVEL",
            {"trace": "--log-level debug", "critical": "--log-level error", ANY: "--log-level {}"},
        ),
        Habit("enable_log_requests", {"true": "--log-requests", "false": "--no-log-requests"}),
        Habit(
            "disable_log_requests, disable_uvicorn_access_log",
            {"true": "--no-log-requests", "false": "--log-requests"},
        ),
        # ---- taken, because nothing changes ----
        Habit(
            "enable_auto_tool_choice, exclude_tools_when_tool_choice_none, enable_prompt_tokens_details, "
            "enable_request_id_headers, log_error_stack, use_tqdm_on_load, enable_server_load_tracking",
            TAKEN,
            "there is nothing to switch on or off",
        ),
        Habit("max_log_len N", TAKEN, note="prompts and answers are never logged"),
        # ---- taken with the values that change nothing, else refused ----
        Habit(
            "skip_tokenizer_init", {}, "a server needs a tokenizer; in Python there is skip_tokenizer_init"
        ),
        Habit(
            "default_chat_template_kwargs JSON",
            {},
            "the server has no defaults of its own: give it with each request",
        ),
        Habit(
            "middleware NAME, tool_parser_plugin FILE",
            {},
            "code that comes from elsewhere is not loaded into the server",
        ),
        Habit("chat_template_content_format NAME", {"auto": ""}, "a template gets text"),
        Habit(
            "trust_request_chat_template",
            {},
            "templates come with the checkpoint or $chat_template, never with a request",
        ),
        Habit("response_role NAME", {"assistant": ""}, "answers are the assistant's"),
        Habit("return_tokens_as_token_ids", {}, "a request can ask for return_token_ids"),
        Habit(
            "enable_force_include_usage", {}, "streams tell it to those who ask: stream_options.include_usage"
        ),
        Habit(
            "enable_tokenizer_info_endpoint",
            {},
            "/tokenize and /detokenize are there, the tokenizer's configuration is not shown",
        ),
        Habit("tool_server HOST", {}, "tools are run by the client, never by the server"),
        Habit("tokens_only, grpc", {}, "the server speaks HTTP with all its routes"),
        Habit("log_config_file FILE", {}, "$log_level and $log_format are what there is to choose"),
        Habit("enable_log_outputs, enable_log_deltas", {}, "prompts and answers are never logged"),
        Habit("uds PATH", {}, "the server listens on an address: $host, $port"),
        Habit(
            "enable_ssl_refresh, ssl_ciphers TEXT",
            {},
            "certificates are read at start, with the system's ciphers: a proxy in front can do more",
        ),
        Habit(
            "disable_fastapi_docs, enable_offline_docs",
            {},
            "/docs needs no network, and cannot be switched off; where keys are asked for, it needs one",
        ),
        Habit(
            "h11_max_incomplete_event_size BYTES, h11_max_header_count N",
            {},
            "$max_header_size bounds the request line and headers",
        ),
        Habit("fingerprint_mode NAME, fingerprint_value TEXT", {}, "there is nothing to choose"),
    )
)
