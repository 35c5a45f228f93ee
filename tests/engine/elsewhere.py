"""An engine process as on another machine, whose clock shows another time."""

from __future__ import annotations

import sys
import time

AHEAD = 1e6  # seconds


def main() -> int:
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + AHEAD
    from inflight.engine.remote import worker

    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
