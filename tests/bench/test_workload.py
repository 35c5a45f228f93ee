"""Requests and their arrival times."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inflight.bench.compare.arrivals import arrival_times
from inflight.bench.workload import (
    PlannedRequest,
    Range,
    ServingWorkload,
    is_sharegpt,
    parse_rate,
    read_dataset,
    read_sharegpt,
)
from inflight.errors import ConfigError, ParameterError


def bodies(jobs: list[PlannedRequest]) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in jobs]


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = arrival_times(4000, 20.0, seed=3)
    assert times == arrival_times(4000, 20.0, seed=3)
    assert times != arrival_times(4000, 20.0, seed=4)
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # for exponential gaps it equals the mean


def test_higher_rate_compresses_the_same_arrivals() -> None:
    slow, fast = arrival_times(50, 4.0, 0), arrival_times(50, 8.0, 0)
    assert slow == pytest.approx([2 * moment for moment in fast])


def test_infinite_rate_arrives_at_once_or_within_the_ramp() -> None:
    assert arrival_times(5, math.inf, 0) == [0.0] * 5
    assert arrival_times(4, math.inf, 0, ramp=2.0) == [0.0, 0.5, 1.0, 1.5]


def test_ramp_starts_slowly_and_reaches_the_rate() -> None:
    times = arrival_times(4000, 100.0, 0, ramp=10.0)
    early, late, after = (sum(low <= t < low + 5 for t in times) for low in (0.0, 5.0, 20.0))
    assert early == pytest.approx(125, abs=40)
    assert late == pytest.approx(375, abs=60)
    assert after == pytest.approx(500, abs=70)


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_the_spread_of_gaps_but_not_the_rate(burstiness: float, spread: float) -> None:
    times = arrival_times(20_000, 20.0, seed=3, burstiness=burstiness)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(spread / 20, rel=0.1)  # 1 / sqrt(burstiness) of the mean
    assert arrival_times(50, 20.0, 3, burstiness=1.0) == arrival_times(50, 20.0, 3)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_invalid_burstiness_is_rejected(burstiness: float) -> None:
    with pytest.raises(ParameterError, match=r"burstiness is .*: it must be a positive number"):
        arrival_times(1, 1.0, 0, burstiness=burstiness)


def test_range_ratio_widens_a_single_length() -> None:
    assert Range(100, 100).widened("prompt_len", 0.2) == Range(80, 120)
    assert Range(3, 3).widened("prompt_len", 0.5) == Range(1, 5)
    assert Range(1, 1).widened("prompt_len", 0.9) == Range(1, 2)
    assert Range(7, 7).widened("prompt_len", 0.0) == Range(7, 7)
    with pytest.raises(ParameterError, match="random_range_ratio is 1"):
        Range(7, 7).widened("prompt_len", 1.0)
    with pytest.raises(
        ParameterError, match="prompt_len is 3:9: with random_range_ratio it must be a single"
    ):
        Range(3, 9).widened("prompt_len", 0.5)


def turns(*values: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}


def test_sharegpt_prompts_are_the_first_turns(tmp_path: Path) -> None:
    words = "one two three four five six"
    good = [turns(f"{number} {words}", "a b c d e", "more") for number in range(5)]
    skipped = [
        turns("short", words),
        turns(words, "short"),
        turns("word " * 1025, words),
        turns(words * 2, "word " * 2048),
        turns(words),
        turns("x" * 100_000, words),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*good, *skipped]))
    assert is_sharegpt(path)
    requests = read_sharegpt(path, "completions", 10, 0, lambda text: len(text.split()))
    assert sorted(request["prompt"] for request in requests) == [f"{number} {words}" for number in range(5)]
    assert {request["max_tokens"] for request in requests} == {5}
    assert read_sharegpt(path, "completions", 2, 0, lambda text: len(text.split())) == requests[:2]
    other = read_sharegpt(path, "completions", 10, 1, lambda text: len(text.split()))
    assert other != requests, "the order depends on the seed"
    chats = read_sharegpt(path, "chat", 10, 0, lambda text: len(text.split()), keep_lengths=False)
    assert chats[0] == {"messages": [{"role": "user", "content": chats[0]["messages"][0]["content"]}]}
    assert len(chats) == 6, "an answer may be short if its length is given"


@pytest.mark.parametrize("text", ["[]", '[{"conversations": []}]', '[{"text": "x"}]', "[1"])
def test_unusable_sharegpt_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_sharegpt(path, "completions", 10, 0, len)


def test_requests_depend_only_on_the_seed() -> None:
    workload = ServingWorkload(
        "m", num_requests=30, prompt_len=Range(3, 9), output_len=Range(2, 5), vocab_size=50
    )
    jobs = workload.jobs(8.0, "0")
    assert jobs == workload.jobs(8.0, "0")
    assert [job.at for job in jobs] == arrival_times(30, 8.0, 0)
    requests = bodies(jobs)
    assert {len(body["prompt"]) for body in requests} == set(range(3, 10))
    assert {body["max_tokens"] for body in requests} == set(range(2, 6))
    assert all(0 <= token_id < 50 for body in requests for token_id in body["prompt"])
    assert requests[0] == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "prompt": requests[0]["prompt"],
        "max_tokens": requests[0]["max_tokens"],
    }


def test_runs_share_lengths_but_not_prompts() -> None:
    workload = ServingWorkload("m", num_requests=20)
    first, second = bodies(workload.jobs(8.0, "0")), bodies(workload.jobs(16.0, "1"))
    for one, other in zip(first, second, strict=True):
        assert one["max_tokens"] == other["max_tokens"]
        assert len(one["prompt"]) == len(other["prompt"])
        assert one["prompt"] != other["prompt"]


def test_chat_prompts_are_words() -> None:
    workload = ServingWorkload("m", "chat", num_requests=3, prompt_len=Range(4, 4), ignore_eos=False)
    for body in bodies(workload.jobs(math.inf, "0")):
        (message,) = body["messages"]
        assert (message["role"], len(message["content"].split())) == ("user", 4)
        assert "ignore_eos" not in body


def test_parameters_are_added_to_every_request() -> None:
    workload = ServingWorkload("m", num_requests=2, parameters={"top_p": 0.5, "ignore_eos": False})
    assert all(
        body["top_p"] == 0.5 and body["ignore_eos"] is False for body in bodies(workload.jobs(1.0, ""))
    )


def test_dataset_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n')
    lines = read_dataset(path, "completions")
    requests = bodies(
        ServingWorkload("m", num_requests=3, output_len=Range(9, 9), dataset=lines).jobs(math.inf, "0")
    )
    assert [(body["prompt"], body["max_tokens"]) for body in requests] == [("a", 3), ([1, 2], 9), ("a", 3)]


def test_dataset_may_contain_conversations(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "system", "content": "b"}]}')
    assert [line["messages"] for line in read_dataset(path, "chat")] == [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "b"}],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n{"text": "a"}', "line 2.*unknown field"),
        ('{"messages": []}', "prompt is missing"),
        (None, "cannot read the dataset"),
    ],
)
def test_invalid_datasets_are_rejected(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_dataset(path, "completions")


@pytest.mark.parametrize("text", ["0", "x", "", "5:3", "0:4", "3:", ":3", "-1:2"])
def test_invalid_lengths_are_rejected(text: str) -> None:
    with pytest.raises(ParameterError, match="prompt_len is"):
        Range.parse("prompt_len", text)


def test_lengths_are_parsed_and_printed() -> None:
    assert (Range.parse("x", "7"), Range.parse("x", "7:9")) == (Range(7, 7), Range(7, 9))
    assert (str(Range(7, 7)), str(Range(7, 9))) == ("7", "7:9")


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan"])
def test_invalid_rates_are_rejected(text: str) -> None:
    with pytest.raises(ParameterError, match="rate is"):
        parse_rate(text)


def test_rates_are_parsed() -> None:
    assert (parse_rate("0.5"), parse_rate("inf")) == (0.5, math.inf)
