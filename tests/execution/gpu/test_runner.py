"""The GPU runner gives the tokens of the CPU runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inflight import LLM, SamplingParams
from inflight.config import EngineConfig
from inflight.errors import DeviceLostError
from inflight.execution import platforms
from inflight.execution.gpu import device
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.platforms import platform
from inflight.layers.attention.triton import rope_write
from inflight.layers.attention.triton.decode import decode_attention
from inflight.layers.attention.triton.tuning import Tuning, choose
from inflight.loading.evaluation import evaluate
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Batch
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.support.checkpoints import write_checkpoint, write_tokenizer

# Padding is computed from whatever was in memory, and its results are dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

# Small, and with what kernels have to mind: three heads per KV head, a head size that is no power of two.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "vocab_size": 96,
}
SHARED = list(range(3, 35))
PROMPTS = [[5, 6, 7, 8, 9], [12] * 17, [*SHARED, 1], [*SHARED, 2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several layers, so that what one passes to the next and the memory of each are covered."""
    return write_checkpoint(tmp_path_factory.mktemp("deep"), "qwen3", **SHAPE | {"num_hidden_layers": 2})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> InterpretedPlatform:
    place = InterpretedPlatform()
    monkeypatch.setattr(platforms, "platform", lambda _: place)
    # The interpreter takes its time by the program: few and large ones.
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    return place


def answers(folder: Path, params: SamplingParams, **options: Any) -> list[Any]:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 60} | options
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def on_the_cpu(folder: Path) -> list[Any]:
    return answers(folder, greedy(), device="cpu")


@pytest.fixture(scope="module")
def deep_on_the_cpu(deep: Path) -> list[Any]:
    return answers(deep, greedy(), device="cpu")


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, **more)


def sampled(**more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.8, seed=3, max_tokens=3, ignore_eos=True, detokenize=False, **more
    )


def test_greedy_tokens_match_the_cpu(
    deep: Path, deep_on_the_cpu: list[Any], interpreted: InterpretedPlatform
) -> None:
    assert answers(deep, greedy(), enable_prefix_caching=False, pipeline_depth=1) == deep_on_the_cpu
    assert not any(shape.prefix for shape in interpreted.runners[-1].upload.shapes_met)


