"""The rows that the training takes from the token ids of dataset.py, and in which shares."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.uint16]
_EARLY = 1 / 3  # of the run: first of all, the model is to learn to copy


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the rows of a step, early in the run and later; the rest are chats without tools."""

    easy_early: float = 0.35
    tools_early: float = 0.25
    easy: float = 0.1
    tools: float = 0.45

    def rows(self, rows: int, progress: float) -> dict[str, int]:
        early = progress < _EARLY
        easy = round(rows * (self.easy_early if early else self.easy))
        tools = round(rows * (self.tools_early if early else self.tools))
        return {"chats": rows - easy - tools, "tools": tools, "easy": easy}


def row_starts(ids: Ids, end: int, length: int, skip: int) -> npt.NDArray[np.int64]:
    """Where rows of length + 1 tokens begin: always at a document, never past the end.

    A document that is cut by the end of its row begins the next row, so each is seen whole in every pass.
    `skip` documents are left out at the front, which shifts all rows from pass to pass.
    """
    starts = np.concatenate(([0], np.flatnonzero(ids == end) + 1))[:-1]
    starts = starts[starts + length + 1 <= len(ids)]
    # The last document that begins inside this row; at least one further, for documents longer than a row.
    following = np.searchsorted(starts, starts + length, side="right") - 1
    following = np.maximum(following, np.arange(1, len(starts) + 1)).tolist()
    chosen, place = [], min(skip, len(starts) - 1)
    while place < len(starts):
        chosen.append(place)
        place = following[place]
    return np.asarray(starts[chosen], dtype=np.int64)


class RowStream:
    """Endless rows of length + 1 tokens, every pass over the documents in a new order."""

    def __init__(self, ids: Ids, end: int, length: int, seed: int) -> None:
        self.ids, self.end, self.length = ids, end, length
        self.generator = np.random.default_rng(seed)
        self.window = np.arange(length + 1)
        self.starts = np.zeros(0, dtype=np.int64)

    def take(self, rows: int) -> npt.NDArray[np.int64]:
        """[rows, length + 1]"""
        while len(self.starts) < rows:
            fresh = row_starts(self.ids, self.end, self.length, int(self.generator.integers(0, 64)))
            self.generator.shuffle(fresh)
            self.starts = np.concatenate((self.starts, fresh))
        picked, self.starts = self.starts[:rows], self.starts[rows:]
        taken: npt.NDArray[np.int64] = self.ids[picked[:, None] + self.window].astype(np.int64)
        return taken


def batches(
    arrays: Mapping[str, Ids],
    end: int,
    shape: tuple[int, int],
    long_shape: tuple[int, int],
    long_every: int,
    shares: Shares,
    progress: Callable[[], float],
    seed: int,
) -> Iterator[Tensor]:
    """Batches of `shape` in the shares of this moment, and every so often one of long rows with as many tokens."""
    rows, length = shape
    streams = {name: RowStream(ids, end, length, seed) for name, ids in arrays.items() if len(ids) > length}
    long = arrays["long"]
    rare = RowStream(long, end, long_shape[1], seed) if len(long) > long_shape[1] else None  # a toy has none
    step = 0
    while True:
        step += 1
        if rare is not None and step % long_every == 0:
            yield torch.from_numpy(rare.take(long_shape[0]))
            continue
        wanted = shares.rows(rows, progress())
        yield torch.from_numpy(
            np.concatenate([streams[name].take(count) for name, count in wanted.items() if count])
        )
