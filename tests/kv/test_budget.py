"""KV budgets on a GPU shared by several processes, with a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.config import CacheConfig
from inflight.errors import KVBudgetError
from inflight.kv.budget import CONTEXT_MEMORY, GpuMemory, gpu_kv_memory

MIB = 1 << 20
BLOCK = 2 * MIB
STEP = 1500 * MIB
WEIGHTS = 1200 * MIB


@dataclass
class Device:
    """A GPU, and what each process holds of it: (inside, outside) its torch allocator."""

    total: int
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.total - sum(map(sum, self.processes.values()))

    def seen_by(self, name: str) -> GpuMemory:
        return GpuMemory("cuda:0", self.total, self.free, self.processes[name][0])


def start(device: Device, name: str, cache: CacheConfig, context: int) -> Iterator[None]:
    """Start an engine, one change of its memory after the other; it holds its KV memory at the end."""
    device.processes[name] = 0, context
    yield
    for reserved in (
        WEIGHTS // 2,
        WEIGHTS,
        WEIGHTS + STEP - 256 * MIB,
        WEIGHTS,
    ):  # the last but one tries a step
        device.processes[name] = reserved, context
        yield
    kv_memory = gpu_kv_memory(device.seen_by(name), cache, STEP, BLOCK)
    yield
    device.processes[name] = WEIGHTS + STEP + kv_memory, context


def interleave(starts: list[Iterator[None]], draw: st.DataObject) -> None:
    while starts:
        index = draw.draw(st.integers(0, len(starts) - 1))
        if next(starts[index], starts) is starts:
            starts.pop(index)


@given(
    count=st.integers(1, 6),
    total=st.integers(80, 200).map(lambda gib: gib << 30),
    utilization=st.floats(0.5, 1.0),
    contexts=st.lists(st.integers(200 * MIB, CONTEXT_MEMORY), min_size=6, max_size=6),
    draw=st.data(),
)
def test_replicas_start_together_in_any_order_and_restart_one_at_a_time(
    count: int, total: int, utilization: float, contexts: list[int], draw: st.DataObject
) -> None:
    device, names = Device(total), [f"engine-{index}" for index in range(count)]
    cache = CacheConfig(gpu_memory_utilization=utilization / count)
    interleave(
        [start(device, name, cache, context) for name, context in zip(names, contexts, strict=False)], draw
    )
    share = int(total * cache.gpu_memory_utilization)
    for name in draw.draw(st.permutations(names)):
        assert share - CONTEXT_MEMORY < sum(device.processes[name]) <= share
        context = device.processes.pop(name)[1]
        list(start(device, name, cache, context))
        assert share - CONTEXT_MEMORY < sum(device.processes[name]) <= share


@given(others=st.integers(0, 40).map(lambda gib: gib << 30), context=st.integers(200 * MIB, CONTEXT_MEMORY))
def test_memory_of_other_processes_does_not_shrink_the_budget(others: int, context: int) -> None:
    total = 80 << 30
    alone = GpuMemory("cuda:0", total, total - WEIGHTS - context, WEIGHTS)
    shared = GpuMemory("cuda:0", total, total - WEIGHTS - context - others, WEIGHTS)
    cache = CacheConfig(gpu_memory_utilization=0.45)
    assert alone.used_here == WEIGHTS + context, "measured while no other process is there"
    assert alone.others == 0
    lost = gpu_kv_memory(alone, cache, STEP, BLOCK) - gpu_kv_memory(shared, cache, STEP, BLOCK)
    assert 0 <= lost <= CONTEXT_MEMORY - context
    assert others - CONTEXT_MEMORY <= shared.others <= others


def test_error_names_the_memory_that_other_processes_hold() -> None:
    memory = GpuMemory("cuda:0", 80 << 30, 20 << 30, 10 << 30)
    with pytest.raises(
        KVBudgetError, match=r"is 0.9: .* 20.00 GiB are free on cuda:0; other processes hold 49.25 GiB$"
    ):
        gpu_kv_memory(memory, CacheConfig(gpu_memory_utilization=0.9), STEP, BLOCK)
    requested = CacheConfig(kv_cache_memory=20 << 30)
    with pytest.raises(
        KVBudgetError, match=r"^kv_cache_memory is 21474836480: that needs 20.00 GiB for KV .* are free"
    ):
        gpu_kv_memory(memory, requested, STEP, BLOCK)
    assert gpu_kv_memory(memory, CacheConfig(num_blocks=1000), STEP, BLOCK) == 1000 * BLOCK


def test_budget_without_room_for_a_block_is_rejected() -> None:
    memory = GpuMemory("cuda:0", 80 << 30, 20 << 30, 40 << 30)
    with pytest.raises(
        KVBudgetError,
        match=r"is 0.5: of 80.00 GiB .* holds 40.75 GiB .* nothing is left for KV blocks \(20.00 GiB are free\)",
    ):
        gpu_kv_memory(memory, CacheConfig(gpu_memory_utilization=0.5), STEP, BLOCK)
