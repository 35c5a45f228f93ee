"""Command lines, configuration files and environment variables in vLLM's style."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.cli.command import NOTES
from inflight.cli.main import app
from inflight.cli.option_sources import gather, unused_variables
from inflight.cli.vllm_flags import SERVE_RULES
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.server.config import SERVE_OPTIONS
from inflight.vllm_rules import plain_size
from tests.cli.vllm.test_flags import BENCH, ROOT, SERVE, parsed, rejection

ACCEPTED: dict[str, dict[str, Any]] = {
    "m --served-model-name a b --port 9": {"model": "m", "served_model_name": ["a", "b"], "port": 9},
    "--model m --served-model-name a b": {"model": "m", "served_model_name": ["a", "b"]},
    "--served-model-name a b --model=m": {"model": "m", "served_model_name": ["a", "b"]},
    "--served-model-name a b": {
        "served_model_name": ["a", "b"]
    },  # as in argparse, all words up to the next flag
    "--api-key a b --port 9 folder": {"api_key": ["a", "b"], "port": 9, "model": "folder"},
    "--cudagraph-capture-sizes 1 2 --api-key secret": {"api_key": ["secret"]},
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
    "--kv-cache-dtype auto --cpu-offload-gb 0": {},
    "--enable-chunked-prefill --enable-prefix-caching": {"enable_prefix_caching": True},
    "--enable-chunked-prefill True -O3 -O 2": {},
    "--no-enable-prefix-caching --no-enable-log-requests": {
        "enable_prefix_caching": False,
        "log_requests": False,
    },
    "--trust-remote-code folder": {"model": "folder"},
}


@pytest.mark.parametrize("line", ACCEPTED)
def test_command_line_is_accepted(line: str) -> None:
    assert parsed(SERVE, *line.split()) == ACCEPTED[line]


REJECTED = {
    "--enable-lora": "LoRA adapters are not supported yet",
    "--cpu-offload-gb=2": "--cpu-offload-gb 2: offloading is not supported",
    "--no-enable-chunked-prefill": "--enable-chunked-prefill false: chunked prefill is always on",
    "--speculative-model x": "--speculative-model x: use --speculative-config",
    "--max-num-seq 3": "there is no option --max-num-seq (did you mean --max-num-seqs?)",
    "--qwerty": "there is no option --qwerty: `inflight serve --help` lists all of them",
    "--scheduling-policy lifo": "--scheduling-policy lifo: fcfs and priority are supported",
    "--kv-cache-dtype": "--kv-cache-dtype needs a value",
    "--hf-token hf_abcdefghijklmnopqrstuvwxyz": "--hf-token: use the environment variable HF_TOKEN",
}


@pytest.mark.parametrize("line", REJECTED)
def test_command_line_is_rejected_with_a_reason(line: str) -> None:
    assert REJECTED[line] in rejection(SERVE, *line.split())


def test_all_unsupported_flags_are_reported_at_once(tmp_path: Path) -> None:
    line = (
        "m --enable-lora --lora-modules a=x b=y --port 9 --qwerty 1 2 --cpu-offload-gb 2 --scheduling-policy"
    )
    with pytest.raises(ConfigError) as caught:
        parsed(SERVE, *line.split())
    title, *reasons = str(caught.value).splitlines()
    assert title == "5 options cannot be used:"
    assert [reason.split()[0] for reason in reasons] == [
        "--enable-lora:",
        "--lora-modules",
        "there",
        "--cpu-offload-gb",
        "--scheduling-policy",
    ]
    file = tmp_path / "config.yaml"
    file.write_text("enable-lora: true\ncpu-offload-gb: 2\nqwerty: 1\n")
    with pytest.raises(ConfigError, match=r"(?s)3 options .*--enable-lora: .*--cpu-offload-gb 2: .*'qwerty'"):
        gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_RULES)
    with pytest.raises(ConfigError, match=r"(?s)2 options .*enable_lora is True.*cpu_offload_gb is 2"):
        EngineConfig.create("m", enable_lora=True, cpu_offload_gb=2)


def test_several_prompts_may_follow_one_flag_once_the_model_is_known() -> None:
    generate = ROOT.commands["generate"]
    assert parsed(generate, "m", "-p", "a", "b") == {"model": "m", "prompt": ["a", "b"]}
    assert parsed(generate, "-p", "a", "m") == {"model": "m", "prompt": ["a"]}


def test_other_commands_accept_engine_flags() -> None:
    generate = ROOT.commands["generate"]
    assert parsed(generate, "-p", "x", "--model", "m", "--dtype", "half", "--trust-remote-code") == {
        "prompt": ["x"],
        "model": "m",
        "dtype": "float16",
    }
    assert "there is no option --uvicorn-log-level" in rejection(generate, "--uvicorn-log-level", "info")
    assert parsed(ROOT.commands["compare"], "--requests", "4", "--batch-size", "2") == {
        "num_requests": 4,
        "max_num_seqs": 2,
    }
    assert parsed(ROOT.commands["rerank"], "query", "a", "b", "--dtype", "float")["files"] == ["a", "b"]


def test_bench_accepts_vllm_flags() -> None:
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


def test_trust_remote_code_logs_that_no_code_is_executed() -> None:
    context = SERVE.make_context("inflight serve", ["--trust-remote-code"])
    assert context.meta[NOTES] == [
        "--trust-remote-code: code from a model folder is never executed; "
        "checkpoints of the supported families load without it"
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
def test_sizes_are_converted(text: str, size: str) -> None:
    assert plain_size(text) == size


# ---- files and variables ----


def test_config_file_may_contain_vllm_options(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "uvicorn-log-level: trace\nkv_cache_dtype: fp8_e4m3\nenable_log_requests: false\ndtype: half\n"
        "data-parallel-size: 2\nmax-model-len: 4k\n"
    )
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_RULES) == {
        "log_level": "debug",
        "kv_cache_dtype": "fp8",
        "log_requests": False,
        "dtype": "float16",
        "replicas": 2,
        "max_model_len": 4000,
    }
    file.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError, match="--enable-lora: LoRA adapters"):
        gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_RULES)


def test_variables_and_files_accept_the_values_of_flags(tmp_path: Path) -> None:
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
    options = gather(SERVE_OPTIONS, {}, environment, compat_rules=SERVE_RULES)
    assert options == {**expected, "log_level": "debug", "kv_cache_memory": 2 << 30}
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_MAX_MODEL_LEN": "auto"}, compat_rules=SERVE_RULES) == {}
    with pytest.raises(ConfigError, match="INFLIGHT_MAX_MODEL_LEN is 'x': it must be an integer"):
        gather(SERVE_OPTIONS, {}, {"INFLIGHT_MAX_MODEL_LEN": "x"}, compat_rules=SERVE_RULES)
    file = tmp_path / "config.yaml"
    file.write_text("dtype: half\nmax_model_len: 32k\npolicy: fcfs\nreasoning-parser: qwen3\n")
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_RULES) == expected
    file.write_text("max-model-len: -1\nmax-num-batched-tokens: 4096\n")
    assert gather(SERVE_OPTIONS, {}, {}, str(file), SERVE_RULES) == {"max_num_batched_tokens": 4096}


def test_vllm_api_key_applies_unless_our_own_is_set() -> None:
    both = {"VLLM_API_KEY": "a b", "INFLIGHT_API_KEY": "c"}
    assert gather(SERVE_OPTIONS, {}, {"VLLM_API_KEY": "a b"}, compat_rules=SERVE_RULES) == {
        "api_key": ("a b",)
    }
    assert gather(SERVE_OPTIONS, {}, both, compat_rules=SERVE_RULES) == {"api_key": ("c",)}
    assert gather(SERVE_OPTIONS, {}, {"INFLIGHT_ALLOWED_ORIGINS": '["a", "b"]'}) == {
        "allowed_origins": ("a", "b")
    }


def test_variables_without_effect_are_reported() -> None:
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
    assert unused_variables(SERVE_OPTIONS, environment) == [
        "VLLM_QWERTY is set, but has no effect",
        "INFLIGHT_APIKEY is set, but has no effect: did you mean INFLIGHT_API_KEY?",
        "INFLIGHT_API_KEY is empty and has no effect",
        "INFLIGHT_QWERTY is set, but has no effect",
    ]


# ---- help and missing packages ----


@pytest.mark.parametrize(
    "command", ["serve", "bench serve", "generate", "compare", "plan", "rerank", "replicas list"]
)
def test_help_fits_80_columns_and_is_not_truncated(command: str) -> None:
    flag = "--help" if command != "serve" else "--help=all"  # vLLM's spelling
    result = CliRunner().invoke(app, [*command.split(), flag], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    if command == "serve":
        assert "inflight-llm[otel]" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("command", "module"), [("serve", "uvicorn"), ("bench serve", "httptools")])
def test_missing_server_package_says_what_to_install(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("inflight.server.run", "inflight.bench.server", "inflight.bench.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"{module} is missing: pip install 'inflight-llm[server]'"
