"""Clients in Node: scripts that read their task from the environment and print their results as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.missing import missing

FOLDER = Path(__file__).parent / "ai_sdk"
SECONDS = 240.0


def run_script(name: str, **environment: str) -> Any:
    """Return what the script printed."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules").is_dir():
        missing("no Node, or not its packages: install nodejs and npm, then `make test-clients`")
    command = [node, str(FOLDER / name)]
    ended = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)
