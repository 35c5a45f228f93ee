"""Finding blocks by what they hold.

A full block is named by a chain hash: SHA-256 over the hash of the block before it and its own token ids,
so equal names mean equal prefixes. The chain starts from the request's salt: requests with different
salts never meet. Only full blocks have names; a name maps to one block.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256
from typing import Protocol

from inflight.request import Request

NUM_RECENT = 8


class PrefixCache(Protocol):
    """What the block manager asks. `NoPrefixCache` answers "nothing" to everything."""

    num_queries: int  # tokens looked up
    num_hits: int  # tokens found

    def match(self, request: Request) -> list[int]:
        """Blocks that already hold the request's leading tokens, at least one token short of all."""

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable."""

    def knows(self, block_id: int) -> bool: ...

    def forget(self, block_id: int) -> None: ...

    def clear(self) -> None: ...


class ChainHashCache:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_queries = 0
        self.num_hits = 0
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._recent: list[Request] = []  # that were named, the latest last: what others begin with, likely

    def _name_blocks(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's first names, hashing only those not hashed before."""
        names = request.block_hashes
        if not names and num_blocks:
            self._name_like_another(request)
        given = len(request.first_ids)
        for start in range(len(names) * self.block_size, num_blocks * self.block_size, self.block_size):
            end = start + self.block_size
            ids = request.first_ids[start:end] if end <= given else array("q", request.token_ids[start:end])
            parent = names[-1] if names else sha256(request.cache_salt.encode()).digest()
            names.append(sha256(parent + ids.tobytes()).digest())
        return names

    def _name_like_another(self, request: Request) -> None:
        """Take names from a recent request that begins alike: comparing is much faster than hashing."""
        ids, size, recent = request.first_ids, self.block_size, self._recent
        first = ids[:size]
        for index, other in enumerate(recent):
            if other.cache_salt == request.cache_salt and other.first_ids[:size] == first:
                request.block_hashes += other.block_hashes[: _num_equal_blocks(ids, other.first_ids, size)]
                del recent[index]  # one of a kind is enough
                break
        recent.append(request)
        del recent[:-NUM_RECENT]

    def match(self, request: Request) -> list[int]:
        if not request.splittable:  # the KV of a token depends on those behind it, too
            return []
        # Logprobs of the prompt need the prompt computed, unless that has happened before a preemption.
        if request.params.prompt_logprobs is not None and 1 < request.num_prompt_tokens > len(
            request.prompt_logprobs
        ):
            return []
        num_blocks = (len(request.token_ids) - 1) // self.block_size  # the last token is always computed
        blocks = []
        for name in self._name_blocks(request, num_blocks)[:num_blocks]:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def publish(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if num_full <= request.num_published or not request.splittable:
            return
        names = self._name_blocks(request, num_full)
        for index in range(request.num_published, num_full):
            block_id = request.block_ids[index]
            # Two requests may compute the same content at once: the first keeps the name.
            if names[index] not in self._block_of and block_id not in self._name_of:
                self._block_of[names[index]] = block_id
                self._name_of[block_id] = names[index]
        request.num_published = num_full

    def knows(self, block_id: int) -> bool:
        return block_id in self._name_of

    def forget(self, block_id: int) -> None:
        del self._block_of[self._name_of.pop(block_id)]

    def clear(self) -> None:
        self._block_of.clear()
        self._name_of.clear()


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


class NoPrefixCache:
    num_queries = 0
    num_hits = 0

    def match(self, request: Request) -> list[int]:  # noqa: ARG002
        return []

    def publish(self, request: Request, num_tokens: int) -> None:  # noqa: ARG002
        request.num_published = (
            sys.maxsize
        )  # nothing is left to publish: whoever asks by that number asks no more

    def knows(self, block_id: int) -> bool:  # noqa: ARG002
        return False

    def forget(self, block_id: int) -> None:
        pass

    def clear(self) -> None:
        pass
