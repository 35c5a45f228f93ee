"""KV memory, in blocks: who holds them, what they hold, how many there are. No tensors here."""

from inflight.kv.block_manager import BlockManager
from inflight.kv.prefix_cache import ChainHashCache, NoPrefixCache, PrefixCache

__all__ = ["BlockManager", "ChainHashCache", "NoPrefixCache", "PrefixCache"]
