"""KV memory in blocks: their number, their holders and their content. No tensors."""

from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache, NoPrefixCache, PrefixCache, PrefixHit

__all__ = ["BlockManager", "ChainHashCache", "KVLayout", "NoPrefixCache", "PrefixCache", "PrefixHit"]
