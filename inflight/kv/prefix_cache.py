"""Prefix caches: find blocks by their content, and report what they store and evict.

A request shares the longest prefix for which every KV group has what its next token needs: all blocks, those of the
last window, and a snapshot of the recurrent state if there is one.

The hash of a full block is SHA-256 over the request's `cache_key` and all its `name_ids` up to the block's end. Equal
hashes therefore mean equal prefixes, and requests with different keys never share blocks. A caller that needs only a
few hashes of a prompt (`hashes_at`) hashes the tokens between them in one update.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from inflight.events import CACHE_HASH_LENGTH, CacheUpdate
from inflight.kv.layout import KVLayout
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
            hasher = request.hash_state = _hasher(request)
            hasher.update(self._ids(request, 0, first))
        ids = self._ids(request, first, num_blocks)
        for start in range(0, len(ids), width):
            hasher.update(ids[start : start + width])
            hashes.append(hasher.copy().digest())
        return hashes

    def hashes_at(self, request: Request, marks: Sequence[int]) -> list[bytes]:
        """Return the hash of each prefix with a number of blocks in `marks` (ascending). The request keeps none."""
        hasher, width = _hasher(request), self.block_size * ID_BYTES
        ids = self._ids(request, 0, marks[-1] if marks else 0)
        hashes, start = [], 0
        for mark in marks:
            hasher.update(ids[start : mark * width])
            hashes.append(hasher.copy().digest())
            start = mark * width
        return hashes

    def _ids(self, request: Request, first: int, end: int) -> memoryview:
        """Return the ids that name blocks [first, end) as bytes."""
        return request.name_ids(first * self.block_size, end * self.block_size)

    def _copy_hashes(self, request: Request) -> None:
        """Copy hashes from a recent request with a common prefix: comparing is much faster than hashing."""
        ids, key, size, recent = request.spec.name_ids, request.spec.cache_key, self.block_size, self.recent
        first = ids[:size]
        for index, other in enumerate(recent):
            others = other.spec.name_ids
            if other.spec.cache_key == key and others[:size] == first:
                request.block_hashes += other.block_hashes[: _num_equal_blocks(ids, others, size)]
                del recent[index]  # one request per prefix is enough
                break
        recent.append(request)
        del recent[:-NUM_RECENT]


def _hasher(request: Request) -> Any:
    return sha256(sha256(request.spec.cache_key.encode()).digest())


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


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a request: bundles for each KV group, by block; -1 before a window."""

    num_blocks: int = 0
    tables: tuple[Sequence[int], ...] = ()
    snapshot: int = -1  # the bundle that holds the recurrent state at the end of the prefix
    num_present: int = 0  # blocks whose KV is there, though other groups may lack what they need
    # Whether the step being formed makes the prefix longer, so that it pays to wait for it.
    grows: bool = False


NO_HIT = PrefixHit()


class PrefixCache:
    """The interface of a prefix cache, and a cache that stores nothing."""

    num_queries = 0  # tokens looked up
    num_hits = 0  # tokens found

    def match(self, request: Request) -> PrefixHit:  # noqa: ARG002
        """Return the cached prefix of the request, leaving at least one token to compute."""
        return NO_HIT

    def publish(self, request: Request, num_tokens: int) -> None:  # noqa: ARG002
        """Make the full blocks among the first `num_tokens` tokens available to prefix hits.

        Blocks of windows behind `request.num_continued` are not yet: most leave their window before anybody needs them.
        """
        request.num_published = sys.maxsize  # nothing left to publish, so the scheduler does not call again

    def publish_windows(self, request: Request) -> None:
        """Make such blocks available, too: the request ends, and its next turn continues from them."""

    def prefix_hash(self, request: Request, num_blocks: int) -> bytes | None:  # noqa: ARG002
        """Return the hash of the request's first blocks; None if nothing about it is cached."""
        return None

    def add_snapshot(self, prefix_hash: bytes, bundle: int) -> None:
        """Make a snapshot of the recurrent state after a prefix available to hits."""

    def has_snapshot(self, prefix_hash: bytes) -> bool:  # noqa: ARG002
        return False

    def knows(self, bundle: int) -> bool:  # noqa: ARG002
        """Return whether anything about the content of a bundle is known."""
        return False

    def forget(self, bundle: int) -> None:
        """Forget the content of a bundle, if anything about it is known."""

    def clear(self) -> None:
        """Forget all content."""

    def report(self, changes: CacheChanges | None) -> None:
        """Record the current content and all later changes in `changes`, or stop recording if it is None."""


