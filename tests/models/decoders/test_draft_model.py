"""Draft models: another decoder behind a decoder, in the same blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from tests.e2e.test_model_drafts import Watched, check_tokens
from tests.models.running import prompt
from tests.support.checkpoints import make_model, write_checkpoint, write_tokenizer

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 120, "block_size": 4}


def speculation(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


class WatchedModel(Watched):
    read_ahead = 1

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.read_ahead = 1


@pytest.mark.parametrize("draft", ["llama", "gemma3", "qwen3-moe", "phi3", "gemma2"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5"])
def test_guesses_are_those_of_the_draft_model(family: str, draft: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family)
    model = make_model(draft, seed=7)
    model.save_pretrained(tmp_path / "draft")
    llm = LLM(
        str(tmp_path / "model"),
        speculative_config=speculation(tmp_path / "draft"),
        max_num_batched_tokens=11,
        **OPTIONS,
    )
    watched = llm._engine.core.scheduler.speculation = WatchedModel(3)
    shared = prompt(13)
    prompts = [shared + prompt(40)[:count] for count in (1, 20, 7)]
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    expected = LLM(str(tmp_path / "model"), **OPTIONS).generate(
        prompts, SamplingParams(temperature=0, max_tokens=12)
    )
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert len(watched.guesses) > 30
    for known, guesses in watched.guesses:
        ids = torch.tensor([known + guesses[:-1]])
        with torch.inference_mode():
            best = model(ids).logits[0, len(known) - 1 :].argmax(-1)
        assert best.tolist() == guesses


def test_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path, "qwen3"))
    llm = LLM(str(folder), speculative_config=speculation(folder), enable_prefix_caching=False)
    llm._engine.core.scheduler.speculation = WatchedModel(3)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0)]
    outputs = llm.generate([prompt(9), prompt(30)], params)
    assert [o.outputs for o in outputs] == [
        o.outputs for o in LLM(str(folder)).generate([prompt(9), prompt(30)], params)
    ]
    stats = llm.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 40


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-next"])
def test_draft_models_change_no_token(family: str, tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path / "model", family))
    write_checkpoint(tmp_path / "draft", "mistral")
    check_tokens(tmp_path / "model", family, speculation(tmp_path / "draft"))


def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = LLM(str(tmp_path / "model"), **OPTIONS).generate([prompt(9)], params)
    for vocab_size in (256, 400):
        draft = tmp_path / str(vocab_size)
        write_checkpoint(draft, "llama", vocab_size=vocab_size)
        llm = LLM(str(tmp_path / "model"), speculative_config=speculation(draft), **OPTIONS)
        watched = llm._engine.core.scheduler.speculation = WatchedModel(3)
        assert llm.generate([prompt(9)], params)[0].outputs == expected[0].outputs
        assert all(token < min(vocab_size, 320) for _, guesses in watched.guesses for token in guesses)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3.5", {}, "it has recurrent layers"),
        ("gemma4-small", {}, "its layers have their own inputs"),
        ("llama", {"vocab_size": 2000}, "its vocabulary has 2000 tokens, that of the model 320"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    write_checkpoint(tmp_path / "draft", family, **fields)
    with pytest.raises(ConfigError) as error:
        LLM(str(tmp_path / "model"), speculative_config=speculation(tmp_path / "draft"), **OPTIONS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path / "model", "llama"))
    write_tokenizer(write_checkpoint(tmp_path / "draft", "llama"))
    LLM(str(tmp_path / "model"), speculative_config={"model": str(tmp_path / "draft")}).close()
    file = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="the draft model has another tokenizer") as error:
        LLM(str(tmp_path / "model"), speculative_config={"model": str(tmp_path / "draft")})
    assert "\n" not in str(error.value)


def test_ranks_share_a_draft_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3")
    params = SamplingParams(temperature=0, max_tokens=20)
    llm = LLM(str(folder), speculative_config=speculation(folder), tensor_parallel_size=2, **OPTIONS)
    llm._engine.core.scheduler.speculation = WatchedModel(3)
    outputs = llm.generate([prompt(9)], params)
    assert outputs[0].outputs == LLM(str(folder), **OPTIONS).generate([prompt(9)], params)[0].outputs
    assert llm.stats().num_draft_tokens == llm.stats().num_accepted_tokens > 10
    llm.close()
