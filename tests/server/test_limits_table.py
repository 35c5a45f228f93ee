"""The table of limits in docs/server.md is complete and matches the declarations."""

from __future__ import annotations

import re
from pathlib import Path

import inflight
from inflight.constraints.validator import ATTEMPT_SECONDS, MAX_PER_OWNER, MAX_WAITING, TRIAL_SECONDS
from inflight.frontend.text.chat_template import MAX_MESSAGES, RenderLimits
from inflight.option import LIMITS
from inflight.request import MAX_SALT_LENGTH, MAX_TENANT_LENGTH
from inflight.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from inflight.server.config import SERVE_OPTIONS
from inflight.server.http.bodies import MAX_PARTS, MAX_VALUES, PIECE
from inflight.server.http.limits import MAX_RESERVED, MIN_PROGRESS, ConnectionSlots
from inflight.server.openai.responses.conversation import MAX_REPEATED_CHARACTERS
from inflight.server.openai.responses.store import MAX_PAGE_BYTES
from inflight.server.openai.schemas import MAX_ARGUMENTS
from inflight.server.routes.requests import MAX_ANSWERS, MAX_LISTED
from inflight.server.routes.timeline import MAX_VIEWERS
from inflight.server.state import TEXT_THREADS

PACKAGE = Path(inflight.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "server.md").read_text()
FLAG = re.compile(r"`(--[a-z-]+)`")
RENDER = RenderLimits()
BYTES = {"max_body_size", "max_header_size", "max_stored_bytes", "max_unsent_bytes"}

# What the table says where the declaration's default is not all of it, or there is no declaration.
AT_MOST = {
    "max_logprobs": f"20, at most {MAX_LOGPROBS}",
    "max_stop_strings": f"16, at most {MAX_STOP_STRINGS}",
    "max_stop_length": f"256, a stop string's at most {MAX_STOP_LENGTH:,}",
}
CONSTANTS = {
    "keys, objects and lists in a body, together": f"{MAX_PARTS:,}",
    "values in a body, such as token ids": f"{MAX_VALUES:,}",
    "a conversation of `/v1/responses`, with the turns and items it refers to": "the limits of one body",
    "size of a page of `input_items`, of requests, and of the answers in a report": (
        f"{MAX_PAGE_BYTES >> 20} MiB, but at least one item"
    ),
    "requests on a page, answers on a page of a report": f"{MAX_LISTED:,}, {MAX_ANSWERS}",
    "lists and reports of requests that a key reads at the same time": "1",
    "pipelined requests behind the one being answered": "1",
    "connections reserved for `GET /health` and `/ready`": f"an eighth, at most {MAX_RESERVED}",
    "`n`, whatever `--max-answers`": str(MAX_N),
    "bad words": f"{MAX_BAD_WORDS:,}",
    "messages of a conversation": f"{MAX_MESSAGES:,}",
    "characters of what `/v1/responses` repeats in its answers (`tools`, `tool_choice`, `text`, `prompt_cache_key`)": (
        f"{MAX_REPEATED_CHARACTERS:,}"
    ),
    "arguments for a chat template": str(MAX_ARGUMENTS),
    "characters of `user`, and of `cache_salt`": f"{MAX_TENANT_LENGTH}, {MAX_SALT_LENGTH}",
    "a chat template's time, output, and input as JSON": (
        f"{RENDER.seconds:g} s, {RENDER.max_characters >> 20} Mi characters, {RENDER.max_input_bytes >> 20} MiB"
    ),
    "chat templates rendered at the same time": str(RENDER.max_workers),
    "characters of a prompt, with the tools and calls that its template renders": (
        "as many as tokens of the context can spell"
    ),
    f"threads that render and tokenize, of {TEXT_THREADS}, for one of several keys": str(TEXT_THREADS - 1),
    "CPU time to compile one new grammar, and all that are tried for a request": (
        f"{ATTEMPT_SECONDS:g} s, {TRIAL_SECONDS:g} s"
    ),
    "new grammars of a tenant that are compiled at the same time, and that wait": f"{MAX_PER_OWNER}, {MAX_WAITING}",
    "rate and concurrency of a key": "none",
    "readers of `/v1/steps`, for each key and API worker": str(MAX_VIEWERS),
    "traces being written, for each key and API worker": "1",
}
ELSEWHERE = {"request_history", "shutdown_timeout"}  # limits of other groups of options


def rows() -> list[list[str]]:
    section = PAGE.partition("## Limits\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def declared(name: str) -> str:
    option = SERVE_OPTIONS[name]
    default = option.default
    if name in AT_MOST:
        assert AT_MOST[name].startswith(str(default))
        return AT_MOST[name]
    if default is None:
        return option.unset
    if name in BYTES:
        return f"{default >> 20} MiB" if default >= 1 << 20 else f"{default >> 10} KiB"
    return f"{default:,g} s" if option.unit == "seconds" else f"{default:,}"


def test_limits_table_matches_the_declarations() -> None:
    by_flag, others = {}, {}
    for what, flag, default, _ in rows():
        match = FLAG.fullmatch(flag)
        if match is not None:
            by_flag[match[1].removeprefix("--").replace("-", "_")] = default
        else:
            others[what] = default
    limits = [
        option
        for option in SERVE_OPTIONS.values()
        if option.panel == LIMITS and option.value_type is not bool
    ]
    options = {option.name for option in limits} | ELSEWHERE
    assert by_flag == {name: declared(name) for name in options}
    assert others == CONSTANTS


def test_limits_table_has_the_right_figures() -> None:
    text = "\n".join(" ".join(row) for row in rows())
    assert f"answers over {PIECE >> 10} KiB" in text
    assert f"(less than {MIN_PROGRESS >> 10} KiB)" in text
    assert ConnectionSlots(max_connections=80).num_reserved == 10
    assert f"after {RENDER.seconds:g} s" in text