class ChainHashCache(PrefixCache):
    """Finds bundles by the hash of their prefix. In each group, a hash maps to one bundle."""

    def __init__(self, layout: KVLayout) -> None:
        self.block_size = layout.block_size
        self._groups = layout.groups
        self._num_full = sum(group.window is None for group in self._groups)  # these come first: none or one
        self._has_state = layout.snapshot_blocks > 0
        # Bundles by hash, for each group and then for snapshots.
        self._bundle_of: list[dict[bytes, int]] = [{} for _ in range(len(self._groups) + 1)]
        self._key_of: dict[int, tuple[int, bytes]] = {}  # by bundle: index into the above, and hash
        # The hashes that tell a router what can be hit: snapshots, or the blocks of the first group.
        self._reported = len(self._groups) if self._has_state else 0
        self._hasher = BlockHasher(layout.block_size)
        self._changes: CacheChanges | None = None  # records what is stored and forgotten

    def match(self, request: Request) -> PrefixHit:
        if not request.splittable:  # bidirectional: the KV of a token depends on later tokens, too
            return NO_HIT
        # Prompt logprobs require computing the prompt, unless that happened before a preemption.
        if request.params.prompt_logprobs is not None and 1 < request.num_prompt_tokens > len(
            request.prompt_logprobs
        ):
            return NO_HIT
        num_blocks = (len(request.token_ids) - 1) // self.block_size  # the last token is always computed
        hashes = self._hasher.hashes(request, num_blocks)[:num_blocks]
        if not self._num_full:
            return self._match_others(hashes, num_blocks)
        bundle_of, bundles = self._bundle_of[0], []
        for block_hash in hashes:
            bundle = bundle_of.get(block_hash)
            if bundle is None:
                break
            bundles.append(bundle)
        if len(self._groups) == 1 and not self._has_state:
            return PrefixHit(len(bundles), (bundles,), num_present=len(bundles)) if bundles else NO_HIT
        return self._match_others(hashes, len(bundles), bundles)

    def _match_others(self, hashes: list[bytes], num_present: int, *full: list[int]) -> PrefixHit:
        """Return the longest hit of at most `num_present` blocks, which the group of all tokens has (`full`)."""
        windowed = self._groups[len(full) :]
        snapshots, num_blocks = self._bundle_of[-1], num_present
        while num_blocks:
            snapshot = snapshots.get(hashes[num_blocks - 1], -1)
            if self._has_state and snapshot < 0:
                num_blocks -= 1
                continue
            tables: list[Sequence[int]] = [bundles[:num_blocks] for bundles in full]
            for group, bundle_of in zip(windowed, self._bundle_of[len(full) :], strict=False):
                first = group.first_needed(num_blocks * self.block_size, self.block_size)
                bundles = [bundle_of.get(block_hash, -1) for block_hash in hashes[first:num_blocks]]
                if -1 in bundles:  # no shorter prefix that ends behind this block can be complete either
                    num_blocks = first + len(bundles) - 1 - bundles[::-1].index(-1)
                    break
                tables.append([-1] * first + bundles)
            else:
                return PrefixHit(num_blocks, tuple(tables), snapshot, num_present if full else num_blocks)
        return PrefixHit(num_present=num_present if full else 0)

    def publish(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if num_full <= request.num_published or not request.splittable:
            return
        hashes = self._hasher.hashes(request, num_full)
        for index in range(request.num_published, num_full):
            tables = request.tables if index < request.num_continued else request.tables[: self._num_full]
            for group, table in enumerate(tables):
                self._store(group, hashes[index], table[index])
        request.num_published = num_full

    def publish_windows(self, request: Request) -> None:
        hashes = request.block_hashes
        for group in range(self._num_full, len(request.tables)):
            first = max(request.first_blocks[group], request.num_continued)
            for index in range(first, request.num_published):
                self._store(group, hashes[index], request.tables[group][index])

    def _store(self, group: int, block_hash: bytes, bundle: int) -> None:
        bundle_of = self._bundle_of[group]
        # Two requests may compute the same content at once: the first one keeps the hash. A window that is smaller
        # than a block may have left the bundle before it is published.
        if block_hash not in bundle_of and bundle not in self._key_of and bundle >= 0:
            bundle_of[block_hash] = bundle
            self._key_of[bundle] = group, block_hash
            if self._changes is not None and group == self._reported:
                self._changes.store(block_hash)

    def prefix_hash(self, request: Request, num_blocks: int) -> bytes | None:
        if not request.splittable or num_blocks * self.block_size > len(request.token_ids):
            return None
        return self._hasher.hashes(request, num_blocks)[num_blocks - 1]

    def add_snapshot(self, prefix_hash: bytes, bundle: int) -> None:
        self._store(len(self._groups), prefix_hash, bundle)

    def has_snapshot(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._bundle_of[-1]

    def knows(self, bundle: int) -> bool:
        return bundle in self._key_of

    def forget(self, bundle: int) -> None:
        key = self._key_of.pop(bundle, None)
        if key is None:
            return
        group, block_hash = key
        del self._bundle_of[group][block_hash]
        if self._changes is not None and group == self._reported:
            self._changes.evict(block_hash)

    def clear(self) -> None:
        for bundle_of in self._bundle_of:
            bundle_of.clear()
        self._key_of.clear()
        if self._changes is not None:
            self._changes.clear()

    def report(self, changes: CacheChanges | None) -> None:
        self._changes = changes
        if changes is not None:
            changes.clear()
            for block_hash in self._bundle_of[self._reported]:
                changes.store(block_hash)
