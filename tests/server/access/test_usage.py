"""Usage of each key in the keys file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.events import RequestRecord
from inflight.server.access.keys import KeyUsage
from tests.server.live import Backend, Live, live_server

PATH = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
FILE = """
keys:
  - {name: alice, key: alice-secret}
  - {name: bob "the, key: bob-secret, requests_per_minute: 1}
  - {name: carol, key: carol-secret}
"""
NAMES = ["requests", "prompt_tokens", "generation_tokens", "queue_seconds"]


@pytest.fixture
def keyed(backend: Backend, tmp_path: Path) -> Iterator[Live]:
    (tmp_path / "keys.yaml").write_text(FILE)
    with live_server(backend, keys=str(tmp_path / "keys.yaml"), api_key=("plain",)) as live:
        yield live


def post(live: Live, key: str, **more: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return live.post(PATH, {**BODY, **more}, headers=headers).status_code


def used(live: Live) -> dict[str, list[float]]:
    """The figures of each key, in the order of NAMES."""
    text = live.http.get("/metrics", headers={"authorization": "Bearer plain"}).text
    usage: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "key" in sample.labels:
                assert family.name == f"inflight:key_{NAMES[len(usage.setdefault(sample.labels['key'], []))]}"
                usage[sample.labels["key"]].append(sample.value)
    return usage


def test_usage_is_counted_per_key(keyed: Live) -> None:
    assert used(keyed) == {name: [0, 0, 0, 0] for name in ("alice", 'bob "the', "carol")}
    assert post(keyed, "alice-secret") == 200
    assert post(keyed, "alice-secret", n=2) == 200
    assert [post(keyed, "bob-secret") for _ in range(2)] == [200, 429]
    usage = used(keyed)
    assert usage["alice"][:3] == [2, 9, 12]  # of three answers
    assert usage['bob "the'][:3] == [1, 3, 4]
    assert usage["carol"] == [0, 0, 0, 0]
    assert all(usage[name][3] > 0 for name in ("alice", 'bob "the'))


def test_only_named_keys_are_labels(keyed: Live) -> None:
    for user in ("x", "alice", None):
        assert post(keyed, "plain", user=user) == 200
    assert post(keyed, "carol-secret", user="mallory") == 200
    assert keyed.http.get("/health").status_code == 200
    usage = used(keyed)
    assert set(usage) == {"alice", 'bob "the', "carol"}
    assert usage["alice"] == [0, 0, 0, 0]
    assert usage["carol"][0] == 1


def test_refused_requests_do_not_count(keyed: Live) -> None:
    assert post(keyed, "alice-secret", top_p=7) == 400
    assert post(keyed, "alice-secret", prompt=[5] * 5000) == 400
    assert used(keyed)["alice"] == [0, 0, 0, 0]


def test_requests_cut_short_count(keyed: Live) -> None:
    body = {**BODY, "max_tokens": 2000, "stream": True}
    headers = {"authorization": "Bearer alice-secret"}
    with keyed.http.stream("POST", PATH, json=body, headers=headers) as response:
        next(response.iter_lines())
    keyed.wait_until_idle()
    requests, prompt, generated, _ = used(keyed)["alice"]
    assert (requests, prompt) == (1, 3)
    assert 1 <= generated <= 2000


def test_without_a_keys_file_there_are_no_key_metrics(backend: Backend) -> None:
    with live_server(backend, api_key=("plain",)) as live:
        assert post(live, "plain", user="x") == 200
        assert used(live) == {}
        assert (
            "inflight:key_" not in live.http.get("/metrics", headers={"authorization": "Bearer plain"}).text
        )


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"admitted_at": 12.5, "finished_at": 30.0}, 2.5),
        ({"finished_at": 14.0}, 4.0),  # aborted in the queue
        ({}, 0.0),
    ],
)
def test_queue_time_ends_with_admission_or_the_end(times: dict[str, Any], expected: float) -> None:
    usage = KeyUsage()
    usage.add_queue_time(RequestRecord("r", "", 0, 3, arrived_at=10.0, **times), 99.0)
    assert usage.queue_seconds == expected


def test_answer_without_a_record_counts_as_queued() -> None:
    usage = KeyUsage()
    usage.add_queue_time(None, 1.5)
    usage.add_queue_time(None, 0.5)
    assert usage.queue_seconds == 2.0
