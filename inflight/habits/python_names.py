"""Names in Python code for vLLM: arguments of `LLM` and its methods, fields of `SamplingParams`, and the methods.

docs/from-vllm.md is the same for people, and tests/habits/test_python.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.errors import InflightError
from inflight.habits.engine_options import ENGINE_HABITS
from inflight.habits.habit import MAX_SHOWN, TAKEN, Habit, Habits, as_text, plain_size

LLM_HABITS = Habits(
    (
        *ENGINE_HABITS,
        Habit("data_parallel_size N", {"1": ""}, "use replicas"),
        Habit("served_model_name NAME", TAKEN, "nothing here has the name in it"),
        Habit("max_logprobs N", TAKEN, "up to 100 may be asked for"),
    )
)

SAMPLING_HABITS = Habits(
    (
        Habit("best_of N", {"1": ""}, "ask for n answers and choose by their logprobs"),
        Habit("length_penalty N", {"1": "", "1.0": ""}, "use LLM.beam_search"),
        Habit("use_beam_search, early_stopping", {}, "use LLM.beam_search"),
        Habit("spaces_between_special_tokens", TAKEN, "text is what the tokenizer makes of tokens"),
        Habit("truncate_prompt_tokens N", {}, "cut the prompt before"),
        Habit(
            "output_kind KIND",
            {"cumulative": ""},
            "give output_kind to AsyncEngine.generate, or read LLM's answers, which are final",
        ),
        Habit("guided_decoding PARAMS", {}, "use structured_outputs"),
        Habit(
            "logits_processors LIST",
            {},
            "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
        ),
        Habit("extra_args DICT", {}, "there are no plug-ins that read it"),
        Habit("flat_logprobs", {}, "logprobs are a dict for each position"),
        Habit("logprob_token_ids IDS", {}, "ask for more logprobs"),
        Habit("prompt_logprob_token_ids IDS", {}, "ask for more prompt_logprobs"),
        Habit("prompt_logprob_start N", {}, "read those that are wanted of prompt_logprobs"),
        Habit("thinking_token_budget N", {"-1": ""}, "give max_reasoning_tokens to chat", off_matters=True),
        Habit("repetition_detection PARAMS", {}, "use repetition_penalty or frequency_penalty"),
        Habit(
            "stream_interval N",
            {"1": ""},
            "a reader that is slower than the engine gets several tokens at a time",
        ),
        Habit("skip_clone", TAKEN, "the engine keeps a copy of its own"),
        Habit("skip_reading_prefix_cache", {}, "give the prompt a cache_salt of its own"),
        Habit("output_text_buffer_length N", TAKEN, "it follows from stop"),
        Habit("routed_experts_prompt_start N", {}, "there are no models with experts yet"),
        Habit("trace_decode_token_ids IDS", {}, "put them into the prompt, and ask for prompt_logprobs"),
    )
)

METHOD_HABITS = Habits(
    (
        Habit(
            "lora_request REQUEST, prompt_adapter_request REQUEST",
            {},
            "there are no adapters yet: merge it into a checkpoint",
        ),
        Habit("guided_options_request PARAMS", {}, "use SamplingParams(structured_outputs=...)"),
        Habit("prompt_token_ids IDS", {}, 'give token ids as prompts, or {"prompt_token_ids": [...]}'),
        Habit("tokenization_kwargs DICT", {}, "give token ids"),
        Habit("chat_template TEXT", {}, "templates come with the checkpoint"),
        Habit("chat_template_content_format NAME", TAKEN, "templates get what they can read"),
        Habit("mm_processor_kwargs DICT", {}, "only text is read"),
        Habit("pooling_params PARAMS", {}, "give dimensions, normalize or scale"),
        Habit("pooling_task NAME", {}, "use embed, classify or score"),
        Habit("concurrency_limit N", TAKEN, "as many run at once as fit"),
    )
)

PROMPT_HABITS = Habits(
    (
        Habit("multi_modal_data, multi_modal_uuids, mm_processor_kwargs", {}, "only text is read"),
        Habit("prompt_embeds", {}, "give a text or token ids"),
        Habit("token_type_ids", TAKEN, "the tokenizer of the model makes them"),
    )
)

# Of the package itself.
MISSING_NAMES = {
    "LLMEngine": "LLM is the engine offline; AsyncEngine takes requests while others run",
    "PoolingParams": "give dimensions and normalize to embed, scale to classify and score",
    "PoolingOutput": "use embed, classify or score, which have outputs of their own",
    "ModelRegistry": "families of models are data, in inflight/models/families.py",
    "initialize_ray_cluster": "give ray_address, which needs replicas",
}

LLM_METHODS = {
    "collective_rpc": "there are no workers that run code of callers; observe sees every step, and stats what there is",
    "apply_model": "the model is no torch module; look at models/decoder.py",
    "tokenizer": "use get_tokenizer",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
    "shutdown": "use close, or `with LLM(...) as llm`",
    "supported_tasks": "a call that the model is not made for is refused",
    "reset_mm_cache": "only text is read",
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


def understood(given: Mapping[str, Any], habits: Habits, error: type[InflightError]) -> dict[str, Any]:
    """What is given, with names and values of habit as they are here, less those that change nothing. Raises the
    error, with the reason, for what cannot be had."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        habit = habits.find(name)
        if habit is None:
            found[name] = value
            continue
        text = as_text(value)
        instead = habit.instead(text)
        if instead is None:
            shown = f"{value!r}, which is" if len(text) <= MAX_SHOWN else "given, which is"
            raise error(f"{name} is {shown} not supported here: {habit.why(flags=False)}", param=name)
        if instead and value is not None:
            found |= _option(instead, value)
    return found


def _option(words: str, value: Any) -> dict[str, Any]:
    """The option that words of a command line set, in which {} is the value, or {size}, which may be a text as 32k."""
    flag, _, told = words.partition(" ")
    if told == "{size}" and isinstance(value, str):
        told = plain_size(value)
    is_given = told in ("{}", "{size}", value)
    found = value if is_given else int(told) if told.isdigit() else told
    return {flag[2:].replace("-", "_"): found}
