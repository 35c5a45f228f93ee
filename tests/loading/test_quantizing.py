"""Quantizing plain checkpoints: while loading, into files of compressed-tensors, and what it costs in quality."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inflight import LLM
from inflight.checkpoint.checkpoint import fingerprint, open_checkpoint
from inflight.config import CacheConfig, EngineConfig
from inflight.errors import ConfigError
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.formats.weight_format import PlainFormat
from inflight.loading.checkpoint import quantized_kv_spec, quantized_spec
from inflight.loading.evaluation import evaluate, unquantized
from inflight.loading.planning import Devices, plan_devices
from inflight.loading.quantizing import quantize_checkpoint
from inflight.models.decoders.families import decoder_spec
from inflight.models.quantization import ON_LOADING
from tests.models.running import load, logprobs, prompt
from tests.support.checkpoints import FAMILIES, write_checkpoint, write_tokenizer
from tests.support.specs import attentions

TEXT = "The quick brown fox jumps over the lazy dog, and a batch is a set of requests. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=False)
    write_tokenizer(path)
    return path


def config(model: Path | str, **options: Any) -> EngineConfig:
    return EngineConfig.create(str(model), device="cpu", **options)


@pytest.mark.parametrize("name", ON_LOADING)
def test_written_checkpoint_is_what_its_library_reads(name: str, folder: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    out = tmp_path / "out"
    quantize_checkpoint(config(folder), out, name)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(described)
    scheme = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(described["format"])
    tensors, original = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    plain = dict(original)
    modules = [
        key.removesuffix(".weight")
        for key in original
        if f"{key.removesuffix('.weight')}.weight_scale" in tensors
    ]
    assert len(modules) == 7 * 3
    assert not set(modules) & set(described["ignore"])
    for module in modules:
        state = {
            key.removeprefix(f"{module}."): value
            for key, value in tensors.items()
            if key.startswith(f"{module}.")
        }
        plain[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].float()
        error = (plain[f"{module}.weight"] - original[f"{module}.weight"]).norm()
        assert error / original[f"{module}.weight"].norm() < {"fp8": 0.03, "int8": 0.01, "int4": 0.11}[name]
    # The copy computes what a plain checkpoint with these weights does.
    expected = _with_weights(folder, tmp_path / "plain", plain)
    torch.testing.assert_close(
        logprobs(load(out), prompt()), logprobs(load(expected), prompt()), rtol=2e-2, atol=2e-2
    )


def _with_weights(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def test_sharded_checkpoint_keeps_its_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", max_shard_size="100KB")
    quantize_checkpoint(config(source), tmp_path / "out", "int8")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert logprobs(load(tmp_path / "out"), prompt()).shape == (40, 320)


def test_unsupported_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(config(folder), out, "fp8")
    with pytest.raises(ConfigError, match="exists: pass a new folder"):
        quantize_checkpoint(config(folder), out, "fp8")
    with pytest.raises(ConfigError, match="already quantized, as compressed-tensors"):
        quantize_checkpoint(config(out), tmp_path / "again", "fp8")
    experts = write_checkpoint(tmp_path / "experts", "granite-moe")
    with pytest.raises(ConfigError, match=r"holds the matrices of all experts of a layer"):
        quantize_checkpoint(config(experts), tmp_path / "other", "fp8")
    odd = write_checkpoint(tmp_path / "odd", "llama", intermediate_size=90)
    with pytest.raises(ConfigError, match="have 64, 90 inputs: for int4, all must be multiples of 32"):
        quantize_checkpoint(config(odd), tmp_path / "other", "int4")


def test_options_choose_what_is_quantized_while_loading(folder: Path) -> None:
    spec = decoder_spec(FAMILIES["llama"]().to_dict())
    layer = "layers.0.mlp.down_proj"
    quantized = quantized_spec(spec, config(folder, quantization="int4").model)
    assert quantized.format_of(layer).scheme == GroupScheme("int4", 128, zeros=True)
    assert quantized.scheme(0, "attention.qkv") == GroupScheme("int4", 128, zeros=True)
    assert quantized.head_format.scheme is None
    with_head = quantized_spec(spec, config(folder, quantization="fp8", quantize_head=True).model)
    assert with_head.head_format.scheme == GroupScheme("fp8", inputs="fp8")
    assert isinstance(with_head.head_format, PlainFormat), "the checkpoint stores it as it is"
    assert quantized_spec(spec, config(folder).model) is spec
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32}
    own = decoder_spec(FAMILIES["llama"]().to_dict() | {"quantization_config": awq})
    assert quantized_spec(own, config(folder, quantization="awq").model) is own
    with pytest.raises(
        ConfigError, match="quantization is 'fp8': the checkpoint is already quantized, as awq"
    ):
        quantized_spec(own, config(folder, quantization="fp8").model)
    with pytest.raises(ConfigError, match="quantization is 'gptq', but the checkpoint is not quantized"):
        quantized_spec(spec, config(folder, quantization="gptq").model)
    with pytest.raises(ConfigError, match="quantize_head is True, but quantization is not set"):
        quantized_spec(spec, config(folder, quantize_head=True).model)


def test_quantization_changes_the_fingerprint(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    models = [
        None,
        config(folder).model,
        config(folder, quantization="fp8").model,
        config(folder, quantization="int8").model,
        config(folder, quantization="int8", quantize_head=True).model,
    ]
    digests = [fingerprint(checkpoint, None, model) for model in models]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_plan_counts_quantized_weights() -> None:
    shape = FAMILIES["llama"](hidden_size=512, intermediate_size=1024, num_hidden_layers=8).to_dict()
    gpus, weights = Devices("cuda", 1, 80 << 30), []
    for name in (None, "fp8", "int4"):
        plan = plan_devices(
            EngineConfig.create("shape", hf_config=shape, dtype="bfloat16", quantization=name), gpus
        )
        weights.append(plan.fits[0].shares[0].weights)
        assert (
            plan.parameters
            == plan_devices(EngineConfig.create("shape", hf_config=shape, dtype="bfloat16"), gpus).parameters
        )
    assert weights[1] < 0.6 * weights[0]
    assert weights[2] < 0.4 * weights[0]


def test_evaluation_scores_every_token_but_the_first(folder: Path) -> None:
    whole = evaluate(config(folder), TEXT)
    # Each token's probability, computed by hand.
    decoder = load(folder)
    ids = list(Tokenizer.load(folder).encode(TEXT))
    scores = logprobs(decoder, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert whole.num_tokens == len(ids) - 1
    assert whole.perplexity == pytest.approx(math.exp(-scores.double().mean().item()), rel=1e-3)
    assert whole.agreement is None
    windows = evaluate(config(folder), TEXT, window=16)
    assert windows.num_tokens == whole.num_tokens
    assert windows.perplexity != pytest.approx(whole.perplexity, rel=1e-6)
    assert evaluate(config(folder), TEXT, max_tokens=9).num_tokens == 8


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
def test_models_with_windows_and_recurrent_layers_are_evaluated(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    write_tokenizer(folder)
    ids = list(Tokenizer.load(folder).encode(TEXT))[:60]
    decoder, scores = load(folder), []
    for start in range(0, 59, 39):  # windows of 40 tokens, of which the next one begins with the last
        window = ids[start : start + 40]
        scores.append(logprobs(decoder, window)[:-1].gather(1, torch.tensor(window[1:])[:, None]))
    expected = math.exp(-torch.cat(scores).double().mean().item())
    actual = evaluate(config(folder), TEXT, window=40, max_tokens=60)
    assert actual.perplexity == pytest.approx(expected, rel=1e-3)


def test_evaluation_compares_with_the_unquantized_model(folder: Path) -> None:
    def divergence(name: str) -> float:
        quantized = config(folder, quantization=name)
        agreement = evaluate(quantized, TEXT, unquantized(quantized)).agreement
        assert agreement is not None
        assert 0.5 < agreement.top_1 <= 1
        assert agreement.perplexity == pytest.approx(evaluate(config(folder), TEXT).perplexity, rel=1e-6)
        return agreement.divergence

    int8, fp8, int4 = (divergence(name) for name in ("int8", "fp8", "int4"))
    assert 0 < int8 < fp8 < int4
    same = evaluate(config(folder), TEXT, config(folder)).agreement
    assert same is not None
    assert (same.divergence, same.top_1) == (0, 1)


def test_text_that_cannot_be_scored_is_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the text has 1 tokens: at least 2 are needed"):
        evaluate(config(folder), "a")
    other = write_checkpoint(tmp_path / "other", "qwen3")
    write_tokenizer(other, 300)
    with pytest.raises(ConfigError, match="the reference has another tokenizer"):
        evaluate(config(folder), TEXT, config(other))


def test_keys_and_values_of_layers_are_quantized_unless_skipped(tmp_path: Path) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 3}
    layers |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    folder = write_checkpoint(tmp_path, "qwen3", layer_types=None, **layers)
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))

    def quantized(*skipped: str, dtype: str = "fp8") -> list[str | None]:
        cache = CacheConfig(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped)
        return [layer.quantized_kv for layer in attentions(quantized_kv_spec(spec, cache))]

    assert quantized(dtype="auto") == [None, None, None]
    assert quantized() == ["fp8", "fp8", "fp8"]
    assert quantized("1") == ["fp8", None, "fp8"]
    assert quantized("sliding_window", dtype="int8") == ["int8", None, None]
    with pytest.raises(
        ConfigError, match=r"skip_layers has 3: allowed are layers from 0 to 2, and sliding_window"
    ):
        quantized("0", "3")
    with pytest.raises(ConfigError, match="kv_cache_dtype is auto: set it to fp8 or int8"):
        quantized("0", dtype="auto")


def test_fp8_kv_cache_is_rejected_on_a_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "show_progress": False,
        "device": "cpu",
        "num_blocks": 16,
    }
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8': on a CPU it must be 'auto' or 'int8'"):
        LLM(write_checkpoint(tmp_path, "qwen3"), kv_cache_dtype="fp8", **options)


def test_int8_kv_cache_is_rejected_on_a_gpu(tmp_path: Path) -> None:
    config = EngineConfig.create(str(write_checkpoint(tmp_path, "qwen3")), kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8': on a GPU it must be 'auto' or 'fp8'"):
        plan_devices(config, Devices("cuda", 1, 8 << 30))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_quantized_kv_cache_is_evaluated_on_a_cpu(folder: Path, dtype: str) -> None:
    quantized = EngineConfig.create(str(folder), device="cpu", kv_cache_dtype=dtype)
    result = evaluate(quantized, TEXT, unquantized(quantized))
    assert result.agreement is not None
    assert 0 < result.agreement.divergence < (2e-2 if dtype == "fp8" else 1e-3)


def test_plan_counts_the_bytes_of_an_fp8_kv_cache(tmp_path: Path) -> None:
    folder, devices = write_checkpoint(tmp_path, "qwen3"), Devices("cuda", 1, 8 << 30)
    plain, quantized = (
        plan_devices(EngineConfig.create(str(folder), kv_cache_dtype=kind, dtype="bfloat16"), devices).fits[0]
        for kind in ("auto", "fp8")
    )
    ratio = plain.shares[0].kv(1) / quantized.shares[0].kv(1)
    head_dim = quantized.shares[0].kv_shape.layers[0].key_dim
    assert ratio == pytest.approx(2 * head_dim / (head_dim + 2))
    assert quantized.num_blocks / plain.num_blocks == pytest.approx(ratio, rel=1e-3)
    with pytest.raises(ConfigError, match="on a CPU it must be 'auto' or 'int8'"):
        plan_devices(EngineConfig.create(str(folder), kv_cache_dtype="fp8"), Devices("cpu", 1, 8 << 30))
