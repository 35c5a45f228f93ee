"""Names that vLLM has and this engine has not: what changes nothing is taken, the rest refused with what to do instead.

Tables, and the few lines that read them. docs/from-vllm.md tells the same in the same words, which tests hold it to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ForeignName:
    """What is said instead where a value would change something. What is not set (None, False, 0, empty) mostly does
    not."""

    instead: str
    harmless: tuple[Any, ...] = ()  # other values that change nothing
    is_needless: bool = False  # no value does
    off_matters: bool = False  # False and 0 do

    def takes(self, value: Any) -> bool:
        if self.is_needless or value is None or any(value == known for known in self.harmless):
            return True
        return not self.off_matters and _is_unset(value)


def _is_unset(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | tuple | dict) and not value


def _needless(why: str) -> ForeignName:
    return ForeignName(why, is_needless=True)


_NO_CODE = "code in a model folder is never run"
_TEXT_ONLY = "only text is read"
_NO_LORA = "there are no adapters yet: merge it into a checkpoint"
_NO_SPECULATION = "there is no speculation yet"
_ONE_MACHINE = "the ranks of an engine are processes of one machine; replicas with ray_address are on many"
_NO_EXPERTS = "there are no models with experts yet"
_NO_PLUGINS = "there are no plug-ins that read it"

# ---- of LLM ----

OTHER_OPTION_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "scheduling_policy": "policy",
}

# Values of options under names of vLLM, or of older versions of it.
OTHER_VALUES: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "policy": {"fcfs": "continuous"},
    "max_model_len": {-1: None, "auto": None},
}

LLM_OPTIONS: dict[str, ForeignName] = {
    # the model
    "trust_remote_code": _needless(f"{_NO_CODE}; checkpoints that do not need it load"),
    "code_revision": _needless(_NO_CODE),
    "tokenizer_mode": ForeignName("tokenizers are read from tokenizer.json", ("auto", "fast", "hf")),
    "tokenizer_revision": ForeignName("give a folder with that revision as tokenizer"),
    "hf_token": ForeignName("set HF_TOKEN"),
    "hf_overrides": ForeignName("give the whole configuration as hf_config"),
    "hf_config_path": ForeignName("give the configuration as hf_config"),
    "rope_scaling": ForeignName("change it in the configuration, and give that as hf_config"),
    "rope_theta": ForeignName("change it in the configuration, and give that as hf_config"),
    "config_format": ForeignName("configurations are read from config.json", ("auto", "hf")),
    "ignore_patterns": _needless("only what is needed is downloaded"),
    "model_loader_extra_config": ForeignName("weights are read from safetensors files"),
    "max_parallel_loading_workers": _needless("weights are read as they come"),
    "quantization": ForeignName("weights are float32, bfloat16 or float16 so far: give such a checkpoint"),
    "model_impl": ForeignName("there is one implementation of each model", ("auto", "vllm")),
    "task": ForeignName(
        "a model does what its head was trained for",
        ("auto", "generate", "embed", "embedding", "classify", "score"),
    ),
    "runner": ForeignName("a model does what its head was trained for", ("auto", "generate", "pooling")),
    "convert": ForeignName(
        "a model does what its head was trained for", ("auto", "none", "embed", "classify")
    ),
    "pooler_config": ForeignName(
        "the checkpoint says how texts are pooled; embed takes dimensions and normalize"
    ),
    "override_pooler_config": ForeignName(
        "the checkpoint says how texts are pooled; embed takes dimensions and normalize"
    ),
    "generation_config": ForeignName("give SamplingParams of your own", ("auto",)),
    "override_generation_config": ForeignName("give SamplingParams of your own"),
    "served_model_name": _needless("nothing here has the name in it"),
    "disable_sliding_window": ForeignName("give a smaller max_model_len"),
    # memory
    "swap_space": _needless("what has to make room is computed again"),
    "cpu_offload_gb": ForeignName("all weights are on the device; share them out with tensor_parallel_size"),
    "kv_cache_dtype": ForeignName("keys and values have the dtype of the weights", ("auto",)),
    "calculate_kv_scales": ForeignName("keys and values have the dtype of the weights"),
    "prefix_caching_hash_algo": _needless("there is one"),
    "enable_sleep_mode": _needless("sleep can always be called"),
    "kv_transfer_config": ForeignName("KV stays in the engine that computed it"),
    "kv_events_config": ForeignName("use replicas with routing prefix_aware, which listens to them"),
    # steps
    "enable_chunked_prefill": ForeignName(
        "long prompts are always computed in chunks: max_num_batched_tokens is how large one may be",
        (True,),
        off_matters=True,
    ),
    "max_num_partial_prefills": ForeignName("chunks are shared out by the policy", (1,)),
    "max_long_partial_prefills": ForeignName("chunks are shared out by the policy", (1,)),
    "long_prefill_token_threshold": ForeignName("use target_step_ms"),
    "num_scheduler_steps": ForeignName("use pipeline_depth", (1,)),
    "preemption_mode": ForeignName("what has to make room is computed again", ("recompute",)),
    "scheduler_cls": ForeignName("give a policy: a name, module:Class, or a class"),
    "async_scheduling": _needless("pipeline_depth says how many steps are in flight"),
    "speculative_config": ForeignName(_NO_SPECULATION),
    "speculative_model": ForeignName(_NO_SPECULATION),
    "num_speculative_tokens": ForeignName(_NO_SPECULATION),
    "compilation_config": _needless("no model is compiled whole; enforce_eager leaves out the graphs"),
    "max_seq_len_to_capture": _needless("graphs are captured by the size of a step, not by length"),
    "disable_cascade_attn": _needless("shared prefixes are attended to once where that pays"),
    "attention_backend": ForeignName("kernels are chosen by the device"),
    "disable_async_output_proc": _needless("there is no such switch"),
    "use_v2_block_manager": _needless("there is one"),
    "logits_processors": ForeignName("use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    "logprobs_mode": ForeignName("logprobs are those of the model", ("raw_logprobs",)),
    "max_logprobs": _needless("up to 100 may be asked for"),
    "structured_outputs_config": _needless("there is one backend"),
    "guided_decoding_backend": _needless("there is one backend"),
    # several devices
    "data_parallel_size": ForeignName("use replicas", (1,)),
    "decode_context_parallel_size": ForeignName("use tensor_parallel_size", (1,)),
    "enable_expert_parallel": ForeignName(_NO_EXPERTS),
    "distributed_executor_backend": ForeignName(_ONE_MACHINE, ("mp", "uni")),
    "nnodes": ForeignName(_ONE_MACHINE, (1,)),
    "disable_custom_all_reduce": _needless("there is no such switch"),
    "worker_cls": ForeignName("there are no workers to replace", ("auto",)),
    "worker_extension_cls": ForeignName("there are no workers to extend"),
    "ray_workers_use_nsight": ForeignName(_ONE_MACHINE),
    # adapters, pictures, and what is left
    "enable_lora": ForeignName(_NO_LORA),
    "max_loras": _needless("of adapters, which there are none of"),
    "max_lora_rank": _needless("of adapters, which there are none of"),
    "max_cpu_loras": _needless("of adapters, which there are none of"),
    "lora_dtype": _needless("of adapters, which there are none of"),
    "fully_sharded_loras": _needless("of adapters, which there are none of"),
    "enable_prompt_adapter": ForeignName(_NO_LORA),
    "enable_prompt_embeds": ForeignName("give a text or token ids"),
    "allowed_local_media_path": ForeignName(_TEXT_ONLY),
    "allowed_media_domains": ForeignName(_TEXT_ONLY),
    "limit_mm_per_prompt": _needless(_TEXT_ONLY),
    "mm_processor_kwargs": ForeignName(_TEXT_ONLY),
    "mm_processor_cache_gb": _needless(_TEXT_ONLY),
    "disable_mm_preprocessor_cache": _needless(_TEXT_ONLY),
    "skip_mm_profiling": _needless(_TEXT_ONLY),
    "disable_log_stats": _needless("statistics cost nothing"),
    "stream_interval": ForeignName(
        "a reader that is slower than the engine gets several tokens at a time", (1,)
    ),
    "additional_config": ForeignName(_NO_PLUGINS),
}

# ---- of SamplingParams ----

SAMPLING_FIELDS: dict[str, ForeignName] = {
    "best_of": ForeignName("ask for n answers and choose by their logprobs", (1,)),
    "use_beam_search": ForeignName("use LLM.beam_search"),
    "length_penalty": ForeignName("use LLM.beam_search", (1,)),
    "early_stopping": ForeignName("use LLM.beam_search"),
    "spaces_between_special_tokens": _needless("text is what the tokenizer makes of tokens"),
    "truncate_prompt_tokens": ForeignName("cut the prompt before"),
    "output_kind": ForeignName(
        "give output_kind to AsyncEngine.generate, or read LLM's answers, which are final", ("cumulative",)
    ),
    "guided_decoding": ForeignName("use structured_outputs"),
    "logits_processors": ForeignName("use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    "extra_args": ForeignName(_NO_PLUGINS),
    "flat_logprobs": ForeignName("logprobs are a dict for each position"),
    "logprob_token_ids": ForeignName("ask for more logprobs"),
    "prompt_logprob_token_ids": ForeignName("ask for more prompt_logprobs"),
    "prompt_logprob_start": ForeignName("read those that are wanted of prompt_logprobs"),
    "thinking_token_budget": ForeignName("give max_reasoning_tokens to chat", (-1,), off_matters=True),
    "repetition_detection": ForeignName("use repetition_penalty or frequency_penalty"),
    "stream_interval": ForeignName(
        "a reader that is slower than the engine gets several tokens at a time", (1,)
    ),
    "skip_clone": _needless("the engine keeps a copy of its own"),
    "skip_reading_prefix_cache": ForeignName("give the prompt a cache_salt of its own"),
    "output_text_buffer_length": _needless("it follows from stop"),
    "routed_experts_prompt_start": ForeignName(_NO_EXPERTS),
    "trace_decode_token_ids": ForeignName("put them into the prompt, and ask for prompt_logprobs"),
}

# ---- arguments of LLM's methods ----

METHOD_ARGUMENTS: dict[str, ForeignName] = {
    "lora_request": ForeignName(_NO_LORA),
    "prompt_adapter_request": ForeignName(_NO_LORA),
    "guided_options_request": ForeignName("use SamplingParams(structured_outputs=...)"),
    "prompt_token_ids": ForeignName('give token ids as prompts, or {"prompt_token_ids": [...]}'),
    "tokenization_kwargs": ForeignName("give token ids"),
    "chat_template": ForeignName("templates come with the checkpoint"),
    "chat_template_content_format": _needless("templates get what they can read"),
    "mm_processor_kwargs": ForeignName(_TEXT_ONLY),
    "pooling_params": ForeignName("give dimensions, normalize or scale"),
    "pooling_task": ForeignName("use embed, classify or score"),
    "concurrency_limit": _needless("as many run at once as fit"),
}

# ---- methods of LLM ----

LLM_METHODS = {
    "collective_rpc": "there are no workers that run code of callers; observe sees every step, and stats what there is",
    "apply_model": "the model is no torch module; look at models/decoder.py",
    "encode": "use embed, classify or score",
    "reward": "use classify, which returns what a head with labels does",
    "set_tokenizer": "give the option tokenizer",
    "start_profile": "observe tells what every step took; benchmarks/step_profile.py profiles one",
    "stop_profile": "observe tells what every step took; benchmarks/step_profile.py profiles one",
    "llm_engine": "LLM is the engine: stats, observe and get_metrics tell what it does",
    "model_config": "use max_model_len, vocab_size and get_tokenizer",
    "init_weight_transfer_engine": "load another LLM",
    "update_weights": "load another LLM",
    "enqueue": "use AsyncEngine, which takes requests while others run",
    "wait_for_completion": "use AsyncEngine, which takes requests while others run",
}


@dataclass(frozen=True, slots=True)
class ForeignRefusal:
    """A name whose value would change something, and what to say about it."""

    name: str
    message: str


def without_needless(
    given: Mapping[str, Any], table: Mapping[str, ForeignName]
) -> tuple[dict[str, Any], ForeignRefusal | None]:
    """What is given, less names in the table whose values change nothing; and the first of them whose value does."""
    kept = {}
    for name, value in given.items():
        known = table.get(name)
        if known is None:
            kept[name] = value
        elif not known.takes(value):
            message = f"{name} is {value!r:.100}, which is not supported here: {known.instead}"
            return kept, ForeignRefusal(name, message)
    return kept, None


def refusal_of(given: Mapping[str, Any]) -> ForeignRefusal | None:
    """Why these arguments of a method cannot be taken, or None if they change nothing."""
    kept, refusal = without_needless(given, METHOD_ARGUMENTS)
    if refusal is None and kept:
        return ForeignRefusal(min(kept), f"unknown argument {', '.join(kept)}")
    return refusal
