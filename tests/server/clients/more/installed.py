"""Clients that cannot share the packages of .venv. `make test-clients` installs each into its own folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.missing import missing

FOLDER = Path(__file__).parents[4] / "build" / "clients"
SECONDS = 240.0


def run_client(name: str, *words: str, home: Path, **variables: str) -> str:
    """Return what a client prints. It runs in `home`, a folder of the test's own."""
    packages = FOLDER / name
    if not (packages / ".installed").exists():
        missing(f"{name} is not installed: make test-clients")
    environment = os.environ | {"PYTHONPATH": str(packages), "HOME": str(home)} | variables
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
