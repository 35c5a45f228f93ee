"""How many blocks there are."""

from __future__ import annotations

from inflight.errors import KVBudgetError


def blocks_for_memory(
    memory: int, bytes_per_block: int, block_size: int, max_num_seqs: int, max_model_len: int, exact: bool
) -> int:
    """Blocks that fit in `memory` bytes. Unless `exact`, no more than all requests at full length could use."""
    num_blocks = memory // bytes_per_block
    if not exact:
        num_blocks = min(num_blocks, max_num_seqs * -(-max_model_len // block_size))
    if num_blocks < 1:
        raise KVBudgetError(
            f"the KV memory is {memory:,} bytes: one block of {block_size} tokens needs {bytes_per_block:,}"
        )
    return num_blocks


def fit_context(
    num_blocks: int, block_size: int, max_kv_tokens: int | None, context: int, asked: int | None
) -> int:
    """The longest request that always fits: `asked` if it does, else as much of `context` as does."""
    room = num_blocks * block_size
    if max_kv_tokens is not None:
        room = min(room, max_kv_tokens)
    if asked is not None and asked > room:
        raise KVBudgetError(
            f"max_model_len is {asked}, but the KV budget holds {room} tokens "
            f"({num_blocks} blocks of {block_size}, max_kv_tokens {max_kv_tokens}): give more memory "
            "(kv_cache_memory), or a smaller max_model_len"
        )
    if room < 2:
        raise KVBudgetError(f"the KV budget holds {room} token: one request needs at least 2")
    return min(context, room)
