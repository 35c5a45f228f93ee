"""Where requests go: counted in tokens, in simulated time."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from inflight.router.replica import BlockMarks
from tests.router.simulation import Simulation, simulated

NUM_SESSIONS, NUM_TURNS, ANSWER = 64, 8, 8
SYSTEM = [random.Random(0).randrange(50) for _ in range(1024)]


async def converse(sim: Simulation, session: int, pause: float, salt: str = "") -> None:
    """One conversation: each turn has all that was said before."""
    chance = random.Random(session + 1)
    said = list(SYSTEM)
    await sim.sleep(chance.uniform(0, pause))
    for _ in range(NUM_TURNS):
        said += [chance.randrange(50) for _ in range(chance.randrange(60, 120))]
        said += await sim.ask(said, ANSWER, cache_salt=salt)
        await sim.sleep(sim.now + chance.uniform(0.5, 1.5) * pause)


async def conversations(count: int, routing: str, pause: float, **options: Any) -> list[int]:
    """Tokens that each replica computed."""
    async with simulated(count, routing, **options) as sim:
        await sim.run(*(converse(sim, session, pause) for session in range(NUM_SESSIONS)))
        return sim.computed


@pytest.mark.parametrize("pause", [2_000, 20_000])
async def test_conversations_stay_on_the_replica_with_their_prefix(pause: float) -> None:
    (once,) = await conversations(1, "round_robin", pause, num_blocks=1 << 15)
    aware = await conversations(4, "prefix_aware", pause)
    in_turn = await conversations(4, "round_robin", pause)
    assert sum(aware) <= 1.15 * once
    assert sum(in_turn) > 2 * once
    mean = sum(aware) / 4
    assert max(aware) <= 1.25 * mean
    assert min(aware) >= 0.75 * mean


async def unshared(routing: str) -> list[float]:
    """First-token times of requests that have nothing in common, in order."""
    chance = random.Random(3)
    async with simulated(4, routing) as sim:

        async def one(at: float) -> None:
            await sim.sleep(at)
            prompt = [chance.randrange(50) for _ in range(chance.choice((100, 300, 1500)))]
            await sim.ask(prompt, chance.randrange(1, 12))

        at, work = 0.0, []
        for _ in range(600):
            at += chance.expovariate(1 / 260)
            work.append(one(at))
        await sim.run(*work)
        return sorted(sim.first_tokens)


async def test_prompts_without_shared_prefixes_are_as_fast_as_round_robin() -> None:
    in_turn, aware, least = [await unshared(name) for name in ("round_robin", "prefix_aware", "least_loaded")]
    p99 = int(0.99 * len(in_turn))
    assert aware[p99] <= 1.05 * in_turn[p99]
    assert aware[p99] <= 1.05 * least[p99]
    assert sum(aware) <= 1.05 * min(sum(in_turn), sum(least))


async def test_popular_prefix_spreads_before_it_floods_a_replica() -> None:
    async with simulated(4, "prefix_aware") as sim:
        await sim.ask_all([[*SYSTEM, index % 50, index // 50] for index in range(200)], 60)
        shares = [client.engine.core.stats().num_output_tokens for client in sim.clients]
        assert min(shares) > 0
        assert max(shares) <= 1.5 * sum(shares) / 4
        assert sum(sim.computed) <= 200 * 80 + 4 * len(SYSTEM)


async def test_answers_to_one_prompt_go_where_it_is_computed() -> None:
    """The replica has not reported the prefix yet."""
    async with simulated(4, "prefix_aware") as sim:
        await sim.ask_all([SYSTEM] * 4, 10)
        assert sorted(sim.computed)[:3] == [0, 0, 0]
        assert sum(sim.computed) < 1.2 * len(SYSTEM)


async def test_salts_keep_prefixes_apart() -> None:
    async with simulated(2, "prefix_aware") as sim:
        await sim.run(sim.ask(SYSTEM, 1, cache_salt="a"))
        await sim.run(sim.ask(SYSTEM, 1, cache_salt="b"))
        assert sim.computed == [len(SYSTEM)] * 2  # no hits, so it went to the replica with less recent work
        await sim.run(sim.ask(SYSTEM, 1, cache_salt="a"), sim.ask(SYSTEM, 1, cache_salt="b"))
        assert sum(sim.computed) <= 2 * len(SYSTEM) + 2 * 16


async def test_evicted_prefixes_are_forgotten() -> None:
    async with simulated(2, "prefix_aware", num_blocks=80) as sim:
        await sim.run(sim.ask(SYSTEM, 1))
        first = next(index for index, count in enumerate(sim.computed) if count)
        blocks = sim.router.replicas.members[first].blocks
        assert len(blocks) == len(SYSTEM) // 16
        for seed in range(4):  # enough to push it out of both
            chance = random.Random(seed)
            await sim.run(sim.ask([chance.randrange(50) for _ in range(1200)], 1))
        for replica, client in zip(sim.router.replicas.members, sim.clients, strict=True):
            assert len(replica.blocks) == len(client.engine.scheduler.blocks.cache._bundle_of[0])  # type: ignore[attr-defined]


async def test_draining_and_unhealthy_replicas_get_no_requests() -> None:
    async with simulated(3, "least_loaded") as sim:
        sim.router.replicas.drain("0")
        await sim.ask_all([[index] for index in range(12)], 4)
        assert sim.computed[0] == 0
        assert 0 < sim.computed[1] == sim.computed[2]


async def test_lack_of_kv_memory_counts_as_load() -> None:
    async with simulated(2, "least_loaded", num_blocks=100) as sim:
        long = sim.ask(list(range(50)) * 28, 150)  # takes nearly all of one replica's memory
        later = [sim.ask_at(200.0, [7] * 300, 20) for _ in range(3)]
        await sim.run(long, *later)
        assert all(client.engine.core.stats().num_preemptions == 0 for client in sim.clients), (
            "a request was sent to a replica without memory for it"
        )
        assert max(sim.first_tokens) < 1500 + 16


@pytest.mark.parametrize("routing", ["prefix_aware", "least_loaded", "round_robin"])
async def test_tenant_that_floods_all_replicas_does_not_keep_others_waiting(routing: str) -> None:
    async with simulated(2, routing, policy="fair", max_num_seqs=4) as sim:

        async def ask(tenant: str, index: int, at: float) -> None:
            await sim.sleep(at)
            await sim.ask([index % 50, index // 50] * 50, 10, tenant=tenant)
            ended[tenant].append(sim.now)

        ended: dict[str, list[float]] = {"many": [], "few": []}
        await sim.run(
            *(ask("many", index, 0.0) for index in range(100)),
            *(ask("few", 1000 + index, 500.0) for index in range(8)),
        )
        assert max(ended["few"]) < 0.5 * max(ended["many"])


def test_marks_are_shared_and_increasingly_sparse() -> None:
    whole = BlockMarks().up_to(70_000)
    assert whole[:66] == [*range(1, 65), 66, 68]
    assert len(whole) < 64 + 32 * 11
    assert all(0 < later - mark <= max(1, mark / 32) for mark, later in itertools.pairwise(whole))
    marks = BlockMarks()
    for num_blocks in (0, 1, 64, 65, 66, 500, 3000, 499):
        assert marks.up_to(num_blocks) == [mark for mark in whole if mark <= num_blocks]
