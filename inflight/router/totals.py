"""Several engines' figures as one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from inflight.engine import EngineStats, ModelFacts
from inflight.events import KVUsage

_TOTALS = [item.name for item in fields(EngineStats) if item.type == "int"]
_BLOCKS = [item.name for item in fields(KVUsage) if item.name != "block_size"]


def summed(found: Sequence[EngineStats]) -> EngineStats:
    """All of them together; there is at least one."""
    kv = replace(found[0].kv, **{name: sum(getattr(stats.kv, name) for stats in found) for name in _BLOCKS})
    totals = {name: sum(getattr(stats, name) for stats in found) for name in _TOTALS}
    step_sizes = tuple(map(sum, zip(*(stats.step_sizes for stats in found), strict=True)))
    is_sleeping = all(stats.is_sleeping for stats in found)
    return EngineStats(**totals, kv=kv, step_sizes=step_sizes, is_sleeping=is_sleeping)


def left_behind(stats: EngineStats) -> EngineStats:
    """What still counts of an engine that is gone: what it has done."""
    nothing = dict.fromkeys(_BLOCKS, 0)
    return replace(stats, num_running=0, num_waiting=0, is_sleeping=True, kv=replace(stats.kv, **nothing))


def facts_of_all(found: Sequence[ModelFacts]) -> ModelFacts:
    """One model's facts, with the room of all engines that have it, and a context that fits into each."""
    return replace(
        found[0],
        max_model_len=min(facts.max_model_len for facts in found),
        num_blocks=sum(facts.num_blocks for facts in found),
        max_num_seqs=sum(facts.max_num_seqs for facts in found),
        max_num_batched_tokens=sum(facts.max_num_batched_tokens for facts in found),
    )


def same_model(facts: ModelFacts, other: ModelFacts) -> bool:
    """Whether requests made for one can be run by the other, if their length fits."""
    names = ("fingerprint", "vocab_size", "eos_token_ids", "block_size", "generates", "pooling")
    return all(getattr(facts, name) == getattr(other, name) for name in names)
