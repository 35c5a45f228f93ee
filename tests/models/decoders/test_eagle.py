"""EAGLE-3 against a written-out reference, in both layouts of checkpoints, and checkpoints that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight import LLM, SamplingParams
from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError, WeightsError
from inflight.loading.planning import Devices, plan_devices
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.eagle import Eagle, eagle_spec
from inflight.models.decoders.families import decoder_spec
from inflight.models.tensors import read_headers
from tests.e2e.test_model_drafts import Watched
from tests.models.decoders.test_predictor import our_states
from tests.models.running import load, prompt
from tests.support.checkpoints import VOCAB_SIZE, make_model
from tests.support.predictors import DIM, DRAFT_VOCAB, EPS, HEADS, HIDDEN, KV_HEADS, write_eagle

GUESSES = [7, 3, 200]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    model = make_model("llama", num_hidden_layers=7)
    model.save_pretrained(folder)
    return folder, model


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@torch.no_grad()
def reference(
    model: Any,
    tensors: dict[str, Tensor],
    token_ids: list[int],
    guesses: list[int],
    inner: tuple[int, ...] = (2, 3, 4),
    norm_first: bool = False,
    norm_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the states behind each token but the last, and each guess, and the logits after them, in float64."""
    layers = "midlayer" if "midlayer.input_layernorm.weight" in tensors else "layers.0"
    weights = {name.removeprefix(f"{layers}."): tensor.double() for name, tensor in tensors.items()}
    hidden = model.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[index][0] for index in inner], dim=1).double() @ weights["fc.weight"].T
    table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight.double())
    following = [*token_ids[1:], *guesses]
    states = states[:-1]
    for number in range(len(guesses) + 1):
        count = len(states)
        embedded = norm64(table[following[:count]], weights["input_layernorm.weight"])
        normed = norm64(states, weights["hidden_norm.weight"])
        both = torch.cat((embedded, normed), dim=1)
        query, key, value = (
            (both @ weights[f"self_attn.{part}_proj.weight"].T).view(count, -1, DIM) for part in "qkv"
        )
        query, key = rotate(query), rotate(key)
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        scores += torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, -1)
        x = (normed if norm_first else states) + mixed @ weights["self_attn.o_proj.weight"].T
        y = norm64(x, weights["post_attention_layernorm.weight"])
        gate, up = (y @ weights[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
        last = norm64(x, weights["norm.weight"])
        if number < len(guesses):
            states = torch.cat((states, (last if norm_output else x)[-1:]))
    return last if norm_output else x, last @ weights["lm_head.weight"].T


def rotate(x: Tensor) -> Tensor:
    frequencies = 1000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    cos, sin = torch.cat((angles.cos(),) * 2, -1)[:, None], torch.cat((angles.sin(),) * 2, -1)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def load_with(folder: Path, draft: Path, fast: bool = False) -> Decoder:
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    checkpoint = open_checkpoint(str(draft))
    predictor = eagle_spec(checkpoint.config, read_headers(checkpoint.weight_files), spec)
    return load(folder, fast=fast, spec=replace(spec, predictor=predictor), draft=checkpoint)


IDS = "eagle_aux_hidden_state_layer_ids"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "nested": ({"layers": "layers.0", "nested": True}, {"norm_first": True}),
    "nested, normalised later": ({"nested": True, "norm_before_residual": False}, {}),
    "own embedding": ({"own_embedding": True}, {}),
    "normalised output": ({"norm_output": True}, {"norm_output": True}),
    "inputs of layers": ({"eagle_config": {IDS: [2, 4, 6]}}, {"inner": (2, 4, 6)}),
    "outputs of layers": ({"eagle_config": {IDS: [1, 2, 5]}}, {"inner": (2, 3, 6)}),
    "inner, nested": ({"nested": True, IDS: [2, 5, 6]}, {"norm_first": True, "inner": (2, 5, 6)}),
}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle_matches_its_reference(
    variant: str, fast: bool, target: tuple[Path, Any], tmp_path: Path
) -> None:
    written, features = VARIANTS[variant]
    folder, model = target
    tensors = write_eagle(tmp_path / "draft", **written)
    decoder = load_with(folder, tmp_path / "draft", fast)
    ids = prompt(22)
    states, logits = our_states(decoder, ids, GUESSES, [9, 1, 12])
    expected, expected_logits = reference(model, tensors, ids, GUESSES, **features)
    torch.testing.assert_close(states.double(), expected, rtol=0, atol=2e-4)
    known = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    torch.testing.assert_close(logits[:, known].double(), expected_logits[-3:], rtol=0, atol=2e-4)
    unknown = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, known, False)
    assert logits[:, unknown].max() < -1e20


