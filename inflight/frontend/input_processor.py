"""Validation: every prompt and parameter is checked here before it reaches the engine, and becomes requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any

import numpy as np

from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.validator import GrammarValidator
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError, PromptError, shown
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.request import DEFAULT_CONTEXT, Request, RequestContext, RequestSpec
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs import PARAM
from inflight.vllm_names import METHOD_RULES, PROMPT_RULES, translate_arguments

# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, with an optional "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_PROMPT_KINDS = "text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


def check_arguments(foreign: Mapping[str, Any]) -> None:
    """Check arguments that only vLLM's methods have. Raises ParameterError for arguments that would have an effect."""
    if foreign and (unknown := translate_arguments(foreign, METHOD_RULES, ParameterError)):
        raise ParameterError(f"unknown argument {', '.join(unknown)}", param=min(unknown))


def context_length_error(detail: str, param: str = "prompt") -> PromptError:
    """Return the error for a prompt that is too long.

    Gateways such as LiteLLM's recognize it by its text, and retry with a model that has a longer context.
    """
    return PromptError(
        f"the prompt is longer than the model's context length: {detail}",
        param=param,
        code="context_length_exceeded",
    )


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the argument of `generate` as a list of prompts. A list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise PromptError(
            f"prompts is of type {type(prompts).__name__}: it must be {_PROMPT_KINDS}, or a list of these",
            param="prompts",
        )
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Turns a prompt into requests, one for each of the `n` answers.

    `max_model_len` bounds the prompt and outputs of one request; `vocab_size` is the width of the logits.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int
    grammars: GrammarValidator  # for structured outputs
    _counter: count[int]

    @classmethod
    def create(
        cls,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos: tuple[int, ...],
        seed: int,
        compiler: GrammarCompiler | None = None,
    ) -> InputProcessor:
        """Create a processor; `compiler` is that of an engine in this process, if there is one."""
        grammars = GrammarValidator(partial(vocabulary_of, tokenizer, vocab_size, eos), compiler)
        return cls(tokenizer, vocab_size, max_model_len, eos, seed, grammars, count())

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        task: str = "generate",
        forbidden_ids: Iterable[int] = (),
    ) -> tuple[str | None, list[Request]]:
        """Return the prompt's text, if it has one, and a request for each answer, which has no forbidden token.

        A constraint is not checked here: `grammars` must validate it before it reaches the engine.
        """
        num_reserved = 1 if task == "generate" else 0  # for the first output token
        text, ids, salt = self._read_prompt(prompt, num_reserved)
        self._check_params(params)
        prediction_ids = self._prediction_ids(params)
        # The caller may change them later.
        params = params.clone() if params.prediction is None else replace(params, prediction=None)
        if salt and not context.cache_salt:
            context = replace(context, cache_salt=salt)
        max_outputs = self.max_model_len - len(ids)
        max_tokens = max_outputs if params.max_tokens is None else min(params.max_tokens, max_outputs)
        if task != "generate":
            max_tokens = 0
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= frozenset(self.eos_token_ids)
        bad_words = (*self._bad_word_ids(params), *((token_id,) for token_id in sorted(forbidden_ids)))
        if params.stop_strings:
            self._need_tokenizer("stop strings", "stop")
        number = next(self._counter)
        seed = _derive(self.seed, number) if params.seed is None else params.seed
        return text, [
            Request(
                RequestSpec(
                    request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                    token_ids=ids,
                    params=params,
                    max_tokens=max_tokens,
                    seed=seed if index == 0 else _derive(seed, index),
                    stop_ids=stop_ids,
                    bad_word_ids=bad_words,
                    context=context,
                    task=task,
                    prediction_ids=prediction_ids,
                )
            )
            for index in range(params.n)
        ]

    def check_characters(self, num_characters: int) -> None:
        """Reject a text that cannot fit into the context before it is tokenized."""
        longest = None if self.tokenizer is None else self.tokenizer.max_characters_per_token
        if longest is not None and num_characters > longest * self.max_model_len:
            raise context_length_error(
                f"it has {num_characters} characters: no more than {longest * self.max_model_len} can fit "
                f"(max_model_len is {self.max_model_len})"
            )

    def check_length(self, num_tokens: int, num_reserved: int = 1) -> None:
        """Reject a prompt that does not fit into the context beside `num_reserved` output tokens."""
        limit = self.max_model_len - num_reserved
        if num_tokens > limit:
            reserved = ", and one token is reserved for the output" if num_reserved else ""
            raise context_length_error(
                f"it has {num_tokens} tokens: at most {limit} are allowed "
                f"(max_model_len is {self.max_model_len}{reserved})"
            )

    def check_listed(self, params: SamplingParams, num_answers: int, limit: int) -> None:
        """Check that the token lists of all answers together have at most `limit` entries.

        Every list costs time in each step, for neighbours too. Raises ParameterError that names the longest.
        """
        sizes = {
            "stop_token_ids": len(params.stop_token_ids or ()),
            "allowed_token_ids": len(params.allowed_token_ids or ()),
            "logit_bias": len(params.logit_bias or ()),
        }
        if sum(sizes.values()) * num_answers <= limit:
            sizes["bad_words"] = sum(map(len, self._bad_word_ids(params)))
        total = sum(sizes.values())
        if total * num_answers > limit:
            raise ParameterError(
                f"bad_words, stop_token_ids, logit_bias and allowed_token_ids have {total} tokens for each of "
                f"{num_answers} answers: at most {limit} are allowed in one request, over all answers",
                param=max(sizes, key=sizes.__getitem__),
                code="too_many_listed_tokens",
            )

    def check_logprobs(
        self, params: SamplingParams, sizes: Sequence[tuple[int, int]], limit: int, name: str = "logprobs"
    ) -> None:
        """Check that the log-probabilities of all answers together are at most `limit`, and so are those of prompts.

        `sizes` are the tokens of each prompt and of the longest answer to it; `name` is what the client calls
        `logprobs`. Raises ParameterError.
        """
        prompts, answers = (params.n * sum(column) for column in zip(*sizes, strict=True))
        totals = (
            (name, params.logprobs, answers, "tokens of all answers together"),
            ("prompt_logprobs", params.prompt_logprobs, prompts, "tokens of all prompts, times n,"),
        )
        for param, top, num_tokens, what in totals:
            if top is not None and num_tokens * (top + 1) > limit:
                raise ParameterError(
                    f"{param} is {top} and the {what} may be {num_tokens}: that is {num_tokens * (top + 1)} "
                    f"log-probabilities (tokens x ({param} + 1)), and at most {limit} are allowed in one request",
                    param=param,
                    code="too_many_logprobs",
                )

    def _prediction_ids(self, params: SamplingParams) -> array[int] | None:
        """Return the tokens of a prediction, as many as an answer can have."""
        text = params.prediction
        if text is None:
            return None
        tokenizer = self._need_tokenizer("predictions", "prediction")
        longest = tokenizer.max_characters_per_token
        if longest is not None and len(text) > longest * self.max_model_len:
            raise ParameterError(
                f"prediction has {len(text)} characters: no more than {longest * self.max_model_len} can fit "
                f"(max_model_len is {self.max_model_len})",
                param="prediction",
            )
        token_ids = tokenizer.encode_plain([text])[0][: self.max_model_len]
        # A tokenizer may have more tokens than the model.
        size = next((i for i, token_id in enumerate(token_ids) if token_id >= self.vocab_size), None)
        return array("q", token_ids[:size]) or None

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        return bad_word_ids(self._need_tokenizer("bad_words", "bad_words"), params.bad_words)

    def _need_tokenizer(self, what: str, param: str | None = None) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(
                f"{what} need a tokenizer, and this engine has none: give token ids", param=param
            )
        return self.tokenizer

    def _read_prompt(self, prompt: Prompt, num_reserved: int) -> tuple[str | None, array[int], str]:
        salt: Any = ""
        if isinstance(prompt, Mapping):
            prompt, salt = _read_mapping(prompt)
        text = prompt if isinstance(prompt, str) else None
        ids = as_ids(prompt if text is None else self._need_tokenizer("text prompts").encode(text))
        if not ids:
            raise _bad_prompt("the prompt is empty: it must have at least one token")
        self.check_length(len(ids), num_reserved)
        # A tokenizer may have more tokens than the model, so the ids of text are checked too.
        numbers = np.frombuffer(ids, dtype=np.int64)
        if numbers.min() < 0 or numbers.max() >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise _bad_prompt(
                f"the prompt has the token id {wrong}: ids must be from 0 to {self.vocab_size - 1}"
            )
        return text, ids, salt

    def _check_params(self, params: SamplingParams) -> None:
        """Check that every token id is in the model's vocabulary."""
        if not isinstance(params, SamplingParams):
            raise ParameterError.of_value("sampling_params", params, "it must be SamplingParams")
        named = (("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", params.allowed_token_ids))
        for name, ids in (*named, ("logit_bias", params.logit_bias)):
            for token_id in ids or ():
                if not 0 <= token_id < self.vocab_size:
                    raise ParameterError(
                        f"{name} has the token id {token_id}: ids must be from 0 to {self.vocab_size - 1}",
                        param=name,
                    )