def test_many_chunks_get_their_own_shape(
    folder: Path, on_the_cpu: list[Any], interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.execution.gpu.shapes.FEW_CHUNKS", 1)
    assert answers(folder, greedy(), enable_prefix_caching=False) == on_the_cpu
    assert {shape.num_chunks for shape in interpreted.runners[-1].upload.shapes_met} >= {1, 4}


def test_prefixes_are_read_together_where_blocks_are_shared(
    deep: Path, deep_on_the_cpu: list[Any], interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not change the tokens."""
    monkeypatch.setattr("inflight.layers.attention.triton.planner.PREFIX_MIN_BLOCKS", 2)
    monkeypatch.setattr("inflight.layers.attention.triton.planner.PREFIX_MIN_SAVED", 2)
    assert answers(deep, greedy()) == deep_on_the_cpu
    assert any(shape.prefix for shape in interpreted.runners[-1].upload.shapes_met)


def test_short_contexts_have_a_tile_of_their_own(
    folder: Path, on_the_cpu: list[Any], interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for short contexts in steps without chunks."""
    used: set[int] = set()

    def tuned(*args: Any) -> Tuning:
        tuning = choose(*args)
        return replace(tuning, short_context=replace(tuning.decodes[0][1], keys=16))

    def watched(*args: Any) -> None:
        used.add(args[6].keys)
        decode_attention(*args)

    monkeypatch.setattr("inflight.layers.attention.triton.backend.choose", tuned)
    monkeypatch.setattr("inflight.layers.attention.triton.backend.decode_attention", watched)
    monkeypatch.setattr("inflight.layers.attention.triton.planner.SHORT_CONTEXT", 35)
    monkeypatch.setattr("inflight.execution.gpu.attention._num_processors", lambda _: 8)
    assert answers(folder, greedy(), enable_prefix_caching=False) == on_the_cpu
    shapes = interpreted.runners[-1].upload.shapes_met
    assert {shape.short_context for shape in shapes if not shape.chunks} == {False, True}
    assert not any(shape.short_context for shape in shapes if shape.chunks)
    assert len(used) == 2
    assert 16 in used


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 2},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}, "logprobs": 0},
        {"allowed_token_ids": list(range(0, 96, 5)), "min_tokens": 2, "stop_token_ids": [0, 5, 10, 15]},
    ],
)
def test_samples_and_scores_match_the_cpu(
    folder: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Requests use every sampling parameter, in steps of the same shapes, two in flight."""
    actual = answers(folder, sampled(**more))
    assert interpreted.runners[0].upload.shapes_met
    monkeypatch.setattr(platforms, "platform", platform)
    expected = answers(folder, sampled(**more), device="cpu")
    assert [ids for ids, _ in actual] == [ids for ids, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(actual, expected, strict=True):
        assert (logprobs is None) == (expected_logprobs is None) == ("logprobs" not in more)
        for position, other in zip(logprobs or (), expected_logprobs or (), strict=True):
            assert position.keys() == other.keys()
            assert [p.logprob for p in position.values()] == pytest.approx(
                [p.logprob for p in other.values()], abs=1e-4
            )


class AllTokens:
    """Implements `Collective` for the one rank that has all tokens."""

    capturable = False

    def __init__(self) -> None:
        self.num_gathers = 0

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert widths == [x.shape[1]]
        self.num_gathers += 1
        return x.clone()


def test_rank_samples_from_gathered_logits(
    folder: Path, interpreted: InterpretedPlatform, on_the_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    create, collective = GpuRunner.__init__, AllTokens()

    def join(self: GpuRunner, decoder: Decoder, *args: Any, **options: Any) -> None:
        decoder.shard = replace(decoder.shard, collective=collective)
        create(self, decoder, *args, **options)

    monkeypatch.setattr(GpuRunner, "__init__", join)
    assert answers(folder, greedy()) == on_the_cpu
    assert interpreted.runners
    assert collective.num_gathers > 0


def test_prompt_logprobs_match_the_cpu(
    folder: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(**options: Any) -> list[float]:
        options |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 60, "block_size": 8}
        with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        return [next(iter(actual.values())).logprob for actual in output.prompt_logprobs if actual]

    actual = scores()
    assert interpreted.runners
    monkeypatch.setattr(platforms, "platform", platform)
    assert actual == pytest.approx(scores(device="cpu"), abs=1e-4)


def test_evaluation_reads_the_distributions_of_its_runner(
    interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EngineConfig.create(write_checkpoint(tmp_path, "qwen3", **SHAPE | {"vocab_size": 320}))
    write_tokenizer(tmp_path)
    actual = evaluate(config, "The dog does not mind. ", config, window=9)
    assert len(interpreted.runners) == 2
    assert actual.agreement is not None
    assert (actual.agreement.divergence, actual.agreement.top_1) == (0, 1)
    monkeypatch.setattr(platforms, "platform", platform)
    expected = evaluate(config, "The dog does not mind. ", window=9)
    assert actual.num_tokens == expected.num_tokens
    assert actual.perplexity == pytest.approx(expected.perplexity, rel=1e-4)


def test_warm_up_leaves_no_trace(folder: Path, interpreted: InterpretedPlatform) -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8, "block_size": 8}
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options):
        runner = interpreted.runners[-1]
        for cache in runner.cache.layers:
            cache.fill_(3.0)
        runner.rows.tokens.fill_(4)
        runner.prepare(runner.buckets.usual())
        runner.warm_up_scoring()
        assert all((cache == 3.0).all() for cache in runner.cache.layers)
        assert (runner.rows.tokens == 4).all()
        assert not runner.attention.workspace.counters.any()


def test_persistent_error_is_reported_as_a_lost_device(
    folder: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered\nmore")

    with LLM(folder, skip_tokenizer_init=True, show_progress=False, num_blocks=8, max_num_seqs=2):
        runner = interpreted.runners[-1]
        monkeypatch.setattr(runner, "_launch", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            runner.launch(Batch(0))
        with monkeypatch.context() as patch:
            patch.setattr(device, "wait_for", broken)
            with pytest.raises(DeviceLostError, match=r"lost: an illegal memory access was encountered$"):
                runner.launch(Batch(0))
