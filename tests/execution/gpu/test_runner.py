"""The GPU runner beside the CPU's: the same engine, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams, loading
from inflight.errors import DeviceLostError
from inflight.scheduling import Batch
from tests.checkpoints import write_checkpoint
from tests.execution.gpu.interpreted import InterpretedPlatform

# Padding is computed from whatever was in memory, and its results are dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

# Small, and with what kernels have to mind: three heads a KV head, a head size that is no power of two.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "vocab_size": 96,
}
SHARED = list(range(3, 83))
PROMPTS = [[5, 6, 7, 8, 9], [12] * 21, [*SHARED, 1], [*SHARED, 2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> InterpretedPlatform:
    place = InterpretedPlatform()
    monkeypatch.setattr(loading, "platform", lambda _: place)
    return place


def answers(folder: Path, params: SamplingParams, **options: Any) -> list[Any]:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 60} | options
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False, **more)


def test_greedy_tokens_are_those_of_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(folder, greedy(), device="cpu")
    place = InterpretedPlatform()
    monkeypatch.setattr(loading, "platform", lambda _: place)
    assert answers(folder, greedy()) == expected
    assert answers(folder, greedy(), enable_prefix_caching=False, pipeline_depth=1) == expected


def test_prefixes_are_read_together_where_blocks_are_shared(
    folder: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And make no difference to the tokens."""
    monkeypatch.setattr("inflight.attention.triton.planner.PREFIX_MIN_BLOCKS", 2)
    monkeypatch.setattr("inflight.attention.triton.planner.PREFIX_MIN_SAVED", 2)
    alone = InterpretedPlatform(share_prefixes=False)
    monkeypatch.setattr(loading, "platform", lambda _: alone)
    expected = answers(folder, greedy())
    monkeypatch.setattr(loading, "platform", lambda _: interpreted)
    assert answers(folder, greedy()) == expected
    assert any(shape.prefix for shape in interpreted.runners[-1].step.shapes_met)
    assert not any(shape.prefix for shape in alone.runners[-1].step.shapes_met)


@pytest.mark.usefixtures("interpreted")
def test_sampling_inside_and_apart_draw_the_same(folder: Path) -> None:
    """Logprobs take the step's sampling out of the graph."""
    plain = SamplingParams(
        temperature=0.9, top_p=0.8, seed=3, max_tokens=4, ignore_eos=True, detokenize=False
    )
    apart = SamplingParams(
        temperature=0.9, top_p=0.8, seed=3, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=2
    )
    drawn, scored = answers(folder, plain), answers(folder, apart)
    assert [ids for ids, _ in drawn] == [ids for ids, _ in scored]
    assert all(logprobs is None for _, logprobs in drawn)
    assert all(logprobs is not None for _, logprobs in scored)


def test_prompt_logprobs_are_those_of_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(**options: Any) -> list[float]:
        with LLM(
            folder, skip_tokenizer_init=True, show_progress=False, num_blocks=60, block_size=8, **options
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        return [next(iter(found.values())).logprob for found in output.prompt_logprobs if found]

    expected = scores(device="cpu")
    place = InterpretedPlatform()
    monkeypatch.setattr(loading, "platform", lambda _: place)
    assert scores() == pytest.approx(expected, abs=1e-4)


def test_a_rehearsal_leaves_no_trace(folder: Path, interpreted: InterpretedPlatform) -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 8, "block_size": 8}
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options):
        runner = interpreted.runners[-1]
        for cache in runner.caches:
            cache.fill_(3.0)
        runner.rows.tokens.fill_(4)
        runner.prepare(runner.buckets.usual())
        runner.rehearse_apart()
        assert all((cache == 3.0).all() for cache in runner.caches)
        assert (runner.rows.tokens == 4).all()
        assert not runner.step.workspace.counters.any()


def test_an_error_that_stays_is_a_lost_device(
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
            patch.setattr(runner, "_wait", broken)
            with pytest.raises(DeviceLostError, match=r"lost: an illegal memory access was encountered$"):
                runner.launch(Batch(0))
