"""Ctrl-C while a command imports what it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli import interrupts_end_at_once


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The one before is the one after."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


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
