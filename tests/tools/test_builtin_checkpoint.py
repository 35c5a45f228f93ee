"""The checkpoint that ships: complete, small, what transformers loads, and the same tokens in the engine."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight.checkpoint.builtin import checkpoint_folder
from inflight.entrypoints.llm import LLM
from inflight.sampling_params import SamplingParams
from tools.builtin import answers
from tools.builtin.corpus import is_held_out
from tools.builtin.model import Shape

PROMPTS = ("What is the opposite of hot?", "Why does it rain?", "How do I bake bread?", "Hello!")


@cache
def greedy(prompt: str) -> tuple[list[int], list[int], str]:
    """Ids of the prompt, ids of transformers' answer without its end, and that answer as text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    with torch.inference_mode():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200)[0].tolist()
    answer = whole[ids.shape[1] : -1]
    return ids[0].tolist(), answer, tokenizer.decode(answer)


def test_checkpoint_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in checkpoint_folder().iterdir()}
    assert sizes.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 14_000_000
    config = json.loads((checkpoint_folder() / "config.json").read_text(encoding="utf-8"))
    assert Shape().as_dict().items() <= config.items()


def test_model_answers_and_stops() -> None:
    texts = [greedy(prompt)[2] for prompt in PROMPTS]
    assert "cold" in texts[0].lower()
    assert "cloud" in texts[1]
    assert "flour" in texts[2]
    assert len(texts[3]) < 60


@pytest.mark.parametrize("prompt", PROMPTS)
def test_engine_gives_the_same_tokens_as_transformers(prompt: str) -> None:
    ids, answer, text = greedy(prompt)
    llm = LLM(dtype="float32", show_progress=False, max_kv_tokens=1024)
    try:
        output = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False)[
            0
        ].outputs[0]
    finally:
        llm.close()
    assert output.text == text
    assert list(output.token_ids)[: len(answer)] == answer


def test_evaluation_prompts_are_held_out_and_in_order() -> None:
    few, more = answers.held_out_prompts(5, 3), answers.held_out_prompts(5, 6)
    assert more[:3] == few
    assert all(is_held_out(example) and len(example.turns) == 2 for example in more)
    assert sum(example.plain for example in answers.written_prompts()) == 3


def test_answer_does_not_depend_on_earlier_answers() -> None:
    folder: Path = checkpoint_folder()
    first, second, other = answers.held_out_prompts(5, 3)
    one = list(answers.answers(folder, [first, second], seed=1, max_new=12))
    two = list(answers.answers(folder, [other, second], seed=1, max_new=12))
    assert one[0] != two[0]
    assert one[1] == two[1]
    assert one[1].num_tokens == 12
    assert not one[1].ended
