"""An engine process with another clock, as on another machine."""

from __future__ import annotations

import time

AHEAD = 1e6  # seconds


def main() -> None:
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + AHEAD
    from inflight.engine.remote import worker

    worker.main()


if __name__ == "__main__":
    main()
