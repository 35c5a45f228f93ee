"""Options as users give them: flags before variables before the file before the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.cli.main import app
from inflight.cli.option_sources import gather
from inflight.config import ENGINE_OPTIONS
from inflight.errors import ConfigError
from inflight.option import PANELS
from inflight.server.config import SERVE_OPTIONS, ServerConfig


def resolve(flags: dict[str, Any], environment: dict[str, str], file: Path | None = None) -> ServerConfig:
    given = gather(SERVE_OPTIONS, flags, environment, None if file is None else str(file))
    return ServerConfig.create(**given)


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmax-queue: 2\nhost: a\nserved_model_name: [x, y]\nread_timeout: 5\n")
    environment = {"INFLIGHT_PORT": "3", "INFLIGHT_MAX_QUEUE": "4", "INFLIGHT_OTHER": "x"}
    config = resolve({"port": 5}, environment, file)
    assert (config.port, config.max_queue, config.host) == (5, 4, "a")
    assert config.served_model_name == ("x", "y")
    assert config.read_timeout == 5.0
    assert config.engine.scheduler.max_num_seqs is None


def test_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 7")
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_CONFIG": str(file)}) == {"port": 7}
    file.write_text("")
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_CONFIG": str(file)}) == {}


def test_variables_have_types() -> None:
    environment = {
        "INFLIGHT_ENABLE_PREFIX_CACHING": "false",
        "INFLIGHT_API_KEY": "a, b",
        "INFLIGHT_GPU_MEMORY_UTILIZATION": "0.5",
        "INFLIGHT_MODEL": "folder",
    }
    config = resolve({}, environment)
    assert config.engine.cache.enable_prefix_caching is False
    assert config.api_key == ("a", "b")
    assert config.engine.cache.gpu_memory_utilization == 0.5
    assert config.model == "folder"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"INFLIGHT_PORT": "x"}, "INFLIGHT_PORT is 'x': it must be an integer"),
        ({"INFLIGHT_READ_TIMEOUT": ""}, "INFLIGHT_READ_TIMEOUT is '': it must be a number"),
        ({"INFLIGHT_LOG_REQUESTS": "maybe"}, "INFLIGHT_LOG_REQUESTS is 'maybe': it must be true or false"),
    ],
)
def test_invalid_variables_are_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gather(SERVE_OPTIONS, {}, environment)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("colour: red", "unknown option 'colour': allowed are model, .*port"),
        ("hf-config: {}", "unknown option 'hf-config'"),  # only in Python
        ("port: x", "port in .* is 'x': it must be an integer"),
        ("port: true", "an integer"),
        ("port: null", "an integer"),
        ("max-queue: null", "an integer"),  # a server always has a limit
        ("dtype: 16", "a string"),
        ("api_key: [1]", "a list of strings"),
        ("enable_prefix_caching: 1", "true or false"),
        ("- port", "must map options"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_invalid_files_are_rejected(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve({}, {}, file)


def test_file_can_leave_an_option_unset(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_num_seqs: null\nmax-model-len: null\n")
    assert resolve({}, {}, file) == ServerConfig.create()


# ---- flags ----


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    return " ".join(result.stdout.split()).replace("- ", "-")  # lines are broken at blanks and hyphens


def test_help_of_serve_lists_every_option() -> None:
    text = help_of("serve")
    words = text.split()
    for name, option in SERVE_OPTIONS.items():
        if name != "model":
            assert option.flag in words or f"--[no-]{option.flag[2:]}" in words
            assert option.help in text
            if option.default_text:
                assert f"[default: {option.default_text}]" in text
    for panel in PANELS:
        assert f" {panel}: " in text


def test_generate_has_the_engine_flags_of_serve() -> None:
    text = help_of("generate")
    words = text.replace("--[no-]", "--").split()
    shared = [option for option in ENGINE_OPTIONS.values() if option.flag in words]
    assert len(shared) == 17  # and one of them, the seed, is a request's own
    for option in shared:
        assert option.help in text or option.name == "seed"


def test_flags_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerConfig] = []
    monkeypatch.setattr("inflight.server.run.run", lambda options, _: seen.append(options))
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
    (config,) = seen
    assert (config.model, config.port, config.host) == ("folder", 9, "0.0.0.0")
    assert config.engine.cache.enable_prefix_caching is False
    assert config.api_key == ("a", "b")
    assert config.log_requests is True


def test_flags_reach_the_engine_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def build(model: str | None, **options: Any) -> None:
        seen.append({"model": model, **options})
        raise ConfigError("seen")

    monkeypatch.setattr("inflight.LLM", build)
    arguments = ["generate", "folder", "-p", "x", "--no-enable-prefix-caching", "--dtype", "FLOAT16"]
    assert isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)
    assert seen == [{"model": "folder", "enable_prefix_caching": False, "dtype": "float16"}]


def test_some_flags_have_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServerConfig] = []
    monkeypatch.setattr("inflight.server.run.run", lambda options, _: found.append(options))
    result = CliRunner().invoke(app, ["serve", "-tp", "2", "-pp", "3"])
    assert result.exit_code == 0, result.output
    parallel = found[0].engine.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (2, 3)
