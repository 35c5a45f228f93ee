"""Prefix caches: find blocks by their content, and report what they store and evict."""

from __future__ import annotations

import sys
from typing import Protocol

from inflight.events import CACHE_HASH_LENGTH, CacheUpdate
from inflight.kv.block_hashes import BlockHasher
from inflight.request import Request


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
    """Finds blocks by the hash of their prefix (`kv/block_hashes.py`). A hash maps to one block."""

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
