"""Answers of a finished checkpoint, to judge it by reading: nothing is picked, left out or drawn twice.

    python -m tools.builtin.answers FOLDER --held-out 20 --seed 1

prints the answers to the first held-out documents of that seed, then to the prompts of data/prompts.txt with
`--written`. Every answer has its own random generator, so that it does not depend on those before it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.builtin.corpus import documents
from tools.builtin.examples import Example
from tools.builtin.tables import rows

_PLAIN = "text:"


class Answer(NamedTuple):
    prompt: str
    text: str
    num_tokens: int
    ended: bool  # by itself, and not at the limit


def held_out_prompts(seed: int, count: int) -> list[Example]:
    """The prompts of the first `count` held-out chats of one question."""
    found: list[Example] = []
    for one in documents(seed, 0, 100 * count, held_out=True):
        if not one.plain and len(one.turns) == 2:
            found.append(one)
        if len(found) == count:
            break
    return found


def written_prompts() -> list[Example]:
    """The prompts that were written by hand."""
    lines = [row[0] for row in rows("prompts")]
    return [
        Example("plain", (line.removeprefix(_PLAIN).strip(),), plain=True)
        if line.startswith(_PLAIN)
        else Example("written", (line, ""))
        for line in lines
    ]


def answers(folder: Path, examples: list[Example], seed: int, max_new: int = 1_000) -> Iterator[Answer]:
    """One answer to each, sampled as the checkpoint's generation_config.json says."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, example in enumerate(examples):
        prompt = example.turns[0] if example.plain else example.prompt
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        torch.manual_seed(1_000_003 * seed + index)
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new)
        new = whole[0, ids.shape[1] :].tolist()
        ended = new[-1] in model.generation_config.eos_token_id
        text = tokenizer.decode(new[:-1] if ended else new, skip_special_tokens=False)
        yield Answer(example.turns[0], text, len(new), ended)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print answers of the built-in model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", type=int, default=20, help="how many held-out prompts")
    parser.add_argument("--written", action="store_true", help="the prompts that were written by hand, too")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    examples = held_out_prompts(arguments.seed, arguments.held_out)
    examples += written_prompts() if arguments.written else []
    lengths, unfinished = [], 0
    for number, answer in enumerate(answers(arguments.folder, examples, arguments.seed), 1):
        print(f"### {number}. {answer.prompt}\n\n{answer.text}\n", flush=True)
        lengths.append(answer.num_tokens)
        unfinished += not answer.ended
    lengths.sort()
    print(
        f"{len(lengths)} answers of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}; "
        f"{unfinished} did not end by themselves"
    )


if __name__ == "__main__":
    main()
