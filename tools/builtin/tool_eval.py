"""How well a checkpoint uses tools: every answer of new chats judged by itself, and whole agent loops.

    python -m tools.builtin.tool_eval FOLDER --chats 150 --loops 200 --seed 1

prints the share of right answers per skill, apart for tools with the names that clients use, with other natural names
and with made-up ones. The latter two use cities, names and questions that training never saw. A call is right if its
name and all arguments are; an answer, if it calls nothing and has what the tools returned. What came before in the chat
is always the right thing, so a mistake counts once; in the loops (tool_loops.py) it is what the model wrote. The
answers are greedy, or drawn as generation_config.json says with `--sampled`.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.builtin.chat_format import Turn
from tools.builtin.tool_chats import ToolChat, tool_chat
from tools.builtin.tool_loops import loop_report, loops, parsed_calls, run_loops
from tools.builtin.tool_names import Naming

NAMINGS: tuple[Naming, ...] = ("common", "varied", "made up")
_MAX_NEW = 160


class ToolCase(NamedTuple):
    """A prompt and the message that is to follow it."""

    prompt: str
    expected: Turn

    @property
    def skill(self) -> str:
        return self.expected.skill + (", thinking" if self.expected.thought else "")


def cases(chat: ToolChat) -> Iterator[ToolCase]:
    """All answers of a chat, each with what comes before it."""
    answers = iter([message for message in chat.messages if message.role == "assistant"])
    before = ""
    for given, learned in zip(chat.segments[:-2:2], chat.segments[1:-2:2], strict=True):
        yield ToolCase(before + given.text, next(answers))
        before += given.text + learned.text


def is_right(expected: Turn, written: str) -> bool:
    """Whether this text does what the message does, though maybe in other words."""
    if expected.thought:
        thought, end, written = written.partition("\n</think>\n\n")
        if not end or not thought.strip():
            return False
    if expected.skill == "output call":
        return _is_output(expected, written)
    if parsed_calls(written) != [{"name": one.name, "arguments": one.arguments} for one in expected.calls]:
        return False
    if expected.calls:
        return True
    said = written.lower()
    return bool(said) and "<tool_call>" not in said and all(word.lower() in said for word in expected.needed)


def _is_output(expected: Turn, written: str) -> bool:
    """Whether the final answer went through its tool. Its words are free, but for those that are needed."""
    call = expected.calls[0]
    match parsed_calls(written):
        case [{"name": call.name, "arguments": dict(arguments)}] if arguments.keys() == call.arguments.keys():
            said = json.dumps(arguments, ensure_ascii=False).lower()
            return all(json.dumps(word, ensure_ascii=False)[1:-1].lower() in said for word in expected.needed)
    return False


class Writer:
    """A checkpoint that answers prompts, many at once."""

    def __init__(self, folder: Path, sampled: bool, batch: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(self.device)
        self.batch, self.sampled = batch, sampled
        if not sampled:
            self.model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None)

    def write(self, prompts: Sequence[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        written = [""] * len(prompts)
        for first in range(0, len(order), self.batch):
            picked = order[first : first + self.batch]
            for index, text in zip(picked, self._batch([prompts[index] for index in picked]), strict=True):
                written[index] = text
        return written

    @torch.inference_mode()
    def _batch(self, prompts: list[str]) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {name: inputs[name].to(self.device) for name in ("input_ids", "attention_mask")}
        whole = self.model.generate(**inputs, max_new_tokens=_MAX_NEW)
        new = whole[:, inputs["input_ids"].shape[1] :].tolist()
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=False)
        return [re.split(r"<\|im_end\|>|<\|endoftext\|>", text)[0] for text in texts]


def report(found: Sequence[tuple[ToolCase, str]], show: int) -> str:
    """A table of skills, then some of the wrong answers."""
    right: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for case, written in found:
        good = is_right(case.expected, written)
        right[case.skill].append(good)
        if not good:
            wrong.append((case, written))
    lines = [f"{'skill':28} {'right':>6} {'of':>6}"]
    for skill, results in sorted(right.items()):
        lines.append(f"{skill:28} {sum(results):6} {len(results):6} {sum(results) / len(results):7.1%}")
    every = [good for results in right.values() for good in results]
    lines.append(f"{'all':28} {sum(every):6} {len(every):6} {sum(every) / len(every):7.1%}")
    for case, written in wrong[:show]:
        question = case.prompt[case.prompt.rindex("<|im_start|>user") :]
        lines.append(
            f"\n--- {case.skill}\n{question}\n--- expected\n{case.expected.written}\n--- written\n{written}"
        )
    return "\n".join(lines)


def new_cases(seed: int, count: int, naming: Naming) -> list[ToolCase]:
    """The answers of chats that training did not have; what clients use is asked for as usual."""
    held_out = naming != "common"
    chats = [tool_chat(seed, index, held_out, naming) for index in range(count)]
    return [case for chat in chats for case in cases(chat)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Evaluate how a checkpoint of the built-in model uses tools."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chats", type=int, default=150, help="of each kind of names")
    parser.add_argument("--loops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="not the one of the training")
    parser.add_argument("--sampled", action="store_true", help="draw answers instead of taking the likeliest")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--show", type=int, default=10, help="how many wrong answers to print of each")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    writer = Writer(arguments.folder, arguments.sampled, arguments.batch)
    started = list(loops(arguments.seed, arguments.loops))
    if started:
        run_loops(started, writer.write)
        print(loop_report(started, arguments.show), flush=True)
    for naming in NAMINGS if arguments.chats else ():
        asked = new_cases(arguments.seed, arguments.chats, naming)
        written = writer.write([case.prompt for case in asked])
        print(f"\n=== names: {naming}", flush=True)
        print(report(list(zip(asked, written, strict=True)), arguments.show), flush=True)


if __name__ == "__main__":
    main()
