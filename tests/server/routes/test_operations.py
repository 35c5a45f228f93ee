"""Administration routes, and who may use them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.server.live import Backend, Live, ProcessBackend, live_server

ADMIN = {"authorization": "Bearer the-admin-key"}
PROMPT = [7] * 100
ALONE = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/server_info"),
]


@pytest.fixture(scope="module", params=["thread", "process"])
def served(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Live]:
    engine_backend = backend if request.param == "thread" else ProcessBackend(num_blocks=128)
    try:
        with live_server(engine_backend, admin_key="the-admin-key") as live:
            yield live
    finally:
        if engine_backend is not backend:
            engine_backend.close()


def cached(live: Live) -> int:
    usage = live.complete(PROMPT, max_tokens=4, ignore_eos=True)["usage"]
    num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def test_prefix_cache_can_be_reset(served: Live) -> None:
    cached(served)
    assert cached(served) == 96
    assert served.http.post("/reset_prefix_cache", headers=ADMIN).json() == {"success": True}
    assert cached(served) == 0


def test_engine_sleeps_and_wakes_up(served: Live) -> None:
    before = served.complete(PROMPT, max_tokens=4)["choices"]
    assert served.http.post("/sleep?level=1", headers=ADMIN).status_code == 200
    assert served.http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    refused = served.post("/v1/completions", {"prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
    assert served.http.get("/ready").json()["status"] == "sleeping"
    assert served.http.get("/health").status_code == 200
    assert served.http.post("/wake_up", headers=ADMIN).status_code == 200
    assert served.http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert served.http.get("/ready").status_code == 200
    assert served.complete(PROMPT, max_tokens=4)["choices"] == before


def test_sleep_accepts_only_level_1(served: Live) -> None:
    refused = served.http.post("/sleep?level=2", headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
    assert served.http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}


def test_admin_routes_need_the_admin_key(served: Live, live: Live) -> None:
    for method, path in ALONE:
        denied = served.http.request(method, path)
        assert (denied.status_code, denied.json()["error"]["code"]) == (401, "invalid_admin_key")
        assert "this route needs the admin key" in denied.json()["error"]["message"]
        closed = live.http.request(method, path)  # a server without such a key
        assert (closed.status_code, closed.json()["error"]["code"]) == (403, "admin_disabled")
        assert "this route needs the admin key" in closed.json()["error"]["message"]
        assert (
            "needs the admin key"
            in live.http.get("/openapi.json").json()["paths"][path][method.lower()]["description"].lower()
        )


def test_server_info_has_no_keys(served: Live) -> None:
    info = served.http.get("/server_info", headers=ADMIN)
    assert info.json()["config"]["block_size"] == 16
    assert "the-admin-key" not in info.text
    assert served.http.get("/load").json() == {"server_load": 0}
    assert served.http.get("/ping").status_code == served.http.post("/ping").status_code == 200


def test_pages_are_one_self_contained_document(served: Live) -> None:
    pages = [
        served.http.get(path) for path in ("/", "/timeline", "/requests", "/memory", "/replicas", "/docs")
    ]
    assert {page.text for page in pages} == {pages[0].text}
    for page in pages:
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)


def test_unknown_path_is_a_page_for_browsers_and_json_for_programs(served: Live) -> None:
    page = served.http.get("/redoc", headers={"accept": "text/html"})
    assert page.status_code == 404
    assert "unknown path &#x27;/redoc&#x27;: use /docs" in page.text
    assert '<a href="/">' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert served.http.get("/redoc").json()["error"]["code"] == "unknown_path"
