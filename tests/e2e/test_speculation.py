"""Drafts change no token: requests of all kinds, families and policies, with drafters that are right, wrong, or mad."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.outputs import RequestOutput
from inflight.request import Request
from inflight.scheduling.drafts import AdaptiveSpeculation, Drafter, Guess
from tests.e2e.conftest import Folder
from tests.scheduling.guessing import Eager
from tests.scheduling.policies import NAMES
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE

LONGEST = 80  # tokens of the longest request, outputs included: what memory must hold at least
GRAMMARS = (
    StructuredOutputs(regex="(ab|cd)*e{3,9}[a-z ]*"),
    StructuredOutputs(choice=["the quick brown fox", "the quick cat", "no"]),
    StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)


@dataclass
class Oracle:
    """Implements `Drafter`: knows the answers, and says something else as often as it is told."""

    rng: random.Random
    odds: float
    answers: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)  # by prompt
    lies: Sequence[int] = range(VOCAB_SIZE)  # tokens to say instead

    def learn(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            told = self.answers.setdefault(tuple(output.prompt_token_ids), [])
            told += [list(answer.token_ids) for answer in output.outputs]

    def propose(self, request: Request, ahead: list[int], most: int) -> Guess:
        known = [*request.token_ids, *ahead]
        prompt = known[: request.num_prompt_tokens]
        outputs = known[len(prompt) :]
        whole = next(
            (answer for answer in self.answers[tuple(prompt)] if answer[: len(outputs)] == outputs), outputs
        )
        ids = [
            token if self.rng.random() < self.odds else self.rng.choice(self.lies)
            for token in whole[len(outputs) : len(outputs) + self.rng.randint(0, most)]
        ]
        return Guess(ids, [1.0] * len(ids))

    def ended(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


def draw_requests(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    shared = ids(30)
    prompts = [
        shared[: rng.choice((0, rng.randint(1, 30)))] + ids(rng.randint(1, 20))
        for _ in range(rng.randint(2, 8))
    ]
    params = [
        SamplingParams(
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0, 0, 1.0)),
            top_p=rng.choice((1, 0.8)),
            top_k=rng.choice((0, 5)),
            repetition_penalty=rng.choice((1, 1.2)),
            presence_penalty=rng.choice((0, 0.5)),
            frequency_penalty=rng.choice((0, 0.5)),
            logit_bias=rng.choice((None, {3: 5.0, 7: -5.0})),
            bad_words=rng.choice((None, ["the", "a b"])),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice((0, 1)),
            stop=rng.choice((None, "e", ["a", "th"])),
            stop_token_ids=rng.choice((None, [5, 9, 100, 200])),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, 1)),
            structured_outputs=rng.choice((None, None, *GRAMMARS)),
        )
        for _ in prompts
    ]
    return prompts, params


def draw_options(rng: random.Random, hard: bool) -> dict[str, Any]:
    """`hard`: settings that leave little or no room for drafts, too."""
    block_size = rng.choice((1, 4, 8) if hard else (8, 16))
    return {
        "policy": rng.choice(NAMES),
        "pipeline_depth": rng.choice((1, 1, 2) if hard else (1,)),
        "block_size": block_size,
        "num_blocks": 4 * -(-rng.randint(LONGEST, 2 * LONGEST) // block_size),
        "max_num_batched_tokens": rng.choice((2, 5, 8, 30) if hard else (30,)),
        "max_num_seqs": rng.choice((1, 3, 8)),
        "enable_prefix_caching": rng.random() < 0.8,
    }


def make_eager(llm: LLM, rng: random.Random, *others: Drafter) -> None:
    """Let an engine verify all drafts: those of other drafters, or also those of its own."""
    scheduler = llm._engine.core.scheduler
    chosen = scheduler.speculation
    assert isinstance(chosen, AdaptiveSpeculation)
    drafters = [*others, *(chosen._drafters if not others or rng.random() < 0.7 else ())]
    scheduler.speculation = Eager(drafters, rng.choice((1, 3, 6)), chosen._constraints)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token(family: str, folder: Folder) -> None:
    rng = random.Random(family)
    plain = LLM(folder(family))
    num_drafted = num_accepted = 0
    for odds, hard in ((1.0, True), (0.7, False), (0.0, True)):
        prompts, params = draw_requests(rng)
        expected = plain.generate(prompts, params)
        llm = LLM(folder(family), speculative_config={"method": "auto"}, **draw_options(rng, hard))
        oracle = Oracle(rng, odds)
        oracle.learn(expected)
        make_eager(llm, rng, oracle)
        for _ in range(2):  # with a cold cache, then with a warm one
            outputs = llm.generate(prompts, params, priority=[rng.randrange(3) for _ in prompts])
            for output, whole in zip(outputs, expected, strict=True):
                assert output.outputs == whole.outputs
            assert llm.stats().kv.num_used == 0
            llm._engine.core.scheduler.pool.check()
        num_drafted += llm.stats().num_draft_tokens
        num_accepted += llm.stats().num_accepted_tokens
        llm.close()
    assert 0 < num_accepted < num_drafted


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTIONS = ("What is the weather in Paris?", "Tell me a story about a cat.", "Why does it rain?")


def draw_chat(rng: random.Random) -> dict[str, Any]:
    """Reasoning and tools with their grammars, which begin, end and are left in the middle of drafts."""
    thinks = rng.random() < 0.5
    return {
        "tools": rng.choice(([TOOL], None)),
        "chat_template_kwargs": {"enable_thinking": thinks},
        "max_reasoning_tokens": rng.choice((None, 3, 10)) if thinks else None,
        "parallel_tool_calls": rng.random() < 0.5,
    }


def test_drafts_change_no_chat() -> None:
    """The built-in model with the engine's own drafters: grammars, predictions and lookups, chats of all kinds."""
    rng, plain = random.Random(5), LLM(num_blocks=400)
    llm = LLM(num_blocks=400, speculative_config={"method": "auto"})
    make_eager(llm, rng)
    for _ in range(6):
        options, params = draw_chat(rng), draw_requests(rng)[1]
        chats = [[{"role": "user", "content": rng.choice(QUESTIONS)}] for _ in params]
        for each in params:
            each.max_tokens = 50
        options["tool_choice"] = rng.choice(("auto", "required")) if options["tools"] else "auto"
        if options["tool_choice"] == "required":  # the answer is a call, and nothing else
            for each in params:
                each.structured_outputs = None
        expected = plain.chat(chats, params, **options)
        for each, whole in zip(params, expected, strict=True):
            words = (whole.outputs[0].text or "nothing").split(" ")
            words[rng.randrange(len(words))] = "wrong"
            each.prediction = rng.choice((None, " ".join(words)))
        outputs = llm.chat(chats, params, **options)
        for output, whole in zip(outputs, expected, strict=True):
            for answer, other in zip(output.outputs, whole.outputs, strict=True):
                answer.message = other.message  # calls have random ids
                assert answer == other
    stats = llm.stats()
    assert 50 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.kv.num_used == 0
