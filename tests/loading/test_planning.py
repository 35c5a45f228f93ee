"""Plans match the memory that engines take."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.shapes import SHAPES
from inflight import LLM
from inflight.cli.main import app
from inflight.cli.plan import described, parse_gpus, parse_size
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution import platforms
from inflight.execution.runner import ModelRunner
from inflight.layers.attention.triton.backend import TritonAttention
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.triton_kernels import TritonKernels
from inflight.loading.planning import Devices, plan_devices
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import meta_decoder, meta_kernels, num_bytes
from inflight.models.decoders.spec import shard_of, whole_shard
from inflight.models.quantization import QuantizedOnLoading
from tests.support.checkpoints import FAMILIES
from tests.support.held_bytes import held, storage_bytes

GIB = 1 << 30


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_planned_memory(family: str, dtype: torch.dtype) -> None:
    fields: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 4001}
    if family == "gemma3":
        fields["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if family == "gemma4-small":
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    spec = decoder_spec(FAMILIES[family](**fields).to_dict())
    kernels = meta_kernels("cpu", dtype)
    platform = platforms.CpuPlatform()
    for shard in (shard_of(spec, 0, 1), shard_of(spec, 1, 2), shard_of(spec, 0, 2, range(2))):
        parts = platform.kernels_and_attention(dtype)
        decoder = Decoder(spec, *parts, dtype, platform.device, 300, shard)
        planned = meta_decoder(shard, kernels, dtype, 300)
        assert num_bytes(planned) == held(decoder)
        assert planned.kv_shape(16) == decoder.kv_shape(16)
    gc.collect()


SCHEMES: list[GroupScheme | None] = [
    None,
    *(GroupScheme("fp8", group, inputs="fp8") for group in (0, 128)),
    *(GroupScheme("int8", group, zeros) for group, zeros in ((0, False), (32, True))),
    *(GroupScheme("int4", group, zeros) for group, zeros in ((0, False), (128, True), (32, True))),
    GroupScheme("fp4", 32),  # plain but in experts
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name if scheme else "plain")
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt-oss", "qwen2-moe", "qwen3.5-moe", "gemma4-small"])
def test_weights_on_a_gpu_take_the_planned_memory(family: str, scheme: GroupScheme | None) -> None:
    # Rows of 288 and 160 features fill no groups of 128.
    fields: dict[str, Any] = {"hidden_size": 288, "num_hidden_layers": 1, "vocab_size": 500}
    if "moe" in family:
        fields |= {"moe_intermediate_size": 160, "shared_expert_intermediate_size": 160}
    fields["intermediate_size"] = 160
    if family in ("qwen3.5-moe", "gemma4-small"):
        fields = {name: value for name, value in fields.items() if name != "num_hidden_layers"}
    if family == "gemma4-small":
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    spec, dtype, device = (
        decoder_spec(FAMILIES[family](**fields).to_dict()),
        torch.bfloat16,
        torch.device("cpu"),
    )
    if scheme is not None:
        spec = replace(spec, quantization=QuantizedOnLoading(scheme))
    kernels = TritonKernels(dtype, device)
    decoder = Decoder(spec, kernels, TritonAttention(dtype, device), dtype, device, 300)
    planned = num_bytes(meta_decoder(whole_shard(spec), meta_kernels("cuda", dtype), dtype, 300))
    assert storage_bytes(decoder) == num_bytes(decoder), "two tensors share memory"
    actual = num_bytes(decoder) - num_bytes(kernels)
    assert planned == pytest.approx(actual, rel=0.001)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_engine_takes_the_planned_memory(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {"hf_config": SHAPES["tiny"], "load_format": "dummy", "max_model_len": 2048}
    options["kv_cache_dtype"] = kv_cache_dtype
    before = 64 << 20
    actual = plan_devices(EngineConfig.create("-", **options), Devices("cpu", 1, before))
    (fit,) = actual.fits
    left = before - fit.shares[0].weights
    monkeypatch.setattr(platforms, "available_memory", lambda: left)
    llm = LLM("-", show_progress=False, **options)
    assert fit.num_tokens == pytest.approx(llm._engine.facts.num_blocks * 16, rel=0.02)
    assert fit.num_requests == fit.num_tokens // 2048
    runner = llm._engine.core.runner
    assert isinstance(runner, ModelRunner)
    num_blocks = llm._engine.facts.num_blocks
    assert sum(lane.nbytes for lane in runner.cache.lanes) == fit.shares[0].kv(num_blocks)
    llm.close()


def test_large_model_fits_only_on_enough_gpus() -> None:
    """8 billion parameters in bfloat16: 15 GiB."""
    config = EngineConfig.create("-", hf_config=SHAPES["llama-3.1-8b"], dtype="bfloat16", load_format="dummy")
    actual = plan_devices(config, Devices("cuda", 4, 24 * 10**9))
    assert actual.parameters == pytest.approx(8.03e9, rel=0.01)
    fits = {(fit.tensor, fit.pipeline): fit for fit in actual.fits}
    assert set(fits) == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert fits[1, 1].shares[0].weights == pytest.approx(2 * actual.parameters, rel=0.01)
    assert fits[1, 1].num_requests == 0
    assert fits[4, 1].num_requests >= 3
    assert fits[4, 1].num_tokens > 2 * fits[2, 1].num_tokens
    for fit in fits.values():
        assert sum(share.weights for share in fit.shares) == pytest.approx(2 * actual.parameters, rel=0.03)
        for share in fit.shares:
            assert share.weights + share.kv(fit.num_blocks) < 0.9 * 24e9
    small = plan_devices(config, Devices("cuda", 1, 8 * 10**9))
    assert [fit.num_tokens for fit in small.fits] == [0]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_are_planned_for_every_rank(expert_parallel: bool) -> None:
    """30.5 billion parameters in bfloat16."""
    config = EngineConfig.create(
        "-",
        hf_config=SHAPES["qwen3-30b-a3b"],
        dtype="bfloat16",
        load_format="dummy",
        enable_expert_parallel=expert_parallel,
    )
    actual = plan_devices(config, Devices("cuda", 4, 80 * 10**9))
    assert actual.parameters == pytest.approx(30.53e9, rel=0.01)
    for fit in actual.fits:
        assert sum(share.weights for share in fit.shares) == pytest.approx(2 * actual.parameters, rel=0.02)
    fits = {(fit.tensor, fit.pipeline): fit for fit in actual.fits}
    assert fits[4, 1].shares[3].weights == pytest.approx(actual.parameters / 2, rel=0.02)


def test_gpu_can_be_planned_for_without_triton() -> None:
    """A CPU build of torch comes without it."""
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from benchmarks.shapes import SHAPES
        from inflight.config import EngineConfig
        from inflight.loading.planning import Devices, plan_devices
        config = EngineConfig.create("-", hf_config=SHAPES["qwen3.5-9b"], quantization="int4", load_format="dummy")
        (fit,) = plan_devices(config, Devices("cuda", 1, 80 * 10**9)).fits
        assert fit.num_requests > 1
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("configured", [None, 500])
def test_plan_has_rows_for_as_many_states_as_an_engine(configured: int | None) -> None:
    """A request's states in Qwen3.5 9B take 53 MB: with 1,024 rows nothing would be left."""
    options: dict[str, Any] = {"hf_config": SHAPES["qwen3.5-9b"], "dtype": "bfloat16", "load_format": "dummy"}
    gpu = Devices("cuda", 1, 141 * 10**9)
    (fit,) = plan_devices(EngineConfig.create("-", max_num_seqs=configured, **options), gpu).fits
    (same,) = plan_devices(EngineConfig.create("-", max_num_seqs=configured or 256, **options), gpu).fits
    assert fit == same
    assert fit.num_blocks > 0


