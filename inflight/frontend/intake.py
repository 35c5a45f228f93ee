"""The one validator: every prompt and every parameter passes here before it reaches the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any

from inflight.errors import ParameterError, PromptError
from inflight.request import MAX_SALT_LENGTH, Request, SamplingParams
from inflight.text import Tokenizer, bad_word_ids

# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, with an optional "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """What `generate` was given, as a list: one prompt (a list of ids is one) or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


@dataclass(frozen=True, slots=True)
class Intake:
    """Turns a prompt into requests, one for each of the `n` answers.

    `max_model_len` is what one request may hold, prompt and outputs; `vocab_size` the width of the logits.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int
    _counter: count[int]

    @classmethod
    def create(
        cls, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, eos: tuple[int, ...], seed: int
    ) -> Intake:
        return cls(tokenizer, vocab_size, max_model_len, eos, seed, count())

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> tuple[str | None, list[Request]]:
        """The prompt's text, where it has one, and a request for each answer."""
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_params(params)
        salt = _check_salt(cache_salt or salt)
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= frozenset(self.eos_token_ids)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            bad_words = bad_word_ids(self._need_tokenizer("bad_words"), params.bad_words)
        if params.stop_strings:
            self._need_tokenizer("stop strings")
        number = next(self._counter)
        seed = _derive(self.seed, number) if params.seed is None else params.seed
        return text, [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                token_ids=token_ids.copy(),
                params=params,
                max_tokens=max_tokens,
                seed=seed if index == 0 else _derive(seed, index),
                stop_ids=stop_ids,
                bad_word_ids=bad_words,
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
            )
            for index in range(params.n)
        ]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(f"{what} need a tokenizer, and this engine runs without one: give token ids")
        return self.tokenizer

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        salt: Any = ""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise PromptError(
                    f"a prompt has the keys {sorted(map(str, prompt))}: give either 'prompt' or "
                    "'prompt_token_ids', and 'cache_salt' if wanted"
                )
            salt = prompt.get("cache_salt") or ""
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            if isinstance(prompt, Mapping):
                raise PromptError(
                    "a prompt's text or ids are a mapping: they must be a string or a list of ids"
                )
        if isinstance(prompt, str):
            token_ids = self._need_tokenizer("text prompts").encode(prompt)
            text: str | None = prompt
        else:
            text, token_ids = None, self._check_ids(prompt)
        if not token_ids:
            raise PromptError("the prompt is empty: it must have at least one token")
        if len(token_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens: at most {self.max_model_len - 1} are allowed "
                f"(max_model_len is {self.max_model_len}, and one place is kept for an output)"
            )
        return text, token_ids, salt

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        try:
            token_ids = array("q", ids).tolist()
        except (TypeError, OverflowError):
            raise PromptError("a prompt is neither text nor a list of integer token ids") from None
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise PromptError(
                f"the prompt has the token id {wrong}: ids must be from 0 to {self.vocab_size - 1}"
            )
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        """What only the model can tell: that every token id is one of its own."""
        named = (("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", params.allowed_token_ids))
        for name, ids in (*named, ("logit_bias", params.logit_bias)):
            for token_id in ids or ():
                if not 0 <= token_id < self.vocab_size:
                    raise ParameterError(
                        f"{name} has the token id {token_id}: ids must be from 0 to {self.vocab_size - 1}"
                    )


def _check_salt(salt: Any) -> str:
    if not isinstance(salt, str) or len(salt) > MAX_SALT_LENGTH:
        raise ParameterError(f"cache_salt must be a string of at most {MAX_SALT_LENGTH} characters")
    return salt


def _derive(seed: int, index: int) -> int:
    """A seed of its own for one of many, the same in every run."""
    return int.from_bytes(sha256(f"{seed}/{index}".encode()).digest()[:8], "big")
