"""Encoders of every family and head through the real scheduler, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM
from inflight.errors import ConfigError, RequestError, WeightsError
from inflight.execution.encoder_runner import EncoderRunner
from inflight.layers.native_kernels import NativeKernels
from inflight.loading.engine import LoadedEngine
from inflight.models.encoders.encoder import PoolingEncoder
from tests.scheduling.policies import NAMES
from tests.support.encoder_checkpoints import (
    FAMILIES,
    HIDDEN,
    LONGEST,
    hidden_states,
    load,
    logits,
    make_encoder,
    run,
    texts,
    vectors,
    write_pooling,
)
from tests.support.steps import observe

TOLERANCE = 1e-4
# So small a budget that each step has texts of some requests, and others wait.
SMALL = {"max_num_batched_tokens": 128, "max_num_seqs": 6}
RAGGED = texts([1, LONGEST, 7, 40, 2, 63, 30, 30, 18, 90, 5, 33])

CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"num_labels": 1}) for family in FAMILIES},
    "bert, three labels": ("bert", {"num_labels": 3, "hidden_act": "relu"}),
    "distilbert, two labels": ("distilbert", {"num_labels": 2}),
    "modernbert, mean": (
        "modernbert",
        {"num_labels": 2, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
    ),
    "modernbert, biases": ("modernbert", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifier_logits_match_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CLASSIFIERS[case]
    model = make_encoder(family, classifier=True, **overrides)
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, **SMALL)
    facts = engine.facts
    assert not facts.generates
    assert facts.pooling is not None
    assert (facts.pooling.task, facts.pooling.size) == ("classify", model.config.num_labels)
    # Pairs, where the model tells the two texts apart.
    seconds = [len(prompt) // 2 if family == "bert" and len(prompt) > 9 else 0 for prompt in RAGGED]
    for prompt, second, vector in zip(RAGGED, seconds, vectors(engine, RAGGED, seconds), strict=True):
        np.testing.assert_allclose(vector, logits(model, prompt, second), atol=TOLERANCE, rtol=TOLERANCE)
    engine.close()


def pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the states pooled as sentence-transformers does."""
    length = len(states)
    weights = torch.arange(1.0, length + 1).unsqueeze(1)
    by_mode: dict[str, torch.Tensor] = {
        "cls": states[0],
        "max": states.amax(0),
        "mean": states.sum(0) / length,
        "mean_sqrt_len_tokens": states.sum(0) / length**0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }
    return by_mode[mode]


EMBEDDERS: dict[str, tuple[str, list[str]]] = {
    "bert": ("bert", ["mean"]),
    "roberta": ("roberta", ["cls"]),
    "xlm-roberta": ("xlm-roberta", ["weightedmean"]),
    "distilbert": ("distilbert", ["max", "mean_sqrt_len_tokens"]),
    "modernbert": ("modernbert", ["lasttoken"]),
    "modernbert, mean": ("modernbert", ["cls", "mean"]),
}


@pytest.mark.parametrize("case", EMBEDDERS)
def test_embeddings_match_pooled_hidden_states_of_transformers(case: str, tmp_path: Path) -> None:
    family, modes = EMBEDDERS[case]
    model = make_encoder(family, classifier=False)
    model.save_pretrained(tmp_path)
    engine = load(write_pooling(tmp_path, modes), **SMALL)
    facts = engine.facts.pooling
    assert facts is not None
    assert (facts.task, facts.size, facts.normalize) == ("embed", HIDDEN * len(modes), True)
    for prompt, vector in zip(RAGGED, vectors(engine, RAGGED), strict=True):
        states = hidden_states(model, prompt)
        expected = torch.cat([pooled(states, mode) for mode in modes])
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=TOLERANCE)
    engine.close()


def test_layers_after_pooling_are_read_from_their_own_folders(tmp_path: Path) -> None:
    model = make_encoder("distilbert", classifier=False)
    model.save_pretrained(tmp_path)
    write_pooling(tmp_path, "mean", ("Dense", "LayerNorm"))
    torch.manual_seed(0)
    dense, norm = torch.nn.Linear(HIDDEN, 24), torch.nn.LayerNorm(24)
    torch.nn.init.normal_(norm.weight)
    config = {
        "in_features": HIDDEN,
        "out_features": 24,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    for module, name, content, tensors in (
        (dense, "linear", config, tmp_path / "2_Dense"),
        (norm, "norm", {"dimension": 24}, tmp_path / "3_LayerNorm"),
    ):
        (tensors / "config.json").write_text(json.dumps(content))
        state = {f"{name}.{part}": tensor for part, tensor in module.state_dict().items()}
        save_file(state, tensors / "model.safetensors")
    engine = load(tmp_path)
    assert engine.facts.pooling is not None
    assert engine.facts.pooling.size == 24
    for prompt, vector in zip(RAGGED, vectors(engine, RAGGED), strict=True):
        states = hidden_states(model, prompt)
        expected = norm(torch.tanh(dense(states.mean(0)))).detach()
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, rtol=TOLERANCE)
    engine.close()
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"is named in modules\.json but is missing"):
        load(tmp_path)


# ---- the real scheduler ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    make_encoder("bert", classifier=False).save_pretrained(path)
    return write_pooling(path)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LoadedEngine:
    return load(folder)


