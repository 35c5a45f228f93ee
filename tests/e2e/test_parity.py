"""The whole engine against transformers: every family, through every way that a request can be scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, CompletionOutput, RequestOutput, SamplingParams
from tests.e2e.conftest import Folder
from tests.e2e.policies import GREEDY_CONTINUOUS, GREEDY_FAIR, GREEDY_PRIORITY
from tests.e2e.reference import NUM_STEPS, Reference
from tests.scheduling.policies import NAMES
from tests.support.checkpoints import FAMILIES, tolerance
from tests.support.memory import with_room_for

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
# Room for one request of the longest kind and a little more: the five need three times as much.
SCARCE: dict[str, Any] = {"num_blocks": 29, "block_size": 4, "policy": GREEDY_CONTINUOUS}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tiny-chunks": {"max_num_batched_tokens": 7},
    "blocks-of-4": {"block_size": 4},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "three-rows": {"max_num_seqs": 3, "block_size": 1},
    "scarce": SCARCE,
    "scarce-tiny-chunks": SCARCE | {"max_num_batched_tokens": 7},
    "depth-2": {"pipeline_depth": 2},
    "depth-2-tiny-chunks": {"pipeline_depth": 2, "max_num_batched_tokens": 7, "block_size": 4},
    "depth-2-scarce": SCARCE | {"pipeline_depth": 2, "max_num_batched_tokens": 11},
    "max-kv-tokens": {"max_kv_tokens": 120, "pipeline_depth": 2, "policy": GREEDY_CONTINUOUS},
    **{name: {"policy": name, "max_num_seqs": 2} for name in NAMES},
    "continuous-scarce": {"num_blocks": 29, "block_size": 4},
    "static-scarce-depth-2": SCARCE | {"policy": "static", "pipeline_depth": 2, "num_blocks": 48},
    "priority-scarce": SCARCE | {"policy": GREEDY_PRIORITY},
    "fair-scarce-depth-2": SCARCE | {"policy": GREEDY_FAIR, "pipeline_depth": 2},
}
# Scheduling does not depend on the family, except where its layers see a window. So one family without windows and one
# with both kinds of layers run with every setting, and the others with those that differ most.
EVERY_SETTING = ("llama", "gemma3")
FOR_ALL = ("default", "tiny-chunks", "depth-2-scarce")
CASES = [
    (family, setting) for family in FAMILIES for setting in (SETTINGS if family in EVERY_SETTING else FOR_ALL)
]
PREEMPTING = {
    "scarce",
    "scarce-tiny-chunks",
    "depth-2-scarce",
    "max-kv-tokens",
    "priority-scarce",
    "fair-scarce-depth-2",
}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(folder: Path, prompts: list[list[int]], options: dict[str, Any]) -> list[RequestOutput]:
    """One run of all prompts, with the promises that hold for every run."""
    llm = LLM(folder, **with_room_for(folder, options))
    outputs = llm.generate(prompts, GREEDY, priority=[2, 0, 1, 0, 1], tenant=["a", "b", "a", "b", "c"])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert llm.stats().kv.num_used == 0
    return outputs


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_greedy_tokens_match_transformers(
    family: str, setting: str, folder: Folder, reference: Callable[[str], Reference]
) -> None:
    expected = reference(family)
    assert expected.smallest_margin > 1e-4, "two tokens are almost equal: choose another seed for the weights"
    outputs = run(folder(family), expected.prompts, SETTINGS[setting])
    assert tokens(outputs) == expected.tokens
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    if setting in PREEMPTING:
        assert num_preemptions > 0
    elif "scarce" not in setting:
        assert num_preemptions == 0


SCORING: tuple[dict[str, Any], ...] = ({"max_num_batched_tokens": 7}, {}, SCARCE | {"pipeline_depth": 2})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (family, options)
        for family in FAMILIES
        for options in (SCORING if family in EVERY_SETTING else SCORING[:1])
    ],
)
def test_prompt_logprobs_match_transformers(
    family: str, options: dict[str, Any], folder: Folder, reference: Callable[[str], Reference]
) -> None:
    expected = reference(family)
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, prompt_logprobs=4)
    outputs = LLM(folder(family), **with_room_for(folder(family), options)).generate(expected.prompts, params)
    assert tokens(outputs) == expected.tokens
    for output, prompt, logprobs in zip(outputs, expected.prompts, expected.logprobs, strict=True):
        positions = output.prompt_logprobs
        assert positions is not None
        assert positions[0] is None
        assert len(positions) == len(prompt)
        for index, position in enumerate(positions[1:]):
            assert position is not None
            row = logprobs[index]
            best = row.topk(4).indices.tolist()
            assert list(position) == [prompt[index + 1], *(i for i in best if i != prompt[index + 1])]
            for token_id, candidate in position.items():
                assert candidate.logprob == pytest.approx(row[token_id].item(), abs=tolerance(family))
                assert candidate.rank == 1 + int((row > row[token_id]).sum())


@pytest.mark.parametrize(
    ("family", "block_size"),
    [*((family, 4) for family in FAMILIES), *((family, 16) for family in EVERY_SETTING)],
)
def test_prefix_hit_does_not_change_tokens(
    family: str, block_size: int, folder: Folder, reference: Callable[[str], Reference]
) -> None:
    expected = reference(family)
    llm = LLM(folder(family), block_size=block_size)
    first = llm.generate(expected.prompts, GREEDY)
    assert tokens(first) == expected.tokens
    # The fourth prompt shares 37 tokens with the second, even in the step that computes both.
    assert first[3].num_cached_tokens == 37 // block_size * block_size
    again = llm.generate(expected.prompts, GREEDY)
    assert tokens(again) == expected.tokens
    for output, prompt in zip(again, expected.prompts, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
    # The answers themselves are cached too: a conversation goes on without computing them again.
    followed = [prompt + answer for prompt, answer in zip(expected.prompts, expected.tokens, strict=True)]
    for output, prompt in zip(llm.generate(followed, GREEDY), followed, strict=True):
        assert output.num_cached_tokens >= (len(prompt) - 1) // block_size * block_size - block_size


def compare_logprobs(ours: CompletionOutput, theirs: CompletionOutput, tolerance: float) -> int:
    """Compare up to the first token that differs, and return its position."""
    logprobs = zip(ours.logprobs or (), theirs.logprobs or (), strict=True)
    for step, (position, other) in enumerate(logprobs):
        for token_id in position.keys() & other.keys():
            assert position[token_id].logprob == pytest.approx(other[token_id].logprob, abs=tolerance)
        if ours.token_ids[step] != theirs.token_ids[step]:
            return step
    return len(ours.token_ids)


@pytest.mark.parametrize("uses_bf16_instructions", [False, True])
def test_bfloat16_checkpoint_computes_like_its_float32_upcast(
    uses_bf16_instructions: bool, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, unless products round activations to bfloat16; then within that rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    from inflight.layers.native.library import native_library
    from tests.e2e.reference import transformers_reference
    from tests.support.checkpoints import write_tokenizer

    library = native_library()
    if not uses_bf16_instructions and library is not None:
        monkeypatch.setattr(library, "instructions", frozenset())
    elif library is None or not any("bf16" in name for name in library.instructions):
        pytest.skip("this processor has no bf16 instructions")
    tolerance = 0.1 if uses_bf16_instructions else 1e-4
    rounded = folder("qwen3", dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    expected = transformers_reference(tmp_path)
    assert expected.smallest_margin > 1e-4
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, logprobs=3)
    upcast = LLM(tmp_path).generate(expected.prompts, params)
    assert tokens(upcast) == expected.tokens
    for dtype in ("auto", "float32", "bfloat16"):
        held = LLM(rounded, dtype=dtype).generate(expected.prompts, params)
        assert uses_bf16_instructions or tokens(held) == expected.tokens
        for ours, theirs in zip(held, upcast, strict=True):
            same = compare_logprobs(ours.outputs[0], theirs.outputs[0], tolerance)
            assert uses_bf16_instructions or same == NUM_STEPS
