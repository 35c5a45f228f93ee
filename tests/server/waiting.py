"""A policy that is not made before a file is there: so long does the model load."""

from __future__ import annotations

import os
import time
from pathlib import Path

from inflight.scheduling.policies.continuous import Continuous

POLICY = "tests.server.waiting:Waiting"
VARIABLE = "TESTS_WAIT_FOR"  # names the file


class Waiting(Continuous):
    def __init__(self) -> None:
        super().__init__()
        while not Path(os.environ[VARIABLE]).exists():
            time.sleep(0.01)
