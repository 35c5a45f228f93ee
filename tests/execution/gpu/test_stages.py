"""The GPU runner of a stage that has some of the layers. In Triton's interpreter one stage runs after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight import LLM
from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.config import EngineConfig
from inflight.constraints.compiler import GrammarCompiler
from inflight.execution import platforms
from inflight.execution.gpu.runner import GpuRunner, GpuStepHandle
from inflight.execution.parallel.messages import SampledIds
from inflight.execution.parallel.runner import StageRank
from inflight.execution.platforms import CpuPlatform
from inflight.execution.runner import StageLinks
from inflight.layers.attention.triton import rope_write
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.spec import shard_of
from inflight.models.decoders.weights import load_decoder
from inflight.scheduling.batch import Batch, Sampled
from tests.execution.gpu.interpreted import DEVICE, InterpretedPlatform
from tests.execution.gpu.test_runner import deep as deep
from tests.execution.gpu.test_runner import greedy
from tests.support.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class OneAfterTheOther:
    """Implements `StageLinks` for both ends."""

    def __init__(self) -> None:
        self._hidden: list[Tensor] = []

    def receive(self, into: Tensor) -> None:
        into.copy_(self._hidden.pop())

    def hand_over(self, hidden: Tensor) -> None:
        self._hidden.append(hidden.clone())


class TwoStages:
    """Implements `Runner`."""

    def __init__(self, first: GpuRunner, last: GpuRunner) -> None:
        assert not first.samples
        self._first = StageRank(first)
        self._last = last
        self._sampled: list[SampledIds] = []

    def launch(self, batch: Batch) -> tuple[int, GpuStepHandle]:
        self._first.run(batch, self._sampled)
        self._sampled = []
        return batch.step, self._last.launch(batch)

    def collect(self, handle: tuple[int, GpuStepHandle]) -> Sampled:
        step, of_last = handle
        sampled = self._last.collect(of_last)
        token_ids = [ids[0] for ids in sampled.token_ids if ids]
        if token_ids:
            self._sampled.append(SampledIds(step, token_ids))
        return sampled

    def close(self) -> None:
        self._first.close()
        self._last.close()


class StagedPlatform(InterpretedPlatform):
    """A platform whose runner splits the decoder's layers into two stages."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,  # noqa: ARG002
    ) -> Any:
        spec, between = decoder.spec, OneAfterTheOther()
        stages = []
        for layer in range(spec.num_layers):
            part = load_decoder(
                open_checkpoint(str(self._folder)),
                *self.kernels_and_attention(torch.float32),
                torch.float32,
                DEVICE,
                spec=spec,
                shard=shard_of(spec, 0, 1, range(layer, layer + 1)),
            )
            stages.append(super().runner(config, part, num_blocks, max_len, grammars, between))
        return TwoStages(*stages)


def test_two_stages_give_the_tokens_of_one_stage(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_stages(deep, monkeypatch)


def test_stage_may_have_recurrent_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(
        tmp_path,
        "qwen3.5",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )
    # Both stages run under the layout of the whole model, whose snapshots take fewer blocks than those of this stage.
    check_stages(folder, monkeypatch, enable_prefix_caching=False)


def check_stages(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A prompt is chunked, and a row is reused by another request."""
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    prompts = [[12] * 10, [5, 6]]
    params = [replace(greedy(), max_tokens=2), replace(greedy(), max_tokens=2, temperature=0.9, seed=3)]
    options: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "num_blocks": 20,
        "block_size": 8,
        **more,
    }
    actual = []
    for place in (CpuPlatform(), StagedPlatform(folder)):
        monkeypatch.setattr(platforms, "platform", lambda _, place=place: place)
        with LLM(folder, skip_tokenizer_init=True, show_progress=False, pipeline_depth=1, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        actual.append([output.outputs[0].token_ids for output in outputs])
    assert actual[1] == actual[0]
