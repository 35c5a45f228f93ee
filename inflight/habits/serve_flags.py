"""Flags of `vllm serve` that are no flags here, or not with every value.

Those that are not in this table have the same name, or are not known to anyone. docs/from-vllm.md is the same for
people, and tests/habits/test_flags.py holds the two together.
"""

from __future__ import annotations

from inflight.habits.habit import ANY, Habit, Habits

_TAKEN = {ANY: ""}  # whatever it says, nothing changes
_ON = {"true": ""}  # what is always on
_OFF = {"false": "", "none": "", "null": "", "{}": "", "[]": ""}  # what is always off
_ZERO = {"0": "", "0.0": ""} | _OFF
_ONE = {"1": ""} | _OFF
_AUTO = {"auto": "", "none": ""}

_TEXT_ONLY = "models read and write text only, no images, audio or video yet"
_NO_LORA = "LoRA adapters are not supported yet: serve a checkpoint that they are merged into"
_NO_DRAFTS = "speculative decoding is not supported yet: leave it out"
_NO_EXPERTS = "models with experts are not supported yet"
_ONE_MACHINE = (
    "the ranks of an engine are processes of one machine; --replicas with --ray-address are on many"
)
_IN_CHECKPOINT = "the checkpoint's own files say that: change it there, or in Python with hf_config"
_NO_TRANSFER = "KV memory stays with its engine: it is neither sent to others nor kept elsewhere"
_NO_CODE = "code that comes from elsewhere is not loaded into the server"