@pytest.mark.parametrize("modes", ["mean", "cls", "max", "weightedmean"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_results_are_bit_identical_in_any_batch(family: str, modes: str, tmp_path: Path) -> None:
    make_encoder(family, classifier=False).save_pretrained(tmp_path)
    engine = load(write_pooling(tmp_path, modes))
    assert isinstance(engine.model, PoolingEncoder)
    if not isinstance(engine.model.encoder.kernels, NativeKernels):
        pytest.skip("plain torch adds up in an order that depends on the shape of the batch")
    alone = [vectors(engine, [prompt])[0] for prompt in RAGGED]
    for order in (RAGGED, RAGGED[::-1], RAGGED * 3):
        together = vectors(engine, order)
        for index, prompt in enumerate(order):
            assert np.array_equal(together[index], alone[RAGGED.index(prompt)])
    engine.close()


def test_padding_changes_nothing(folder: Path) -> None:
    engine = load(folder)
    expected = vectors(engine, RAGGED)
    assert isinstance(engine.core.runner, EncoderRunner)
    engine.core.runner.padded = True
    for vector, reference in zip(vectors(engine, RAGGED), expected, strict=True):
        np.testing.assert_allclose(vector, reference, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_gives_the_same_results(engine: LoadedEngine, policy: str, depth: int) -> None:
    expected = vectors(engine, RAGGED)
    engine.use(policy=policy, pipeline_depth=depth, **SMALL)
    for vector, reference in zip(vectors(engine, RAGGED), expected, strict=True):
        np.testing.assert_allclose(vector, reference, atol=1e-6)


def test_step_is_as_full_as_its_budget_allows(engine: LoadedEngine) -> None:
    engine.use(policy="continuous", max_num_batched_tokens=LONGEST, max_num_seqs=256)
    records: list[Any] = []
    observe(engine.core, records.append)
    vectors(engine, texts([30] * 9))
    assert [sum(slot.num_tokens for slot in record.slots) for record in records] == [90, 90, 90]
    blocks = engine.core.scheduler.blocks
    assert blocks.pool.num_empty == blocks.pool.num_blocks


def test_budget_below_one_text_is_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"must be at least max_model_len, {LONGEST}"):
        load(folder, max_num_batched_tokens=LONGEST - 1)
    load(folder, max_num_batched_tokens=LONGEST - 1, max_model_len=50).close()
    with pytest.raises(ConfigError, match=f"the checkpoint supports at most {LONGEST} positions"):
        load(folder, max_model_len=LONGEST + 1)


@pytest.mark.parametrize(("declared", "expected"), [(50, 50), (None, LONGEST), (LONGEST + 100, LONGEST)])
def test_longest_text_is_the_smallest_declared_limit(
    declared: int | None, expected: int, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    if declared is not None:
        (copy / "tokenizer_config.json").write_text(json.dumps({"model_max_length": declared}))
    engine = load(copy)
    assert engine.frontend.max_model_len == expected
    engine.close()


def test_numbers_that_are_not_finite_fail_one_request(tmp_path: Path) -> None:
    model = make_encoder("bert", classifier=True, num_labels=1)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] = torch.nan
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu", skip_tokenizer_init=True, show_progress=False)
    good, bad, also_good = RAGGED[3], [9, 7, 12], RAGGED[5]
    expected = [vectors(llm._engine, [prompt])[0] for prompt in (good, also_good)]
    first, failed, last = run(llm._engine, (good, bad, also_good))
    assert failed.error_code == "logits_not_finite"
    assert [first.vector, last.vector] == [vector.tobytes() for vector in expected]


def test_encoder_does_not_generate(folder: Path) -> None:
    llm = LLM(folder, device="cpu", skip_tokenizer_init=True, show_progress=False)
    with pytest.raises(RequestError, match="embed"):
        llm.generate([[5, 6, 7]], use_tqdm=False)
    (output,) = llm.embed([[5, 6, 7]], use_tqdm=False)
    assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1)


def test_rejected_text_fails_the_whole_call(folder: Path) -> None:
    """Texts are made into requests while earlier ones are computed: nothing of those is left."""
    llm = LLM(
        folder, device="cpu", max_num_batched_tokens=LONGEST, skip_tokenizer_init=True, show_progress=False
    )
    fine = texts([3] * 300)
    with pytest.raises(RequestError, match=f"text 300 has {LONGEST + 1} tokens"):
        llm.embed([*fine, [5] * (LONGEST + 1)], use_tqdm=False)
    stats = llm.stats()
    assert stats.num_steps > 0
    assert not llm._engine.core.has_work
    outputs = llm.embed(fine, use_tqdm=False)
    assert len({output.request_id for output in outputs}) == len(fine)
    assert np.linalg.norm(outputs[-1].outputs.embedding) == pytest.approx(1)


# ---- odd files ----


def test_mismatched_weights_are_named_before_memory_is_allocated(tmp_path: Path) -> None:
    make_encoder("bert", classifier=True, num_labels=2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = tensors | {"bert.encoder.layer.0.adapter.weight": torch.ones(2)}
    less = {name: tensor for name, tensor in tensors.items() if name != "classifier.bias"}
    other = tensors | {"classifier.weight": torch.ones(3, HIDDEN)}
    narrow = tensors | {"classifier.weight": torch.ones(2, HIDDEN, dtype=torch.int8)}
    for odd, message in (
        (
            more,
            "the weights have bert.encoder.layer.0.adapter.weight, which config.json does not account for",
        ),
        (less, "the weights lack classifier.bias, required by config.json"),
        (other, r"classifier.weight in model.safetensors has shape \[3, 64\]"),
        (narrow, "is stored as I8: it must be one of F32, BF16, F16"),
    ):
        save_file(odd, file)
        with pytest.raises(WeightsError, match=message):
            load(tmp_path)


def test_older_norm_names_are_accepted(tmp_path: Path) -> None:
    model = make_encoder("bert", classifier=True, num_labels=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    greek = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(greek | {"bert.embeddings.position_ids": torch.arange(LONGEST)[None]}, file)
    (vector,) = vectors(load(tmp_path), RAGGED[1:2])
    np.testing.assert_allclose(vector, logits(model, RAGGED[1]), atol=TOLERANCE)
