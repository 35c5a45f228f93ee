"""Options of vLLM's engine that differ here: flags of `vllm serve` and arguments of `LLM`.

An option that is missing from this table has the same name and values here, or is unknown. docs/from-vllm.md documents
the same table, and tests/vllm_compat checks that both agree.
"""

from __future__ import annotations

from inflight.vllm_rules import ANY, IGNORED, CompatRule

_ONE_MACHINE = (
    "an engine's ranks run on one machine; $replicas with $ray_address spreads replicas over several"
)
_OWN_FILES = "the checkpoint determines what a model can do: leave it out"

ENGINE_RULES = (
    # ---- different name ----
    CompatRule("kv_cache_memory_bytes BYTES", {ANY: "--kv-cache-memory {size}"}),
    CompatRule("num_gpu_blocks_override N", {ANY: "--num-blocks {}"}),
    CompatRule("async_scheduling", {"true": "--pipeline-depth 2", "false": "--pipeline-depth 1"}),
    CompatRule(
        "scheduling_policy NAME",
        {"fcfs": "--policy continuous", "priority": "--policy priority"},
        "fcfs and priority are supported, and $policy offers more",
    ),
    # ---- same name, different values ----
    CompatRule("policy NAME", {"fcfs": "--policy continuous", ANY: "--policy {}"}),
    CompatRule(
        "dtype TYPE",
        {
            "half": "--dtype float16",
            "fp16": "--dtype float16",
            "bf16": "--dtype bfloat16",
            "float": "--dtype float32",
            "fp32": "--dtype float32",
            ANY: "--dtype {}",
        },
    ),
    CompatRule("kv_cache_memory BYTES", {ANY: "--kv-cache-memory {size}"}),
    CompatRule("max_model_len N", {"auto": "", "-1": "", ANY: "--max-model-len {size}"}),
    CompatRule("max_num_batched_tokens N", {ANY: "--max-num-batched-tokens {size}"}),
    CompatRule(
        "tool_call_parser NAME",
        {
            "openai": "--tool-call-parser harmony",
            "qwen3_xml": "--tool-call-parser qwen3_coder",
            "llama4_pythonic": "--tool-call-parser pythonic",
            ANY: "--tool-call-parser {}",
        },
    ),
    CompatRule(
        "reasoning_parser NAME",
        {
            "deepseek_r1": "--reasoning-parser think",
            "qwen3": "--reasoning-parser think",
            "glm45": "--reasoning-parser think",
            "openai_gptoss": "--reasoning-parser harmony",
            ANY: "--reasoning-parser {}",
        },
    ),
    # ---- accepted without effect ----
    CompatRule(
        "trust_remote_code",
        IGNORED,
        note="code from a model folder is never executed; checkpoints of the supported families load without it",
    ),
    CompatRule("code_revision NAME", IGNORED, "code from a model folder is never executed"),
    CompatRule(
        "enable_sleep_mode",
        IGNORED,
        note="sleep and wake_up are always available; over HTTP they need $admin_key",
    ),
    CompatRule(
        "show_hidden_metrics_for_version VERSION",
        IGNORED,
        note="$metrics_compat vllm exports vLLM's metric names",
    ),
    CompatRule(
        "compilation_config JSON, -cc JSON, optimization_level N, -O N, performance_mode NAME",
        IGNORED,
        "models are not compiled as a whole; $enforce_eager disables CUDA graphs",
    ),
    CompatRule(
        "max_seq_len_to_capture N, max_context_len_to_capture N, cuda_graph_sizes N..., cudagraph_capture_sizes N..., "
        "max_cudagraph_capture_size N",
        IGNORED,
        "the sizes of captured graphs are chosen automatically",
    ),
    CompatRule(
        "guided_decoding_backend NAME, structured_outputs_config JSON",
        IGNORED,
        "llguidance handles all constraints",
    ),
    CompatRule(
        "num_scheduler_steps N, multi_step_stream_outputs",
        IGNORED,
        "$pipeline_depth sets the number of steps in flight",
    ),
    CompatRule("enable_reasoning", IGNORED, "$reasoning_parser alone enables it"),
    CompatRule("swap_space GIB", IGNORED, "preempted requests are recomputed"),
    CompatRule(
        "max_parallel_loading_workers N, ignore_patterns TEXT, pt_load_map_location DEVICE, "
        "safetensors_load_strategy NAME",
        IGNORED,
        "each rank reads the weights it needs directly from the files",
    ),
    CompatRule("attention_backend NAME, disable_cascade_attn", IGNORED, "kernels are chosen automatically"),
    CompatRule("disable_log_stats, aggregate_engine_logging", IGNORED, "statistics are always collected"),
    CompatRule(
        "disable_custom_all_reduce, disable_async_output_proc, use_v2_block_manager, "
        "disable_hybrid_kv_cache_manager, fail_on_environ_validation, tokenizer_pool_size N, "
        "tokenizer_pool_type NAME, prefix_caching_hash_algo NAME",
        IGNORED,
        "there is only one implementation",
    ),
    CompatRule(
        "max_loras N, max_lora_rank N, max_cpu_loras N, lora_dtype TYPE, lora_extra_vocab_size N, "
        "fully_sharded_loras, enable_lora_bias",
        IGNORED,
        "it configures LoRA adapters, which are not supported yet",
    ),
    CompatRule(
        "limit_mm_per_prompt JSON, mm_processor_cache_gb GIB, mm_processor_cache_type NAME, "
        "mm_encoder_tp_mode NAME, mm_encoder_attn_backend NAME, skip_mm_profiling, "
        "disable_mm_preprocessor_cache, language_model_only",
        IGNORED,
        "it configures images, audio and video, which are not supported yet",
    ),
    # ---- accepted with values that have no effect, otherwise rejected ----
    CompatRule(
        "enable_chunked_prefill",
        {"true": ""},
        "chunked prefill is always on; $max_num_batched_tokens bounds the size of a chunk",
        off_matters=True,
    ),
    CompatRule(
        "quantization_param_path FILE", {}, "scales are read from the checkpoint, and computed if it has none"
    ),
    CompatRule(
        "kv_cache_dtype TYPE",
        {
            "auto": "",
            "fp8": "--kv-cache-dtype fp8",
            "fp8_e4m3": "--kv-cache-dtype fp8",
            "int8": "--kv-cache-dtype int8",
        },
        "the supported types are auto, fp8 and int8",
    ),
    CompatRule(
        "calculate_kv_scales",
        {"true": ""},
        "scales of a quantized KV cache are computed for every token",
        off_matters=True,
    ),
    CompatRule(
        "cpu_offload_gb GIB, kv_offloading_size GIB",
        {},
        "offloading is not supported: weights and KV cache are in GPU memory, or in host memory with $device cpu",
    ),
    CompatRule(
        "kv_offloading_backend NAME, kv_transfer_config JSON, kv_events_config JSON, ec_transfer_config JSON",
        {},
        "the KV cache stays in its engine: it is neither transferred nor offloaded",
    ),
    CompatRule(
        "enable_lora, lora_modules NAME..., default_mm_loras JSON, qlora_adapter_name_or_path PATH",
        {},
        "LoRA adapters are not supported yet: use a checkpoint with the adapter merged into it",
    ),
    CompatRule(
        "enable_prompt_adapter, prompt_adapters NAME..., max_prompt_adapters N, max_prompt_adapter_token N",
        {},
        "prompt adapters are not supported",
    ),
    CompatRule(
        "speculative_model NAME, num_speculative_tokens N, num_lookahead_slots N, "
        "speculative_max_model_len N, speculative_draft_tensor_parallel_size N, "
        "speculative_disable_by_batch_size N, spec_decoding_acceptance_method NAME, "
        "ngram_prompt_lookup_max N, ngram_prompt_lookup_min N",
        {},
        "use $speculative_config, with the methods mtp, eagle3, draft_model, suffix and ngram",
    ),
    CompatRule(
        "enable_eplb, eplb_config JSON, all2all_backend NAME, expert_placement_strategy NAME",
        {},
        "experts stay where they are: each rank holds an equal, contiguous share",
    ),
    CompatRule(
        "mm_processor_kwargs JSON, media_io_kwargs JSON, allowed_local_media_path PATH, "
        "allowed_media_domains NAME..., enable_mm_embeds, interleave_mm_strings, video_pruning_rate N",
        {},
        "images, audio and video are not supported yet",
    ),
    CompatRule("enable_prompt_embeds", {}, "prompts must be text or token ids, not embeddings"),
    CompatRule("distributed_executor_backend NAME", {"mp": "", "uni": ""}, _ONE_MACHINE),
    CompatRule(
        "decode_context_parallel_size N, -dcp N, prefill_context_parallel_size N, -pcp N, nnodes N",
        {"1": ""},
        _ONE_MACHINE,
    ),
    CompatRule(
        "headless, node_rank N, -r N, master_addr HOST, master_port PORT, data_parallel_rank N, "
        "data_parallel_start_rank N, data_parallel_size_local N, data_parallel_address HOST, "
        "data_parallel_rpc_port PORT, data_parallel_backend NAME, data_parallel_hybrid_lb, "
        "data_parallel_external_lb, ray_workers_use_nsight, worker_use_ray, engine_use_ray",
        {},
        _ONE_MACHINE,
    ),
    CompatRule("enable_dbo, ubatch_size N", {}, "steps are not split into micro-batches"),
    CompatRule(
        "task NAME",
        dict.fromkeys(("auto", "generate", "embed", "embedding", "classify", "score"), ""),
        _OWN_FILES,
    ),
    CompatRule("runner NAME", {"auto": "", "generate": "", "pooling": ""}, _OWN_FILES),
    CompatRule("convert NAME", {"auto": "", "embed": "", "classify": ""}, _OWN_FILES),
    CompatRule(
        "tokenizer_mode NAME", {"auto": "", "hf": "", "fast": ""}, "tokenizers are loaded from tokenizer.json"
    ),
    CompatRule(
        "tokenizer_revision NAME",
        {},
        "$revision also applies to the tokenizer; $tokenizer can name a folder with another one",
    ),
    CompatRule("config_format NAME", {"auto": "", "hf": ""}, "only the Hugging Face format is supported"),
    CompatRule(
        "model_impl NAME",
        {"auto": "", "vllm": ""},
        "inflight has its own model implementations; docs/models.md lists the supported families",
    ),
    CompatRule("hf_token TOKEN", {}, "use the environment variable HF_TOKEN, which `ps` does not show"),
    CompatRule(
        "hf_config_path PATH, hf_overrides JSON, rope_scaling JSON, rope_theta N, override_attention_dtype TYPE",
        {},
        "it is read from the checkpoint: change it there, or pass hf_config in Python",
    ),
    CompatRule(
        "pooler_config JSON, override_pooler_config JSON",
        {},
        "the checkpoint determines the pooling; requests can set dimensions and normalize",
    ),
    CompatRule(
        "disable_sliding_window",
        {},
        "sliding windows are part of the model; $max_model_len shortens the context",
    ),
    CompatRule(
        "model_loader_extra_config JSON, weight_transfer_config JSON, additional_config JSON, "
        "reasoning_config JSON, override_neuron_config JSON",
        {},
        "there is no equivalent",
    ),
    CompatRule(
        "generation_config PATH, override_generation_config JSON",
        {"auto": ""},
        "defaults come from the checkpoint's generation_config.json: override them in the request",
    ),
    CompatRule(
        "logits_processors NAME..., logits_processor_pattern TEXT, reasoning_parser_plugin FILE, "
        "worker_cls NAME, worker_extension_cls NAME",
        {"auto": ""},
        "third-party code is not loaded: use logit_bias, bad_words or structured_outputs in requests",
    ),
    CompatRule("scheduler_cls NAME", {}, "$policy module:Class loads a custom policy"),
    CompatRule(
        "max_num_partial_prefills N, max_long_partial_prefills N",
        {"1": ""},
        "the policy divides a step's tokens among prompts; $target_step_ms bounds how long a step takes",
    ),
    CompatRule(
        "long_prefill_token_threshold N, scheduler_delay_factor N",
        {},
        "$target_step_ms bounds how long a prompt can delay other requests",
    ),
    CompatRule("preemption_mode NAME", {"recompute": ""}, "preempted requests are recomputed"),
    CompatRule(
        "stream_interval N",
        {"1": ""},
        "tokens are sent after every step; slow clients receive several at a time",
    ),
    CompatRule("logprobs_mode NAME", {"raw_logprobs": ""}, "logprobs are computed from the raw logits"),
    CompatRule(
        "kv_cache_metrics, cudagraph_metrics, enable_mfu_metrics, enable_layerwise_nvtx_tracing, "
        "collect_detailed_traces NAME..., profiler_config JSON",
        {},
        "use /metrics, /v1/requests/{id} or $otlp_traces_endpoint",
    ),
)
