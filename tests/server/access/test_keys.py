"""API keys: access, limits, and isolation between callers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.errors import ConfigError
from inflight.server.access.keys import Caller, Keys, load_keys
from inflight.server.errors import ApiError
from inflight.server.state import TEXT_THREADS
from tests.server.live import Backend, Live, live_server

PATH = "/v1/completions"
GOOD = {"prompt": [5] * 40, "max_tokens": 4, "temperature": 0}
ENDLESS = {"prompt": [5, 6], "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
FILE = """
keys:
  - name: alice
    key: alice-secret
    weight: 2
  - name: bob
    key_env: BOBS_KEY
    requests_per_minute: 3
  - name: carol
    key: carol-secret
    max_concurrent: 1
    cache: shared
"""


@pytest.fixture(scope="module")
def keyed(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BOBS_KEY", "bob-secret")
        with live_server(backend, keys=str(path), api_key=("plain",)) as live:
            yield live
            live.wait_until_idle()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Basic alice-secret"}, "missing_api_key"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"authorization": "Bearer alice-secre"}, "invalid_api_key"),
        ({"authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
        ({"x-api-key": ""}, "missing_api_key"),
        ({"x-api-key": "wrong"}, "invalid_api_key"),
        ({"x-api-key": "alice-secret", "authorization": "Bearer wrong"}, "invalid_api_key"),
    ],
)
def test_routes_except_health_need_a_key(headers: Any, code: str, keyed: Live) -> None:
    paths = ["/v1/models", "/version", "/metrics", "/openapi.json", "/v1/requests/x", "/nothing"]
    paths += ["/health/", "/health/../v1/models", "/%68ealth/x", "/v1/models?path=/health"]
    for path in paths:
        response = keyed.http.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == code
        assert response.headers["www-authenticate"] == "Bearer"
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/health"):
        assert keyed.post(path, GOOD, headers=headers).status_code == 401


def test_health_checks_and_pages_need_no_key(keyed: Live) -> None:
    for path in ("/health", "/ready", "/"):
        assert keyed.http.get(path).status_code == 200


@pytest.mark.parametrize("key", ["alice-secret", "bob-secret", "carol-secret", "plain"])
def test_every_key_is_accepted(key: str, keyed: Live) -> None:
    assert keyed.http.get("/v1/models", headers=bearer(key)).status_code == 200


def test_concurrency_limit_of_a_key_is_enforced(keyed: Live) -> None:
    headers = bearer("carol-secret")
    with keyed.http.stream("POST", PATH, json=ENDLESS, headers=headers) as running:
        assert running.status_code == 200
        response = keyed.post(PATH, GOOD, headers=headers)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "concurrency_limit_exceeded"
        assert keyed.post(PATH, GOOD, headers=bearer("alice-secret")).status_code == 200
    keyed.wait_until("the end of it", lambda: not len(keyed.state.request_log))
    for _ in range(3):  # a refusal leaves nothing behind
        assert keyed.post(PATH, {"prompt": []}, headers=headers).status_code == 400
    assert keyed.post(PATH, GOOD, headers=headers).status_code == 200


def test_one_key_leaves_a_thread_to_the_others(keyed: Live) -> None:
    """Tokenizing long texts takes seconds, which no disconnect ends."""
    go_on = threading.Event()
    held = [keyed.state.threads.submit("alice", go_on.wait) for _ in range(2 * TEXT_THREADS)]
    try:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = keyed.http.post("/v1/chat/completions", json=chat, headers=bearer("plain"))
        assert answer.status_code == 200
        assert not any(future.done() for future in held)
    finally:
        go_on.set()
    assert all(future.result(30) for future in held)


def test_rate_limit_of_a_key_is_enforced(keyed: Live) -> None:
    headers = bearer("bob-secret")
    statuses = [keyed.post(PATH, GOOD, headers=headers).status_code for _ in range(3)]
    response = keyed.post(PATH, GOOD, headers=headers)
    assert statuses == [200, 200, 200]
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["retry-after"]) <= 20
    assert keyed.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})])
def test_tokenize_counts_against_the_limits_of_a_key(
    path: str, body: Any, backend: Backend, tmp_path: Path
) -> None:
    (tmp_path / "keys.yaml").write_text(FILE.replace("key_env: BOBS_KEY", "key: bob-secret"))
    with live_server(backend, keys=str(tmp_path / "keys.yaml")) as live:
        answers = [live.post(path, body, headers=bearer("bob-secret")) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answers[3].headers["retry-after"]) > 1
        with live.http.stream("POST", PATH, json=ENDLESS, headers=bearer("carol-secret")):
            refused = live.post(path, body, headers=bearer("carol-secret"))
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        live.wait_until_idle()
        assert live.post(path, body, headers=bearer("carol-secret")).status_code == 200
        assert not any(caller.num_running for caller in live.state.keys.callers)


def test_cached_prefixes_belong_to_a_key_unless_shared(keyed: Live) -> None:
    def cached(key: str, prompt: list[int], **more: str) -> int:
        response = keyed.post(PATH, {**GOOD, "prompt": prompt, **more}, headers=bearer(key))
        num_cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    assert cached("alice-secret", [9] * 40) == 0
    assert cached("alice-secret", [9] * 40) == 32
    assert cached("carol-secret", [9] * 40) == 0
    assert cached("plain", [9] * 40) == 32  # carol's, both being shared
    alices = hashlib.sha256(b"alice\0").hexdigest()  # what her salt is made of is no secret
    assert cached("carol-secret", [9] * 40, cache_salt=alices) == 0
    assert cached("plain", [9] * 40, cache_salt=alices) == 32


def test_request_ids_belong_to_a_key(keyed: Live) -> None:
    alice, carol = bearer("alice-secret"), bearer("carol-secret")
    with keyed.http.stream("POST", PATH, json={**ENDLESS, "request_id": "mine"}, headers=alice) as running:
        assert running.headers["x-request-id"] == "mine"
        for headers in (carol, bearer("plain")):
            assert keyed.http.get("/v1/requests/mine", headers=headers).status_code == 404
            assert keyed.http.delete("/v1/requests/mine", headers=headers).status_code == 404
        # The same id of another key is another request.
        assert keyed.post(PATH, {**GOOD, "request_id": "mine"}, headers=carol).json()["id"] == "mine"
        response = keyed.post(PATH, {**GOOD, "request_id": "mine"}, headers=alice)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "request_id_in_use"
        assert keyed.http.get("/v1/requests/mine", headers=alice).json()["status"] == "running"
        deleted = keyed.http.delete("/v1/requests/mine", headers=alice).json()
        assert deleted["cancelled"] is True
        assert deleted["freed_blocks"] > 0
        assert '"finish_reason":"abort"' in running.read().decode()
    assert keyed.http.get("/v1/requests/mine", headers=carol).json()["status"] == "finished"
    assert keyed.http.get("/v1/requests/mine", headers=alice).json()["status"] == "cancelled"


def test_tenant_is_the_key_name_or_user(keyed: Live) -> None:
    def tenant(key: str, **more: str) -> str:
        keyed.post(PATH, {**GOOD, "request_id": "t", **more}, headers=bearer(key))
        found: str = keyed.http.get("/v1/requests/t", headers=bearer(key)).json()["tenant"]
        return found

    assert tenant("alice-secret", user="u1") == "alice"
    assert tenant("plain", user="u1") == "u1"
    assert tenant("plain") == ""


# ---- without a server ----


def test_rate_allowance_refills_evenly() -> None:
    now = 100.0
    caller = Caller(requests_per_minute=60, clock=lambda: now)
    for _ in range(60):
        caller.enter()
    with pytest.raises(ApiError) as refused:
        caller.enter()
    assert refused.value.headers["retry-after"] == "1"
    now += 2.0
    caller.enter()
    caller.enter()
    with pytest.raises(ApiError):
        caller.enter()
    assert caller.num_running == 62


def test_weights_are_passed_to_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    entries = [{"name": "a", "key": "1", "weight": 3}, {"name": "b", "key": "2"}]
    file.write_text(json.dumps({"keys": entries}))
    assert load_keys(["x"], str(file)).weights() == {"a": 3.0, "b": 1.0}


def test_without_keys_there_is_one_caller() -> None:
    keys = Keys()
    assert not keys.required
    assert keys.find(None) is keys.find("Bearer x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "at least one key"),
        ("x: 1", "must have 'keys'"),
        ("keys: [{name: a}]", "either 'key' or 'key_env'"),
        ("keys: [{name: a, key: ''}]", "non-empty"),
        ("keys: [{name: a, key: 5}]", "non-empty string"),
        ("keys: [{name: a, key_env: NOT_SET_ANYWHERE}]", "has no key"),
        ("keys: [{key: x}]", "the name None"),
        ("keys: [{name: a, key: x, weight: 0}]", "weight is 0"),
        ("keys: [{name: a, key: x, weight: .inf}]", "weight is inf"),
        ("keys: [{name: a, key: x, requests_per_minute: -1}]", "requests_per_minute is -1"),
        ("keys: [{name: a, key: x, colour: red}]", "whose only fields are"),
        ("keys: [{name: a, key: x, cache: both}]", "own or shared"),
        ("keys: [{name: a, key: x}, {name: a, key: y}]", "two keys with the name 'a'"),
        ("keys: [{name: a, key: x}, {name: b, key: x}]", "listed twice"),
        ("keys: [", "is not YAML"),
    ],
)
def test_invalid_keys_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_keys([], str(file))


@pytest.mark.parametrize(
    "key", [" secret", "secret ", "secret\n", "\tsecret", "sécret", "sec\u00a0ret", "sec\x00ret"]
)
def test_keys_that_no_client_could_send_are_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="API key 2 has surrounding spaces") as caught:
        load_keys(["good", key], None)
    assert key.strip() not in str(caught.value)
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": key}]}))
    with pytest.raises(ConfigError, match="the key of 'a' has surrounding spaces"):
        load_keys([], str(file))
    if "\x00" not in key:
        monkeypatch.setenv("A_KEY", key)
        file.write_text(json.dumps({"keys": [{"name": "a", "key_env": "A_KEY"}]}))
        with pytest.raises(ConfigError, match="the key of 'a' has surrounding spaces"):
            load_keys([], str(file))
    load_keys(["with a space inside ~!"], None)


def test_missing_keys_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys([], "/nowhere/keys.yaml")


def test_cors_headers_are_sent_to_allowed_origins_only(backend: Backend) -> None:
    """A browser asks first, without a key; the answer to the request itself must be readable too."""
    with live_server(backend, api_key=("k",), allowed_origins=("https://a.example",)) as live:
        preflight_headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        preflight = live.http.options(PATH, headers=preflight_headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        denied = live.post(PATH, GOOD, headers={"origin": "https://a.example"})
        assert denied.status_code == 401
        assert denied.headers["access-control-allow-origin"] == "https://a.example"
        other = live.http.options(PATH, headers={**preflight_headers, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
    with live_server(backend) as live:
        plain = live.post(PATH, GOOD, headers={"origin": "https://a.example"})
        assert isinstance(plain, httpx.Response)
        assert "access-control-allow-origin" not in plain.headers