def test_guesses_of_eagle_are_those_of_its_reference(target: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = target
    tensors = write_eagle(tmp_path / "draft")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 60, "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [prompt(22)[:count] for count in (3, 22, 9)]
    expected = LLM(str(folder), **options).generate(prompts, params)
    speculation = {
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
    }  # its config says what it is
    llm = LLM(
        str(folder),
        speculative_config=speculation,
        max_num_batched_tokens=11,
        enable_prefix_caching=False,
        **options,
    )
    watched = llm._engine.core.scheduler.speculation = Watched(3)
    outputs = llm.generate(prompts, params)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    known = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert len(watched.guesses) > 20
    for tokens, guesses in watched.guesses:
        _, logits = reference(model, tensors, tokens, guesses[:-1])
        assert known[logits[-len(guesses) :].argmax(-1)].tolist() == guesses


def test_weights_and_kv_memory_of_a_draft_are_planned(target: tuple[Path, Any], tmp_path: Path) -> None:
    write_eagle(tmp_path / "draft")
    speculation = {"method": "eagle3", "model": str(tmp_path / "draft")}
    fits = []
    for options in ({}, {"speculative_config": speculation}):
        config = EngineConfig.create(model=str(target[0]), **options)
        fits.append(plan_devices(config, Devices("cpu", 2, 1 << 30)))
    assert fits[0].parameters < fits[1].parameters
    assert fits[0].fits[0].shares[0].kv(1) < fits[1].fits[0].shares[0].kv(1)
    assert {(fit.tensor, fit.pipeline) for fit in fits[1].fits} == {(1, 1), (2, 1)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 400}, "the vocabulary has 400 tokens, that of the model 320"),
        ({"target_hidden_size": 80}, "target_hidden_size is 80, hidden_size of the model is 64"),
        ({"hidden_size": 32}, "hidden_size is 32, that of the model 64"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size is 1000, the model has 320 tokens"),
        ({"norm_before_fc": True}, "norm_before_fc is true"),
    ],
)
def test_draft_that_does_not_fit_is_refused(
    fields: dict[str, Any], message: str, target: tuple[Path, Any], tmp_path: Path
) -> None:
    write_eagle(tmp_path, **fields)
    with pytest.raises(ConfigError) as error:
        LLM(
            str(target[0]),
            skip_tokenizer_init=True,
            speculative_config={"method": "eagle3", "model": str(tmp_path)},
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_of_another_draft_are_refused(target: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = write_eagle(tmp_path)
    save_file(tensors | {"fc_norm.0.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"the weights have fc_norm\.0\.weight"):
        load_with(target[0], tmp_path)


def test_ranks_share_a_draft(target: tuple[Path, Any], tmp_path: Path) -> None:
    write_eagle(tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 60, "block_size": 4}
    speculation = {"method": "eagle3", "model": str(tmp_path)}
    params = SamplingParams(temperature=0, max_tokens=9)
    made = []
    for size in (1, 2):
        llm = LLM(str(target[0]), speculative_config=speculation, tensor_parallel_size=size, **options)
        watched = llm._engine.core.scheduler.speculation = Watched(3)
        llm.generate([prompt(9)], params)
        made.append(watched.guesses)
        assert isinstance(llm._engine.model, Decoder)
        assert isinstance(llm._engine.model.predictor, Eagle)
        llm.close()
    assert made[0] == made[1]
