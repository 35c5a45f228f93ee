"""The reference of the command line and of the Python API as Markdown, made from the code for `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

import inflight
from inflight import errors
from inflight.cli.main import app
from inflight.scoring import ClassifyParams, EmbedParams, ScoreParams, parameter_help
from tools.options_page import table_cell

LINE = 100  # signatures that are longer get one line for each parameter
_CODE = re.compile(r"(`[^`]*`)")

_CLI_INTRO = """\
# Command line

Made from the commands. [Options](../options.md) has those of `inflight serve` with what each may be; they can also be
given as variables and in a file.
"""
_API_INTRO = """\
# Python API

Made from the code: what `from inflight import ...` finds. `LLM(...)` and `AsyncEngine.start(...)` take the engine's
[options](../options.md) as arguments.
"""


# ---- the command line ----


def cli_page() -> str:
    """Every command with its arguments and options."""
    return "\n".join([_CLI_INTRO, *_command("inflight", typer.main.get_command(app))])


def _command(name: str, command: Any) -> Iterator[str]:
    children = getattr(command, "commands", {})
    if not children:
        yield from _one_command(name, command)
    for child, found in children.items():
        yield from _command(f"{name} {child}", found)


def _one_command(name: str, command: Any) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield f"{_prose(inspect.cleandoc(command.help or ''))}\n"
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    for item in arguments:
        yield f"`{_argument(item)}`: {_prose(item.help or '')} {_default(item, 'Without it: {}.')}\n"
    panels: dict[str, list[Any]] = {}
    for item in command.params:
        if item.param_type_name == "option" and not item.hidden:
            panels.setdefault(item.rich_help_panel or "Options", []).append(item)
    for panel, items in panels.items():
        yield f"**{panel}**\n"
        yield "| option | default | what it is |\n| --- | --- | --- |"
        for item in items:
            names = ", ".join(f"`{flag}`" for flag in (*item.opts, *item.secondary_opts))
            metavar = f" {table_cell(item.metavar)}" if item.metavar else ""
            yield f"| {names}{metavar} | {table_cell(_default(item))} | {table_cell(item.help or '')} |"
        yield ""


def _argument(item: Any) -> str:
    name = (item.metavar or item.name or "").upper()
    return name if item.required else f"[{name}]"


def _default(item: Any, form: str = "{}") -> str:
    """As the help shows it, which may be words for what None means."""
    if isinstance(item.show_default, str):
        return form.format(item.show_default)
    if not item.show_default or item.default is None or item.default in ((), []):
        return ""
    shown = item.default
    return form.format(str(shown).lower() if isinstance(shown, bool) else shown)


# ---- Python ----


def api_page() -> str:
    """Every public class with its methods, and the tree of errors."""
    parts = [_API_INTRO]
    for name in inflight.__all__:
        found = getattr(inflight, name)
        if inspect.isclass(found):
            parts += _class(name, found)
    parts.append("## Scoring parameters\n\nKeyword arguments of `embed`, `classify`, `score` and `rerank`.\n")
    for params in (EmbedParams, ClassifyParams, ScoreParams):
        parts += [f"### `{params.__name__}`\n", f"{inspect.cleandoc(params.__doc__ or '')}\n"]
        parts += [f"- `{name}`: {_prose(text)}" for name, text in parameter_help(params).items()] + [""]
    tree = inspect.cleandoc(errors.__doc__ or "")
    parts.append(f"## Errors\n\n```text\n{tree}\n```\n")
    return "\n".join(parts)


def _class(name: str, found: type) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield _signature(name, found)
    yield _doc(found)
    for member, value in _members(found):
        if isinstance(value, property):
            yield f"### `{name}.{member}`\n"
            returns = inspect.signature(value.fget).return_annotation if value.fget else ""
            yield f"```python\n{name}.{member}: {returns}\n```\n"
        else:
            yield f"### `{name}.{member}()`\n"
            # The class is no argument of a class method, nor the object one of a method.
            function = getattr(found, member)
            yield _signature(member, function, skip_first=inspect.isfunction(function))
        yield _doc(value)


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that this package defines, in the order in which they are written."""
    seen: set[str] = set()
    for owner in found.__mro__:
        if not owner.__module__.startswith("inflight."):
            continue
        for member, value in vars(owner).items():
            public = not member.startswith("_") and member not in seen
            if public and (
                isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
            ):
                seen.add(member)
                yield member, value


class _Annotation(str):
    """A type as it is written, without the quotes of a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(name: str, function: Any, skip_first: bool = False) -> str:
    found = inspect.signature(function)
    parameters = [
        item.replace(annotation=_written(item.annotation), default=_shown(item.default))
        for item in found.parameters.values()
    ]
    is_class = inspect.isclass(function)
    found = found.replace(
        parameters=parameters[skip_first:],
        return_annotation=found.empty if is_class else _written(found.return_annotation),
    )
    prefix = "async " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    text = f"{prefix}{name}{found}"
    if len(text) > LINE:
        inner = "".join(f"    {item},\n" for item in _listed(found))
        end = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
        text = f"{prefix}{name}(\n{inner}){end}"
    return f"```python\n{text}\n```\n"


def _listed(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for item in signature.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or item.kind in (item.KEYWORD_ONLY, item.VAR_POSITIONAL)
        yield str(item)


def _written(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _shown(default: Any) -> Any:
    """Defaults of dataclasses that are made anew for each object have no text of their own."""
    made = dataclasses.fields.__module__ == type(default).__module__ or repr(default) == "<factory>"
    return _Annotation("...") if made else default


def _doc(found: Any) -> str:
    """A docstring; examples of a Python prompt are code."""
    own = (
        found if isinstance(found, property) or inspect.isclass(found) else getattr(found, "__func__", found)
    )
    text = inspect.cleandoc(own.__doc__ or "")
    if inspect.isclass(found) and text.startswith(f"{found.__name__}("):  # dataclasses write their signature
        return ""
    parts = []
    for paragraph in filter(None, text.split("\n\n")):
        code = paragraph.lstrip().startswith(">>>")
        parts.append(f"```pycon\n{inspect.cleandoc(paragraph)}\n```\n" if code else f"{_prose(paragraph)}\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Text in which only backquotes mean something."""
    parts = _CODE.split(text)
    return "".join(
        part if index % 2 else re.sub(r"([\\*_<\[])", r"\\\1", part) for index, part in enumerate(parts)
    )