def _read_mapping(prompt: Mapping[str, Any]) -> tuple[str | Sequence[int], Any]:
    """Return the text or the ids of a prompt given as a mapping, and its cache salt."""
    unknown = set(prompt) - _PROMPT_KEYS
    if unknown:
        prompt = translate_arguments(prompt, PROMPT_RULES, PromptError)
        unknown = set(prompt) - _PROMPT_KEYS
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise _bad_prompt(
            f"a prompt has the keys {sorted(map(str, prompt))}: give either 'prompt' or "
            "'prompt_token_ids', and optionally 'cache_salt'"
        )
    salt = prompt.get("cache_salt") or ""
    if "prompt" not in prompt:
        ids = prompt["prompt_token_ids"]
        if isinstance(ids, str | Mapping):
            raise PromptError(
                f"prompt_token_ids is of type {type(ids).__name__}: it must be a list of ids",
                param="prompt_token_ids",
            )
        return ids, salt
    if not isinstance(prompt["prompt"], str):
        raise _bad_prompt(f"prompt is of type {type(prompt['prompt']).__name__}: it must be text")
    return prompt["prompt"], salt


def _bad_prompt(problem: str) -> PromptError:
    return PromptError(problem, param="prompt")


def as_ids(ids: Any) -> array[int]:
    """Return token ids given as any sequence of integers. Raises PromptError."""
    if isinstance(ids, bytes | bytearray | memoryview) or not isinstance(ids, Iterable):
        raise _bad_prompt(f"a prompt is of type {type(ids).__name__}: it must be {_PROMPT_KINDS}")
    items = ids if isinstance(ids, list) else list(ids)
    if bool in set(map(type, items)):  # which array would accept as 0 and 1
        raise _bad_prompt("the prompt has True or False among its token ids: ids must be integers")
    try:
        return array("q", items)
    except (TypeError, OverflowError):
        wrong = next(item for item in items if not _is_id(item))
        raise _bad_prompt(
            f"the prompt has the token id {shown(wrong)}: ids must be integers of at most 64 bits"
        ) from None


