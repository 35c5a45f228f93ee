"""`inflight bench serve` against `inflight serve`, both from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli.main import main

KEY = "a-key-of-this-test"
SMALL = (
    "--num-requests",
    "6",
    "--prompt-len",
    "3:9",
    "--output-len",
    "2:5",
    "--warmup",
    "2",
    "--api-key",
    KEY,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server with the built-in model."""
    command = [sys.executable, "-m", "inflight.cli.main", "serve", "--port", "0", "--in-process"]
    limits = [
        "--num-blocks",
        "256",
        "--max-num-seqs",
        "8",
        "--log-level",
        "warning",
        "--shutdown-timeout",
        "0",
    ]
    environment = {**os.environ, "INFLIGHT_API_KEY": KEY}
    with subprocess.Popen(command + limits, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if match := re.search(r"(http://\S+)/metrics", line):
                    break
            assert match, "the server did not print its URL"
            yield match[1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["inflight", "bench", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_writes_table_json_and_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str
) -> None:
    files = ("--json", tmp_path / "x.json", "--plot", tmp_path / "x.svg")
    assert bench(monkeypatch, "--url", f"{url}/v1", *SMALL, "--rate", "50", "100", "inf", *files) == 0
    text = capsys.readouterr().out
    assert "6 requests to inflight-builtin" in text
    for words in ("50/s", "100/s", "all at once"):
        assert words in text
    report = json.loads((tmp_path / "x.json").read_text())
    assert [run["rate"] for run in report["runs"]] == [50, 100, "inf"]
    for run in report["runs"]:
        assert (run["num_complete"], run["errors"]) == (6, {})
        assert 12 <= run["num_output_tokens"] <= 30
        assert run["ttft_ms"]["p50"] > 0
    # The lengths are the same at every rate.
    assert len({(run["num_prompt_tokens"], run["num_output_tokens"]) for run in report["runs"]}) == 1
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_chat_load_from_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    options = ("--endpoint", "chat", "--processes", "2", "--concurrency", "3", "--json", "-")
    assert bench(monkeypatch, "--url", url, *SMALL, *options) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["num_complete"], run["rate"]) == (6, "inf")


def test_dataset_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "Once upon a time", "max_tokens": 3}\n{"prompt": [5, 6], "max_tokens": 4}\n')
    options = ("--dataset", path, "--api-key", KEY, "--warmup", "0", "--json", "-", "--ramp", "0.01")
    assert bench(monkeypatch, "--url", url, *options) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["num_requests"], run["num_output_tokens"]) == (2, 7)


def test_failure_of_all_requests_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert bench(monkeypatch, "--url", url, *SMALL, "--parameters", '{"nonsense": 1}') == 1
    message = capsys.readouterr().err
    assert "all 2 requests failed; the most frequent error is http_400" in message
    assert "nonsense" in message


def test_wrong_key_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert bench(monkeypatch, "--url", url, "--api-key", "wrong") == 1
    assert "lists no model (status 401)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "sometimes"), "rate is 'sometimes'"),
        (("--rate", "4", "0"), "rate is '0'"),
        (("--prompt-len", "9:3"), "prompt_len is '9:3'"),
        (("--parameters", "[1]"), "must be a JSON object"),
        (("--dataset", "no/such/file"), "cannot read the dataset"),
        (("--json", "no/such/folder/x.json"), "an existing folder"),
        (("--plot", "x.pdf"), "must end in .svg or .png"),
        (("--url", "localhost:8000"), "url is 'localhost:8000'"),
        (("--url", "http://x:port"), "url is 'http://x:port'"),
        (("--url", "http://127.0.0.1:1"), "no answer from http://127.0.0.1:1"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert bench(monkeypatch, *arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("inflight: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_command_line_starts_without_the_load_generator() -> None:
    code = (
        "import sys, inflight.cli.main; print({'msgspec', 'httptools', 'asyncio', 'ssl'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
