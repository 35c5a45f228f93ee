"""The child process that renders chat templates, run as a script by `chat_template.py`.

A template is a program from a checkpoint. Jinja's sandbox keeps it away from the machine, but does not stop it from
looping forever or building a string of gigabytes inside one C call, which no hook, deadline or injected exception of
the same process could interrupt. In a separate process the kernel enforces the limits: address space, and an alarm that
ends the process even if its parent is gone.

Apart from `sandbox_worker.py`, only the standard library and jinja2 are imported, so that starting takes a tenth of a
second.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from inflight.processes.sandbox_worker import isolate, serve

MAX_ERROR_CHARACTERS = 2000


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    chunks = []
    remaining = max_characters
    for chunk in compiled(source).generate(variables):
        chunks.append(chunk)
        remaining -= len(chunk)
        if remaining < 0:
            raise jinja2.TemplateRuntimeError(
                f"its output is longer than the limit of {max_characters} characters"
            )
    return "".join(chunks)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return `text`, or `error`, or `rejected` if the template itself raised an exception."""
    try:
        return {"text": render(request["source"], request["variables"], request["max_characters"])}
    except MemoryError:
        # The heap may stay close to its limit: the next rendering needs a fresh process.
        return {"error": "it needs more memory than its limit", "exhausted": "yes"}
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"[:MAX_ERROR_CHARACTERS]}
    except jinja2.TemplateError as error:
        outcome = "rejected" if type(error) is jinja2.TemplateError else "error"
        return {outcome: str(error)[:MAX_ERROR_CHARACTERS]}
    except Exception as error:  # a template can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}


def main() -> None:
    isolate()
    limit = int(sys.argv[1])
    with contextlib.suppress(ValueError, OSError):  # some systems lack this limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    serve(answer, signal.ITIMER_REAL)


if __name__ == "__main__":
    main()
