"""What `inflight` and `python -m inflight` start: nothing is imported before Ctrl-C has a quiet end."""

from __future__ import annotations

from inflight.interrupts import interrupts_end_at_once


def main() -> None:
    with interrupts_end_at_once():
        from inflight.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
