"""The server under test: its address, and the requests made before measuring (readiness, model, vocabulary)."""

from __future__ import annotations

import json
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from inflight.bench.client import Target, error_message
from inflight.bench.workload import PATHS, Endpoint
from inflight.errors import ConfigError, EngineError

TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.2
SMALLEST_VOCABULARY = 64
CHARACTERS_PER_TOKEN = 4  # of English text, roughly

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerAddress:
    url: str  # without /v1
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> ServerAddress:
        parts = urlsplit(url)
        try:
            ok = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # an invalid port
            ok = False
        if not ok or parts.query or parts.fragment:
            raise ConfigError(
                f"url is {url!r}: it must be an http or https URL such as http://127.0.0.1:8000"
            )
        return cls(url.rstrip("/").removesuffix("/v1"), api_key)

    def target(self, endpoint: Endpoint) -> Target:
        parts = urlsplit(self.url)
        tls = parts.scheme == "https"
        headers = () if self.api_key is None else (f"Authorization: Bearer {self.api_key}",)
        assert parts.hostname is not None
        port = parts.port or (443 if tls else 80)
        return Target(parts.hostname, port, parts.path + PATHS[endpoint], tls, headers)

    def wait_until_loaded(self) -> None:
        """Wait while the server says that it is loading its model. Any other answer ends the wait."""
        while _is_loading(*self._request("/v1/models")):
            time.sleep(POLL_SECONDS)

    def model(self) -> str:
        """Return the name of the first model that the server lists."""
        status, answer = self._request("/v1/models")
        try:
            name = answer["data"][0]["id"]
        except (LookupError, TypeError):
            raise EngineError(
                f"{self.url}/v1/models lists no model (status {status}): give its name with --model"
            ) from None
        return str(name)

    def vocab_size(self, model: str, most: int) -> int:
        """Return how many token ids can be used: `most`, halved until the server accepts the highest one.

        Servers do not report the size of their vocabulary, but they reject ids outside it.
        """
        size = most
        while True:
            body = {"model": model, "prompt": [size - 1], "max_tokens": 1}
            status, answer = self._request(PATHS["completions"], body)
            if status == 200:
                return size
            message = error_message(answer.get("error") if isinstance(answer, dict) else answer)
            if status != 400:  # an unknown model or a wrong key, for example
                raise EngineError(f"{self.url} rejected a request with status {status}: {message}")
            if size < 2 * SMALLEST_VOCABULARY:
                raise EngineError(
                    f"{self.url} does not accept token ids as a prompt ({message}): use --endpoint chat"
                )
            size //= 2

    def token_counter(self, model: str) -> Callable[[str], int]:
        """Return a function that counts the tokens of a text: by the server's /tokenize, or else by its length."""

        def ask(text: str) -> int | None:
            status, answer = self._request("/tokenize", {"model": model, "prompt": text})
            count = answer.get("count") if status == 200 and isinstance(answer, dict) else None
            return count if isinstance(count, int) else None

        def estimate(text: str) -> int:
            return math.ceil(len(text) / CHARACTERS_PER_TOKEN)

        if ask("a text") is None:
            logger.warning("%s has no /tokenize: the lengths of answers are estimated", self.url)
            return estimate
        return lambda text: ask(text) or estimate(text)

    def _request(self, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                try:
                    return error.code, json.loads(error.read())
                except ValueError:
                    return error.code, None
        except (OSError, ValueError) as error:
            raise EngineError(f"no answer from {self.url}: {error}") from None


def _is_loading(status: int, answer: Any) -> bool:
    error = answer.get("error") if isinstance(answer, dict) else None
    return status == 503 and isinstance(error, dict) and error.get("code") == "loading"
