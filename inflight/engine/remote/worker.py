"""The engine process: builds a core as it is told, and runs a loop over it until it is told to stop.

Started by `engine/remote/child_process.py`, or by Ray (`ray_cluster/actor.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.engine.remote.engine_loop import EngineLoop
from inflight.engine.remote.sockets import EngineSockets
from inflight.engine.remote.wire import ConnectionInfo, Failed, Progress, Ready, RemoteError, Start, Stopped
from inflight.logs import configure_logging
from inflight.processes.parent_watch import die_with, ignore_signals, reporting_input
from inflight.registry import Registry

logger = logging.getLogger("inflight.engine.remote.worker")  # as the main module it would be called __main__

Build = Callable[[EngineConfig, Callable[[int, int], None]], tuple[EngineCore, ModelFacts]]
BUILDERS: Registry[Build] = Registry("builder", {"model": "inflight.loading:load_core"})


def main() -> int:
    ignore_signals()
    preload = threading.Thread(target=_preload, daemon=True)
    if "--preload" in sys.argv[1:]:
        preload.start()
    line = sys.stdin.buffer.readline()
    if not line:  # whoever started this one was told to stop meanwhile
        return 0
    if preload.ident is not None:
        preload.join()  # two threads that import the same packages may meet half-imported ones
    connection = msgspec.json.decode(line, type=ConnectionInfo)
    die_with(connection.parent_id)
    return serve(connection)


def _preload() -> None:
    """Import what loading a model needs. An error is raised again, and reported, where the import is needed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("inflight.loading")


def serve(connection: ConnectionInfo) -> int:
    """An engine for whoever is at the other end, until told to stop. The code that its process is to end with."""
    configure_logging(connection.log_level, connection.log_format, process="engine")
    sockets = EngineSockets(connection)
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
        last = Progress(0, 0)

        def tell(num_done: int, num_total: int) -> None:
            nonlocal last
            last = Progress(num_done, num_total)
            sockets.send(last)

        with reporting_input(lambda: sockets.send(last), start.heartbeat):
            core, facts = BUILDERS.get(start.build)(config, tell)
    except Exception as error:
        logger.debug("the engine could not be built", exc_info=True)
        sockets.send(Failed(RemoteError.of(error)))
        return 1
    if sockets.is_remote:  # records have times of one clock: the front's
        core.clock = lambda: time.monotonic() + ahead
    # What is there now stays until the end: no collection need look at it. Later ones wait for their time.
    gc.collect()
    gc.freeze()
    gc.disable()
    loop = EngineLoop(core, sockets)
    _in_thread(lambda: _send_heartbeats(sockets, loop, start.heartbeat), "heartbeat")
    sockets.send(Ready(facts, core.stats()))
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine loop stopped")
        sockets.send(
            Stopped(f"the engine stopped: {RemoteError.of(error).kind}: {RemoteError.of(error).text}")
        )
        return 1
    core.close()
    return 0


def _send_heartbeats(sockets: EngineSockets, loop: EngineLoop, interval: float) -> None:
    while True:
        with contextlib.suppress(zmq.ZMQError):  # the socket was closed
            sockets.send(loop.heartbeat())
        time.sleep(interval)


def _in_thread(function: Callable[[], None], name: str) -> None:
    threading.Thread(target=function, name=f"inflight-{name}", daemon=True).start()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the system takes back memory faster than the libraries do
