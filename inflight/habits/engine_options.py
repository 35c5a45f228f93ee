"""Options of vLLM's engine that are none here, or not with every value: flags of `vllm serve`, and arguments of `LLM`.

Those that are not in this table have the same name, or are not known to anyone. docs/from-vllm.md is the same for
people, and tests/habits holds the two together.
"""

from __future__ import annotations

from inflight.habits.habit import ANY, TAKEN, Habit

_ONE_MACHINE = "the ranks of an engine are processes of one machine; $replicas with $ray_address are on many"
_OWN_FILES = "what a model can do its own files say: leave it out"

ENGINE_HABITS = (
    # ---- the same under another name ----
    Habit("kv_cache_memory_bytes BYTES", {ANY: "--kv-cache-memory {size}"}),
    Habit("num_gpu_blocks_override N", {ANY: "--num-blocks {}"}),
    Habit("async_scheduling", {"true": "--pipeline-depth 2", "false": "--pipeline-depth 1"}),
    Habit(
        "scheduling_policy NAME",
        {"fcfs": "--policy continuous", "priority": "--policy priority"},
        "fcfs and priority are known, and $policy has more",
    ),
    # ---- the same name, with values that are written otherwise ----
    Habit("policy NAME", {"fcfs": "--policy continuous", ANY: "--policy {}"}),
    Habit(
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
    Habit("kv_cache_memory BYTES", {ANY: "--kv-cache-memory {size}"}),
    Habit("max_model_len N", {"auto": "", "-1": "", ANY: "--max-model-len {size}"}),
    Habit("max_num_batched_tokens N", {ANY: "--max-num-batched-tokens {size}"}),
    Habit(
        "tool_call_parser NAME",
        {
            "openai": "--tool-call-parser harmony",
            "qwen3_xml": "--tool-call-parser qwen3_coder",
            "llama4_pythonic": "--tool-call-parser pythonic",
            ANY: "--tool-call-parser {}",
        },
    ),
    Habit(
        "reasoning_parser NAME",
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
        "trust_remote_code",
        TAKEN,
        note="code in a model folder is never run; checkpoints of the known families load without it",
    ),
    Habit("code_revision NAME", TAKEN, "code in a model folder is never run"),
    Habit(
        "enable_sleep_mode", TAKEN, note="sleep and wake_up can always be called; over HTTP with $admin_key"
    ),
    Habit("show_hidden_metrics_for_version VERSION", TAKEN, note="$metrics_compat vllm has vLLM's names"),
    Habit(
        "compilation_config JSON, -cc JSON, optimization_level N, -O N, performance_mode NAME",
        TAKEN,
        "no model is compiled as a whole: $enforce_eager switches the captured graphs off",
    ),
    Habit(
        "max_seq_len_to_capture N, max_context_len_to_capture N, cuda_graph_sizes N..., cudagraph_capture_sizes N..., "
        "max_cudagraph_capture_size N",
        TAKEN,
        "graphs are captured by the size of a step",
    ),
    Habit(
        "guided_decoding_backend NAME, structured_outputs_config JSON",
        TAKEN,
        "llguidance compiles all constraints",
    ),
    Habit("num_scheduler_steps N, multi_step_stream_outputs", TAKEN, "$pipeline_depth steps are in flight"),
    Habit("enable_reasoning", TAKEN, "$reasoning_parser is enough"),
    Habit("swap_space GIB", TAKEN, "what has to make room is computed again"),
    Habit(
        "max_parallel_loading_workers N, ignore_patterns TEXT, pt_load_map_location DEVICE, "
        "safetensors_load_strategy NAME",
        TAKEN,
        "what is needed of the weights is read as it comes",
    ),
    Habit(
        "attention_backend NAME, disable_cascade_attn", TAKEN, "kernels are chosen by the device and the step"
    ),
    Habit("disable_log_stats, aggregate_engine_logging", TAKEN, "statistics cost nothing"),
    Habit(
        "disable_custom_all_reduce, disable_async_output_proc, use_v2_block_manager, "
        "disable_hybrid_kv_cache_manager, fail_on_environ_validation, tokenizer_pool_size N, "
        "tokenizer_pool_type NAME, prefix_caching_hash_algo NAME",
        TAKEN,
        "there is one way, and no switch",
    ),
    Habit(
        "max_loras N, max_lora_rank N, max_cpu_loras N, lora_dtype TYPE, lora_extra_vocab_size N, "
        "fully_sharded_loras, enable_lora_bias",
        TAKEN,
        "of adapters, which there are none of",
    ),
    Habit(
        "limit_mm_per_prompt JSON, mm_processor_cache_gb GIB, mm_processor_cache_type NAME, "
        "mm_encoder_tp_mode NAME, mm_encoder_attn_backend NAME, skip_mm_profiling, "
        "disable_mm_preprocessor_cache, language_model_only",
        TAKEN,
        "of images, audio and video, which are not read",
    ),
    # ---- taken with the values that change nothing, else refused ----
    Habit(
        "enable_chunked_prefill",
        {"true": ""},
        "prompts are always computed in chunks: $max_num_batched_tokens makes them as long as you like",
        off_matters=True,
    ),
    Habit(
        "quantization METHOD, -q METHOD, quantization_param_path FILE",
        {},
        "quantized weights are not supported yet: give a bf16, fp16 or fp32 checkpoint",
    ),
    Habit(
        "kv_cache_dtype TYPE, calculate_kv_scales",
        {"auto": ""},
        "keys and values are held as the model computes them",
    ),
    Habit(
        "cpu_offload_gb GIB, kv_offloading_size GIB",
        {},
        "weights and KV memory are in one place: on the GPU, or with $device cpu in the host's memory",
    ),
    Habit(
        "kv_offloading_backend NAME, kv_transfer_config JSON, kv_events_config JSON, ec_transfer_config JSON",
        {},
        "KV memory stays with its engine: it is neither sent to others nor kept elsewhere",
    ),
    Habit(
        "enable_lora, lora_modules NAME, default_mm_loras JSON, qlora_adapter_name_or_path PATH",
        {},
        "LoRA adapters are not supported yet: give a checkpoint that they are merged into",
    ),
    Habit(
        "enable_prompt_adapter, prompt_adapters NAME, max_prompt_adapters N, max_prompt_adapter_token N",
        {},
        "prompt adapters are not supported",
    ),
    Habit(
        "speculative_config JSON, speculative_model NAME, num_speculative_tokens N, num_lookahead_slots N, "
        "speculative_max_model_len N, speculative_draft_tensor_parallel_size N, "
        "speculative_disable_by_batch_size N, spec_decoding_acceptance_method NAME, "
        "ngram_prompt_lookup_max N, ngram_prompt_lookup_min N",
        {},
        "speculative decoding is not supported yet: leave it out",
    ),
    Habit(
        "enable_expert_parallel, enable_eplb, eplb_config JSON, all2all_backend NAME, "
        "expert_placement_strategy NAME",
        {},
        "models with experts are not supported yet",
    ),
    Habit(
        "mm_processor_kwargs JSON, media_io_kwargs JSON, allowed_local_media_path PATH, "
        "allowed_media_domains NAME, enable_mm_embeds, interleave_mm_strings, video_pruning_rate N",
        {},
        "models read and write text only, no images, audio or video yet",
    ),
    Habit("enable_prompt_embeds", {}, "prompts are texts or token ids, not embeddings"),
    Habit("distributed_executor_backend NAME", {"mp": "", "uni": ""}, _ONE_MACHINE),
    Habit(
        "decode_context_parallel_size N, -dcp N, prefill_context_parallel_size N, -pcp N, nnodes N",
        {"1": ""},
        _ONE_MACHINE,
    ),
    Habit(
        "headless, node_rank N, -r N, master_addr HOST, master_port PORT, data_parallel_rank N, "
        "data_parallel_start_rank N, data_parallel_size_local N, data_parallel_address HOST, "
        "data_parallel_rpc_port PORT, data_parallel_backend NAME, data_parallel_hybrid_lb, "
        "data_parallel_external_lb, ray_workers_use_nsight, worker_use_ray, engine_use_ray",
        {},
        _ONE_MACHINE,
    ),
    Habit("enable_dbo, ubatch_size N", {}, "a step is not split in two"),
    Habit(
        "task NAME",
        dict.fromkeys(("auto", "generate", "embed", "embedding", "classify", "score"), ""),
        _OWN_FILES,
    ),
    Habit("runner NAME", {"auto": "", "generate": "", "pooling": ""}, _OWN_FILES),
    Habit("convert NAME", {"auto": "", "embed": "", "classify": ""}, _OWN_FILES),
    Habit(
        "tokenizer_mode NAME", {"auto": "", "hf": "", "fast": ""}, "tokenizers are read from tokenizer.json"
    ),
    Habit(
        "tokenizer_revision NAME",
        {},
        "$revision is the tokenizer's as well; $tokenizer may name a folder with another",
    ),
    Habit("config_format NAME", {"auto": "", "hf": ""}, "models are read in the format of Hugging Face"),
    Habit(
        "model_impl NAME",
        {"auto": "", "vllm": ""},
        "models run on this engine's own code: the README lists the families",
    ),
    Habit("hf_token TOKEN", {}, "give it in the variable HF_TOKEN, which `ps` does not show"),
    Habit(
        "hf_config_path PATH, hf_overrides JSON, rope_scaling JSON, rope_theta N, override_attention_dtype TYPE",
        {},
        "the checkpoint's own files say that: change it there, or give hf_config in Python",
    ),
    Habit(
        "pooler_config JSON, override_pooler_config JSON",
        {},
        "the checkpoint says how texts are pooled; dimensions and normalize come with a request",
    ),
    Habit(
        "disable_sliding_window",
        {},
        "a model's windows are part of it: $max_model_len makes the context shorter",
    ),
    Habit(
        "model_loader_extra_config JSON, weight_transfer_config JSON, additional_config JSON, "
        "reasoning_config JSON, override_neuron_config JSON",
        {},
        "there is nothing here that it could configure",
    ),
    Habit(
        "generation_config PATH, override_generation_config JSON",
        {"auto": ""},
        "what a request does not say is as the checkpoint's makers recommend: say it in the request",
    ),
    Habit(
        "logits_processors NAME, logits_processor_pattern TEXT, reasoning_parser_plugin FILE, "
        "worker_cls NAME, worker_extension_cls NAME",
        {"auto": ""},
        "code that comes from elsewhere is not loaded: requests have logit_bias, bad_words and structured_outputs",
    ),
    Habit("scheduler_cls NAME", {}, "$policy module:Class takes a policy of your own"),
    Habit(
        "max_num_partial_prefills N, max_long_partial_prefills N",
        {"1": ""},
        "prompts share a step's tokens by the policy: $target_step_ms bounds how long readers wait",
    ),
    Habit(
        "long_prefill_token_threshold N, scheduler_delay_factor N",
        {},
        "$target_step_ms bounds how long a prompt holds up others",
    ),
    Habit("preemption_mode NAME", {"recompute": ""}, "what has to make room is computed again"),
    Habit(
        "stream_interval N",
        {"1": ""},
        "every step's token is sent at once; a slow reader gets several together",
    ),
    Habit("logprobs_mode NAME", {"raw_logprobs": ""}, "logprobs are those of the raw logits"),
    Habit(
        "kv_cache_metrics, cudagraph_metrics, enable_mfu_metrics, enable_layerwise_nvtx_tracing, "
        "collect_detailed_traces NAME, profiler_config JSON",
        {},
        "/metrics, /v1/requests/{id} and $otlp_traces_endpoint are what there is to look at",
    ),
)
