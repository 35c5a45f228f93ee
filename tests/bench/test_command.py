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


def test_results_are_saved_as_by_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "results"
    lengths = ("--random-input-len", 6, "--random-output-len", 4, "--random-range-ratio", 0.5)
    load = f"--num-prompts 6 --num-warmups 0 --max-concurrency 4 --burstiness 0.5 --api-key {KEY}".split()
    goals = ("--goodput", "ttft:60000", "e2el:60000", "--rate", "50", "inf")
    files = ("--save-result", "--result-dir", folder)
    assert bench(monkeypatch, "--base-url", url, *lengths, *load, *goals, *files) == 0
    assert "good" in capsys.readouterr().out
    names = sorted(path.name for path in folder.iterdir())
    assert [re.sub(r"\d{8}-\d{6}", "TIME", name) for name in names] == [
        f"openai-{rate}qps-concurrency4-inflight-builtin-TIME.json" for rate in ("50.0", "inf")
    ]
    fields = json.loads((folder / names[0]).read_text())
    assert (fields["completed"], fields["num_prompts"], fields["request_rate"]) == (6, 6, 50.0)
    assert (fields["burstiness"], fields["max_concurrency"]) == (0.5, 4)
    assert fields["request_goodput"] == fields["request_throughput"]
    assert 18 <= fields["total_input_tokens"] <= 54
    assert fields["p99_ttft_ms"] > 0


def test_sharegpt_file_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str
) -> None:
    path = tmp_path / "sharegpt.json"
    chat = [
        {"from": "human", "value": "Why does it rain in Spain?"},
        {"from": "gpt", "value": "Clouds are heavy."},
    ]
    path.write_text(json.dumps([{"conversations": chat}, {"conversations": chat[:1]}]))
    options = ("--dataset-name", "sharegpt", "--dataset-path", path, "--api-key", KEY, "--warmup", "0")
    assert bench(monkeypatch, "--url", url, *options, "--num-requests", "3", "--json", "-") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["num_complete"], run["errors"]) == (3, {})
    assert run["num_output_tokens"] % 3 == 0
    assert 12 <= run["num_output_tokens"] <= 45


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
        (("--goodput", "speed:5"), "goodput is 'speed:5'"),
        (("--burstiness", "0"), "burstiness is 0.0"),
        (("--random-range-ratio", "1"), "random_range_ratio is 1.0"),
        (("--prompt-len", "3:9", "--random-range-ratio", "0.1"), "prompt_len is 3:9"),
        (("--result-filename", "x.json", "--rate", "1", "2"), "result_filename is 'x.json'"),
        (("--save-result", "--result-dir", "/proc/nowhere"), "result_dir is '/proc/nowhere'"),
        (("--dataset", "no/such/file"), "cannot read the dataset"),
        (("--json", "no/such/folder/x.json"), "an existing folder"),
        (("--plot", "x.pdf"), "must end in .svg"),
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
