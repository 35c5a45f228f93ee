"""Names of vLLM's Python API: arguments of `LLM` and its methods, the methods, and fields of `SamplingParams`.

`python -m tools.from_vllm_page` writes them into docs/from-vllm.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from inflight.errors import InflightError
from inflight.vllm_options import ENGINE_RULES
from inflight.vllm_rules import IGNORED, MAX_SHOWN, CompatRule, CompatRules, as_text, join_reasons, plain_size

LLM_RULES = CompatRules(
    (
        *ENGINE_RULES,
        CompatRule("data_parallel_size N", {"1": ""}, "use replicas"),
        CompatRule("served_model_name NAME", IGNORED, "no output contains the name"),
        CompatRule("max_logprobs N", IGNORED, "up to 100 logprobs are available"),
    )
)

SAMPLING_RULES = CompatRules(
    (
        CompatRule("best_of N", {"1": ""}, "request n answers and choose by their logprobs"),
        CompatRule("length_penalty N", {"1": "", "1.0": ""}, "use LLM.beam_search"),
        CompatRule("use_beam_search, early_stopping", {}, "use LLM.beam_search"),
        CompatRule("spaces_between_special_tokens", IGNORED, "the tokenizer determines the text"),
        CompatRule("truncate_prompt_tokens N", {}, "truncate the prompt before the call"),
        CompatRule(
            "output_kind KIND",
            {"cumulative": ""},
            "pass output_kind to AsyncEngine.generate; LLM returns final answers",
        ),
        CompatRule("guided_decoding PARAMS", {}, "use structured_outputs"),
        CompatRule(
            "logits_processors LIST", {}, "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
        ),
        CompatRule("extra_args DICT", {}, "there are no plug-ins that would read it"),
        CompatRule("flat_logprobs", {}, "logprobs are a dict per position"),
        CompatRule("logprob_token_ids IDS", {}, "request more logprobs"),
        CompatRule("prompt_logprob_token_ids IDS", {}, "request more prompt_logprobs"),
        CompatRule("prompt_logprob_start N", {}, "select the positions from prompt_logprobs"),
        CompatRule(
            "thinking_token_budget N", {"-1": ""}, "pass max_reasoning_tokens to chat", off_matters=True
        ),
        CompatRule("repetition_detection PARAMS", {}, "use repetition_penalty or frequency_penalty"),
        CompatRule("stream_interval N", {"1": ""}, "slow readers receive several tokens at a time"),
        CompatRule("skip_clone", IGNORED, "the engine always keeps its own copy"),
        CompatRule("skip_reading_prefix_cache", {}, "use a prompt with its own cache_salt"),
        CompatRule("output_text_buffer_length N", IGNORED, "it is derived from stop"),
        CompatRule("routed_experts_prompt_start N", {}, "the experts of each token are not returned"),
        CompatRule("trace_decode_token_ids IDS", {}, "append them to the prompt and request prompt_logprobs"),
    )
)

METHOD_RULES = CompatRules(
    (
        CompatRule(
            "lora_request REQUEST, prompt_adapter_request REQUEST",
            {},
            "adapters are not supported yet: merge them into a checkpoint",
        ),
        CompatRule("guided_options_request PARAMS", {}, "use SamplingParams(structured_outputs=...)"),
        CompatRule("prompt_token_ids IDS", {}, 'pass token ids as prompts, or {"prompt_token_ids": [...]}'),
        CompatRule("tokenization_kwargs DICT", {}, "pass token ids instead"),
        CompatRule("chat_template TEXT", {}, "templates come from the checkpoint"),
        CompatRule("chat_template_content_format NAME", IGNORED, "the format is chosen to fit the template"),
        CompatRule("mm_processor_kwargs DICT", {}, "only text input is supported"),
        CompatRule("pooling_params PARAMS", {}, "pass dimensions, normalize or scale"),
        CompatRule("pooling_task NAME", {}, "use embed, classify or score"),
        CompatRule("concurrency_limit N", IGNORED, "as many requests run concurrently as fit"),
    )
)

PROMPT_RULES = CompatRules(
    (
        CompatRule(
            "multi_modal_data, multi_modal_uuids, mm_processor_kwargs", {}, "only text input is supported"
        ),
        CompatRule("prompt_embeds", {}, "pass text or token ids"),
        CompatRule("token_type_ids", IGNORED, "the tokenizer creates them"),
    )
)

# vLLM's names for our objects.
ALIASES = {
    "AsyncLLMEngine": "inflight.entrypoints.async_engine:AsyncLLM",
    "BeamSearchParams": "inflight.entrypoints.beam_search:BeamSearchParams",
    "ClassificationOutput": "inflight.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "EmbeddingOutput": "inflight.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "EngineArgs": "inflight.entrypoints.async_engine:AsyncEngineArgs",
    "GuidedDecodingParams": "inflight.structured_outputs:StructuredOutputs",
    "PoolingRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "PromptType": "inflight.frontend.input_processor:Prompt",
    "ScoringOutput": "inflight.outputs:ScoreOutput",
    "ScoringRequestOutput": "inflight.outputs:PoolingRequestOutput",
    "StructuredOutputsParams": "inflight.structured_outputs:StructuredOutputs",
    "TextPrompt": "builtins:dict",
    "TokensPrompt": "builtins:dict",
}

# Names that `import inflight` does not have, and what to use instead.
MISSING_NAMES = {
    "LoRARequest": "LoRA adapters are not supported yet: use a checkpoint with the adapter merged into it",
    "LLMEngine": "use LLM for offline inference, or AsyncEngine to add requests while others run",
    "PoolingParams": "pass dimensions and normalize to embed, or scale to classify and score",
    "PoolingOutput": "use embed, classify or score, which have their own outputs",
    "ModelRegistry": "model families are defined in inflight/models/decoders/families.py",
    "RequestOutputKind": 'pass output_kind="cumulative", "delta" or "final" to AsyncEngine.generate',
    "initialize_ray_cluster": "pass ray_address together with replicas",
}

_MODELS = "model families are defined in inflight/models/decoders/families.py"
# Modules that vLLM has and inflight does not, and what to use instead. They stand for their submodules, too.
MISSING_MODULES = {
    "inputs": "import TextPrompt, TokensPrompt and PromptType from inflight; prompts are plain dicts",
    "lora": MISSING_NAMES["LoRARequest"],
    "pooling_params": MISSING_NAMES["PoolingParams"],
    "sequence": "import Logprob from inflight.outputs",
    "logprobs": "import Logprob from inflight.outputs",
    "beam_search": "import BeamSearchParams from inflight",
    "engine.arg_utils": "import AsyncEngineArgs from inflight",
    "engine.async_llm_engine": "import AsyncLLM or AsyncEngine from inflight",
    "engine.llm_engine": MISSING_NAMES["LLMEngine"],
    "v1": "import LLM, AsyncLLM or AsyncEngine from inflight",
    "entrypoints.openai": "use `inflight serve MODEL` to start a server",
    "entrypoints.api_server": "use `inflight serve MODEL` to start a server",
    "multimodal": "only text input is supported",
    "assets": "only text input is supported",
    "model_executor": _MODELS,
    "transformers_utils": "use LLM.get_tokenizer, and transformers for everything else",
    "tokenizers": "use LLM.get_tokenizer",
    "distributed": "pass tensor_parallel_size, pipeline_parallel_size or replicas to LLM",
    "platforms": "pass device to LLM; torch.cuda tells what this machine has",
    "plugins": "third-party code is not loaded, except for a policy",
    "logger": "use logging.getLogger; inflight's loggers are below `inflight`",
    "utils": "it holds vLLM's internal helpers: use Python's argparse and uuid",
    "version": "use inflight.__version__",
}

# Methods and attributes that LLM does not have, and what to use instead.
LLM_METHODS = {
    "collective_rpc": "callers cannot run code in workers; use recorded or stats",
    "apply_model": "the model is not a torch module; see models/decoders/decoder.py",
    "tokenizer": "use get_tokenizer",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
    "shutdown": "use close, or `with LLM(...) as llm`",
    "supported_tasks": "calls that the model does not support raise an error",
    "reset_mm_cache": "only text input is supported",
    "encode": "use embed, classify or score",
    "reward": "use classify, which returns the scores of the classification head",
    "set_tokenizer": "pass the option tokenizer to LLM",
    "start_profile": "recorded reports the times of every step; benchmarks/step_profile.py profiles one step",
    "stop_profile": "recorded reports the times of every step; benchmarks/step_profile.py profiles one step",
    "llm_engine": "LLM is the engine: use stats, recorded and get_metrics",
    "model_config": "use max_model_len, vocab_size and get_tokenizer",
    "init_weight_transfer_engine": "create a new LLM",
    "update_weights": "create a new LLM",
    "enqueue": "use AsyncEngine, which accepts requests while others run",
    "wait_for_completion": "use AsyncEngine, which accepts requests while others run",
}


def vllm_attribute(module: str, name: str) -> Any:
    """Return an object of ours by the name that vLLM has for it in a module.

    Raises ImportError with an alternative for names that only vLLM has: `from inflight import` would drop the message
    of an AttributeError.
    """
    if name in ALIASES:
        source, _, attribute = ALIASES[name].partition(":")
        return getattr(import_module(source), attribute)
    if name in MISSING_NAMES:
        raise ImportError(f"{module} has no {name}: {MISSING_NAMES[name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def check_module(module: str) -> None:
    """Raise ImportError with an alternative for a module that only vLLM has."""
    name = module.removeprefix("inflight.")
    for missing, reason in MISSING_MODULES.items():
        if name == missing or name.startswith(f"{missing}."):
            raise ImportError(f"there is no module {module}: {reason}", name=module)


def translate_arguments(
    arguments: Mapping[str, Any], rules: CompatRules, error: type[InflightError]
) -> dict[str, Any]:
    """Return the arguments with vLLM's names and values translated, without arguments that have no effect.

    Raises the error, with the reasons, for arguments that are not supported.
    """
    translated: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, value in arguments.items():
        rule = rules.find(name)
        if rule is None:
            translated[name] = value
            continue
        text = as_text(value)
        replacement = rule.replacement(text)
        if replacement is None:
            repeated = f" is {value!r}, which" if len(text) <= MAX_SHOWN else ""
            reasons[name] = f"{name}{repeated} is not supported: {rule.explanation(flags=False)}"
        elif replacement and value is not None:
            translated |= _option(replacement, value)
    if reasons:
        raise error(join_reasons(list(reasons.values())), param=next(iter(reasons)))
    return translated


def _option(replacement: str, value: Any) -> dict[str, Any]:
    """Return the option that a replacement such as `--flag {}` sets, where {} is the value and {size} a size."""
    flag, _, text = replacement.partition(" ")
    if text == "{size}" and isinstance(value, str):
        text = plain_size(value)
    is_unchanged = text in ("{}", "{size}", value)
    result = value if is_unchanged else int(text) if text.isdigit() else text
    return {flag[2:].replace("-", "_"): result}
