"""Several ranks give the tokens of one, with any parameters and any schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutputs
from inflight.config import EngineConfig
from inflight.errors import ConfigError, EngineAsleepError
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.runner import LoadedRank
from inflight.execution.parallel.shared_memory import HostCollective, SharedCollective
from inflight.execution.parallel.starting import rank_shard
from inflight.execution.platforms import Platform
from inflight.execution.runner import GRAMMAR_PATIENCE
from inflight.layers.native.library import native_library
from inflight.loading import load as decoders
from inflight.loading.load import load_rank
from inflight.models.decoders.spec import DecoderSpec, Shard
from inflight.outputs import RequestOutput
from tests.e2e.conftest import Folder
from tests.e2e.policies import GREEDY_CONTINUOUS
from tests.e2e.reference import PROMPTS
from tests.execution.parallel import thread_ranks
from tests.support.checkpoints import FAMILIES
from tests.support.pooled import write_reranker

pytestmark = [
    pytest.mark.skipif(native_library() is None, reason="ranks on a CPU need the compiled kernels"),
    pytest.mark.usefixtures("in_threads"),
]

BASE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = [
    BASE,
    replace(BASE, logprobs=3, prompt_logprobs=2),
    replace(BASE, temperature=0.9, top_k=20, seed=7, repetition_penalty=1.2),
    replace(BASE, temperature=1.3, top_p=0.8, min_p=0.01, seed=3, logprobs=1),
    replace(
        BASE,
        temperature=0.7,
        seed=1,
        logit_bias={5: 3.0, 9: -100},
        frequency_penalty=0.4,
        presence_penalty=0.2,
    ),
]
SCARCE: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "policy": GREEDY_CONTINUOUS}
SCENES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 13},
    "scarce": SCARCE,
    "scarce-chunked-depth-2": SCARCE | {"max_num_batched_tokens": 9, "pipeline_depth": 2},
}
SHAPES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def run(llm: LLM, rounds: int = 1) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(rounds):
        outputs = llm.generate([*PROMPTS, *PROMPTS[1:]], [*PARAMS, *PARAMS[:4]], use_tqdm=False)
    llm.close()
    return outputs


@cache
def of_one_rank(path: Path) -> list[RequestOutput]:
    return run(LLM(path, show_progress=False))


def logprobs(output: RequestOutput) -> list[dict[int, float]]:
    positions = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [{i: entry.logprob for i, entry in at.items()} for at in positions if at is not None]


def check(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for a, b in zip(logprobs(ours), logprobs(theirs), strict=True):
            assert a == pytest.approx(b, abs=1e-4)


# The most ranks of either kind, and both: what fewer of one kind do, the schedules below try with one family.
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (family, shape)
        for family in FAMILIES
        for shape in ("tp4", "pp3", "tp2-pp2")
        if family != "gemma4-small" or shape == "tp4"
    ],
)
def test_every_family_gives_the_tokens_of_one_rank(family: str, shape: str, folder: Folder) -> None:
    path = folder(family)
    check(run(LLM(path, show_progress=False, **SHAPES[shape])), of_one_rank(path))


def test_layers_that_share_what_one_stage_has_are_not_cut(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2: layers of Gemma4ForCausalLM read"):
        LLM(folder("gemma4-small"), show_progress=False, pipeline_parallel_size=2)


# Five experts do not divide evenly.
@pytest.mark.parametrize(
    ("family", "size"), [("qwen3-moe", 2), ("qwen2-moe", 2), ("glm4-moe", 4), ("granite-moe", 4)]
)
def test_ranks_with_whole_experts_give_the_tokens_of_one_rank(family: str, size: int, folder: Folder) -> None:
    path = folder(family)
    llm = LLM(path, show_progress=False, tensor_parallel_size=size, enable_expert_parallel=True)
    check(run(llm), of_one_rank(path))


def test_ranks_without_experts_are_rejected(folder: Folder) -> None:
    path = folder("mixtral", num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 8: the model has 4 experts"):
        LLM(path, show_progress=False, tensor_parallel_size=8, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("scene", "shape"),
    [
        *((scene, shape) for scene in ("whole", "scarce-chunked-depth-2") for shape in SHAPES),
        *((scene, "tp2-pp2") for scene in ("chunked", "scarce")),
    ],
)
def test_every_schedule_gives_the_tokens_of_one_rank(scene: str, shape: str, folder: Folder) -> None:
    expected = of_one_rank(folder("qwen3"))
    outputs = run(LLM(folder("qwen3"), show_progress=False, **SHAPES[shape], **SCENES[scene]), rounds=2)
    check(outputs, expected)
    if "scarce" in scene:
        assert any(output.metrics.num_preemptions for output in outputs)
    else:
        assert any(output.num_cached_tokens for output in outputs)


def test_other_requests_change_no_bit(folder: Folder) -> None:
    """For a given number of ranks, sums are taken in the same order whatever else is in the step."""
    llm = LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2, enable_prefix_caching=False)
    params = replace(PARAMS[3], logprobs=5)
    (alone,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
    crowd = llm.generate([*PROMPTS, PROMPTS[3]], [*PARAMS, params], use_tqdm=False)
    llm.close()
    assert crowd[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert logprobs(crowd[-1]) == logprobs(alone)


def test_biases_count_once_and_uneven_parts_are_complete(folder: Folder) -> None:
    """A bias of a summed product counts once; a vocabulary and inner features that do not divide are cut unevenly."""
    fields: dict[str, Any] = {
        "attention_bias": True,
        "mlp_bias": True,
        "vocab_size": 319,
        "intermediate_size": 97,
    }
    path = folder("llama", **fields)
    prompts = [[i % 319 for i in prompt] for prompt in PROMPTS]
    answers = []
    for size in (1, 2, 4):
        llm = LLM(path, show_progress=False, tensor_parallel_size=size)
        answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS, use_tqdm=False)])
        llm.close()
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_constrained_answers_are_those_of_one_rank(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank samples knows the grammars, and the others wait for it to compile them: the first one may have
    them already, since it is where constraints are validated."""
    allowed: list[float] = []
    monkeypatch.setattr(SharedCollective, "allow", lambda _, seconds: allowed.append(seconds))
    params = [
        replace(BASE, ignore_eos=False, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
        BASE,
    ]
    texts = []
    for options in ({}, SHAPES[shape]):
        with LLM(show_progress=False, **options) as llm:
            outputs = llm.generate(["Is it?", "Once upon a time"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert texts[0][0] in ("yes", "no")
    assert allowed == ([GRAMMAR_PATIENCE] * 2 if shape == "tp2" else [])


@pytest.mark.parametrize("shape", ["tp2", "tp2-pp2"])
def test_vectors_of_a_decoder_are_those_of_one_rank(shape: str, tmp_path: Path) -> None:
    path = write_reranker(tmp_path / "Qwen3-Reranker-Tiny")
    scores = []
    for options in ({}, SHAPES[shape]):
        with LLM(path, show_progress=False, **options) as llm:
            outputs = llm.score("What is the capital?", ["Paris is.", "A fox jumps."], use_tqdm=False)
            scores.append([output.outputs.score for output in outputs])
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)


def test_dummy_weights_do_not_depend_on_the_ranks(folder: Folder) -> None:
    config = json.loads((folder("llama") / "config.json").read_text())
    answers = []
    for options in ({}, SHAPES["tp2"], SHAPES["pp2"]):
        with LLM("-", show_progress=False, load_format="dummy", hf_config=config, **options) as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, BASE, use_tqdm=False)])
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_share_of_every_rank_is_logged_before_it_is_allocated(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inflight")
    llm = LLM(folder("qwen3"), show_progress=False, num_blocks=64, **SHAPES["tp2-pp2"])
    llm.close()
    messages = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rank")]
    assert len(messages) == 8
    assert messages[0].startswith("rank 0 of 4, layers 0 to ")
    assert messages[3].startswith("rank 3 of 4, layers ")
    assert messages[3].endswith("GiB of weights")
    assert messages[7].endswith("GiB of KV memory")


def test_mirrored_ranks_give_the_tokens_of_one(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks sample, as on GPUs, here with the runner of a CPU: sums go through the host, every rank has all logits,
    and tokens are not exchanged."""
    expected = run(LLM(folder("qwen3"), show_progress=False))

    def shard_of_rank(spec: DecoderSpec, memory: RankMemory, place: Platform) -> Shard:
        shard = rank_shard(spec, memory, place)
        assert isinstance(shard.collective, SharedCollective)
        return replace(shard, collective=HostCollective(shard.collective))

    def load(config: EngineConfig, memory: RankMemory) -> LoadedRank:
        return load_rank(config, memory)._replace(num_blocks=50)

    monkeypatch.setattr(decoders, "rank_shard", shard_of_rank)
    monkeypatch.setattr(thread_ranks, "load_rank", load)
    llm = LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2, num_blocks=60)
    assert llm._engine.facts.num_blocks == 50  # as many as fit on every rank
    check(run(llm), expected)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_serve_another_policy_and_wake_from_sleep(folder: Folder, size: str) -> None:
    expected = run(LLM(folder("qwen3"), show_progress=False))
    llm = LLM(folder("qwen3"), show_progress=False, **{size: 2})
    llm.generate(PROMPTS, BASE, use_tqdm=False)
    llm._engine.use(policy="static", max_num_seqs=4)
    llm.sleep()
    assert llm.is_sleeping()
    with pytest.raises(EngineAsleepError):
        llm.generate(PROMPTS, BASE, use_tqdm=False)
    llm.wake_up()
    check(run(llm), expected)
