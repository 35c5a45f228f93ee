"""Generates the corpus with many processes and writes it as token ids.

    python -m tools.builtin.dataset --out FOLDER --documents 1000000

writes tokenizer.json, train.npy and held_out.npy (uint16, documents one after the other). It needs no torch, so
its processes start quickly; train.py runs it as its first step.
"""

import argparse
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.builtin.corpus import documents
from tools.builtin.tokenizer import VOCAB_SIZE, train_tokenizer

Ids = npt.NDArray[np.uint16]
SHARD = 1_000  # documents a task
_TOKENIZER_DOCUMENTS = 30_000
_HELD_OUT_DOCUMENTS = 4_000


def _shard(task: tuple[int, int, bool], tokenizer_path: str, seed: int) -> Ids:
    """The token ids of one task's documents. Runs in a worker process."""
    start, count, held_out = task
    tokenizer = Tokenizer.from_file(tokenizer_path)
    texts = [example.text for example in documents(seed, start, count, held_out)]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(one.ids, dtype=np.uint16) for one in encoded])


def _tasks(count: int, held_out: bool) -> list[tuple[int, int, bool]]:
    return [(start, min(SHARD, count - start), held_out) for start in range(0, count, SHARD)]


def make_tokenizer(
    seed: int, documents_used: int = _TOKENIZER_DOCUMENTS, vocab_size: int = VOCAB_SIZE
) -> Tokenizer:
    """The tokenizer of the first documents of the corpus."""
    texts = (example.text for example in documents(seed, 0, documents_used))
    return train_tokenizer(texts, vocab_size)


def generate(folder: Path, count: int, seed: int, processes: int, seconds: float) -> tuple[int, int]:
    """Writes both arrays, with fewer documents than asked if `seconds` run out. Returns their token counts."""
    held_out = min(_HELD_OUT_DOCUMENTS, max(100, count // 100))
    tasks = _tasks(held_out, True) + _tasks(count, False)
    num_first = len(_tasks(held_out, True))
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
                if time.monotonic() > deadline and len(shards) > num_first:
                    print(f"corpus: stopped after {seconds:.0f} s with {len(shards)} of {len(tasks)} shards")
                    break
    held, train = np.concatenate(shards[:num_first]), np.concatenate(shards[num_first:])
    np.save(folder / "held_out.npy", held)
    np.save(folder / "train.npy", train)
    return len(train), len(held)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate and tokenize the corpus of the built-in model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=75.0, help="stop generating after this time")
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
        arguments.out, arguments.documents, arguments.seed, arguments.processes, arguments.seconds
    )
    print(
        f"corpus: {sizes[0]:,} training and {sizes[1]:,} held-out tokens after {time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
