"""What Ray runs on the machine that it has chosen: the engine process of `engine/remote/worker.py`, as an actor.

Ray starts, places and ends it. Tokens do not go through Ray: the engine connects to the server by itself, and speaks
with it as a child process does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version


class EngineActor:
    def run(self, connection: bytes, environment: Mapping[str, str], wanted: str) -> str:
        """Serve until told to stop. Says why it ended. `wanted` is the server's version."""
        found = installed_version()
        if found != wanted:
            return f"its node has inflight {found}, and the server {wanted}"
        os.environ.update(environment)  # before libraries read it

        import msgspec

        from inflight.engine.remote.worker import serve
        from inflight.processes.channel import ConnectionInfo

        return f"it returned {serve(msgspec.json.decode(connection, type=ConnectionInfo))}"


def installed_version() -> str:
    return version("inflight-llm")
