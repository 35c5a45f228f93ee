"""The server's options, and those of its engine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from inflight.config import ENGINE_OPTIONS, EngineConfig
from inflight.errors import ConfigError
from inflight.execution.gpu.platform import CudaPlatform
from inflight.execution.platforms import CpuPlatform
from inflight.option import PYTHON, options_of
from inflight.server.config import SERVE_OPTIONS, ServerConfig

CERT, KEY = (str(Path(__file__).parent / "tls" / name) for name in ("cert.pem", "key.pem"))


def test_engine_options_are_server_options() -> None:
    flags = {name for name, option in ENGINE_OPTIONS.items() if option.panel != PYTHON}
    assert flags < set(SERVE_OPTIONS)
    assert not set(ENGINE_OPTIONS) & set(options_of(ServerConfig))
    for name in flags - {"target_step_ms", "max_queue"}:
        assert SERVE_OPTIONS[name] is ENGINE_OPTIONS[name]


def test_flat_names_are_assigned_to_their_configs() -> None:
    config = ServerConfig.create(model="m", block_size=8, max_restarts=1, log_format="json", port=9)
    assert config.engine == EngineConfig.create("m", block_size=8, target_step_ms=None, max_queue=1024)
    assert (config.process.max_restarts, config.process.log_format) == (1, "json")
    assert config.port == 9


def test_shown_defaults_are_the_real_ones() -> None:
    config = ServerConfig.create()
    values = {**config.engine.options(), "max_restarts": 3, "kill_stalled_after": 900.0, "log_format": "text"}
    values |= asdict(config.router)
    for name, option in SERVE_OPTIONS.items():
        assert (values[name] if name in values else getattr(config, name)) == option.default
    assert (config.model, config.policy, config.max_queue) == (None, "continuous", 1024)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 99999}, "port is 99999: allowed is an integer from 0 to 65535"),
        ({"port": -1}, "from 0 to 65535"),
        ({"max_queue": 0}, "at least 1"),
        ({"max_body_size": 10}, "at least 1024"),
        ({"request_timeout": 0.0}, "positive number of seconds"),
        ({"first_token_timeout": float("nan")}, "positive number of seconds"),
        ({"shutdown_timeout": float("inf")}, "at least 0"),
        ({"metrics_compat": "x"}, "none, gateway, vllm"),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"log_format": "xml"}, "text, json"),
        ({"ssl_cert_reqs": 3}, "0, 1, 2"),
        ({"max_restarts": -1}, "at least 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"ssl_keyfile": "k"}, "must be set together"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c"}, r"TLS files \(c, k\).*: No such file"),
        ({"ssl_keyfile": KEY, "ssl_certfile": KEY}, "TLS files"),  # no certificate
        ({"ssl_keyfile": KEY, "ssl_certfile": CERT, "ssl_ca_certs": KEY}, "TLS files"),
        ({"ssl_ca_certs": CERT}, "need ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "need ssl_certfile"),
        ({"ssl_keyfile": KEY, "ssl_certfile": CERT, "ssl_cert_reqs": 1}, "it needs ssl_ca_certs"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "list each origin"),
        ({"api_key": (" ",)}, "empty"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig.create(**values)


@pytest.mark.parametrize("name", ["target_step_ms", "max_num_seqs"])
def test_help_shows_device_dependent_defaults(name: str) -> None:
    gpu, cpu = getattr(CudaPlatform.defaults, name), getattr(CpuPlatform.defaults, name)
    assert SERVE_OPTIONS[name].default_text == f"{gpu:,g} on a GPU, {cpu:,g} on a CPU"
