"""Layers that predict further tokens: against transformers, with their tensors, and refused where they cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight import LLM, SamplingParams
from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError, WeightsError
from inflight.layers.attention.backend import AttentionInputs
from inflight.layers.recurrent import StateInputs, allocate_states
from inflight.loading.planning import Devices, plan_devices
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec, mtp_spec
from inflight.models.decoders.footprint import num_bytes
from tests.models.running import BLOCK_SIZE, CPU, load, prompt
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.gguf_checkpoints import write_gguf
from tests.support.predictors import PREDICTORS, edit_tensors, predicted_states, write_with_predictor

GUESSES = [7, 3, 200]


def load_with_predictor(folder: Path, **options: Any) -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    spec = decoder_spec(config)
    spec = replace(spec, predictor=mtp_spec(config, spec))
    return load(folder, spec=spec, **options)


@torch.inference_mode()
def our_states(
    decoder: Decoder, token_ids: list[int], guesses: list[int], chunks: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the states behind the tokens of a prompt, which is computed in chunks, but the last, and behind guesses
    of what follows; and the logits after the guesses."""
    predictor = decoder.predictor
    assert predictor is not None
    num_blocks = -(-(len(token_ids) + len(guesses)) // BLOCK_SIZE)
    shape = decoder.kv_shape(BLOCK_SIZE)
    tables = torch.randperm(len(shape.windows) * num_blocks).view(len(shape.windows), num_blocks)
    caches = decoder.attention.allocate(shape, tables.numel(), CPU).layers
    states = allocate_states(decoder.state_sizes, [torch.zeros(1, 1)], 1)

    def inputs(start: int, count: int) -> AttentionInputs:
        positions = torch.arange(start, start + count)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        step = AttentionInputs(
            positions,
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([start + count], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            tables.to(torch.int32)[:, None],
            slots,
        )
        step.state = StateInputs(step.query_starts, torch.zeros(1, dtype=torch.int64), torch.tensor([start]))
        return step

    ids, out, start = torch.tensor([*token_ids, 0]), [], 0
    for count in chunks:
        step = inputs(start, count)
        inner: list[Tensor] = []
        hidden = decoder.forward(ids[start : start + count], caches, step, None, states, inner)
        following, first = ids[start + 1 : start + count + 1], decoder.first_states(hidden, inner)
        x = decoder.predict(following, first.clone(), caches, step)
        last = decoder.predict(following, first, caches, step, torch.tensor([count - 1, -1]))
        torch.testing.assert_close(last[:1], x[-1:])
        out.append(predictor.next_states(x))
        start += count
    out = [torch.cat(out)[:-1]]  # the last token's guess is overwritten
    logits = []
    for number, guess in enumerate(guesses):
        step = inputs(len(token_ids) - 1 + number, 1)
        x = decoder.predict(torch.tensor([guess]), out[-1][-1:].clone(), caches, step)
        out.append(predictor.next_states(x))
        logits.append(decoder.predicted_logits(x))
        if predictor.logits(x) is None:
            assert torch.equal(decoder.predicted_logits(x, 70), logits[-1][:, :70])
    return torch.cat(out), torch.cat(logits)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("family", PREDICTORS)
def test_predictors_match_transformers(family: str, fast: bool, tmp_path: Path) -> None:
    model, layer = write_with_predictor(tmp_path, family)
    decoder = load_with_predictor(tmp_path, fast=fast)
    ids = prompt(22)
    states, logits = our_states(decoder, ids, GUESSES, [9, 1, 12])
    expected = predicted_states(model, layer, ids, GUESSES)
    head = model.get_output_embeddings().weight.detach()
    torch.testing.assert_close(logits, expected[-3:] @ head.T, rtol=0, atol=5e-4)
    torch.testing.assert_close(states, expected, rtol=0, atol=2e-4)


def test_predictor_is_read_from_a_gguf_file(tmp_path: Path) -> None:
    model, layer = write_with_predictor(tmp_path, "glm4-moe")
    write_tokenizer(tmp_path)
    file = write_gguf(tmp_path / "model.gguf", tmp_path)
    config = open_checkpoint(str(file)).config
    spec = decoder_spec(config)
    decoder = load(file, spec=replace(spec, predictor=mtp_spec(config, spec)))
    ids = prompt(22)
    expected = predicted_states(model, layer, ids, GUESSES)
    states, _ = our_states(decoder, ids, GUESSES, [9, 1, 12])
    torch.testing.assert_close(states, expected, rtol=0, atol=2e-4)
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = LLM(str(file), speculative_config=MTP, **OPTIONS).generate([ids], params)
    assert outputs[0].outputs == LLM(str(file), **OPTIONS).generate([ids], params)[0].outputs


MTP = {"method": "mtp"}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 40, "block_size": 4}


@pytest.mark.parametrize("family", PREDICTORS)
def test_predictors_are_loaded_only_for_speculation(family: str, tmp_path: Path) -> None:
    write_with_predictor(tmp_path, family)
    sizes = {}
    for method in ("none", "suffix", "auto", "mtp"):
        options = OPTIONS | ({} if method == "none" else {"speculative_config": {"method": method}})
        llm = LLM(str(tmp_path), **options)
        decoder = llm._engine.model
        assert isinstance(decoder, Decoder)
        assert (decoder.predictor is not None) == (method in ("auto", "mtp"))
        sizes[method] = (
            num_bytes(decoder),
            decoder.kv_shape(4).bytes_per_block,
            len(decoder.kv_shape(4).layers),
        )
        llm.close()
    assert sizes["none"] == sizes["suffix"] < sizes["auto"] == sizes["mtp"]
    assert sizes["mtp"][2] == sizes["none"][2] + 1


def test_plans_count_a_predictor(tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "qwen3.5")
    fits = []
    for options in ({}, {"speculative_config": MTP}):
        config = EngineConfig.create(model=str(tmp_path), **OPTIONS, **options)
        fits.append(plan_devices(config, Devices("cpu", 2, 1 << 30)))
    assert fits[0].parameters < fits[1].parameters
    for before, after in zip(fits[0].fits, fits[1].fits, strict=False):
        assert before.shares[0].weights < after.shares[0].weights
        assert before.shares[0].kv(1) < after.shares[0].kv(1)
    assert {fit.pipeline for fit in fits[1].fits} == {1}


def test_missing_tensor_of_a_predictor_is_reported(tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "qwen3.5")
    edit_tensors(tmp_path, {"mtp.norm.weight": torch.zeros(3)})
    LLM(str(tmp_path), **OPTIONS).close()
    with pytest.raises(WeightsError, match=r"mtp\.norm\.weight .* has shape \[3\]"):
        LLM(str(tmp_path), speculative_config=MTP, **OPTIONS)


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "qwen3-next", "glm4-moe"])
def test_checkpoint_without_a_predictor_is_refused(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    with pytest.raises(ConfigError, match=r"method is mtp, but this checkpoint of .* has no layer") as error:
        LLM(str(tmp_path), speculative_config=MTP, **OPTIONS)
    assert "\n" not in str(error.value)
    LLM(str(tmp_path), speculative_config={"method": "auto"}, **OPTIONS).close()


def test_modules_that_differ_by_depth_are_refused(tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "qwen3.5")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="or not exactly one"):
        LLM(str(tmp_path), speculative_config=MTP, **OPTIONS)


def test_stages_are_refused_with_a_predictor(tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "glm4-moe")
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        LLM(str(tmp_path), speculative_config=MTP, pipeline_parallel_size=2, **OPTIONS)


def test_predictor_sleeps_with_its_model(tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "qwen3.5")
    llm = LLM(str(tmp_path), speculative_config=MTP, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=12)
    before = llm.generate([prompt(9)], params)[0].outputs
    llm.sleep()
    llm.wake_up()
    assert llm.generate([prompt(9)], params)[0].outputs == before
    llm.close()


@pytest.mark.parametrize(
    "options", [{"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}]
)
def test_quantized_models_predict(options: dict[str, Any], tmp_path: Path) -> None:
    write_with_predictor(tmp_path, "qwen3.5-moe")
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = LLM(str(tmp_path), **OPTIONS, **options).generate([prompt(9)], params)
    llm = LLM(str(tmp_path), speculative_config=MTP, **OPTIONS, **options)
    assert llm.generate([prompt(9)], params)[0].outputs == expected[0].outputs
