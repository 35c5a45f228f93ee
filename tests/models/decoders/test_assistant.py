"""Gemma 4's assistants against transformers, and in place of them checkpoints that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from tests.e2e.test_model_drafts import Watched, check_tokens
from tests.models.running import prompt
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE, make_model, randomise, write_tokenizer

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 160, "block_size": 4}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 32, "centroid_intermediate_top_k": 5}


def make_assistant(family: str, **fields: Any) -> Any:
    """Return transformers' assistant with random weights, for a model of this family."""
    import transformers

    text_config = FAMILIES[family](
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        use_double_wide_mlp=False,
        enable_moe_block=False,
        final_logit_softcapping=None,
    )
    made = transformers.Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=64, **fields)
    model = transformers.Gemma4AssistantForCausalLM(made)
    model.lm_head.weight = model.model.embed_tokens.weight  # as it is when it is loaded
    randomise(model, 5)
    if model.masked_embedding is not None:
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
        model.masked_embedding.token_ordering.copy_(order)
    return model.eval()


def write_assistant(folder: Path, family: str, **fields: Any) -> tuple[Any, Any]:
    """Write a model and an assistant, and return both."""
    model, assistant = make_model(family), make_assistant(family, **fields)
    model.save_pretrained(folder / "model")
    assistant.save_pretrained(folder / "draft")
    return model, assistant


@torch.inference_mode()
def reference(model: Any, assistant: Any, known: list[int], count: int) -> list[int]:
    """Return what the assistant guesses to follow these tokens, as transformers runs it."""
    outputs = model.model(
        torch.tensor([known[:-1]]), use_cache=False, return_shared_kv_states=True, output_hidden_states=True
    )
    # Its mask would let the assistant see one token more than the window, which caches do not keep.
    window, kind = model.config.sliding_window, "sliding_attention"
    kv = outputs.shared_kv_states
    kv[kind] = tuple(part[:, :, -window:] for part in kv[kind])
    hidden, token = outputs.last_hidden_state[:, -1:], known[-1]
    guesses: list[int] = []
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        made = assistant(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=torch.tensor([[len(known) - 1]]),
            shared_kv_states=kv,
        )
        token, hidden = int(made.logits[0, -1].argmax()), made.last_hidden_state
        guesses.append(token)
    return guesses


@pytest.mark.parametrize("fields", [{}, CENTROIDS], ids=["all tokens", "centroids"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-small", "gemma4-moe"])
def test_guesses_of_assistants_are_those_of_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model, assistant = write_assistant(tmp_path, family, **fields)
    speculation = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    prompts = [prompt(22)[:count] for count in (6, 22, 13)]
    params = SamplingParams(temperature=0, max_tokens=14)
    expected = LLM(str(tmp_path / "model"), **OPTIONS).generate(prompts, params)
    llm = LLM(str(tmp_path / "model"), speculative_config=speculation, max_num_batched_tokens=11, **OPTIONS)
    watched = llm._engine.core.scheduler.speculation = Watched(3)
    assert [output.outputs for output in llm.generate(prompts, params)] == [
        output.outputs for output in expected
    ]
    assert len(watched.guesses) > 30
    for known, guesses in watched.guesses:
        assert guesses == reference(model, assistant, known, len(guesses))
    llm.close()


def test_assistants_change_no_token(tmp_path: Path) -> None:
    write_assistant(tmp_path, "gemma4")
    write_tokenizer(tmp_path / "model")
    check_tokens(tmp_path / "model", "gemma4", {"model": str(tmp_path / "draft")})


def test_ranks_share_an_assistant(tmp_path: Path) -> None:
    write_assistant(tmp_path, "gemma4-small", **CENTROIDS)
    made = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path / "model"),
            speculative_config={"model": str(tmp_path / "draft")},
            tensor_parallel_size=size,
            **OPTIONS,
        )
        watched = llm._engine.core.scheduler.speculation = Watched(3)
        llm.generate([prompt(9)], SamplingParams(temperature=0, max_tokens=9))
        made.append(watched.guesses)
        llm.close()
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("", {"backbone_hidden_size": 80}, "backbone_hidden_size is 80, hidden_size of the model is 64"),
        ("text_config", {"vocab_size": 400}, "the vocabulary has 400 tokens, that of the model 320"),
        ("text_config", {"head_dim": 24}, "no layer of the model has heads like those of its layers"),
    ],
)
def test_assistant_of_another_model_is_refused(
    part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_assistant(tmp_path, "gemma4")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config).update(fields)
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        LLM(str(tmp_path / "model"), speculative_config={"model": str(tmp_path / "draft")}, **OPTIONS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_tensor_of_an_assistant_is_reported(tmp_path: Path) -> None:
    write_assistant(tmp_path, "gemma4")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "post_projection" not in name}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(Exception, match=r"lack post_projection\.weight"):
        LLM(str(tmp_path / "model"), speculative_config={"model": str(tmp_path / "draft")}, **OPTIONS)
