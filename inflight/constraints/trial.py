"""Tries grammars in a child process, which can be ended.

llguidance counts what it does and stops at its limits, almost everywhere: an intersection of a few dozen patterns keeps
it busy without end, in code that cannot be interrupted. So whatever holds regular expressions of a user is compiled in
a process of its own first. That costs a tenth of a second or two, once for each grammar; plain schemas are not tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading

from inflight.constraints import trial_worker
from inflight.structured_outputs import StructuredOutputs

SECONDS = 2
MEMORY = 1 << 30  # bytes of address space
MAX_PLAIN_LENGTH = 1 << 15  # characters of a schema that needs no trial
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
_PLAIN = {"json", "json_object", "choice", "structural_tag"}
_RISKY_KEYWORD = re.compile(r'"(pattern|patternProperties|allOf|multipleOf)"')
_places = threading.BoundedSemaphore(2)  # trials at once


def needs_trial(asked: StructuredOutputs) -> bool:
    if asked.kind == "choice":
        return False
    return (
        asked.kind not in _PLAIN
        or len(asked.text) > MAX_PLAIN_LENGTH
        or _RISKY_KEYWORD.search(asked.text) is not None
    )


def passes_trial(grammar: str, limits: dict[str, int]) -> bool:
    """Whether a grammar can be compiled, or be found wrong, within the limits of time and memory."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-S", "-P", trial_worker.__file__, str(SECONDS), str(MEMORY)]
    job = json.dumps({"grammar": grammar, "limits": limits}).encode()
    with _places:
        try:
            done = subprocess.run(
                command, input=job, env=environment, capture_output=True, timeout=2 * SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
