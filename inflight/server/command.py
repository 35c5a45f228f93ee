"""`inflight serve`: flags made from the table of options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any

import typer

from inflight.server.options import FIELDS

_MODEL = typer.Argument(help="A folder with a checkpoint, or a hub id.", show_default="the built-in model")
_CONFIG = typer.Option(help="A YAML file with options, by the names of the flags.", rich_help_panel="Life")


def serve(model: str | None, config: str | None, **flags: Any) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every option can also be given as INFLIGHT_NAME in the environment or as a line of the --config file;
    flags win over variables, variables over the file.
    """
    from inflight.server.settings import resolve

    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in flags.items()
        if value is not None and value != []
    }
    if model is not None:
        given["model"] = model
    options = resolve(given, os.environ, config)
    from inflight.server.run import run  # torch and the server's packages are loaded only now

    run(options)


def _shown(default: Any) -> str | bool:
    """A default as the help has it; False where there is none."""
    if isinstance(default, tuple):
        return " ".join(default) or False
    return False if default is None else str(default).lower()


def _parameter(item: Field[Any]) -> inspect.Parameter:
    """The flag of one option. It is None when not given, so that variables and the file can speak."""
    from inflight.server.settings import TYPES

    default, kind = item.default, TYPES[item.name]
    shown = item.metadata["show"] or _shown(default)
    flag = "--" + item.name.replace("_", "-")
    names = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
    option = typer.Option(
        *names, help=item.metadata["help"], rich_help_panel=item.metadata["panel"], show_default=shown
    )
    kind = list[str] | None if isinstance(default, tuple) else kind | None
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def command() -> Callable[..., None]:
    """`serve` with a signature that typer can read."""
    parameters = [
        inspect.Parameter(
            "model",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _MODEL],
        ),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, _CONFIG],
        ),
        *(_parameter(item) for name, item in FIELDS.items() if name != "model"),
    ]

    def serve_command(**values: Any) -> None:
        serve(**values)

    serve_command.__doc__ = serve.__doc__
    serve_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve_command.__annotations__ = {item.name: item.annotation for item in parameters}
    return serve_command
