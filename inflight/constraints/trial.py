"""Tries grammars in a child process, which can be ended.

llguidance counts what it does and stops at its limits, almost everywhere: an intersection of a few dozen patterns keeps
it busy without end, in code that cannot be interrupted. So whatever holds regular expressions of a user is compiled in
a process of its own first. That costs a tenth of a second or two, once for each grammar; plain schemas are not tried.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SECONDS = 1
START_SECONDS = 10  # a Python on a very busy machine
MEMORY = 1 << 30  # bytes of address space
MAX_PLAIN_LENGTH = 1 << 15  # characters of a schema that needs no trial
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
_RISKY_KEYWORD = re.compile(r'"(pattern|patternProperties|allOf|multipleOf)"')
_WORKER = Path(__file__).with_name("trial_worker.py")  # which is not imported here
_places = threading.BoundedSemaphore(2)  # trials at once


def needs_trial(kind: str, grammar: str) -> bool:
    """Of a grammar that was made from what a user asked for: however it was written, keywords are spelled plainly."""
    if kind in ("choice", "json_object"):
        return False
    is_written_by_user = kind in ("regex", "grammar")
    return is_written_by_user or len(grammar) > MAX_PLAIN_LENGTH or bool(_RISKY_KEYWORD.search(grammar))


def passes_trial(grammars: Sequence[str], limits: dict[str, Any]) -> bool:
    """Whether grammars can be compiled, or be found wrong, all of them within the limits of time and memory."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-S", "-P", str(_WORKER), str(SECONDS), str(MEMORY)]
    job = json.dumps({"grammars": grammars, "limits": limits}).encode()
    with _places:
        try:
            done = subprocess.run(
                command, input=job, env=environment, capture_output=True, timeout=START_SECONDS + 2 * SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
    if done.returncode > 0:  # no limit ended it
        logger.warning("a grammar could not be tried: %s", done.stderr.decode(errors="replace")[-500:])
    return done.returncode == 0
