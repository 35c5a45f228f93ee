from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from inflight.bench.compare.arrivals import Arrival
from inflight.bench.compare.workload import KINDS, Workload, build_jobs, draw_prompts
from inflight.errors import ParameterError
from inflight.loading.engine import LoadedEngine


def test_prompts_are_seeded_and_mixed() -> None:
    drawn = draw_prompts(1000, seed=3)
    assert drawn == draw_prompts(1000, seed=3)
    assert drawn != draw_prompts(1000, seed=4)
    counts = Counter(drawn)
    for kind in KINDS:
        share = sum(counts[prompt] for prompt in kind.prompts) / 1000
        assert share == pytest.approx(kind.share / 10, abs=0.05)
        # No prompt is repeated before all have been used.
        assert (
            max(counts[prompt] for prompt in kind.prompts) - min(counts[prompt] for prompt in kind.prompts)
            <= 1
        )


def test_prompts_are_unique_and_shares_add_up() -> None:
    prompts = [prompt for kind in KINDS for prompt in kind.prompts]
    assert len(set(prompts)) == len(prompts)
    assert sum(kind.share for kind in KINDS) == 10


def test_poisson_arrivals_are_seeded_and_match_the_rate() -> None:
    arrival = Arrival.parse("poisson:20")
    times = arrival.times(4000, seed=1)
    assert times == arrival.times(4000, seed=1)
    assert times != arrival.times(4000, seed=2)
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # In a Poisson process the standard deviation of the gaps equals their mean.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def test_burst_arrives_at_once() -> None:
    assert Arrival.parse("burst").times(3, seed=0) == [0.0, 0.0, 0.0]
    assert str(Arrival.parse("burst")) == "burst"
    assert str(Arrival.parse("poisson:2.5")) == "poisson:2.5"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "often",
        "poisson",
        "poisson:",
        "poisson:0",
        "poisson:-1",
        "poisson:nan",
        "poisson:inf",
        "poisson:1e-300",
        "burst:2",
    ],
)
def test_invalid_arrivals_are_rejected(text: str) -> None:
    with pytest.raises(ParameterError, match="it must be burst, or poisson:RATE"):
        Arrival.parse(text)


def test_real_prompts_are_rendered_with_the_chat_template(engine: LoadedEngine) -> None:
    jobs = build_jobs(Workload(num_requests=5, seed=1), engine)
    assert engine.frontend.tokenizer is not None
    for job in jobs:
        rendered = engine.frontend.chat_template.render([{"role": "user", "content": job.title}])
        assert job.prompt_ids == engine.frontend.tokenizer.encode(rendered, add_special_tokens=False)
        assert not job.params.ignore_eos
        assert job.params.temperature == engine.frontend.default_params["temperature"]
    assert len({job.params.seed for job in jobs}) == 5
    assert jobs == build_jobs(Workload(num_requests=5, seed=1), engine)


def test_ragged_lengths_are_fixed(engine: LoadedEngine) -> None:
    workload = Workload(num_requests=40, lengths="ragged", max_tokens=50, temperature=0.0)
    jobs = build_jobs(workload, engine)
    lengths = [job.params.max_tokens for job in jobs]
    assert all(job.params.ignore_eos and job.params.greedy for job in jobs)
    assert all(length is not None and 5 <= length <= 50 for length in lengths)
    assert len(set(lengths)) > 20
    assert all(5 <= len(job.prompt_ids) <= 50 for job in jobs)
    assert jobs == build_jobs(workload, engine)
    assert jobs != build_jobs(Workload(40, lengths="ragged", max_tokens=50, seed=1), engine)
