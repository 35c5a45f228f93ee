"""KV memory in blocks: their number, their holders and their content. No tensors."""

from inflight.kv.block_manager import BlockManager, TableUpdate
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache, NoPrefixCache, PrefixCache, PrefixHit
from inflight.kv.snapshots import StateCopies, StateCopy

__all__ = [
    "BlockManager",
    "ChainHashCache",
    "KVLayout",
    "NoPrefixCache",
    "PrefixCache",
    "PrefixHit",
    "StateCopies",
    "StateCopy",
    "TableUpdate",
]
