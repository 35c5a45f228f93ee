"""A list of everything used of uvicorn beyond its public API: an upgrade that drops something fails here."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
from types import ModuleType

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from inflight.server import run
from inflight.server.http import protocol, tls

IMPORTS = {
    ("uvicorn._types", "ASGI3Application"),
    ("uvicorn._types", "ASGIReceiveCallable"),
    ("uvicorn._types", "ASGISendCallable"),
    ("uvicorn._types", "ASGISendEvent"),
    ("uvicorn._types", "Scope"),
    ("uvicorn.protocols.http.flow_control", "HIGH_WATER_LIMIT"),
    ("uvicorn.protocols.http.flow_control", "FlowControl"),
    ("uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol"),
    ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle"),
    ("uvicorn.protocols.http.httptools_impl", "STATUS_LINE"),
}
# Methods that are overridden: a new name would silently disable the limit that the override enforces.
OVERRIDDEN = {
    HttpToolsProtocol: {
        *("__init__", "connection_made", "connection_lost", "eof_received", "data_received", "shutdown"),
        *("pause_writing", "resume_writing", "on_header", "on_headers_complete", "on_body"),
        *("on_message_complete", "on_response_complete", "send_400_response"),
        *("_start_asgi_task", "_unsupported_upgrade_warning"),
    },
    FlowControl: {"resume_reading"},
    uvicorn.Server: {"__init__", "startup", "capture_signals", "handle_exit"},
}
# Attributes that are read, set or called on instances.
USED = {
    HttpToolsProtocol: {"connections", "cycle", "flow", "headers", "loop", "pipeline", "transport", "url"},
    FlowControl: {"pause_reading", "write_paused"},
    uvicorn.Server: {"config", "server_state", "servers", "should_exit", "started"},
    RequestResponseCycle: {
        *("body", "chunked_encoding", "disconnected", "expected_content_length", "keep_alive"),
        *("message_event", "response_complete", "response_started", "scope"),
    },
}
CYCLES = ("cycle", "self.cycle", "self._answered")  # expressions that are a RequestResponseCycle
FLOWS = ("self.flow", "self._flow")


def classes(*modules: ModuleType) -> dict[str, ast.ClassDef]:
    nodes = [node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def inherited(*nodes: ast.ClassDef) -> set[str]:
    """Return the attributes of `self` that none of these classes defines or is the first to set."""
    own: set[str] = set()
    for node in nodes:
        own |= methods(node)
        for item in node.body:
            targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
    seen = {item.attr for node in nodes for item in ast.walk(node) if of_self(item)}  # type: ignore[attr-defined]
    stored = {
        item.attr  # type: ignore[attr-defined]
        for node in nodes
        for item in ast.walk(node)
        if of_self(item) and isinstance(item.ctx, ast.Store)  # type: ignore[attr-defined]
    }
    return seen - own - {name for name in stored if name.startswith("_") or name == "loading_app"}


def of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def attributes_of(module: ModuleType, *expressions: str) -> set[str]:
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in expressions
    }


def test_lists_of_uvicorn_internals_are_complete() -> None:
    nodes = classes(protocol, tls, run)
    bounded, held, secure, server = (
        nodes[name] for name in ("BoundedProtocol", "HeldFlow", "TlsProtocol", "Server")
    )
    imports = {
        (node.module, alias.name)
        for module in (protocol, tls, run)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "uvicorn"
        for alias in node.names
    }
    assert imports == IMPORTS
    for base, *own in ((HttpToolsProtocol, bounded, secure), (FlowControl, held), (uvicorn.Server, server)):
        overridden = set().union(*map(methods, own)) & OVERRIDDEN[base]
        assert overridden == OVERRIDDEN[base], "the list has methods that are not overridden"
        existing = set().union(*map(methods, own)) & set(dir(base))
        assert existing <= OVERRIDDEN[base]
    assert inherited(bounded, secure) == USED[HttpToolsProtocol]
    assert inherited(server) == USED[uvicorn.Server]
    flow = attributes_of(protocol, *FLOWS) | inherited(held)
    assert flow - methods(held) - {"is_held"} == USED[FlowControl]
    assert attributes_of(protocol, *CYCLES) == USED[RequestResponseCycle]


def missing(instance: object, names: set[str]) -> set[str]:
    return {name for name in names if not hasattr(instance, name)}


@pytest.mark.parametrize(("module", "name"), sorted(IMPORTS))
def test_uvicorn_has_the_imported_name(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


async def test_uvicorn_has_every_method_and_attribute() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    config.load()
    connection = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    connection.on_message_begin()  # sets the attributes of a request
    flow = FlowControl(asyncio.Transport())
    names = inspect.signature(RequestResponseCycle).parameters
    cycle = RequestResponseCycle(**{**dict.fromkeys(names), "scope": {}})  # type: ignore[arg-type]
    for instance in (connection, flow, server, cycle):
        kind = type(instance)
        gone = missing(kind, OVERRIDDEN.get(kind, set())) | missing(instance, USED[kind])
        gone -= {"servers"} if kind is uvicorn.Server else set()  # set by `startup`
        assert not gone, (
            f"uvicorn {uvicorn.__version__}: {kind.__name__} has no {', '.join(sorted(gone))} any more"
        )
    assert "servers" in inspect.getsource(uvicorn.Server.startup)
