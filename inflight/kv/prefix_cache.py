"""What became findable in a prefix cache and what was forgotten, for those who keep a list of it elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol

from inflight.events import CACHE_NAME_LENGTH, CacheUpdate
from inflight.kv.block_hashes import BlockNamer
from inflight.request import Request


class CacheChanges:
    """Changes since they were last taken. Only their sum counts: a block that came and went is in no list, so that
    there are never more entries than the cache had and has blocks, however long nobody takes them."""

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[bytes, None] = {}  # in order, and found fast
        self._evicted: dict[bytes, None] = {}

    def store(self, name: bytes) -> None:
        name = name[:CACHE_NAME_LENGTH]
        if name in self._evicted:
            del self._evicted[name]
        else:
            self._stored[name] = None

    def evict(self, name: bytes) -> None:
        name = name[:CACHE_NAME_LENGTH]
        if name in self._stored:
            del self._stored[name]
        elif not self._cleared:
            self._evicted[name] = None

    def clear(self) -> None:
        """All are forgotten."""
        self._cleared = True
        self._stored.clear()
        self._evicted.clear()

    def __bool__(self) -> bool:
        return self._cleared or bool(self._stored) or bool(self._evicted)

    def take(self) -> CacheUpdate | None:
        """The changes, None where there are none; the next ones are counted from here."""
        if not self:
            return None
        found = CacheUpdate(self._cleared, b"".join(self._stored), b"".join(self._evicted))
        self._cleared = False
        self._stored.clear()
        self._evicted.clear()
        return found


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

    def report(self, changes: CacheChanges | None) -> None:
        """From now on tell `changes` what is stored and forgotten, beginning with all that is there; None: no one."""


class ChainHashCache:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_queries = 0
        self.num_hits = 0
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._namer = BlockNamer(block_size)
        self._changes: CacheChanges | None = None  # told of all that is stored or forgotten

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
        for name in self._namer.names(request, num_blocks)[:num_blocks]:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def publish(self, request: Request, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if num_full <= request.num_published or not request.splittable:
            return
        names = self._namer.names(request, num_full)
        for index in range(request.num_published, num_full):
            block_id = request.block_ids[index]
            # Two requests may compute the same content at once: the first keeps the name.
            if names[index] not in self._block_of and block_id not in self._name_of:
                self._block_of[names[index]] = block_id
                self._name_of[block_id] = names[index]
                if self._changes is not None:
                    self._changes.store(names[index])
        request.num_published = num_full

    def knows(self, block_id: int) -> bool:
        return block_id in self._name_of

    def forget(self, block_id: int) -> None:
        name = self._name_of.pop(block_id)
        del self._block_of[name]
        if self._changes is not None:
            self._changes.evict(name)

    def clear(self) -> None:
        self._block_of.clear()
        self._name_of.clear()
        if self._changes is not None:
            self._changes.clear()

    def report(self, changes: CacheChanges | None) -> None:
        self._changes = changes
        if changes is not None:
            changes.clear()
            for name in self._block_of:
                changes.store(name)


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

    def report(self, changes: CacheChanges | None) -> None:
        pass
