"""What a router knows of one replica's prefix cache: what the replica has told, and what is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.events import CACHE_NAME_LENGTH, CacheUpdate


class KnownBlocks:
    """Names of full blocks (`kv/block_hashes.py`), of which the first bytes."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        # Of requests that were sent there and have no token yet: the replica will tell of their blocks only once it has
        # computed them, and those who begin alike often come together.
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def update(self, update: CacheUpdate) -> None:
        if update.cleared:
            self._stored.clear()
        self._stored.update(_split(update.stored))
        self._stored.difference_update(_split(update.evicted))

    def clear(self) -> None:
        """The replica has lost its memory."""
        self._stored.clear()
        self._expected.clear()

    def expect(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._expected[name] = self._expected.get(name, 0) + 1

    def expect_no_more(self, names: Sequence[bytes]) -> None:
        for name in names:
            count = self._expected.get(name, 0) - 1
            if count > 0:
                self._expected[name] = count
            else:
                self._expected.pop(name, None)

    def num_leading(self, names: Sequence[bytes]) -> int:
        """How many of these are there, from the first on. Halving: of one prefix, the end is evicted first."""
        stored, expected = self._stored, self._expected
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in stored or names[middle] in expected:
                low = middle + 1
            else:
                high = middle
        return low


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + CACHE_NAME_LENGTH] for at in range(0, len(packed), CACHE_NAME_LENGTH)]