SERVE_HABITS = Habits(
    (
        # ---- the same under another name ----
        Habit("--kv-cache-memory-bytes BYTES", {ANY: "--kv-cache-memory {size}"}),
        Habit("--num-gpu-blocks-override N", {ANY: "--num-blocks {}"}),
        Habit("--data-parallel-size N, -dp N", {"1": "", ANY: "--replicas {}"}),
        Habit("--api-server-count N, -asc N", {ANY: "--api-workers {}"}),
        Habit("--disable-frontend-multiprocessing", {"true": "--in-process", "false": "--no-in-process"}),
        Habit(
            "--uvicorn-log-level LEVEL",
            {"trace": "--log-level debug", "critical": "--log-level error", ANY: "--log-level {}"},
        ),
        Habit("--enable-log-requests", {"true": "--log-requests", "false": "--no-log-requests"}),
        Habit(
            "--disable-log-requests, --disable-uvicorn-access-log",
            {"true": "--no-log-requests", "false": "--log-requests"},
        ),
        Habit("--async-scheduling", {"true": "--pipeline-depth 2", "false": "--pipeline-depth 1"}),
        Habit(
            "--scheduling-policy NAME",
            {"fcfs": "--policy continuous", "priority": "--policy priority"},
            "fcfs and priority are known, and --policy has more",
        ),
        # ---- the same name, with values that are written otherwise ----
        Habit("--dtype TYPE", {"half": "--dtype float16", "float": "--dtype float32", ANY: "--dtype {}"}),
        Habit("--max-model-len N", {"auto": "", "-1": "", ANY: "--max-model-len {size}"}),
        Habit("--max-num-batched-tokens N", {ANY: "--max-num-batched-tokens {size}"}),
        Habit(
            "--tool-call-parser NAME",
            {
                "openai": "--tool-call-parser harmony",
                "qwen3_xml": "--tool-call-parser qwen3_coder",
                "llama4_pythonic": "--tool-call-parser pythonic",
                ANY: "--tool-call-parser {}",
            },
        ),
        Habit(
            "--reasoning-parser NAME",
            {
                "deepseek_r1": "--reasoning-parser think",
                "qwen3": "--reasoning-parser think",
                "glm45": "--reasoning-parser think",
                "openai_gptoss": "--reasoning-parser harmony",
                ANY: "--reasoning-parser {}",
            },
        ),
        # ---- taken, because nothing changes ----
        Habit(
            "--trust-remote-code",
            _TAKEN,
            note="code in a model folder is never run; checkpoints of the known families load without it",
        ),
        Habit(
            "--enable-chunked-prefill",
            _ON,
            "prompts are always computed in chunks: --max-num-batched-tokens N makes them as long as you like",
        ),
        Habit(
            "--enable-auto-tool-choice, --exclude-tools-when-tool-choice-none, "
            "--enable-prompt-tokens-details, --enable-request-id-headers, --log-error-stack, --language-model-only",
            _ON | _OFF,
        ),
        Habit(
            "--disable-log-stats, --aggregate-engine-logging, --use-tqdm-on-load, "
            "--disable-custom-all-reduce, --disable-async-output-proc, --use-v2-block-manager, "
            "--disable-cascade-attn, --multi-step-stream-outputs, --disable-hybrid-kv-cache-manager, "
            "--enable-server-load-tracking, --fail-on-environ-validation",
            _TAKEN,
        ),
        Habit(
            "--swap-space GIB, --max-parallel-loading-workers N, --max-seq-len-to-capture N, "
            "--cuda-graph-sizes N..., --cudagraph-capture-sizes N..., --max-cudagraph-capture-size N, "
            "--num-scheduler-steps N, --tokenizer-pool-size N, --tokenizer-pool-type NAME, "
            "--ignore-patterns TEXT, --pt-load-map-location DEVICE, --safetensors-load-strategy NAME, "
            "--code-revision NAME, --attention-backend NAME, --performance-mode NAME, "
            "--optimization-level N, -O N, --prefix-caching-hash-algo NAME",
            _TAKEN,
        ),
        Habit("--max-log-len N", _TAKEN, note="prompts and answers are never logged"),
        Habit(
            "--show-hidden-metrics-for-version VERSION", _TAKEN, note="--metrics-compat vllm has vLLM's names"
        ),
        Habit("--enable-sleep-mode", _TAKEN, note="POST /sleep and /wake_up need no flag but --admin-key"),
        # ---- taken with the values that change nothing, else refused ----
        Habit(
            "--quantization METHOD, -q METHOD",
            _OFF,
            "quantized weights are not supported yet: serve a bf16, fp16 or fp32 checkpoint",
        ),
        Habit("--kv-cache-dtype TYPE", _AUTO, "keys and values are held as the model computes them: auto"),
        Habit("--calculate-kv-scales", _OFF, "keys and values are not quantized"),
        Habit(
            "--cpu-offload-gb GIB, --kv-offloading-size GIB",
            _ZERO,
            "weights and KV memory are in one place: on the GPU, or with --device cpu in the host's memory",
        ),
        Habit(
            "--kv-offloading-backend NAME, --kv-transfer-config JSON, --kv-events-config JSON, "
            "--ec-transfer-config JSON",
            _OFF,
            _NO_TRANSFER,
        ),
        Habit(
            "--enable-lora, --enable-lora-bias, --fully-sharded-loras, --lora-modules NAME, "
            "--max-loras N, --max-lora-rank N, --max-cpu-loras N, --lora-dtype TYPE, "
            "--lora-extra-vocab-size N, --default-mm-loras JSON",
            _OFF,
            _NO_LORA,
        ),
        Habit(
            "--enable-prompt-adapter, --max-prompt-adapters N, --max-prompt-adapter-token N",
            _OFF,
            "prompt adapters are not supported",
        ),
        Habit("--speculative-config JSON, --speculative-model NAME", _OFF, _NO_DRAFTS),
        Habit("--num-speculative-tokens N, --num-lookahead-slots N", _ZERO, _NO_DRAFTS),
        Habit(
            "--enable-expert-parallel, --enable-eplb, --eplb-config JSON, --all2all-backend NAME, "
            "--expert-placement-strategy NAME",
            _OFF,
            _NO_EXPERTS,
        ),
        Habit(
            "--limit-mm-per-prompt JSON, --mm-processor-kwargs JSON, --media-io-kwargs JSON, "
            "--allowed-local-media-path PATH, --allowed-media-domains NAME, --enable-mm-embeds, "
            "--interleave-mm-strings, --skip-mm-profiling, --disable-mm-preprocessor-cache, "
            "--mm-processor-cache-gb GIB, --mm-processor-cache-type NAME, --mm-encoder-tp-mode NAME, "
            "--mm-encoder-attn-backend NAME, --video-pruning-rate N",
            _OFF,
            _TEXT_ONLY,
        ),
        Habit("--enable-prompt-embeds", _OFF, "prompts are texts or token ids, not embeddings"),
        Habit("--distributed-executor-backend NAME", {"mp": "", "uni": "", "none": ""}, _ONE_MACHINE),
        Habit(
            "--decode-context-parallel-size N, -dcp N, --prefill-context-parallel-size N, -pcp N, --nnodes N",
            _ONE,
            _ONE_MACHINE,
        ),
        Habit(
            "--headless, --node-rank N, -r N, --master-addr HOST, --master-port PORT, "
            "--data-parallel-rank N, --data-parallel-start-rank N, --data-parallel-size-local N, "
            "--data-parallel-address HOST, --data-parallel-rpc-port PORT, --data-parallel-backend NAME, "
            "--data-parallel-hybrid-lb, --data-parallel-external-lb, --ray-workers-use-nsight",
            _ZERO,
            _ONE_MACHINE,
        ),
        Habit("--enable-dbo, --ubatch-size N", _ZERO, "a step is not split in two"),
        Habit(
            "--task NAME, --runner NAME",
            {"auto": "", "generate": ""},
            "what a model can do its own files say: leave it out",
        ),
        Habit("--convert NAME", _AUTO, "what a model can do its own files say: leave it out"),
        Habit("--tokenizer-mode NAME", {"auto": "", "hf": ""}, "tokenizers are read from tokenizer.json"),
        Habit(
            "--config-format NAME", {"auto": "", "hf": ""}, "models are read in the format of Hugging Face"
        ),
        Habit(
            "--model-impl NAME",
            {"auto": "", "vllm": ""},
            "models run on this engine's own code: the README lists the families",
        ),
        Habit(
            "--skip-tokenizer-init",
            _OFF,
            "a server needs a tokenizer; in Python there is skip_tokenizer_init",
        ),
        Habit(
            "--tokenizer-revision NAME",
            _OFF,
            "--revision is the tokenizer's as well; --tokenizer FOLDER takes another",
        ),
        Habit("--hf-token TOKEN", _OFF, "give it in the variable HF_TOKEN, which `ps` does not show"),
        Habit(
            "--hf-config-path PATH, --hf-overrides JSON, --rope-scaling JSON, --rope-theta N, "
            "--override-attention-dtype TYPE, --pooler-config JSON, --override-pooler-config JSON",
            _OFF,
            _IN_CHECKPOINT,
        ),
        Habit(
            "--disable-sliding-window",
            _OFF,
            "a model's windows are part of it: --max-model-len makes the context shorter",
        ),
        Habit(
            "--model-loader-extra-config JSON, --weight-transfer-config JSON, --additional-config JSON",
            _OFF,
            "there is nothing here that it could configure",
        ),
        Habit(
            "--generation-config PATH",
            {"auto": ""},
            "what a request does not say is as the checkpoint's makers recommend: say it in the request",
        ),
        Habit(
            "--override-generation-config JSON, --default-chat-template-kwargs JSON",
            _OFF,
            "the server has no defaults of its own: give it with each request",
        ),
        Habit(
            "--compilation-config JSON, -cc JSON",
            _ZERO,
            "no model is compiled as a whole: --enforce-eager switches the captured graphs off",
        ),
        Habit(
            "--guided-decoding-backend NAME",
            {"auto": "", "guidance": ""},
            "llguidance compiles all constraints: leave it out",
        ),
        Habit(
            "--structured-outputs-config JSON, --reasoning-config JSON",
            _OFF,
            "there is nothing to configure: leave it out, and see --reasoning-parser",
        ),
        Habit(
            "--logits-processors NAME, --logits-processor-pattern TEXT, --middleware NAME, "
            "--tool-parser-plugin FILE, --reasoning-parser-plugin FILE, --worker-extension-cls NAME",
            _OFF,
            _NO_CODE,
        ),
        Habit("--worker-cls NAME", _AUTO, _NO_CODE),
        Habit("--scheduler-cls NAME", _OFF, "--policy module:Class takes a policy of your own"),
        Habit(
            "--max-num-partial-prefills N, --max-long-partial-prefills N",
            _ONE,
            "prompts share a step's tokens by the policy: --target-step-ms bounds how long readers wait",
        ),
        Habit(
            "--long-prefill-token-threshold N, --scheduler-delay-factor N",
            _ZERO,
            "--target-step-ms bounds how long a prompt holds up others",
        ),
        Habit(
            "--preemption-mode NAME",
            {"recompute": "", "none": ""},
            "a preempted request is computed again: recompute",
        ),
        Habit(
            "--stream-interval N",
            _ONE,
            "every step's token is sent at once; a slow reader gets several per event",
        ),
        Habit(
            "--logprobs-mode NAME", {"raw_logprobs": ""}, "logprobs are those of the raw logits: raw_logprobs"
        ),
        Habit(
            "--kv-cache-metrics, --cudagraph-metrics, --enable-mfu-metrics, "
            "--enable-layerwise-nvtx-tracing, --collect-detailed-traces NAME, --profiler-config JSON",
            _OFF,
            "/metrics, /v1/requests/{id} and --otlp-traces-endpoint are what there is to look at",
        ),
        Habit("--chat-template-content-format NAME", _AUTO, "a template gets text: auto"),
        Habit(
            "--trust-request-chat-template",
            _OFF,
            "templates come with the checkpoint or --chat-template, never with a request",
        ),
        Habit("--response-role NAME", {"assistant": ""}, "answers are the assistant's"),
        Habit("--return-tokens-as-token-ids", _OFF, "a request can ask for return_token_ids"),
        Habit(
            "--enable-force-include-usage",
            _OFF,
            "streams tell it to those who ask: stream_options.include_usage",
        ),
        Habit(
            "--enable-tokenizer-info-endpoint",
            _OFF,
            "/tokenize and /detokenize are there, the tokenizer's configuration is not shown",
        ),
        Habit("--tool-server HOST", _OFF, "tools are run by the client, never by the server"),
        Habit("--tokens-only, --grpc", _OFF, "the server speaks HTTP with all its routes"),
        Habit("--log-config-file FILE", _OFF, "--log-level and --log-format are what there is to choose"),
        Habit("--enable-log-outputs, --enable-log-deltas", _OFF, "prompts and answers are never logged"),
        Habit("--uds PATH", _OFF, "the server listens on an address: --host, --port"),
        Habit(
            "--enable-ssl-refresh, --ssl-ciphers TEXT",
            _OFF,
            "certificates are read at start, with the system's ciphers: a proxy in front can do more",
        ),
        Habit(
            "--disable-fastapi-docs, --enable-offline-docs",
            _OFF,
            "/docs needs no network, and cannot be switched off; where keys are asked for, it needs one",
        ),
        Habit(
            "--h11-max-incomplete-event-size BYTES, --h11-max-header-count N",
            _OFF,
            "--max-header-size bounds the request line and headers",
        ),
        Habit("--fingerprint-mode NAME, --fingerprint-value TEXT", _OFF, "there is nothing to choose"),
    )
)
