"""Clients that cannot be installed beside the rest: `make clients` gives each a folder of packages, which come before
those of this Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.missing import missing

FOLDER = Path(__file__).parent.parent.parent.parent / "build" / "clients"
SECONDS = 240.0


def run_client(name: str, *words: str, home: Path, **told: str) -> str:
    """What a client prints. Its home, in which it runs, is a folder of the test's own."""
    packages = FOLDER / name
    if not (packages / ".installed").exists():
        missing(f"{name} is not installed: make clients")
    environment = os.environ | {"PYTHONPATH": str(packages), "HOME": str(home)} | told
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
