"""The processes that this one has started."""

from __future__ import annotations

import os
from pathlib import Path


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}
