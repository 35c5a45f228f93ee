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

from inflight.interrupts import held_interrupts, interrupts_end_at_once


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The one before is the one after."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_takes_effect_where_it_may() -> None:
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


def test_or_at_the_end() -> None:
    done = []

    def work() -> None:
        with held_interrupts():
            ctrl_c()
            done.append("the last step")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the last step"]


def test_the_second_is_not_held() -> None:
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


def test_an_error_goes_before() -> None:
    def work() -> None:
        with held_interrupts():
            ctrl_c()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_what_cleans_up_is_not_cut_short() -> None:
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


def test_a_handler_of_ones_own_is_called() -> None:
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


def test_an_ignored_one_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts() as let_go:
        ctrl_c()
        let_go()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_have_none() -> None:
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
def test_ctrl_c_while_imports_last_is_one_line(module: str, arguments: list[str], tmp_path: Path) -> None:
    """The module is one that presses it: it stands before the real one on the path."""
    (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    found = subprocess.run(
        [sys.executable, "-m", "inflight", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "inflight: interrupted\n")


def test_after_imports_it_is_as_before() -> None:
    with interrupts_end_at_once():
        pass
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_end_at_once():
        ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
