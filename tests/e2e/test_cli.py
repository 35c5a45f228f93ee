"""The command line, mostly within this process; as its own process where that is the point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import inflight
from inflight import LLM, SamplingParams
from inflight.cli.main import app, main
from inflight.engine.core import EngineCore
from inflight.errors import ConfigError
from tests.e2e.conftest import Folder

TEXT = "The quick brown fox"
GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


def run(*arguments: object, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def expected(folder: Path, prompts: list[Any]) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].text for output in LLM(folder).generate(prompts, params)]


def test_one_prompt_prints_its_answer_and_nothing_else(folder: Folder) -> None:
    result = run("generate", folder(), "-p", TEXT, *GREEDY)
    assert result.exit_code == 0
    assert result.stdout == expected(folder(), [TEXT])[0] + "\n"


def test_several_prompts_print_json_lines(folder: Folder) -> None:
    prompts = [TEXT, "A batch", "Numbers such as 12"]
    prompt_options = [argument for prompt in prompts for argument in ("-p", prompt)]
    result = run("generate", folder(), *prompt_options, *GREEDY, "--json", "--logprobs", 1, "-n", 2)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line, text in zip(lines, expected(folder(), prompts), strict=True):
        assert len(line["outputs"]) == 2
        answer = line["outputs"][0]
        assert answer["text"] == text
        assert answer["finish_reason"] == "length"
        assert answer["error"] is None
        assert [next(iter(position)) for position in answer["logprobs"]] == [
            str(token_id) for token_id in answer["token_ids"]
        ]
        assert line["num_prompt_tokens"] > 0
        assert 0 <= line["seconds"]["first_token"] <= line["seconds"]["total"]


def test_prompts_are_read_from_a_file_and_standard_input(folder: Folder, tmp_path: Path) -> None:
    text = f"{TEXT}\n\nA batch\n"
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    from_file = run("generate", folder(), "--prompts-file", file, *GREEDY)
    from_stdin = run("generate", folder(), "--prompts-file", "-", *GREEDY, stdin=text)
    assert from_file.stdout == from_stdin.stdout
    for prompt, answer in zip((TEXT, "A batch"), expected(folder(), [TEXT, "A batch"]), strict=True):
        assert f"── {prompt}\n{answer}\n" in from_file.stdout


def test_chat_uses_the_template(folder: Folder) -> None:
    result = run("generate", folder(), "--chat", "-p", "hello", *GREEDY)
    assert result.stdout == expected(folder(), ["<|user|>hello<|end|><|assistant|>"])[0] + "\n"


def test_template_flag_overrides_the_checkpoint(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    for template in (file, file.read_text()):
        result = run("generate", folder(), "--chat", "--chat-template", template, "-p", "hello", *GREEDY)
        assert result.stdout == expected(folder(), ["hello!"])[0] + "\n"
    with pytest.raises(ConfigError, match=r"chat_template is '.*nowhere': it must be .* \(No such file"):
        run("generate", folder(), "--chat", "--chat-template", tmp_path / "nowhere", "-p", "hello")


def test_answers_are_printed_unchanged(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No colour, no emoji codes, no wrapping."""
    from inflight.frontend.text.detokenizer import IncrementalDetokenizer

    text = ":smile: [red]x[/red] " + "long " * 100
    monkeypatch.setattr(IncrementalDetokenizer, "push", lambda _, ids: text if ids else "")
    monkeypatch.setattr(IncrementalDetokenizer, "flush", lambda _: "")
    assert run("generate", folder(), "-p", TEXT, *GREEDY).stdout == text + "\n"


def test_options_override_the_checkpoints_defaults(folder: Folder, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5, "do_sample": false}')
    arguments = ("generate", tmp_path, "-p", TEXT, "--json", "--ignore-eos")
    (short,) = [json.loads(line)["outputs"][0] for line in run(*arguments).stdout.splitlines()]
    assert len(short["token_ids"]) == 5
    (longer,) = [
        json.loads(line)["outputs"][0] for line in run(*arguments, "--max-tokens", 7).stdout.splitlines()
    ]
    assert len(longer["token_ids"]) == 7


