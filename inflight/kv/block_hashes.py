"""Hashes that identify full blocks by their content.

The hash of a full block is SHA-256 over the request's cache salt and all token ids up to the block's end. Equal hashes
therefore mean equal prefixes, and requests with different salts never share blocks. A caller that needs only a few
hashes of a prompt (`hashes_at`) hashes the tokens between them in one update.
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
NUM_EACH = 64  # marks at every block; beyond, half as many between consecutive powers of two


class BlockHasher:
    """Hashes the blocks of requests; a request keeps its hashes (`Request.block_hashes`)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # The requests that were hashed last, the latest at the end: others are likely to share their prefix.
        self.recent: list[Request] = []

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks, computing only missing ones."""
        hashes = request.block_hashes
        if not hashes and num_blocks:
            self._copy_hashes(request)
        first, width = len(hashes), self.block_size * ID_BYTES
        if first >= num_blocks:
            return hashes
        hasher = request.hash_state
        if hasher is None:  # not needed so far
            hasher = request.hash_state = _hasher(request.spec.cache_salt)
            hasher.update(self._ids(request, 0, first))
        ids = self._ids(request, first, num_blocks)
        for at in range(0, len(ids), width):
            hasher.update(ids[at : at + width])
            hashes.append(hasher.copy().digest())
        return hashes

    def hashes_at(self, request: Request, marks: Sequence[int]) -> list[bytes]:
        """Return the hash of each prefix with a number of blocks in `marks` (ascending). The request keeps none."""
        hasher, width = _hasher(request.spec.cache_salt), self.block_size * ID_BYTES
        ids = self._ids(request, 0, marks[-1] if marks else 0)
        hashes, at = [], 0
        for mark in marks:
            hasher.update(ids[at : mark * width])
            hashes.append(hasher.copy().digest())
            at = mark * width
        return hashes

    def _ids(self, request: Request, first: int, end: int) -> memoryview:
        """Return the token ids of blocks [first, end) as bytes."""
        start, stop = first * self.block_size, end * self.block_size
        if stop <= len(request.spec.token_ids):
            return memoryview(request.spec.token_ids).cast("B")[start * ID_BYTES : stop * ID_BYTES]
        return memoryview(array("q", request.token_ids[start:stop])).cast("B")

    def _copy_hashes(self, request: Request) -> None:
        """Copy hashes from a recent request with a common prefix: comparing is much faster than hashing."""
        ids, size, recent = request.spec.token_ids, self.block_size, self.recent
        first = ids[:size]
        for index, other in enumerate(recent):
            if other.spec.cache_salt == request.spec.cache_salt and other.spec.token_ids[:size] == first:
                request.block_hashes += other.block_hashes[
                    : _num_equal_blocks(ids, other.spec.token_ids, size)
                ]
                del recent[index]  # one request per prefix is enough
                break
        recent.append(request)
        del recent[:-NUM_RECENT]


def _hasher(salt: str) -> Any:
    return sha256(sha256(salt.encode()).digest())


def _num_equal_blocks(ids: array[int], others: array[int], size: int) -> int:
    """Return the number of equal leading blocks, by bisection: arrays compare at memory speed."""
    low, high = 0, min(len(ids), len(others)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low * size : middle * size] == others[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


class BlockMarks:
    """Prefix lengths, in blocks, at which prompts are hashed: each of the first ones, then fewer and fewer.

    They are the same for all prompts. A few hundred hashes tell, for a prompt of any length, how much of it a cache
    holds, to within a thirty-second.
    """

    def __init__(self) -> None:
        self._marks = list(range(1, NUM_EACH + 1))

    def up_to(self, num_blocks: int) -> list[int]:
        marks = self._marks
        while marks[-1] < num_blocks:
            step = marks[-1] // NUM_EACH * 2
            marks += range(marks[-1] + step, 2 * marks[-1] + step, step)
        return marks[: bisect_right(marks, num_blocks)]
