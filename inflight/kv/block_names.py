"""Names for full blocks by what they hold.

A full block is named by a chain hash: SHA-256 over the name of the block before it and its own token ids, so equal
names mean equal prefixes. The chain starts from the request's salt: requests with different salts never meet.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from inflight.request import Request

NUM_RECENT = 8
ID_BYTES = array("q").itemsize


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
        first, size = len(names), self.block_size
        if first >= num_blocks:
            return names
        parent = names[-1] if names else sha256(request.cache_salt.encode()).digest()
        if num_blocks * size <= len(request.first_ids):
            ids, start = memoryview(request.first_ids).cast("B"), first * size * ID_BYTES
        else:
            ids, start = (
                memoryview(array("q", request.token_ids[first * size : num_blocks * size])).cast("B"),
                0,
            )
        width = size * ID_BYTES
        for at in range(start, start + (num_blocks - first) * width, width):
            parent = sha256(parent + ids[at : at + width]).digest()
            names.append(parent)
        return names

    def _name_like_another(self, request: Request) -> None:
        """Take names from a recent request that begins alike: comparing is much faster than hashing."""
        ids, size, recent = request.first_ids, self.block_size, self.recent
        first = ids[:size]
        for index, other in enumerate(recent):
            if other.cache_salt == request.cache_salt and other.first_ids[:size] == first:
                request.block_hashes += other.block_hashes[: _num_equal_blocks(ids, other.first_ids, size)]
                del recent[index]  # one of a kind is enough
                break
        recent.append(request)
        del recent[:-NUM_RECENT]


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
