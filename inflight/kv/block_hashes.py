"""Names for full blocks by what they hold.

A full block is named by SHA-256 over the request's salt and all token ids up to the block's end, so equal names mean
equal prefixes, and requests with different salts never meet. Whoever needs few of a prompt's names hashes what is
between them in one go.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from inflight.request import Request

NUM_RECENT = 8
ID_BYTES = array("q").itemsize
NUM_EACH = 64  # marks at every block; beyond, half as many between one power of two and the next


class BlockNamer:
    """Names the blocks of requests; a request keeps its names (`Request.block_hashes`)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.recent: list[Request] = []  # that were named, the latest last: what others begin with, likely

    def names(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's first names, hashing only those not hashed before. There may be more."""
        names = request.block_hashes
        if not names and num_blocks:
            self._name_like_another(request)
        first, width = len(names), self.block_size * ID_BYTES
        if first >= num_blocks:
            return names
        hasher = request.block_hasher
        if hasher is None:  # none was needed so far
            hasher = request.block_hasher = _hasher(request.spec.cache_salt)
            hasher.update(self._ids(request, 0, first))
        ids = self._ids(request, first, num_blocks)
        for at in range(0, len(ids), width):
            hasher.update(ids[at : at + width])
            names.append(hasher.copy().digest())
        return names

    def names_at(self, request: Request, marks: Sequence[int]) -> list[bytes]:
        """The names of the blocks that end at these numbers of blocks, which ascend. The request keeps none of them."""
        hasher, width = _hasher(request.spec.cache_salt), self.block_size * ID_BYTES
        ids = self._ids(request, 0, marks[-1] if marks else 0)
        names, at = [], 0
        for mark in marks:
            hasher.update(ids[at : mark * width])
            names.append(hasher.copy().digest())
            at = mark * width
        return names

    def _ids(self, request: Request, first: int, end: int) -> memoryview:
        """Token ids of the blocks from `first` to before `end`, as bytes."""
        start, stop = first * self.block_size, end * self.block_size
        if stop <= len(request.spec.token_ids):
            return memoryview(request.spec.token_ids).cast("B")[start * ID_BYTES : stop * ID_BYTES]
        return memoryview(array("q", request.token_ids[start:stop])).cast("B")

    def _name_like_another(self, request: Request) -> None:
        """Take names from a recent request that begins alike: comparing is much faster than hashing."""
        ids, size, recent = request.spec.token_ids, self.block_size, self.recent
        first = ids[:size]
        for index, other in enumerate(recent):
            if other.spec.cache_salt == request.spec.cache_salt and other.spec.token_ids[:size] == first:
                request.block_hashes += other.block_hashes[
                    : _num_equal_blocks(ids, other.spec.token_ids, size)
                ]
                del recent[index]  # one of a kind is enough
                break
        recent.append(request)
        del recent[:-NUM_RECENT]


def _hasher(salt: str) -> Any:
    return sha256(sha256(salt.encode()).digest())


def _num_equal_blocks(ids: array[int], others: array[int], size: int) -> int:
    """How many blocks are the same from the start. Halving: arrays are compared at the speed of memory."""
    low, high = 0, min(len(ids), len(others)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low * size : middle * size] == others[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


class BlockMarks:
    """Some numbers of blocks, the same for all prompts: every one at the beginning, then ever fewer. So how much of a
    prompt is found somewhere is known to a thirty-second of it, by a few hundred names however long it is."""

    def __init__(self) -> None:
        self._marks = list(range(1, NUM_EACH + 1))

    def up_to(self, num_blocks: int) -> list[int]:
        marks = self._marks
        while marks[-1] < num_blocks:
            step = marks[-1] // NUM_EACH * 2
            marks += range(marks[-1] + step, 2 * marks[-1] + step, step)
        return marks[: bisect_right(marks, num_blocks)]
