"""Cross-site requests, which a browser sends for any page."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.server.access.middleware import Origins
from inflight.server.errors import ApiError
from tests.server.live import Backend, Live, live_server

PATH = "/v1/completions"
GOOD = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
PAGE = "https://page.example"


def allowed(origins: Origins, method: str = "POST", **headers: str) -> bool:
    raw_headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: Any = {"type": "http", "method": method, "headers": raw_headers}
    try:
        origins.check(scope)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),
        ({"host": "localhost:8000"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ({"host": "LocalHost:8000", "origin": "https://localhost:8000"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, False),
        ({"host": "localhost:8000", "origin": "http://localhost"}, False),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "origin": ""}, False),
        ({"host": "", "origin": "null"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"sec_fetch_site": "same-origin", "host": "behind-a-proxy", "origin": "https://llm.example"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
        ({"sec_fetch_site": "nonsense"}, False),
        ({"sec_fetch_site": "cross-site", "host": "x", "origin": "http://x"}, False),
    ],
)
def test_cross_site_post_is_refused(headers: dict[str, str], expected: bool) -> None:
    assert allowed(Origins(), **headers) is expected
    assert allowed(Origins(), "DELETE", **headers) is expected
    assert allowed(Origins(), "GET", **headers)
    assert allowed(Origins(("*",)), **headers)


def test_allowed_origins_may_post() -> None:
    named = Origins((PAGE,))
    assert allowed(named, origin=PAGE, sec_fetch_site="cross-site")
    assert allowed(named, origin=PAGE)
    assert not allowed(named, origin="https://other.example")
    assert not allowed(named, sec_fetch_site="cross-site")


def test_page_of_another_site_is_refused(live: Live) -> None:
    refused = live.state.metrics.refused
    before = refused["origin_not_allowed"]
    for headers in ({"origin": PAGE}, {"sec-fetch-site": "cross-site"}):
        for path in (PATH, "/tokenize", "/nothing"):
            response = live.post(path, GOOD, headers=headers)
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "origin_not_allowed"
            assert "--allowed-origins" in response.json()["error"]["message"]
        assert live.http.delete("/v1/requests/x", headers=headers).status_code == 403
    assert refused["origin_not_allowed"] == before + 8
    assert live.http.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link
    assert live.post(PATH, GOOD, headers={"origin": live.url}).status_code == 200


def test_page_of_an_allowed_origin_is_answered(backend: Backend) -> None:
    with live_server(backend, allowed_origins=(PAGE,)) as live:
        headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        response = live.post(PATH, GOOD, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert live.post(PATH, GOOD, headers=headers | {"origin": "https://x.example"}).status_code == 403


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_body_must_have_the_json_content_type(path: str, live: Live) -> None:
    response = live.http.post(path, content=b'{"prompt": [5, 6]}')  # as browsers send a Blob
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert "no content type" in response.json()["error"]["message"]
