"""The Ray actor that runs the engine process of `engine/remote/worker.py` on a machine of the cluster.

Ray starts, places and stops it. Tokens do not go through Ray: the engine connects to the server and talks to it like a
child process. This module imports nothing heavy, so that the environment is set before libraries read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version


class EngineActor:
    def run(self, connection: bytes, environment: Mapping[str, str], server_version: str) -> str:
        """Serve until stopped, and return why it ended."""
        own_version = installed_version()
        if own_version != server_version:
            return f"its node has inflight {own_version}, and the server has {server_version}"
        os.environ.update(environment)  # before libraries read it

        import msgspec

        from inflight.engine.remote.worker import serve
        from inflight.processes.channel import ConnectionInfo

        return f"it returned {serve(msgspec.json.decode(connection, type=ConnectionInfo))}"


def installed_version() -> str:
    return version("inflight-llm")
