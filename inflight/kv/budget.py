"""The number of KV blocks, and the longest request that fits into them."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config import CacheConfig
from inflight.errors import KVBudgetError, as_gib
from inflight.kv.layout import KVLayout

# The most GPU memory that a process is charged for outside torch's allocator: the CUDA context and loaded kernels.
CONTEXT_MEMORY = 768 << 20
# The same for a rank with buffers for collectives.
PEER_MEMORY = 1 << 30
# Memory of CUDA graphs besides their tensors, and fragmentation of the allocator.
GRAPH_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of GPU memory, as seen by one of the processes that share the GPU."""

    device: str
    total: int
    free: int  # not in use by any process
    reserved: int  # held by the torch allocator of this process
    most_outside: int = CONTEXT_MEMORY  # upper bound of what this process holds outside its allocator

    @property
    def used_here(self) -> int:
        """Return what this process holds.

        CUDA does not report how much a process holds outside its allocator, only what all processes hold together.
        On a GPU of its own that is the measured difference. On a shared GPU the difference includes the other
        processes, so it is bounded by what a process can need.
        """
        outside = self.total - self.free - self.reserved
        return self.reserved + min(max(0, outside), self.most_outside)

    @property
    def others(self) -> int:
        """Return what other processes hold, or a little less."""
        return max(0, self.total - self.free - self.used_here)


def gpu_kv_memory(memory: GpuMemory, cache: CacheConfig, step: int, bytes_per_block: int) -> int:
    """Return the bytes for KV blocks of an engine whose largest step takes `step` bytes.

    Memory of other processes does not reduce the result, so engines that share a GPU get the same in whatever order
    they start. Too little free memory is an error instead.
    """
    share = f"gpu_memory_utilization is {cache.gpu_memory_utilization:g}"
    requested = cache.kv_cache_memory if cache.num_blocks is None else cache.num_blocks * bytes_per_block
    if requested is None:
        kv_memory = int(memory.total * cache.gpu_memory_utilization) - memory.used_here - step
        if kv_memory < bytes_per_block:
            raise KVBudgetError(
                f"{share}: of {as_gib(memory.total)} on {memory.device}, this process holds {as_gib(memory.used_here)} "
                f"and its largest step takes {as_gib(step)}; "
                f"nothing is left for KV blocks ({as_gib(memory.free)} are free)"
            )
    else:
        kv_memory = requested
        share = requested_memory(cache)
    if kv_memory + step > memory.free:
        raise KVBudgetError(
            f"{share}: that needs {as_gib(kv_memory)} for KV blocks and {as_gib(step)} for the largest step, but only "
            f"{as_gib(memory.free)} are free on {memory.device}; other processes hold {as_gib(memory.others)}"
        )
    return kv_memory


def requested_memory(cache: CacheConfig) -> str:
    """Return the option that sets the KV memory, for messages."""
    if cache.num_blocks is not None:
        return f"num_blocks is {cache.num_blocks}"
    return f"kv_cache_memory is {cache.kv_cache_memory}"


def blocks_for_memory(memory: int, bytes_per_block: int, block_size: int, most: int | None = None) -> int:
    """Return how many blocks fit in `memory` bytes, up to `most`."""
    num_blocks = memory // bytes_per_block
    if most is not None:
        num_blocks = min(num_blocks, most)
    if num_blocks < 1:
        raise KVBudgetError(
            f"the KV memory is {as_gib(memory)}: one block of {block_size} tokens needs {as_gib(bytes_per_block)}"
        )
    return num_blocks


def most_blocks(layout: KVLayout, num_requests: int, num_tokens: int, chunk: int) -> int:
    """Return the most blocks that requests of `num_tokens` can use, with two snapshots each."""
    return num_requests * (layout.blocks_for(num_tokens, chunk) + 2 * layout.snapshot_blocks)


def fit_context(
    num_blocks: int,
    layout: KVLayout,
    chunk: int,
    max_kv_tokens: int | None,
    context: int,
    max_model_len: int | None,
) -> int:
    """Return the longest request that always fits: `max_model_len` if set, else as much of `context` as fits.

    Requests are computed in steps of at most `chunk` tokens.
    """
    capacity = layout.max_tokens(num_blocks, chunk)
    if max_kv_tokens is not None:
        capacity = min(capacity, max_kv_tokens)
    if max_model_len is not None and max_model_len > capacity:
        raise KVBudgetError(
            f"max_model_len is {max_model_len}, but the KV budget holds {capacity} tokens "
            f"({num_blocks} blocks of {layout.block_size}, max_kv_tokens {max_kv_tokens}): set a larger "
            "kv_cache_memory or a smaller max_model_len"
        )
    if capacity < 2:
        raise KVBudgetError(f"the KV budget holds {capacity} token: one request needs at least 2")
    return min(context, capacity)
