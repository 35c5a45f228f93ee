"""Options: flags before variables before the file before the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.errors import ConfigError
from inflight.execution.platforms.cpu import CpuPlatform
from inflight.execution.platforms.cuda import CudaPlatform
from inflight.server.options import ENGINE_OPTIONS, FIELDS, ServeOptions
from inflight.server.settings import resolve

KEY = str(Path(__file__).parent / "tls" / "key.pem")


def test_each_place_wins_over_the_next(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmax-queue: 2\nhost: a\nserved_model_name: [x, y]\nread_timeout: 5\n")
    environment = {"INFLIGHT_PORT": "3", "INFLIGHT_MAX_QUEUE": "4", "INFLIGHT_OTHER": "x"}
    options = resolve({"port": 5}, environment, str(file))
    assert (options.port, options.max_queue, options.host) == (5, 4, "a")
    assert options.served_model_name == ("x", "y")
    assert options.read_timeout == 5.0
    assert options.max_num_seqs == ServeOptions().max_num_seqs


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("")
    assert resolve({}, {"INFLIGHT_CONFIG": str(file)}) == ServeOptions()


def test_variables_have_types() -> None:
    environment = {
        "INFLIGHT_ENABLE_PREFIX_CACHING": "false",
        "INFLIGHT_API_KEY": "a, b",
        "INFLIGHT_GPU_MEMORY_UTILIZATION": "0.5",
        "INFLIGHT_MODEL": "folder",
    }
    options = resolve({}, environment)
    assert options.enable_prefix_caching is False
    assert options.api_key == ("a", "b")
    assert options.gpu_memory_utilization == 0.5
    assert options.model == "folder"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({}, {"INFLIGHT_PORT": "x"}, "INFLIGHT_PORT is 'x': it must be an integer"),
        ({}, {"INFLIGHT_LOG_REQUESTS": "maybe"}, "true or false"),
        ({"port": 99999}, {}, "from 0 to 65535"),
        ({"max_queue": 0}, {}, "at least 1"),
        ({"max_body_size": 10}, {}, "at least 1024"),
        ({"request_timeout": 0.0}, {}, "positive number of seconds"),
        ({"first_token_timeout": float("nan")}, {}, "positive number of seconds"),
        ({"shutdown_timeout": float("inf")}, {}, "at least 0"),
        ({"metrics_compat": "x"}, {}, "none, vllm"),
        ({"log_format": "xml"}, {}, "text, json"),
        ({"ssl_keyfile": "k"}, {}, "go together"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c"}, {}, r"files for TLS \(c, k\).*: No such file"),
        ({"ssl_keyfile": KEY, "ssl_certfile": KEY}, {}, "files for TLS"),  # no certificate
        ({"ssl_ca_certs": KEY}, {}, "files for TLS"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, {}, "each origin must be named"),
        ({"api_key": (" ",)}, {}, "empty"),
    ],
)
def test_what_cannot_work(flags: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(flags, environment)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("colour: red", "unknown option 'colour'"),
        ("port: x", "port in .* is 'x': it must be an integer"),
        ("port: true", "an integer"),
        ("port: null", "an integer"),
        ("api_key: [1]", "a list of strings"),
        ("enable_prefix_caching: 1", "true or false"),
        ("- port", "must map options"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_files_that_cannot_work(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve({}, {}, str(file))


def test_every_option_is_in_the_help() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in FIELDS:
        if name != "model":
            assert f"--{name.replace('_', '-')}" in result.stdout
    for panel in ("Model", "Memory", "Scheduling", "Network", "Access", "Limits", "Watching", "Life"):
        assert f"─ {panel} ─" in result.stdout


def test_the_engines_options_are_options() -> None:
    assert set(ENGINE_OPTIONS) <= set(FIELDS)


def test_flags_reach_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    import inflight.server.run as module

    monkeypatch.setattr(module, "run", seen.append)
    monkeypatch.setenv("INFLIGHT_HOST", "0.0.0.0")
    arguments = [
        "serve",
        "folder",
        "--port",
        "9",
        "--no-enable-prefix-caching",
        "--api-key",
        "a",
        "--api-key",
        "b",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (options,) = seen
    assert (options.model, options.port, options.host) == ("folder", 9, "0.0.0.0")
    assert options.enable_prefix_caching is False
    assert options.api_key == ("a", "b")
    assert options.log_requests is True


@pytest.mark.parametrize("name", ["target_step_ms", "max_num_seqs"])
def test_the_help_has_the_defaults_of_the_devices(name: str) -> None:
    gpu, cpu = getattr(CudaPlatform, name), getattr(CpuPlatform, name)
    assert FIELDS[name].metadata["show"] == f"{gpu:g} on a GPU, {cpu:g} on a CPU"