def _is_id(item: Any) -> bool:
    try:
        array("q", [item])
    except (TypeError, OverflowError):
        return False
    return True


def _derive(seed: int, index: int) -> int:
    """Return the seed of one of several answers, the same in every run."""
    return int.from_bytes(sha256(f"{seed}/{index}".encode()).digest()[:8], "big")


def vocabulary_of(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Return the tokens as grammars need them. Raises ParameterError if the model's output cannot be constrained."""
    decoder = None if tokenizer is None else tokenizer.byte_decoder
    ends = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    if tokenizer is None or decoder is None or not ends:
        raise ParameterError(
            f"{PARAM} is given, but this engine does not support it: "
            + (
                "it has no tokenizer"
                if tokenizer is None
                else "the model has no end-of-text token"
                if not ends
                else "the tokenizer's decoder does more than join the bytes of tokens"
            ),
            param=PARAM,
            code="constraints_unavailable",
        )
    spell = partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
    return Vocabulary([decoder.pieces[i] for i in range(vocab_size)], tokenizer.special_ids, ends, spell)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences whose last token is banned if the tokens before it were just generated.

    Every word is banned both at the start of a text and after a space, as these are different tokens.
    """
    stripped = [word.lstrip() or word for word in words]
    spellings = [*stripped, *(f" {word}" for word in stripped)]
    encoded = tokenizer.encode_batch(spellings, add_special_tokens=False)
    for word, ids in zip(words, encoded, strict=False):  # only the spellings without a space
        if not ids:
            raise ParameterError(
                f"bad_words contains {word!r}: this tokenizer has no tokens for it", param="bad_words"
            )
    sequences = dict.fromkeys((tuple(ids) for ids in encoded if ids), False)  # whether each is redundant
    # A sequence that ends in another banned sequence is redundant: the shorter one always applies first. The endings
    # are a tree of tokens from the last one on, with None where a sequence begins.
    endings: dict[int | None, Any] = {}
    for sequence in sorted(sequences, key=len):
        node = endings
        for token_id in reversed(sequence):
            node = node.setdefault(token_id, {})
            if None in node:
                sequences[sequence] = True
                break
        node[None] = {}
    return tuple(sequence for sequence, is_redundant in sequences.items() if not is_redundant)
