"""The entry point of `inflight` and `python -m inflight`. Ctrl-C during the imports exits quietly."""

from __future__ import annotations

from inflight.cli import interrupts_end_at_once


def main() -> None:
    with interrupts_end_at_once():
        from inflight.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
