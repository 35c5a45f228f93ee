"""Clients in Node: scripts that are told what to ask, and print what they found as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "ai_sdk"
SECONDS = 120.0


def run_script(name: str, **told: str) -> Any:
    """What the script found. Without Node or the packages tests are skipped, but never where CI runs."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules").is_dir():
        reason = f"no Node, or not its packages: install nodejs and npm, then `npm ci` in {FOLDER.name}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    command = [node, str(FOLDER / name)]
    ended = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)
