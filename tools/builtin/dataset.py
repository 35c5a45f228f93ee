"""Generates the corpus with many processes and writes it as token ids.

    python -m tools.builtin.dataset --out FOLDER --documents 1000000

writes tokenizer.json and, as uint16, documents one after the other: chats.npy, tools.npy, easy.npy (what the training
begins with), long.npy (the documents of more than 1,024 tokens, which need long rows) and held_out.npy. It needs no
torch, so its processes start quickly; train.py runs it while the model compiles.

The upper bits of a token tell how it is learned: what is given in a chat with tools is read only, and what the model
writes there counts more.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.builtin.chat_format import Segment
from tools.builtin.corpus import documents
from tools.builtin.tokenizer import VOCAB_SIZE, train_tokenizer
from tools.builtin.tool_chats import easy_chat, tool_chat

Ids = npt.NDArray[np.uint16]
Source = Literal["chats", "tools", "easy", "held_out"]
ARRAYS = ("chats", "tools", "easy", "long", "held_out")
ID_BITS = (1 << 14) - 1
TOOL_BIT = 1 << 14
GIVEN_BIT = 1 << 15
LONG = 1024  # tokens of a document that still fits in a short row
SHARD = 1_000  # documents a task
_TOKENIZER_DOCUMENTS = 15_000
_HELD_OUT_DOCUMENTS = 4_000


class Portion(NamedTuple):
    source: Source
    start: int
    size: int


class Shard(NamedTuple):
    """Documents one after the other."""

    short: Ids
    long: Ids


def _segments(task: Portion, seed: int) -> Iterator[tuple[Segment, ...]]:
    if task.source in ("tools", "easy"):
        make = tool_chat if task.source == "tools" else easy_chat
        return (make(seed, index).segments for index in range(task.start, task.start + task.size))
    held_out = task.source == "held_out"
    return (one.segments for one in documents(seed, task.start, task.size, held_out))


def _shard(task: Portion, tokenizer_path: str, seed: int) -> Shard:
    """The token ids of one task's documents. Runs in a worker process."""
    tokenizer = Tokenizer.from_file(tokenizer_path)
    mark = TOOL_BIT if task.source in ("tools", "easy") else 0
    pieces = list(_segments(task, seed))
    texts = [segment.text for document in pieces for segment in document]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    short: list[Ids] = []
    long: list[Ids] = []
    for document in pieces:
        marked = [
            np.asarray(next(encoded).ids, dtype=np.uint16) | (mark if segment.learned else GIVEN_BIT)
            for segment in document
        ]
        # Ends of documents are found by their token, which therefore has no mark.
        marked[-1][-1] &= ID_BITS
        ids = np.concatenate(marked).astype(np.uint16)
        (long if len(ids) > LONG else short).append(ids)
    nothing = np.zeros(0, dtype=np.uint16)
    return Shard(np.concatenate([nothing, *short]), np.concatenate([nothing, *long]))


def _tasks(source: Source, count: int) -> list[Portion]:
    return [Portion(source, start, min(SHARD, count - start)) for start in range(0, count, SHARD)]


def make_tokenizer(
    seed: int, documents_used: int = _TOKENIZER_DOCUMENTS, vocab_size: int = VOCAB_SIZE
) -> Tokenizer:
    """The tokenizer of the first documents of the corpus, some of them with tools."""
    texts = [example.text for example in documents(seed, 0, documents_used)]
    texts += [tool_chat(seed, index).text for index in range(documents_used // 15)]
    texts += [easy_chat(seed, index).text for index in range(documents_used // 15)]
    return train_tokenizer(texts, vocab_size)


def _spread(*lists: list[Portion]) -> list[Portion]:
    """All lists in one, evenly mixed, so that what comes in time has all of them."""
    placed = [(index / len(tasks), task) for tasks in lists for index, task in enumerate(tasks)]
    return [task for _, task in sorted(placed)]


def generate(
    folder: Path, count: int, num_tool_chats: int, num_easy: int, seed: int, processes: int, seconds: float
) -> dict[str, int]:
    """Writes the arrays, with fewer documents than asked if `seconds` run out. Returns their token counts."""
    first = _tasks("held_out", min(_HELD_OUT_DOCUMENTS, max(100, count // 100)))
    tasks = first + _spread(_tasks("chats", count), _tasks("tools", num_tool_chats), _tasks("easy", num_easy))
    work = partial(_shard, tokenizer_path=str(folder / "tokenizer.json"), seed=seed)
    deadline, shards = time.monotonic() + seconds, []
    if processes == 1:
        shards = [work(task) for task in tasks]
    else:
        # Each worker tokenizes alone: threads of 16 processes would only get in each other's way.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            # In order, so that the arrays do not depend on which worker is the faster.
            for shard in pool.imap(work, tasks):
                shards.append(shard)
                if time.monotonic() > deadline and len(shards) > len(first):
                    print(f"corpus: stopped after {seconds:.0f} s with {len(shards)} of {len(tasks)} shards")
                    break
    made: dict[str, list[Ids]] = {name: [np.zeros(0, dtype=np.uint16)] for name in ARRAYS}
    for task, shard in zip(tasks, shards, strict=False):
        made[task.source].append(shard.short)
        if task.source != "held_out":
            made["long"].append(shard.long)
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", np.concatenate(made[name]))
    return {name: sum(map(len, made[name])) for name in ARRAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate and tokenize the corpus of the built-in model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--tool-chats", type=int, default=300_000)
    parser.add_argument("--easy-chats", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop generating after this time")
    parser.add_argument("--tokenizer", type=Path, help="an already trained tokenizer.json")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = make_tokenizer(arguments.seed, min(arguments.documents, _TOKENIZER_DOCUMENTS))
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    print(
        f"tokenizer: {tokenizer.get_vocab_size()} tokens after {time.monotonic() - began:.1f} s", flush=True
    )
    sizes = generate(
        arguments.out,
        arguments.documents,
        arguments.tool_chats,
        arguments.easy_chats,
        arguments.seed,
        arguments.processes,
        arguments.seconds,
    )
    shown = ", ".join(f"{size:,} {name}" for name, size in sizes.items())
    print(f"corpus: {shown} tokens after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
