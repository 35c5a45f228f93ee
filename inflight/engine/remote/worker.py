"""The engine process: it builds an engine core and runs the engine loop until it receives `Stop`.

Started by `supervisor.py`, or by Ray (`router/ray_cluster/actor.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import zmq

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.engine.remote.engine_loop import EngineLoop
from inflight.engine.remote.wire import EngineSockets, Failed, Progress, Ready, Start, Stopped, ToEngine
from inflight.logs import configure_logging
from inflight.processes.channel import ConnectionInfo, RemoteError
from inflight.processes.child import reporting_input, run_child
from inflight.registry import Registry

logger = logging.getLogger("inflight.engine.remote.worker")  # __name__ is __main__ here

Build = Callable[[EngineConfig, Callable[[int, int], None]], tuple[EngineCore, ModelFacts]]
BUILDERS: Registry[Build] = Registry("builder", {"model": "inflight.loading.load:load_core"})


def main() -> NoReturn:
    preload = threading.Thread(target=_preload, daemon=True)

    def work(connection: ConnectionInfo) -> int:
        if preload.ident is not None:
            preload.join()  # two threads that import the same packages may see half-imported ones
        return serve(connection)

    run_child(
        ConnectionInfo, work, while_waiting=preload.start if "--preload" in sys.argv[1:] else lambda: None
    )


def _preload() -> None:
    """Import what loading a model needs. An error is raised again where the import is needed, and reported there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("inflight.loading.load")


def serve(connection: ConnectionInfo) -> int:
    """Serve an engine until the other end sends `Stop`. Return the exit code for the process."""
    configure_logging(connection.log_level, connection.log_format, process="engine")
    sockets = EngineSockets(connection, ToEngine)
    try:
        return _serve(sockets)
    finally:
        sockets.close()


def _serve(sockets: EngineSockets) -> int:
    start = sockets.receive(wait=True)
    while not isinstance(start, Start):
        start = sockets.receive(wait=True)
    ahead = start.now - time.monotonic() if sockets.is_remote else 0.0
    try:
        config = EngineConfig.create(**start.options)
        latest = Progress(0, 0)

        def report(num_done: int, num_total: int) -> None:
            nonlocal latest
            latest = Progress(num_done, num_total)
            sockets.send(latest)

        with reporting_input(lambda: sockets.send(latest), start.heartbeat):
            core, facts = BUILDERS.get(start.build)(config, report)
    except Exception as error:
        logger.debug("the engine could not be built", exc_info=True)
        sockets.send(Failed(RemoteError.from_exception(error)))
        return 1
    if sockets.is_remote:  # all times in records are the client's
        core.clock = lambda: time.monotonic() + ahead
    # The objects that exist now stay until the end, so collections can skip them. The loop chooses when to collect.
    gc.collect()
    gc.freeze()
    gc.disable()
    core.record(start.generation)
    loop = EngineLoop(core, sockets)
    arguments = sockets, loop, start.heartbeat
    threading.Thread(target=_send_heartbeats, args=arguments, name="inflight-heartbeat", daemon=True).start()
    sockets.send(Ready(facts, core.stats()))
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine loop stopped")
        described = RemoteError.from_exception(error)
        sockets.send(Stopped(f"the engine stopped: {described.class_name}: {described.text}"))
        return 1
    core.close()
    return 0


def _send_heartbeats(sockets: EngineSockets, loop: EngineLoop, interval: float) -> None:
    while True:
        with contextlib.suppress(zmq.ZMQError):  # the socket was closed
            sockets.send(loop.heartbeat())
        time.sleep(interval)


if __name__ == "__main__":
    main()
