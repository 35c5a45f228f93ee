"""Reference counts of blocks. Each block is in exactly one of three states:

         allocate                     release (last holder)
    EMPTY ───────► USED (refs ≥ 1) ──────────────────────────► EMPTY
      ▲              ▲   │                  not published
      │      acquire │   │ release (last holder), published
      │   prefix hit │   ▼
      └─────────── CACHED (refs = 0, content available for prefix hits)
         evict, least recently used first

so empty + cached + used == total at all times. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """All blocks, and how many holders each has."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, for locality
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of blocks that could be allocated now, evicting cached ones if needed."""
        return len(self._empty) + len(self._cached)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def take_empty(self) -> int:
        """Allocate an empty block with one holder."""
        block_id = self._empty.pop()
        self._refs[block_id] = 1
        return block_id

    def evict(self) -> int:
        """Empty the least recently used cached block and return its id. The caller must forget its content."""
        block_id, _ = self._cached.popitem(last=False)
        self._empty.append(block_id)
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these used or cached blocks."""
        refs, cached = self._refs, self._cached
        for block_id in block_ids:
            if refs[block_id] == 0:
                del cached[block_id]
            refs[block_id] += 1

    def release(self, block_ids: Iterable[int], keep: Callable[[int], bool]) -> int:
        """Remove a holder from each of these blocks, and return how many had no other.

        A block without holders becomes cached if `keep` returns true for it, otherwise empty.
        """
        refs, num_freed = self._refs, 0
        for block_id in block_ids:
            refs[block_id] -= 1
            if refs[block_id] == 0:
                num_freed += 1
                if keep(block_id):
                    self._cached[block_id] = None
                else:
                    self._empty.append(block_id)
        return num_freed

    def check(self, held: Iterable[int]) -> None:
        """Assert that every block has one state and that `held` (with repeats) accounts for every reference."""
        refs = [0] * self.num_blocks
        for block_id in held:
            refs[block_id] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        states = [*self._empty, *self._cached, *(i for i, count in enumerate(refs) if count)]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states or in none"
