"""What became findable in a prefix cache and what was forgotten, for those who keep a list of it elsewhere."""

from __future__ import annotations

from inflight.events import CACHE_NAME_LENGTH, CacheUpdate


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
