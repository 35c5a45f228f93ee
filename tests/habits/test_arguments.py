"""Command lines as people type them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.command import NOTES
from inflight.errors import ConfigError
from inflight.habits.habit import plain_size
from inflight.habits.serve_flags import SERVE_HABITS
from inflight.option_sources import gather, unread
from inflight.server.config import SERVE_OPTIONS
from tests.habits.test_flags import BENCH, ROOT, SERVE, parsed, refusal

WORKS: dict[str, dict[str, Any]] = {
    "m --served-model-name a b --port 9": {"model": "m", "served_model_name": ["a", "b"], "port": 9},
    "--model m --served-model-name a b": {"model": "m", "served_model_name": ["a", "b"]},
    "--served-model-name a b --model=m": {"model": "m", "served_model_name": ["a", "b"]},
    "--api-key secret folder": {
        "api_key": ["secret"],
        "model": "folder",
    },  # as before: a bare word is the model
    "--api-key a --api-key b": {"api_key": ["a", "b"]},
    """m --allowed-origins ["*"] --allowed-headers=["a","b"]""": {
        "model": "m",
        "allowed_origins": ["*"],
        "allowed_headers": ["a", "b"],
    },
    "m --max_num_seqs 3 --max-model-len 32K": {"model": "m", "max_num_seqs": 3, "max_model_len": 32768},
    "--max-model-len auto --seed None --tokenizer None --max-num-batched-tokens None": {},
    "m --cudagraph-capture-sizes 1 2 4 --port 9": {"model": "m", "port": 9},
    "--dtype half": {"dtype": "float16"},
    "--dtype bf16 --kv-cache-memory 4GiB": {"dtype": "bfloat16", "kv_cache_memory": 4 << 30},
    "--tensor-parallel-size 1 -pp 1": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    "--quantization None --kv-cache-dtype auto --speculative-config null --cpu-offload-gb 0": {},
    "--enable-chunked-prefill --enable-prefix-caching": {"enable_prefix_caching": True},
    "--enable-chunked-prefill True -O3 -O 2": {},
    "--no-enable-prefix-caching --no-enable-log-requests": {
        "enable_prefix_caching": False,
        "log_requests": False,
    },
    "--trust-remote-code folder": {"model": "folder"},
}


@pytest.mark.parametrize("line", WORKS)
def test_what_works(line: str) -> None:
    assert parsed(SERVE, *line.split()) == WORKS[line]


REFUSED = {
    "--enable-lora": "LoRA adapters are not supported yet",
    "--quantization=fp8": "--quantization fp8: quantized weights are not supported yet",
    "--no-enable-chunked-prefill": "--enable-chunked-prefill false: prompts are always computed in chunks",
    "--speculative-config.method ngram": "--speculative-config.method ngram: speculative decoding is not",
    "--max-num-seq 3": "there is no option --max-num-seq (--max-num-seqs?)",
    "--qwerty": "there is no option --qwerty: `inflight serve --help` has all of them",
    "--scheduling-policy lifo": "--scheduling-policy lifo: fcfs and priority are known",
    "--quantization": "--quantization needs a value",
    "--hf-token hf_abcdefghijklmnopqrstuvwxyz": "--hf-token: give it in the variable HF_TOKEN",  # not repeated
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line: str) -> None:
    assert REFUSED[line] in refusal(SERVE, *line.split())


def test_other_commands_know_the_flags_of_their_engine() -> None:
    generate = ROOT.commands["generate"]
    assert parsed(generate, "-p", "x", "--model", "m", "--dtype", "half", "--trust-remote-code") == {
        "prompt": ["x"],
        "model": "m",
        "dtype": "float16",
    }
    assert "there is no option --uvicorn-log-level" in refusal(generate, "--uvicorn-log-level", "info")
    assert parsed(ROOT.commands["compare"], "--requests", "4", "--batch-size", "2") == {
        "num_requests": 4,
        "max_num_seqs": 2,
    }
    assert parsed(ROOT.commands["rerank"], "query", "a", "b", "--dtype", "float")["files"] == ["a", "b"]


def test_bench_takes_vllms_line() -> None:
    line = "--backend openai-chat --endpoint /v1/chat/completions --host h --port 9 --dataset-name random"
    more = "--random-input-len 128 --random-output-len 64 --num-prompts 10 --request-rate inf --save-detailed"
    assert parsed(BENCH, *line.split(), *more.split()) == {
        "endpoint": "chat",
        "host": "h",
        "port": 9,
        "prompt_len": "128",
        "output_len": "64",
        "num_requests": 10,
        "rate": ["inf"],
    }
    assert parsed(BENCH, "--rate", "8", "16", "inf", "-q") == {"rate": ["8", "16", "inf"], "quiet": True}


def test_who_trusts_code_is_told_that_none_is_run() -> None:
    context = SERVE.make_context("inflight serve", ["--trust-remote-code"])
    assert context.meta[NOTES] == [
        "--trust-remote-code: code in a model folder is never run; checkpoints of the known families load without it"
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32k", "32000"),
        ("32K", "32768"),
        ("1.5k", "1500"),
        ("7", "7"),
        ("1.5K", "1.5K"),
        ("4GiB", str(4 << 30)),
        ("4GB", "4000000000"),
    ],
)
def test_sizes(text: str, size: str) -> None:
    assert plain_size(text) == size


# ---- files and variables ----


def test_a_file_may_have_lines_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "uvicorn-log-level: trace\nquantization: null\nenable_log_requests: false\ndtype: half\n"
        "data-parallel-size: 2\nmax-model-len: 4k\n"
    )
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_HABITS) == {
        "log_level": "debug",
        "log_requests": False,
        "dtype": "float16",
        "replicas": 2,
        "max_model_len": 4000,
    }
    file.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError, match="--enable-lora: LoRA adapters"):
        gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_HABITS)


def test_variables_and_files_have_the_values_of_flags(tmp_path: Path) -> None:
    environment = {
        "INFLIGHT_DTYPE": "half",
        "INFLIGHT_MAX_MODEL_LEN": "32k",
        "INFLIGHT_POLICY": "fcfs",
        "INFLIGHT_REASONING_PARSER": "qwen3",
        "INFLIGHT_MAX_NUM_BATCHED_TOKENS": "None",
        "INFLIGHT_SEED": "None",
        "INFLIGHT_LOG_LEVEL": "DEBUG",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    expected = {
        "dtype": "float16",
        "max_model_len": 32000,
        "policy": "continuous",
        "reasoning_parser": "think",
    }
    found = gather(SERVE_OPTIONS, {}, environment, habits=SERVE_HABITS)
    assert found == {**expected, "log_level": "debug", "kv_cache_memory": 2 << 30}
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_MAX_MODEL_LEN": "auto"}, habits=SERVE_HABITS) == {}
    with pytest.raises(ConfigError, match="INFLIGHT_MAX_MODEL_LEN is 'x': it must be an integer"):
        gather(SERVE_OPTIONS, {}, {"INFLIGHT_MAX_MODEL_LEN": "x"}, habits=SERVE_HABITS)
    file = tmp_path / "config.yaml"
    file.write_text("dtype: half\nmax_model_len: 32k\npolicy: fcfs\nreasoning-parser: qwen3\n")
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_HABITS) == expected
    file.write_text("max-model-len: -1\nmax-num-batched-tokens: 4096\n")
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_HABITS) == {"max_num_batched_tokens": 4096}


def test_the_key_of_vllm_is_a_key_unless_there_is_another() -> None:
    both = {"VLLM_API_KEY": "a b", "INFLIGHT_API_KEY": "c"}
    assert gather(SERVE_OPTIONS, {}, {"VLLM_API_KEY": "a b"}, habits=SERVE_HABITS) == {"api_key": ("a b",)}
    assert gather(SERVE_OPTIONS, {}, both, habits=SERVE_HABITS) == {"api_key": ("c",)}
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_ALLOWED_ORIGINS": '["a", "b"]'}) == {
        "allowed_origins": ("a", "b")
    }


def test_variables_that_do_nothing_are_told() -> None:
    environment = {
        "INFLIGHT_APIKEY": "x",
        "INFLIGHT_QWERTY": "x",
        "INFLIGHT_API_KEY": "",
        "INFLIGHT_PORT": "80",
        "INFLIGHT_CACHE": "x",
        "INFLIGHT_SERVICE_HOST": "10.0.0.1",  # Kubernetes sets these
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
        "VLLM_QWERTY": "1",
        "OTHER": "x",
    }
    assert unread(SERVE_OPTIONS, environment) == [
        "VLLM_QWERTY is set: nothing here reads it",
        "INFLIGHT_APIKEY is set: nothing reads it; INFLIGHT_API_KEY is meant?",
        "INFLIGHT_API_KEY is empty: that is as if it were not set",
        "INFLIGHT_QWERTY is set: nothing reads it",
    ]


# ---- what a user sees ----


@pytest.mark.parametrize(
    "command", ["serve", "bench serve", "generate", "compare", "plan", "rerank", "replicas list"]
)
def test_help_fits_and_is_whole(command: str) -> None:
    asked = "--help" if command != "serve" else "--help=all"  # as vLLM's users ask
    result = CliRunner().invoke(app, [*command.split(), asked], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    if command == "serve":
        assert "inflight-llm[otel]" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("command", "module"), [("serve", "uvicorn"), ("bench serve", "httptools")])
def test_without_the_servers_packages_one_line_says_what_to_install(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("inflight.server.run", "inflight.bench.server", "inflight.bench.connection"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"{module} is missing: pip install 'inflight-llm[server]'"
