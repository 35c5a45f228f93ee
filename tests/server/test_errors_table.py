"""The table of errors in docs/server.md has every status and code that the source has, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import inflight
from inflight.errors import (
    CheckpointChangedError,
    EngineAsleepError,
    GrammarWorkerError,
    QueueFullError,
    TemplateWorkerError,
)
from inflight.server.errors import ApiError
from tests.server.test_limits_table import PAGE, rows

PACKAGE = Path(inflight.__file__).parent
CODE = re.compile(r"`([a-z]+(?:_[a-z]+)*)`")
BELOW = ("frontend", "agents", "constraints", "text", "router", "engine")
LEFT = 499  # the client has disconnected: nobody reads it

INSIDE = {"aborted", "logits_not_finite"}  # sent as `cancelled` and as `engine_error`
# Codes that are not a literal beside the status: those of exceptions, or chosen before.
ELSEWHERE = {
    400: {
        *(
            "context_length_exceeded",
            "too_many_listed_tokens",
            "too_many_logprobs",
            "unsupported_task",
            "no_token_allowed",
        ),
        *("unsupported_keyword", "invalid_constraint", "constraint_too_complex", "constraints_unavailable"),
        *("tools_unavailable", "constraint_failed", "unsupported", "last_replica", "replica_missing"),
        CheckpointChangedError.code,
    },
    401: {"missing_api_key", "invalid_api_key", "invalid_admin_key"},
    429: {QueueFullError.code},
    503: {TemplateWorkerError.code, GrammarWorkerError.code, EngineAsleepError.code},
}


def table() -> dict[int, tuple[str, set[str]]]:
    """Return the type and codes of each status."""
    section = PAGE.partition("## Errors\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table_rows = {}
    for line in lines[2:]:
        status, kind, codes = (cell.strip() for cell in line.strip("|").split("|"))
        table_rows[int(status)] = kind.strip("`"), set(CODE.findall(codes)) - {"param"}
    return table_rows


def named(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def literal(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def calls_of(folder: str) -> list[ast.Call]:
    trees = (ast.parse(path.read_text()) for path in sorted((PACKAGE / folder).rglob("*.py")))
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


def code_of(call: ast.Call) -> Any:
    return next((literal(keyword.value) for keyword in call.keywords if keyword.arg == "code"), None)


def source() -> dict[int, set[str]]:
    """Return the codes of each status."""
    codes_by_status: dict[int, set[str]] = defaultdict(set)
    for call in calls_of("server"):
        if named(call) == "ApiError" and isinstance(status := literal(call.args[0]), int):
            codes_by_status[status] |= {code_of(call)} - {None}
    for status, codes in ELSEWHERE.items():
        codes_by_status[status] |= codes
    del codes_by_status[LEFT]
    return dict(codes_by_status)


def test_error_table_has_every_status_and_code() -> None:
    assert {status: codes for status, (_, codes) in table().items()} == source()


def test_error_table_has_the_types_of_responses() -> None:
    for status, (kind, _) in table().items():
        assert f'"type":"{kind}"'.encode() in ApiError(status, "").body()


def test_error_table_has_codes_of_lower_packages() -> None:
    documented = {code for _, codes in table().values() for code in codes}
    below = {code_of(call) for folder in BELOW for call in calls_of(folder)} - {None}
    assert below - documented == INSIDE


def test_limits_table_uses_codes_of_the_error_table() -> None:
    documented = {code for _, codes in table().values() for code in codes}
    assert {code for *_, answer in rows() for code in CODE.findall(answer)} <= documented
