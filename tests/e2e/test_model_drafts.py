"""Drafts that the model makes itself: they are what transformers says, they are used, and they change no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inflight import LLM, SamplingParams
from inflight.constraints.drafts import GrammarDrafts
from inflight.request import Request
from inflight.scheduling.batch import Sampled, ScheduledStep
from inflight.scheduling.model_drafts import ModelDrafter, ModelSpeculation
from tests.e2e.test_speculation import Oracle, draw_options, draw_requests
from tests.scheduling.guessing import EagerModel
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint, write_tokenizer
from tests.support.predictors import (
    PREDICTORS,
    edit_tensors,
    predicted_states,
    write_eagle,
    write_with_predictor,
)

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, Any]]:
    """By family: the folder of a checkpoint, and transformers' model and layer."""
    checkpoints: dict[str, tuple[Path, Any, Any]] = {}
    for family in PREDICTORS:
        folder = tmp_path_factory.mktemp(family)
        checkpoints[family] = (folder, *write_with_predictor(folder, family))
        write_tokenizer(folder)
    return checkpoints


class Replaced(ModelDrafter):
    """The model drafts as many tokens as an oracle then replaces."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def receive(self, request: Request, token_ids: list[int]) -> None:
        super().receive(request, self._oracle.propose(request, [], len(token_ids)).token_ids)


@pytest.mark.parametrize("family", PREDICTORS)
def test_model_drafts_change_no_token(family: str, written: dict[str, tuple[Path, Any, Any]]) -> None:
    check_tokens(written[family][0], family, MTP)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3.5"])
def test_drafts_of_another_checkpoint_change_no_token(family: str, tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path / "model", family))
    write_eagle(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    check_tokens(tmp_path / "model", family, {"method": "eagle3", "model": str(tmp_path / "draft")})


def check_tokens(folder: Path, seed: str, speculation: dict[str, Any]) -> None:
    rng = random.Random(seed)
    plain = LLM(str(folder))
    num_drafted = num_accepted = 0
    for odds, hard in ((1.0, True), (0.7, False), (0.0, True), (0.8, True)):
        prompts, params = draw_requests(rng)
        expected = plain.generate(prompts, params)
        llm = LLM(str(folder), speculative_config=speculation, **draw_options(rng, hard))
        oracle = Oracle(rng, odds)
        oracle.learn(expected)
        scheduler = llm._engine.core.scheduler
        assert isinstance(scheduler.speculation, ModelSpeculation)
        grammars = scheduler.speculation._constraints
        assert isinstance(grammars, GrammarDrafts)
        eager = EagerModel(rng.choice((1, 3, 6)), Replaced(oracle), rng.choice((None, rng)), grammars)
        eager.read_ahead = scheduler.speculation.read_ahead
        scheduler.speculation = eager
        for _ in range(2):  # with a cold cache, then with a warm one
            outputs = llm.generate(prompts, params, priority=[rng.randrange(3) for _ in prompts])
            for output, whole in zip(outputs, expected, strict=True):
                assert output.outputs == whole.outputs
            assert llm.stats().kv.num_used == 0
            llm._engine.core.scheduler.pool.check()
        num_drafted += llm.stats().num_draft_tokens
        num_accepted += llm.stats().num_accepted_tokens
        llm.close()
    assert 0 < num_accepted < num_drafted


class Watched(EagerModel):
    """Keeps what the model guessed: all tokens before, and the guesses."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.guesses: list[tuple[list[int], list[int]]] = []

    def settle(self, step: ScheduledStep, sampled: Sampled) -> None:
        super().settle(step, sampled)
        for entry, token_ids in sampled.drafts.items():
            self.guesses.append((step.requests[entry].token_ids[:], token_ids))


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("family", PREDICTORS)
def test_guesses_are_those_of_transformers(
    family: str, caching: bool, written: dict[str, tuple[Path, Any, Any]]
) -> None:
    folder, model, layer = written[family]
    llm = LLM(
        str(folder),
        speculative_config=MTP,
        block_size=4,
        num_blocks=80,
        max_num_batched_tokens=11,
        max_num_seqs=3,
        enable_prefix_caching=caching,
    )
    watched = llm._engine.core.scheduler.speculation = Watched(3)
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(13)]
    prompts = [shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))] for _ in range(5)]
    for _ in range(1 + caching):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
    head = model.get_output_embeddings().weight.detach()
    num_equal = num_compared = 0
    for known, guesses in watched.guesses:
        states = predicted_states(model, layer, known, guesses[:-1])[len(known) - 2 :]
        best = (states @ head.T).argmax(-1).tolist()
        num_equal += sum(ours == theirs for ours, theirs in zip(guesses, best, strict=True))
        num_compared += len(guesses)
    assert num_compared > 40
    # What a block's last token left behind may depend on what followed it in another request.
    assert num_equal == num_compared if not caching else num_equal >= 0.8 * num_compared


def write_permutation(folder: Path, family: str, reads: str) -> Path:
    """Write a checkpoint in which each token decides the next. Its predictor knows that from what it `reads`."""
    write_with_predictor(folder, family)
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    size = 64  # tokens that are used: one for each feature
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    projection = next(name for name in tensors if name.endswith(("mtp.fc.weight", "eh_proj.weight")))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0 if family == "glm4-moe" else 0.0)
    one_hot = torch.eye(size)
    tensors["model.embed_tokens.weight"].zero_()[:size] = one_hot
    tensors["lm_head.weight"].zero_()[order] = one_hot  # after token i comes token order[i]
    following = torch.zeros(size, size)
    following[order, torch.arange(size)] = 1.0  # the state of a token to that of the next
    zeros = torch.zeros(size, size)
    parts = (one_hot, zeros) if reads == "the embedding" else (zeros, following)
    tensors[projection] = torch.cat(parts, dim=1)
    edit_tensors(folder, tensors)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("reads", ["the embedding", "the hidden state"])
@pytest.mark.parametrize("family", PREDICTORS)
def test_predictors_that_know_are_always_right(family: str, reads: str, tmp_path: Path) -> None:
    """Accepting nearly nothing is a mistake that no other test of tokens would show."""
    folder = str(write_permutation(tmp_path, family, reads))
    prompts = [[1, 2, 3], [9] * 17, [5]]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=41, ignore_eos=True) for t in (0.0, 0.3, 0.1)]
    expected = LLM(folder).generate(prompts, params)
    llm = LLM(folder, speculative_config=MTP, max_num_batched_tokens=20)
    llm._engine.core.scheduler.speculation = EagerModel(3)
    outputs = llm.generate(prompts, params)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    stats = llm.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 80


@pytest.mark.parametrize("family", ["qwen3.5", "glm4-moe"])
def test_ranks_share_a_predictor(family: str, tmp_path: Path) -> None:
    folder = str(write_permutation(tmp_path, family, "the hidden state"))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = LLM(folder).generate([[1, 2, 3], [7] * 9], params)
    llm = LLM(folder, speculative_config=MTP, tensor_parallel_size=2)
    llm._engine.core.scheduler.speculation = EagerModel(3)
    outputs = llm.generate([[1, 2, 3], [7] * 9], params)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    stats = llm.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 30
    llm.close()
