"""Snapshots of recurrent states: where they are taken, and which copies a step has to make.

A model with recurrent layers has one state for each row, which holds all that they keep of a request's tokens. So a
prefix can be shared only where a copy of the state was made. Snapshots are taken at block boundaries:

- at the last boundary of a prompt, for requests with the same prompt or a continuation of it,
- every few blocks of a prompt,
- where an earlier request's tokens began to differ (`Request.branch`), for the next requests that branch off there,
- at every boundary that a decoding request passes, in the blocks of its previous one, for the next turn of a
  conversation, which can hit it once the request ends.

A state at the start of an entry is copied by the step before it computes anything (a save), one inside an entry by the
recurrent layers (a capture). Snapshots are bundles of blocks, found by the hash of their prefix from the next step on,
and evicted like others. They take only blocks that nobody holds, and at most a part of the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from inflight.kv.prefix_cache import PrefixCache, PrefixHit
from inflight.request import Request

if TYPE_CHECKING:  # `block_manager.py` imports this module
    from inflight.kv.block_manager import BlockPool

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
    """A snapshot that the step being formed takes."""

    request: Request
    position: int
    prefix_hash: bytes
    bundle: int
    is_save: bool  # whether the entry begins at the position


@dataclass(slots=True)
class _Latest:
    """The latest snapshot of a decoding request, which it overwrites at each block boundary.

    Nobody else could use it before the request ends, so it can be hit only until it is overwritten for the first time
    and again once the request leaves.
    """

    bundle: int
    num_blocks: int  # of the prefix whose state it holds
    can_be_hit: bool = True


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
        self._latest: dict[Request, _Latest] = {}
        # The step being formed.
        self._starts: dict[Request, int] = {}  # positions where entries of several tokens begin
        self._overwritten: dict[Request, int] = {}  # latest snapshots, and the blocks before their new states
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

    def begin_entry(self, request: Request, end: int) -> None:
        """Note that an entry of the step begins at `request.num_computed`, and save the state there if it is wanted."""
        # Hot: every request runs it at every block boundary.
        start = request.num_computed
        if end > start + 1:
            self._starts[request] = start
        num_blocks, rest = divmod(start, self._block_size)
        if not start or rest:
            return
        if start < request.num_prompt_tokens:
            if self._is_wanted(request, num_blocks):
                self._plan(request, num_blocks, is_save=True)
            return
        latest = self._latest.get(request)
        if latest is None:
            self._plan(request, num_blocks, is_save=True)
            return
        bundle = latest.bundle
        if latest.can_be_hit:
            self._cache.forget(bundle)
            latest.can_be_hit = False
        self._pool.touch(bundle)
        self._kept.move_to_end(bundle)
        self._overwritten[request] = num_blocks

    def end_entry(self, request: Request) -> None:
        """Plan the captures of an entry, which ends at `request.num_computed` and can no longer be withdrawn."""
        start = self._starts.get(request)
        if start is None:
            return
        for num_blocks in self._wanted_inside(request, start):
            self._plan(request, num_blocks, is_save=False)

    def _is_wanted(self, request: Request, num_blocks: int) -> bool:
        last_boundary = (len(request.token_ids) - 1) // self._block_size
        return num_blocks in (last_boundary, request.branch) or num_blocks % PROMPT_INTERVAL == 0

    def _wanted_inside(self, request: Request, start: int) -> Iterator[int]:
        first, end = start // self._block_size + 1, -(-request.num_computed // self._block_size)
        # The most useful ones first: there may not be room for all.
        last_boundary = (len(request.token_ids) - 1) // self._block_size
        yield from (count for count in dict.fromkeys((last_boundary, request.branch)) if first <= count < end)
        others = range(-(-first // PROMPT_INTERVAL) * PROMPT_INTERVAL, end, PROMPT_INTERVAL)
        yield from (count for count in reversed(others) if count not in (last_boundary, request.branch))

    def _plan(self, request: Request, num_blocks: int, is_save: bool) -> None:
        prefix_hash = self._cache.prefix_hash(request, num_blocks)
        if prefix_hash is None or prefix_hash in self._planned or self._cache.has_snapshot(prefix_hash):
            return
        while len(self._kept) + len(self._planned) >= self._limit and self._kept:
            self._drop(next(iter(self._kept)))
        if len(self._planned) >= self._limit or self._pool.num_available < self._size:
            return
        position = num_blocks * self._block_size
        self._planned[prefix_hash] = _Planned(request, position, prefix_hash, self._take(self._size), is_save)

    def take_copies(self) -> StateCopies:
        """Return the copies of the step that has been formed. Its snapshots can be hit from now on."""
        copies = StateCopies([StateCopy(request.row, block_ids) for request, block_ids in self._restores])
        blocks, saves, all_latest = self._pool.blocks, copies.saves, self._latest
        for request, num_blocks in self._overwritten.items():
            latest = all_latest[request]
            latest.num_blocks = num_blocks
            saves.append(StateCopy(request.row, blocks(latest.bundle)))
        for request, position, prefix_hash, bundle, is_save in self._planned.values():
            owner = None
            if not is_save:
                copies.captures.append(StateAt(request, position, blocks(bundle)))
            else:
                saves.append(StateCopy(request.row, blocks(bundle)))
                if position >= request.num_prompt_tokens:
                    all_latest[request], owner = _Latest(bundle, position // self._block_size), request
            self._cache.add_snapshot(prefix_hash, bundle)
            self._kept[bundle] = owner
        self._pool.release([planned.bundle for planned in self._planned.values()], self._cache.knows)
        self._restores.clear()
        self._starts.clear()
        self._overwritten.clear()
        self._planned.clear()
        return copies

    # ---- memory ----

    def cancel(self) -> None:
        """Give up the snapshots of the step being formed: a request needs their blocks."""
        self._give_up(list(self._planned.values()))

    def leave(self, request: Request) -> None:
        """Note that a request gives up its memory; its latest snapshot stays for the next turn."""
        self._starts.pop(request, None)
        self._overwritten.pop(request, None)
        self._restores = [restore for restore in self._restores if restore[0] is not request]
        self._give_up([planned for planned in self._planned.values() if planned.request is request])
        latest = self._latest.pop(request, None)
        if latest is None:
            return
        bundle = latest.bundle
        if not latest.can_be_hit:
            prefix_hash = self._cache.prefix_hash(request, latest.num_blocks)
            if prefix_hash is None or self._cache.has_snapshot(prefix_hash):
                self._drop(bundle)
                return
            self._cache.add_snapshot(prefix_hash, bundle)
        self._pool.touch(bundle)
        self._kept[bundle] = None
        self._kept.move_to_end(bundle)

    def forget(self, bundle: int) -> None:
        """Note that a bundle was evicted."""
        owner = self._kept.pop(bundle, None)
        if owner in self._latest:
            del self._latest[owner]
            self._overwritten.pop(owner, None)

    def clear(self) -> None:
        """Note that all cached content was dropped."""
        self._kept.clear()
        self._latest.clear()
        self._overwritten.clear()

    def bundles_in_use(self) -> list[int]:
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
