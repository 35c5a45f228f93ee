"""Prefix caches: find blocks by their content, and report what they store and evict.

The hash of a full block is SHA-256 over the request's cache salt and all token ids up to the block's end. Equal hashes
therefore mean equal prefixes, and requests with different salts never share blocks. A caller that needs only a few
hashes of a prompt (`hashes_at`) hashes the tokens between them in one update.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Protocol

from inflight.events import CACHE_HASH_LENGTH, CacheUpdate
from inflight.request import Request

NUM_RECENT = 8
ID_BYTES = array("q").itemsize


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


class CacheChanges:
    """The net changes of a prefix cache since they were last taken, for a router that tracks its content.

    A block that was stored and evicted again is not listed, so the number of entries is bounded by the blocks that the
    cache had and has, however long they are not taken.
    """

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[bytes, None] = {}  # a dict, as an ordered set
        self._evicted: dict[bytes, None] = {}

    def store(self, block_hash: bytes) -> None:
        block_hash = block_hash[:CACHE_HASH_LENGTH]
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None

    def evict(self, block_hash: bytes) -> None:
        block_hash = block_hash[:CACHE_HASH_LENGTH]
        if block_hash in self._stored:
            del self._stored[block_hash]
        elif not self._cleared:
            self._evicted[block_hash] = None

    def clear(self) -> None:
        """Record that everything was forgotten."""
        self._cleared = True
        self._stored.clear()
        self._evicted.clear()

    def __bool__(self) -> bool:
        return self._cleared or bool(self._stored) or bool(self._evicted)

    def take(self) -> CacheUpdate | None:
        """Return and reset the changes, or return None if there are none."""
        if not self:
            return None
        update = CacheUpdate(self._cleared, b"".join(self._stored), b"".join(self._evicted))
        self._cleared = False
        self._stored.clear()
        self._evicted.clear()
        return update


class PrefixCache(Protocol):
    """The cache that the block manager uses. `NoPrefixCache` is the null object."""

    num_queries: int  # tokens looked up
    num_hits: int  # tokens found

    def match(self, request: Request) -> list[int]:
        """Return blocks that hold the request's leading tokens, leaving at least one token to compute."""

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens available to prefix hits."""

    def knows(self, block_id: int) -> bool: ...

    def forget(self, block_id: int) -> None: ...

    def clear(self) -> None: ...

    def report(self, changes: CacheChanges | None) -> None:
        """Record the current content and all later changes in `changes`, or stop recording if it is None."""


class ChainHashCache:
    """Finds blocks by the hash of their prefix. A hash maps to one block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_queries = 0
        self.num_hits = 0
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._hasher = BlockHasher(block_size)
        self._changes: CacheChanges | None = None  # records what is stored and forgotten

    def match(self, request: Request) -> list[int]:
        if not request.splittable:  # bidirectional: the KV of a token depends on later tokens, too
            return []
        # Prompt logprobs require computing the prompt, unless that happened before a preemption.
        if request.params.prompt_logprobs is not None and 1 < request.num_prompt_tokens > len(
            request.prompt_logprobs
        ):
            return []
        num_blocks = (len(request.token_ids) - 1) // self.block_size  # the last token is always computed
        blocks = []
        for block_hash in self._hasher.hashes(request, num_blocks)[:num_blocks]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def publish(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if num_full <= request.num_published or not request.splittable:
            return
        hashes = self._hasher.hashes(request, num_full)
        for index in range(request.num_published, num_full):
            block_id = request.block_ids[index]
            # Two requests may compute the same content at once: the first one keeps the hash.
            if hashes[index] not in self._block_of and block_id not in self._hash_of:
                self._block_of[hashes[index]] = block_id
                self._hash_of[block_id] = hashes[index]
                if self._changes is not None:
                    self._changes.store(hashes[index])
        request.num_published = num_full

    def knows(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        if self._changes is not None:
            self._changes.evict(block_hash)

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
        if self._changes is not None:
            self._changes.clear()

    def report(self, changes: CacheChanges | None) -> None:
        self._changes = changes
        if changes is not None:
            changes.clear()
            for block_hash in self._block_of:
                changes.store(block_hash)


class NoPrefixCache:
    num_queries = 0
    num_hits = 0

    def match(self, request: Request) -> list[int]:  # noqa: ARG002
        return []

    def publish(self, request: Request, num_tokens: int) -> None:  # noqa: ARG002
        request.num_published = sys.maxsize  # nothing left to publish, so the scheduler does not call again

    def knows(self, block_id: int) -> bool:  # noqa: ARG002
        return False

    def forget(self, block_id: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def report(self, changes: CacheChanges | None) -> None:
        pass
