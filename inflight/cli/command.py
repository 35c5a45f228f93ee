"""The base of all commands: flags of other engines are accepted, and the help fits into 80 columns."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand, TyperGroup

from inflight.cli.vllm_arguments import ArgumentReader, KnownFlag
from inflight.cli.vllm_flags import COMMANDS, SERVE_RULES
from inflight.errors import ConfigError, PromptError
from inflight.vllm_rules import CompatRules

logger = logging.getLogger(__name__)

NOTES = "inflight.notes"  # key in a click context: notes for the user about the flags
OPTIONS = "Options"
STDIN = "-"
NAME_WIDTH = 26  # the help of longer flags starts on the next line


class InflightCommand(TyperCommand):
    """A command that accepts the flags of other engines as well as its own."""

    compat_rules = SERVE_RULES
    logs_notes = True  # False: the command logs them itself
    greedy_lists = False  # True: as in argparse, a flag with a list takes all words up to the next flag

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known, has_model = self._known_flags(ctx), self._has_model()
        reader = ArgumentReader(known, self.compat_rules, ctx.command_path, has_model, self.greedy_lists)
        rest: list[str] = super().parse_args(ctx, reader.read(args))
        ctx.meta[NOTES] = reader.notes
        return rest

    def invoke(self, ctx: Any) -> Any:
        for note in ctx.meta[NOTES] if self.logs_notes else ():
            logger.warning("%s", note)
        return super().invoke(ctx)

    def _known_flags(self, ctx: Any) -> dict[str, KnownFlag]:
        # Words after a list option could also be arguments of the command, unless its only argument is the model.
        may_list = self._has_model() or not any(_is_argument(param) for param in self.params)
        flags = {}
        for param in self._parameters(ctx):
            if not _is_argument(param):
                flag = KnownFlag(not param.is_flag, may_list and param.multiple)
                flags.update(dict.fromkeys([*param.opts, *param.secondary_opts], flag))
        return flags

    def _parameters(self, ctx: Any) -> list[Any]:
        """Return typer's parameters, whose types are not public."""
        return list(self.get_params(ctx))

    def _has_model(self) -> bool:
        return [param.name for param in self.params if _is_argument(param)] == ["model"]

    # ---- help ----

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write plain text, in which no flag is cut and brackets are not markup."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, those of the arguments and of the command itself first."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], OPTIONS: []}
        for param in self._parameters(ctx):
            name, text = param.get_help_record(ctx)
            panel = "Arguments" if _is_argument(param) else param.rich_help_panel or OPTIONS
            panels.setdefault(panel, []).append((_names(param, name), _without_parentheses(text)))
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=NAME_WIDTH)


class Command(InflightCommand):
    """A command without engine options."""

    compat_rules = CompatRules()


class InflightGroup(TyperGroup):
    """A group that explains commands which only other engines have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
        if name in COMMANDS:
            raise ConfigError(f"there is no command {name}: {COMMANDS[name]}")
        return super().resolve_command(ctx, args)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _names(param: Any, name: str) -> str:
    """Return a flag's names as --[no-]quick or --size <int>."""
    if not _is_argument(param) and param.is_flag:
        long = [
            f"--[no-]{opt[2:]}" if param.secondary_opts else opt for opt in param.opts if opt.startswith("--")
        ]
        return ", ".join([*(opt for opt in param.opts if not opt.startswith("--")), *long])
    return name.replace("<list[str]>", "<str>...").replace(" range>", ">")


def _without_parentheses(text: str) -> str:
    """Return help text without the parentheses around a default in words."""
    return re.sub(r"default: \((.*?)\)(?=[\];])", r"default: \1", text)


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Turn a missing package into a ConfigError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "inflight"):
            raise
        raise ConfigError(f"{package} is missing: pip install 'inflight-llm[{name}]'") from None


def check_writable(path: Path) -> None:
    """Raise ConfigError if a file cannot be written; called before anything is measured."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be written: it must be a file in an existing folder")


def read_text(file: str) -> str:
    """Return the text of a file, or of standard input for "-"."""
    try:
        return sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the file {file!r} cannot be read: {error}") from error


def progress_bar() -> Progress:
    """Return a transient progress bar on standard error, redrawn rarely because drawing disturbs measurements."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
