"""The collector of garbage, which looks at every object there is, kept out of the middle of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Within this, no cycles are looked for: thousands of requests are thousands of objects that stay, and a run makes
    next to no cycles. It leaves the process as it found it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
