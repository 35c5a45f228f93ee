"""Blocks of KV memory and their holders.

Blocks that are allocated, shared and freed together are a bundle, known by its first block: one block for each table of
a KV group, or those of a snapshot. Where a group has one table, a bundle is a block. Each bundle is in one of three
states:

         allocate                     release (last holder)
    EMPTY ───────► USED (refs ≥ 1) ──────────────────────────► EMPTY
      ▲              ▲   │                  not published
      │      acquire │   │ release (last holder), published
      │   prefix hit │   ▼
      └─────────── CACHED (refs = 0, content available for prefix hits)
         evict, least recently used first

so empty + cached + used == total at all times. The snapshot that a running request overwrites again and again counts as
cached, though its content is available only once the request ends. Every operation is O(1) per block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice

MAX_EVICTIONS = 64  # the most blocks that `BlockPool.state` lists as those to be evicted next


class BlockPool:
    """All blocks, and how many holders each bundle has."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._refs = [0] * num_blocks  # by a bundle's first block
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, for locality
        self._cached: OrderedDict[int, None] = OrderedDict()  # bundles, least recently used first
        self._bundles: dict[int, list[int]] = {}  # the blocks of each bundle that has several

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty) - self.num_cached

    @property
    def num_available(self) -> int:
        """The number of blocks that could be allocated now, evicting cached ones if needed."""
        return len(self._empty) + self.num_cached

    def refs(self, bundle: int) -> int:
        return self._refs[bundle]

    def is_cached(self, bundle: int) -> bool:
        return bundle in self._cached

    def blocks(self, bundle: int) -> list[int]:
        """Return the blocks of a bundle."""
        return self._bundles.get(bundle) or [bundle]

    def take_empty(self, size: int = 1) -> int:
        """Allocate a bundle of empty blocks with one holder. Return -1 if there are not enough."""
        empty = self._empty
        if len(empty) < size:
            return -1
        bundle = empty.pop()
        self._refs[bundle] = 1
        if size > 1:
            self._bundles[bundle] = [bundle, *empty[:-size:-1]]
            del empty[1 - size :]
        return bundle

    def evict(self) -> int:
        """Empty the least recently used cached bundle and return it. The caller must forget its content."""
        bundle = next(iter(self._cached))
        self.drop(bundle)
        return bundle

    def drop(self, bundle: int) -> None:
        """Empty a cached bundle. The caller must forget its content."""
        del self._cached[bundle]
        self.num_cached -= self._size(bundle)
        self._clear(bundle)

    def acquire(self, bundles: Iterable[int]) -> int:
        """Add a holder to each of these used or cached bundles, and return how many blocks had none."""
        refs, cached, before = self._refs, self._cached, self.num_cached
        for bundle in bundles:
            if refs[bundle] == 0:
                del cached[bundle]
                self.num_cached -= self._size(bundle)
            refs[bundle] += 1
        return before - self.num_cached

    def release(self, bundles: Iterable[int], keep: Callable[[int], bool], soon: bool = False) -> int:
        """Remove a holder from each of these bundles, and return how many blocks have no other.

        A bundle without holders becomes cached if `keep` returns true for it, otherwise empty. With `soon`, it will be
        evicted before all that are cached now.
        """
        refs, several, num_freed = self._refs, self._bundles, 0
        for bundle in bundles:
            refs[bundle] -= 1
            if refs[bundle] == 0:
                size = len(several[bundle]) if bundle in several else 1
                num_freed += size
                if keep(bundle):
                    self._cached[bundle] = None
                    self.num_cached += size
                    if soon:
                        self._cached.move_to_end(bundle, last=False)
                else:
                    self._clear(bundle)
        return num_freed

    def _size(self, bundle: int) -> int:
        return len(self._bundles[bundle]) if bundle in self._bundles else 1

    def _clear(self, bundle: int) -> None:
        if bundle in self._bundles:
            self._empty += self._bundles.pop(bundle)
        else:
            self._empty.append(bundle)

    def touch(self, bundle: int) -> None:
        """Mark a cached bundle as just used."""
        self._cached.move_to_end(bundle)

    def state(self) -> tuple[array[int], array[int], list[int]]:
        """Return the holders of every block, the empty blocks, and the cached ones to be evicted next."""
        refs = array("i", self._refs)
        for bundle, blocks in self._bundles.items():
            for block_id in blocks:
                refs[block_id] = refs[bundle]
        next_ids = chain.from_iterable(map(self.blocks, self._cached))
        return refs, array("i", self._empty), list(islice(next_ids, MAX_EVICTIONS))

    def check(self, references: Iterable[int]) -> None:
        """Assert that every block has one state and that `references` (bundles, repeated) account for every holder."""
        refs = [0] * self.num_blocks
        for bundle in references:
            refs[bundle] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        bundles = [*self._cached, *(bundle for bundle, count in enumerate(refs) if count)]
        states = [*self._empty, *chain.from_iterable(map(self.blocks, bundles))]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states or in none"
        assert self.num_cached == sum(len(self.blocks(bundle)) for bundle in self._cached)
        assert self._bundles.keys() <= set(bundles), "an empty bundle is still known"
