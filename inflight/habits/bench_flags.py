"""Flags of `vllm bench serve` that `inflight bench serve` has not, or not with every value."""

from __future__ import annotations

from inflight.habits.habit import ANY, TAKEN, Habit, Habits

_IN_BODY = "--parameters '{\"top_p\": 0.9}' puts it into every request"
_ONE_FILE = "--json FILE writes the figures of every run"

BENCH_HABITS = Habits(
    (
        # ---- the same under another name ----
        Habit("--base-url URL", {ANY: "--url {}"}),
        Habit("--num-prompts N", {ANY: "--num-requests {}"}),
        Habit("--request-rate RATE", {ANY: "--rate {}"}),
        Habit("--max-concurrency N", {ANY: "--concurrency {}"}),
        Habit("--random-input-len N, --input-len N", {ANY: "--prompt-len {}"}),
        Habit("--random-output-len N", {ANY: "--output-len {}"}),
        Habit("--num-warmups N", {ANY: "--warmup {}"}),
        Habit("--dataset-path FILE", {ANY: "--dataset {}"}),
        Habit("--extra-body JSON", {ANY: "--parameters {}"}),
        Habit("--served-model-name NAME", {ANY: "--model {}"}),
        Habit("--result-filename FILE", {ANY: "--json {}"}),
        # ---- the same name, with values that are written otherwise ----
        Habit(
            "--endpoint PATH",
            {
                "/v1/completions": "--endpoint completions",
                "/v1/chat/completions": "--endpoint chat",
                "completions": "--endpoint completions",
                "chat": "--endpoint chat",
            },
            "completions and chat are measured",
        ),
        # ---- taken, because nothing changes ----
        Habit(
            "--tokenizer NAME, --tokenizer-mode NAME, --trust-remote-code, --skip-tokenizer-init, "
            "--ready-check-timeout-sec N, --disable-tqdm, --percentile-metrics NAMES, "
            "--metric-percentiles N, --save-detailed, --request-id-prefix TEXT, --label TEXT, --disable-shuffle, "
            "--no-oversample",
            TAKEN,
        ),
        # ---- taken with the values that change nothing, else refused ----
        Habit(
            "--backend NAME, --endpoint-type NAME",
            {"openai": "", "vllm": "", "openai-chat": "--endpoint chat"},
            "completions (openai, vllm) and chats (openai-chat) are measured",
        ),
        Habit(
            "--dataset-name NAME",
            {"random": "", "custom": ""},
            "prompts are random, or from --dataset FILE: JSON lines with prompt or messages",
        ),
        Habit(
            "--hf-name NAME, --hf-subset NAME, --hf-split NAME, --hf-output-len N, --sharegpt-output-len N, "
            "--custom-output-len N, --sonnet-input-len N, --sonnet-output-len N, --sonnet-prefix-len N, "
            "--prefix-repetition-prefix-len N, --prefix-repetition-suffix-len N, "
            "--prefix-repetition-num-prefixes N, --prefix-repetition-output-len N",
            {},
            "--dataset FILE has a JSON object per line: prompt or messages, and max_tokens",
        ),
        Habit("--random-batch-size N", {"1": ""}, "a request has one prompt"),
        Habit(
            "--skip-chat-template, --custom-skip-chat-template",
            {},
            "prompts of completions are sent as they are; --endpoint chat sends messages",
        ),
        Habit("--n N, --best-of N", {"1": ""}, "one answer per request is measured"),
        Habit("--no-stream", {}, "answers are always streamed: latencies are those of tokens"),
        Habit("--burstiness N", {"1": "", "1.0": ""}, "requests come at random moments (Poisson): 1"),
        Habit(
            "--random-range-ratio N",
            {},
            "--prompt-len LOW:HIGH and --output-len LOW:HIGH are ranges",
        ),
        Habit("--random-prefix-len N", {}, "--dataset FILE can have prompts with a common beginning"),
        Habit("--save-result, --append-result, --result-dir PATH, --metadata TEXT", {}, _ONE_FILE),
        Habit("--plot-timeline, --plot-dataset-stats", {}, "--plot FILE draws latency over rate"),
        Habit(
            "--top-p N, --top-k N, --min-p N, --frequency-penalty N, --presence-penalty N, "
            "--repetition-penalty N, --logprobs N, --chat-template-kwargs JSON",
            {},
            _IN_BODY,
        ),
        Habit("--use-beam-search", {}, "no server here searches beams"),
        Habit("--goodput TEXT", {}, "latencies are told at percentiles instead"),
        Habit(
            "--ramp-up-strategy NAME, --ramp-up-start-rps N, --ramp-up-end-rps N",
            {},
            "--ramp SECONDS lets the rate grow from nothing",
        ),
        Habit("--lora-modules NAME, --lora-assignment NAME", {}, "LoRA adapters are not supported yet"),
        Habit("--profile", {}, "there is no profiler to switch on"),
        Habit("--header TEXT", {}, "--api-key is the one header that can be given"),
        Habit("--insecure", {}, "certificates are always checked: SSL_CERT_FILE can name another authority"),
        Habit(
            "--probe-request-rate N",
            {},
            "run a second `inflight bench serve` beside the first",
        ),
    )
)
