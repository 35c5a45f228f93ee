"""Ctrl-C that is held until it may take effect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli import interrupts_end_at_once
from inflight.entrypoints.offline import held_interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The one before is the one after."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_interrupt_acts_where_it_is_allowed() -> None:
    done = []

    def work() -> None:
        with held_interrupts() as let_go:
            let_go()
            done.append("before")
            ctrl_c()
            done.append("the step")
            let_go()
            done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["before", "the step"]


def test_interrupt_acts_at_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with held_interrupts():
            ctrl_c()
            done.append("the last step")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the last step"]


def test_second_interrupt_acts_at_once() -> None:
    done = []

    def work() -> None:
        with held_interrupts():
            ctrl_c()
            done.append("the step")
            ctrl_c()
            done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the step"]


def test_error_takes_precedence_over_a_held_interrupt() -> None:
    def work() -> None:
        with held_interrupts():
            ctrl_c()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_cleanup_is_not_interrupted() -> None:
    done = []

    def work() -> None:
        with held_interrupts() as let_go:
            try:
                ctrl_c()
                let_go()
            finally:
                ctrl_c()
                done.append("clean")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["clean"]


def test_own_handler_is_called() -> None:
    numbers = []

    def own(number: int, _: object) -> None:
        numbers.append(number)

    signal.signal(signal.SIGINT, own)
    with held_interrupts() as let_go:
        ctrl_c()
        assert numbers == []
        let_go()
        assert numbers == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts() as let_go:
        ctrl_c()
        let_go()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_unaffected() -> None:
    done = []

    def work() -> None:
        with held_interrupts() as let_go:
            let_go()
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


# ---- imports ----


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--version"]),
        ("torch", ["generate", "-p", "x"]),
        ("torch", ["compare"]),
        ("uvicorn", ["serve", "--port", "0"]),
    ],
)
def test_interrupt_during_imports_prints_one_line(module: str, arguments: list[str], tmp_path: Path) -> None:
    """The module is one that presses it: it stands before the real one on the path."""
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    found = subprocess.run(
        [sys.executable, "-m", "inflight", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "inflight: interrupted\n")


def test_handler_is_restored_after_imports() -> None:
    with interrupts_end_at_once():
        pass
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_end_at_once():
        ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
