"""The GPU's encoder runner, in Triton's interpreter, against transformers and the CPU's runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.config import EngineConfig
from inflight.errors import EngineError
from inflight.execution.encoder_runner import EncoderRunner, TextRunner
from inflight.execution.gpu.encoder_runner import GpuEncoderRunner
from inflight.execution.gpu.shapes import TextShape
from inflight.execution.platforms import CpuPlatform, EncoderKernels
from inflight.layers.attention.triton import sequences as triton_sequences
from inflight.layers.attention.triton.sequences import TritonSequenceAttention
from inflight.layers.attention.triton.tuning import choose_sequences
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_kernels import TritonKernels
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.heads import POOLINGS, Pooler
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission, Batch
from inflight.scheduling.request_pool import Limits
from tests.support.encoder_checkpoints import (
    HIDDEN,
    LONGEST,
    load,
    logits,
    make_encoder,
    texts,
    vectors,
    write_pooling,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"
    ),
    # Padding is computed from whatever was in memory, and its results are dropped.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")
NAN = float("nan")
# 50 tokens, with room for 64: a tile of positions and one more, one that is full, and the smallest.
RAGGED = texts([1, 37, 7, 5])


def triton_kernels(_: CpuPlatform, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
    attention = TritonSequenceAttention(choose_sequences(dtype, spec.head_dim, CPU))
    return EncoderKernels(TritonKernels(dtype, CPU, few_tokens=0), attention, TorchKernels(torch.float32))


def gpu_runner(_: CpuPlatform, __: EngineConfig, encoder: PoolingEncoder, limits: Limits) -> GpuEncoderRunner:
    return GpuEncoderRunner(encoder, limits.max_num_seqs, limits.max_num_batched_tokens, graphs=False)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines for the CPU have the GPU's kernels and runner."""
    monkeypatch.setattr(CpuPlatform, "encoder_kernels", triton_kernels)
    monkeypatch.setattr(CpuPlatform, "encoder_runner", gpu_runner)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("bert", {"num_hidden_layers": 2}),  # positions, segments, biases
        ("xlm-roberta", {"num_hidden_layers": 1}),  # one segment
        ("modernbert", {"num_hidden_layers": 2, "local_attention": 8, "global_attn_every_n_layers": 2}),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_logits_match_transformers(
    family: str, overrides: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    """Run one step alone, and two in flight at once."""
    model = make_encoder(family, classifier=True, **overrides)
    model.save_pretrained(tmp_path)
    max_tokens = {1: 64, 2: 40}[depth]
    engine = load(tmp_path, max_model_len=40, max_num_batched_tokens=max_tokens, pipeline_depth=depth)
    seconds = [0, 5, 0, 3] if family == "bert" else [0] * 4
    actual = vectors(engine, RAGGED, seconds)
    for prompt, second, vector in zip(RAGGED, seconds, actual, strict=True):
        np.testing.assert_allclose(vector, logits(model, prompt, second), atol=1e-4, rtol=1e-4)
    runner = engine.core.runner
    assert isinstance(runner, GpuEncoderRunner)
    shapes = runner.upload.shapes_met
    assert shapes == ({TextShape(64, 8)} if depth == 1 else {TextShape(40, 8), TextShape(16, 8)})
    engine.close()


# ---- the runner by itself ----

Vectors = dict[int, NDArray[np.float32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedder of one layer."""
    path = tmp_path_factory.mktemp("bert")
    make_encoder("bert", classifier=False, num_hidden_layers=1).save_pretrained(path)
    return write_pooling(path)


@pytest.fixture
def cpu_runner(folder: Path) -> EncoderRunner:
    runner = load(folder).core.runner
    assert isinstance(runner, EncoderRunner)
    return runner


@pytest.fixture
def runner(cpu_runner: EncoderRunner, folder: Path, on_gpu: None) -> GpuEncoderRunner:  # noqa: ARG001
    runner = load(folder, max_num_batched_tokens=LONGEST, max_num_seqs=16).core.runner
    assert isinstance(runner, GpuEncoderRunner)
    return runner


def batch_of(prompts: Sequence[list[int]]) -> Batch:
    requests = [
        Request.create(str(row), ids, SamplingParams(), 0, task="pool") for row, ids in enumerate(prompts)
    ]
    admissions = [Admission(row, request.current_spec()) for row, request in enumerate(requests)]
    rows, lengths = list(range(len(prompts))), [len(ids) for ids in prompts]
    return Batch(0, rows, [0] * len(prompts), lengths, num_tokens=sum(lengths), admissions=admissions)


def computed(runner: TextRunner, prompts: Sequence[list[int]]) -> Vectors:
    return read(runner, runner.launch(batch_of(prompts)))


def read(runner: TextRunner, handle: Any) -> Vectors:
    result = runner.collect(handle)
    assert not result.errors
    return {entry: np.frombuffer(vector, np.float32) for entry, vector in result.vectors.items()}


def assert_same(actual: Vectors, expected: Vectors) -> None:
    assert actual.keys() == expected.keys()
    for entry, vector in actual.items():
        np.testing.assert_allclose(vector, expected[entry], atol=1e-4, rtol=1e-4)


class Unchanged:
    """Implements `Head`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, pooled: Tensor) -> Tensor:
        return pooled.float()


def with_pooling(model: PoolingEncoder, modes: tuple[str, ...]) -> PoolingEncoder:
    return PoolingEncoder(model.encoder, Pooler(modes), Unchanged(len(modes) * HIDDEN))


@pytest.mark.parametrize("modes", [("cls",), ("lasttoken",), POOLINGS], ids=["cls", "last", "all"])
@pytest.mark.parametrize("lengths", [(5, 33, 1, 12), (40, 24)], ids=["padded", "full"])
def test_every_pooling_matches_the_cpu(
    runner: GpuEncoderRunner, cpu_runner: EncoderRunner, modes: tuple[str, ...], lengths: tuple[int, ...]
) -> None:
    """Steps have padding tokens and texts, or only texts, so that no token follows the last."""
    prompts, model = texts(lengths), with_pooling(runner.model, modes)
    on_gpu = GpuEncoderRunner(model, max_rows=16, max_tokens=LONGEST, graphs=False)
    on_cpu = EncoderRunner(with_pooling(cpu_runner._model, modes))
    assert_same(computed(on_gpu, prompts), computed(on_cpu, prompts))
    assert on_gpu.upload.shapes_met == {TextShape(64, 8)}


def test_stale_memory_reaches_no_result(
    runner: GpuEncoderRunner, cpu_runner: EncoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = computed(cpu_runner, RAGGED)
    computed(runner, texts([48, 48], seed=1))  # a step of more tokens, laid out differently
    runner.vectors[:32].fill_(NAN)

    def not_a_number(num_tokens: int, num_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((num_tokens, num_features), NAN, dtype=dtype, device=device)

    monkeypatch.setattr(triton_sequences, "padded_empty", not_a_number)
    assert_same(computed(runner, RAGGED), expected)


def test_later_step_does_not_overwrite_uncollected_vectors(
    runner: GpuEncoderRunner, cpu_runner: EncoderRunner
) -> None:
    other = texts([7, 5], seed=1)
    handles = [runner.launch(batch_of(prompts)) for prompts in (RAGGED, other)]
    for prompts, handle in zip((RAGGED, other), handles, strict=True):
        assert_same(read(runner, handle), computed(cpu_runner, prompts))


def test_padded_texts_give_the_same_vectors(runner: GpuEncoderRunner, cpu_runner: EncoderRunner) -> None:
    """Padding, for comparisons, adds tokens but does not change the vectors."""
    runner.padded = True
    assert_same(computed(runner, texts([3, 9, 1])), computed(cpu_runner, texts([3, 9, 1])))
    assert runner.upload.shapes_met == {TextShape(32, 8)}


def test_shapes_are_captured_and_trial_steps_run_at_start(runner: GpuEncoderRunner) -> None:
    runner.prepare([TextShape(16, 8), TextShape(32, 32)])
    runner.warm_up(max_len=24, max_tokens=50)
    assert runner.upload.shapes_met == {TextShape(16, 8), TextShape(32, 32), TextShape(48, 8)}


def test_attention_without_a_planner_is_rejected(cpu_runner: EncoderRunner) -> None:
    with pytest.raises(EngineError, match="cannot plan for"):
        GpuEncoderRunner(cpu_runner._model, max_rows=4, max_tokens=64, graphs=False)
