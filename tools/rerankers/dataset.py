"""Generates the lists with many processes and writes them as token ids.

    python -m tools.rerankers.dataset --out FOLDER --lists 220000

writes tokenizer.json and one .npy file per array. It needs no torch, so its processes start quickly; train.py runs it
as its first step.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.rerankers import overlap, subjects
from tools.rerankers.corpus import ranked_list
from tools.rerankers.ranked import RankedList
from tools.rerankers.tokenizer import VOCAB_SIZE, train_tokenizer
from tools.rerankers.wording import DATA, Side

TEXTS = 6  # of a list
QUERY_TOKENS = 40
TEXT_TOKENS = 208
SHARD = 500  # lists a task
_TOKENIZER_LISTS = 6_000
_WORD_TABLES = ("synonyms", "fields", "groups", "lists")
Ids = npt.NDArray[np.int16]
Arrays = dict[str, npt.NDArray[np.generic]]


def make_tokenizer(seed: int, lists: int = _TOKENIZER_LISTS, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trained on generated lists, on the prose, and on every word of the tables, several times."""
    words = [(DATA / f"{name}.txt").read_text(encoding="utf-8") for name in _WORD_TABLES]
    written = [text for one in subjects.subjects() for text in (*one.asks, *one.answers)]
    found = [*words * 30, *written * 10, *overlap.sentences() * 2]
    for index in range(lists):
        one = ranked_list(seed, Side.TRAIN, index, 2)
        found += [one.query, one.texts[0]]
    return train_tokenizer(found, vocab_size)


def _padded(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> tuple[Ids, Ids]:
    """Token ids [texts, most], and how many there are of each."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = np.zeros((len(texts), most), dtype=np.int16)
    lengths = np.zeros(len(texts), dtype=np.int16)
    for row, one in enumerate(encoded):
        kept = one.ids[:most]
        ids[row, : len(kept)] = kept
        lengths[row] = len(kept)
    return ids, lengths


def encode(tokenizer: Tokenizer, lists: Sequence[RankedList]) -> Arrays:
    """Lists of equally many texts as arrays: ids without special tokens, lengths, grades, and a number per subject."""
    queries, query_lengths = _padded(tokenizer, [one.query for one in lists], QUERY_TOKENS)
    texts, text_lengths = _padded(tokenizer, [text for one in lists for text in one.texts], TEXT_TOKENS)
    shape = (len(lists), -1)
    return {
        "queries": queries,
        "query_lengths": query_lengths,
        "texts": texts.reshape(*shape, TEXT_TOKENS),
        "text_lengths": text_lengths.reshape(shape),
        "grades": np.asarray([one.grades for one in lists], dtype=np.uint8),
        "keys": np.asarray([crc32(one.key.encode()) for one in lists], dtype=np.uint32),
    }


def _shard(task: tuple[int, int], tokenizer_path: str, seed: int) -> Arrays:
    """The arrays of one task's lists. Runs in a worker process."""
    start, count = task
    lists = [ranked_list(seed, Side.TRAIN, index, TEXTS) for index in range(start, start + count)]
    return encode(Tokenizer.from_file(tokenizer_path), lists)


def generate(folder: Path, count: int, seed: int, processes: int, seconds: float) -> int:
    """Writes the arrays, with fewer lists than asked if `seconds` run out. Returns how many there are."""
    tasks = [(start, min(SHARD, count - start)) for start in range(0, count, SHARD)]
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
                if time.monotonic() > deadline:
                    print(f"lists: stopped after {seconds:.0f} s with {len(shards)} of {len(tasks)} shards")
                    break
    found = {key: np.concatenate([shard[key] for shard in shards]) for key in shards[0]}
    for key, array in found.items():
        np.save(folder / f"{key}.npy", array)
    return len(found["keys"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate and tokenize the training lists.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lists", type=int, default=220_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=25.0, help="stop generating after this time")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tokenizer = make_tokenizer(arguments.seed, min(arguments.lists, _TOKENIZER_LISTS))
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    print(
        f"tokenizer: {tokenizer.get_vocab_size()} tokens after {time.monotonic() - began:.1f} s", flush=True
    )
    count = generate(arguments.out, arguments.lists, arguments.seed, arguments.processes, arguments.seconds)
    print(f"lists: {count:,} after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
