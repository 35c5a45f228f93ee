"""Snapshots of recurrent states: where they are taken, and which copies a step has to make.

A model with recurrent layers has one state for each row, which holds all that they keep of a request's tokens. So a
prefix can be shared only where a copy of the state was made. Snapshots are taken at block boundaries:

- at the last boundary of a prompt, for requests with the same prompt or a continuation of it,
- every few blocks of a prompt,
- where an earlier request's tokens began to differ (`Request.branch`), for the next requests that branch off there,
- at every boundary that a decoding request passes, in the blocks of its previous one, for the next turn of a
  conversation.

A state at the start of an entry is copied by the step before it computes anything (a save), one inside an entry by the
recurrent layers (a capture). Snapshots are bundles of blocks, found by the hash of their prefix from the next step on,
and evicted like others. They take only blocks that nobody holds, and at most a part of the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from inflight.kv.block_pool import BlockPool
from inflight.kv.prefix_cache import PrefixCache, PrefixHit
from inflight.request import Request

PROMPT_INTERVAL = 16  # blocks of a prompt between snapshots
MAX_SHARE = 0.25  # of all blocks


class StateCopy(NamedTuple):
    """The recurrent state of a row is copied to or from a snapshot, which these blocks hold."""

    row: int
    block_ids: list[int]


class StateAt(NamedTuple):
    """The state of a request at a position inside its entry, and the blocks of the snapshot that holds it."""

    request: Request
    position: int  # tokens
    block_ids: list[int]


@dataclass(slots=True)
class StateCopies:
    """The copies of one step."""

    restores: list[StateCopy] = field(default_factory=list)
    saves: list[StateCopy] = field(default_factory=list)
    captures: list[StateAt] = field(default_factory=list)


class _Planned(NamedTuple):
    request: Request
    position: int
    prefix_hash: bytes
    bundle: int


class Snapshots:
    """Plans the snapshots of a step and keeps those of earlier steps."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, size: int, take: Callable[[int], int]
    ) -> None:
        """`size`: blocks of a snapshot. `take` allocates a bundle, evicting others if needed."""
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._size = size
        self._take = take
        self._limit = max(1, int(pool.num_blocks * MAX_SHARE) // size)
        # Snapshots, least recently used first, and the decoding request whose latest one it is.
        self._kept: OrderedDict[int, Request | None] = OrderedDict()
        self._latest: dict[Request, int] = {}  # the latest snapshot of each decoding request
        # The step being formed.
        self._starts: dict[Request, int] = {}  # positions where entries begin
        self._restores: list[tuple[Request, list[int]]] = []
        self._planned: dict[bytes, _Planned] = {}

    @property
    def count(self) -> int:
        return len(self._kept)

    @property
    def num_planned_blocks(self) -> int:
        """The number of blocks that `cancel` would free."""
        return len(self._planned) * self._size

    # ---- a step ----

    def grows(self, request: Request, hit: PrefixHit) -> bool:
        """Return whether the step being formed takes a snapshot with which the request's hit would be longer."""
        if not self._planned:
            return False
        hashes = request.block_hashes
        return any(hashes[index] in self._planned for index in range(hit.num_blocks, hit.num_present))

    def attach(self, request: Request, hit: PrefixHit) -> None:
        """Start a request from the state of its hit."""
        if hit.num_blocks:
            block_ids = self._pool.blocks(hit.snapshot)  # the snapshot may be evicted before the step begins
            self._restores.append((request, block_ids))
            self._pool.touch(hit.snapshot)
            self._kept.move_to_end(hit.snapshot)

    def begin_entry(self, request: Request) -> None:
        """Note that an entry of the step begins at `request.num_computed`, and save the state there if it is wanted."""
        start = self._starts[request] = request.num_computed
        num_blocks, rest = divmod(start, self._block_size)
        if not start or rest:
            return
        if start >= request.num_prompt_tokens:
            if request in self._latest:
                self._replace_latest(request, num_blocks)
            else:
                self._plan(request, num_blocks)
        elif self._is_wanted(request, num_blocks):
            self._plan(request, num_blocks)

    def end_entry(self, request: Request) -> None:
        """Plan the captures of an entry, which ends at `request.num_computed` and can no longer be withdrawn."""
        start = self._starts.get(request)
        if start is None:
            return
        for num_blocks in self._wanted_inside(request, start):
            self._plan(request, num_blocks)

    def _is_wanted(self, request: Request, num_blocks: int) -> bool:
        last = (len(request.token_ids) - 1) // self._block_size
        return num_blocks in (last, request.branch) or num_blocks % PROMPT_INTERVAL == 0

    def _wanted_inside(self, request: Request, start: int) -> Iterator[int]:
        first, end = start // self._block_size + 1, -(-request.num_computed // self._block_size)
        # The most useful ones first: there may not be room for all.
        last = (len(request.token_ids) - 1) // self._block_size
        yield from (count for count in dict.fromkeys((last, request.branch)) if first <= count < end)
        others = range(-(-first // PROMPT_INTERVAL) * PROMPT_INTERVAL, end, PROMPT_INTERVAL)
        yield from (count for count in reversed(others) if count not in (last, request.branch))

    def _plan(self, request: Request, num_blocks: int) -> None:
        prefix_hash = self._cache.prefix_hash(request, num_blocks)
        if prefix_hash is None or prefix_hash in self._planned or self._cache.has_snapshot(prefix_hash):
            return
        while len(self._kept) + len(self._planned) >= self._limit and self._kept:
            self._drop(next(iter(self._kept)))
        if len(self._planned) >= self._limit or self._pool.num_available < self._size:
            return
        position = num_blocks * self._block_size
        self._planned[prefix_hash] = _Planned(request, position, prefix_hash, self._take(self._size))

    def _replace_latest(self, request: Request, num_blocks: int) -> None:
        """Plan to overwrite the latest snapshot of a decoding request. Nobody can hit it any more."""
        prefix_hash = self._cache.prefix_hash(request, num_blocks)
        if prefix_hash is None or prefix_hash in self._planned or self._cache.has_snapshot(prefix_hash):
            return
        bundle = self._latest.pop(request)
        del self._kept[bundle]
        self._cache.forget(bundle)
        self._pool.acquire((bundle,))
        position = num_blocks * self._block_size
        self._planned[prefix_hash] = _Planned(request, position, prefix_hash, bundle)

    def take_copies(self) -> StateCopies:
        """Return the copies of the step that has been formed. Its snapshots can be hit from now on."""
        copies = StateCopies([StateCopy(request.row, block_ids) for request, block_ids in self._restores])
        add, blocks, starts, kept = self._cache.add_snapshot, self._pool.blocks, self._starts, self._kept
        bundles = []
        for request, position, prefix_hash, bundle in self._planned.values():
            owner = None
            if position != starts[request]:
                copies.captures.append(StateAt(request, position, blocks(bundle)))
            else:
                copies.saves.append(StateCopy(request.row, blocks(bundle)))
                if position >= request.num_prompt_tokens:
                    self._latest[request], owner = bundle, request
            add(prefix_hash, bundle)
            kept[bundle] = owner
            bundles.append(bundle)
        self._pool.release(bundles, self._cache.knows)
        self._restores.clear()
        starts.clear()
        self._planned.clear()
        return copies

    # ---- memory ----

    def cancel(self) -> None:
        """Give up the snapshots of the step being formed: a request needs their blocks."""
        self._give_up(list(self._planned.values()))

    def leave(self, request: Request) -> None:
        """Note that a request gives up its memory; its latest snapshot stays for the next turn."""
        if request in self._starts:
            del self._starts[request]
            self._restores = [restore for restore in self._restores if restore[0] is not request]
            self._give_up([planned for planned in self._planned.values() if planned.request is request])
        latest = self._latest.pop(request, None)
        if latest is not None:
            self._pool.touch(latest)
            self._kept[latest] = None
            self._kept.move_to_end(latest)

    def forget(self, bundle: int) -> None:
        """Note that a bundle was evicted."""
        owner = self._kept.pop(bundle, None)
        if owner is not None:
            del self._latest[owner]

    def clear(self) -> None:
        """Note that all cached content was dropped."""
        self._kept.clear()
        self._latest.clear()

    def held(self) -> list[int]:
        """Return the bundles that are in use, for checks."""
        return [planned.bundle for planned in self._planned.values()]

    def _drop(self, bundle: int) -> None:
        self._pool.drop(bundle)
        self._cache.forget(bundle)
        self.forget(bundle)

    def _give_up(self, planned: list[_Planned]) -> None:
        for one in planned:
            del self._planned[one.prefix_hash]
        self._pool.release((one.bundle for one in planned), lambda _: False)