def test_version_and_help_are_printed() -> None:
    assert run("--version").stdout == f"inflight {inflight.__version__}\n"
    text = run("generate", "--help").stdout
    for option in ("--prompt", "--max-tokens", "--temperature", "--policy", "--kv-cache-memory"):
        assert option in text
    nothing = run()
    assert "generate" in nothing.output


# ---- errors ----


def error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> str:
    """Run `main`, which must exit with status 1, and return its only line on standard error."""
    monkeypatch.setattr(sys, "argv", ["inflight", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("inflight: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", TEXT, "--temperature", "-1"), "temperature is -1.0"),
        (("-p", TEXT, "--top-p", "nan"), "top_p is nan"),
        (("-p", ""), "the prompt is empty"),
        (("-p", TEXT, "-p", "", "-p", TEXT), "in prompt 1 of 3"),
        (("-p", TEXT, "--policy", "best"), "unknown policy 'best'"),
        (("-p", TEXT, "--max-model-len", "100000"), "max_model_len is 100000"),
        (("-p", TEXT, "--kv-cache-memory", "10"), "10 bytes"),
        (("-p", TEXT, "--dtype", "int4"), "dtype is 'int4'"),
        (("--prompts-file", "/no/such/file"), "/no/such/file"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    words: str,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert words in error_line(monkeypatch, capsys, "generate", folder(), *arguments)


def test_prompts_file_that_is_not_text_is_an_error(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error_line(
        monkeypatch, capsys, "generate", folder(), "--prompts-file", tmp_path / "x"
    )


def test_missing_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(monkeypatch, capsys, "generate", tmp_path / "nowhere", "-p", TEXT)
    assert "does not exist" in line


def test_answers_that_failed_are_an_error(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are printed all the same."""
    from inflight.execution.runner import ModelRunner
    from inflight.execution.step import NOT_FINITE

    real = ModelRunner.collect

    def collect(runner: ModelRunner, handle: Any) -> Any:
        sampled = real(runner, handle)
        sampled.errors[0] = NOT_FINITE
        monkeypatch.setattr(ModelRunner, "collect", real)
        return sampled

    monkeypatch.setattr(ModelRunner, "collect", collect)
    monkeypatch.setattr(
        sys, "argv", ["inflight", "generate", str(folder()), "-p", TEXT, "-p", TEXT, *GREEDY, "--json"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    first, second = (json.loads(line)["outputs"][0] for line in captured.out.splitlines())
    assert (first["finish_reason"], first["error"]) == ("error", "the model's logits are not finite")
    assert second["text"] == expected(folder(), [TEXT])[0]
    assert "1 answers failed" in captured.err


def test_no_prompt_is_a_usage_error(folder: Folder) -> None:
    result = run("generate", folder())
    assert result.exit_code == 2
    assert "--prompts-file" in result.output


def test_interrupt_exits_with_one_line(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: EngineCore) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineCore, "step", interrupted)
    monkeypatch.setattr(sys, "argv", ["inflight", "generate", str(folder()), "-p", TEXT])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


# ---- as a process ----


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "inflight.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_command_works_as_a_process(folder: Folder) -> None:
    process = start("generate", folder(), "-p", TEXT, *GREEDY)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out == expected(folder(), [TEXT])[0] + "\n"


def test_ctrl_c_ends_a_process_quietly(folder: Folder) -> None:
    many = [argument for i in range(2000) for argument in ("-p", f"{i} and so on")]
    policy = "tests.e2e.policies:AnnouncingPolicy"
    process = start("generate", folder(), *many, "--ignore-eos", "--policy", policy)
    assert process.stderr is not None
    assert process.stderr.readline() == "the first step\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