def test_plan_reports_groups_and_counts_only_windows() -> None:
    config = EngineConfig.create(
        "-", hf_config=SHAPES["gemma-3-12b"], dtype="bfloat16", load_format="dummy", max_model_len=32_768
    )
    (fit,) = plan_devices(config, Devices("cuda", 1, 141 * 10**9)).fits
    assert described(fit.layout) == "1 of all tokens, 5 of the last 1,024"
    in_full = 6 * 32_768 // 16  # blocks of a request if all layers kept all tokens
    assert fit.num_requests >= 5 * (fit.num_blocks // in_full)
    assert fit.layout.blocks_for(32_768, 1) < 0.2 * in_full
    hybrid = EngineConfig.create("-", hf_config=SHAPES["qwen3.5-9b"], dtype="bfloat16", load_format="dummy")
    (fit,) = plan_devices(hybrid, Devices("cuda", 1, 141 * 10**9)).fits
    assert "snapshots of" in described(fit.layout)


def test_gpu_stores_weights_in_their_dtype() -> None:
    spec = decoder_spec(SHAPES["qwen3-0.6b"])
    dtype = torch.bfloat16
    assert num_bytes(meta_decoder(whole_shard(spec), meta_kernels("cuda", dtype), dtype)) == pytest.approx(
        2 * 596e6, rel=0.01
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4x80GB", (4, 80 * 10**9)), ("1 x 79.5GiB", (1, int(79.5 * GIB))), ("2X40g", (2, 40 * 10**9))],
)
def test_gpus_option_is_parsed(text: str, expected: tuple[int, int]) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", "80GB", "4x", "0x80GB", "4x-1GB", "x80GB", "4x80 apples"])
def test_invalid_gpus_option_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)
    with pytest.raises(ConfigError, match="--cpu has the size"):
        parse_size("much", "--cpu")


def test_planning_an_encoder_is_rejected(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is an encoder"):
        plan_devices(EngineConfig.create(tmp_path), Devices("cpu", 1, GIB))


def test_plan_command_reports_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"] | {"dtype": "bfloat16"}))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "4x24GB", "--max-model-len", "8192"])
    assert result.exit_code == 0, result.output
    assert "8.03 billion parameters in bfloat16, context 8,192" in result.output
    assert "a request of full length: --tensor-parallel-size 1 --pipeline-parallel-size 1" in result.output
    assert CliRunner().invoke(app, ["plan", str(tmp_path)]).exit_code == 2  # on what?
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "1x4GB"])
    assert "no number of ranks has room" in str(result.exception)
