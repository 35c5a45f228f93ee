"""Writes docs/options.md from where options are declared: `config.py` and `server/config.py`.

python -m tools.options_page
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from inflight.cli.main import GENERATE_OPTIONS
from inflight.cli.option_sources import PREFIX
from inflight.config import ENGINE_OPTIONS, ProcessConfig
from inflight.option import PANELS, PYTHON, Option, options_of
from inflight.server.config import SERVE_OPTIONS

PAGE = Path(__file__).parent.parent / "docs" / "options.md"

_INTRO = """\
# Options

Made from the declarations in `inflight/config.py` and `inflight/server/config.py` by
`python -m tools.options_page`.

Options with **E** are the engine's: `LLM(...)` and `AsyncEngine.start(...)` take them as arguments. `inflight generate`
has those with **G**, too. All but the last two tables are flags of `inflight serve` (`--max-queue 64`), variables
(`{prefix}MAX_QUEUE=64`) and lines of its `--config` file (`max-queue: 64`, YAML); flags win over variables, variables
over the file. Lists are repeated flags, and have commas in variables.
"""
_OF_GENERATE = ("model", *GENERATE_OPTIONS)
_PYTHON = "In Python only"
_PROCESS = "`ProcessConfig`, in Python only"


def page() -> str:
    """The whole page."""
    parts = [_INTRO.format(prefix=PREFIX)]
    for panel in PANELS:
        parts.append(_table(panel, (item for item in SERVE_OPTIONS.values() if item.panel == panel)))
    parts.append(_table(_PYTHON, (item for item in ENGINE_OPTIONS.values() if item.panel == PYTHON)))
    watching = (item for item in options_of(ProcessConfig).values() if item.panel == PYTHON)
    parts.append(_table(_PROCESS, watching))
    return "\n".join(parts)


def _table(title: str, options: Iterable[Option]) -> str:
    rows = [f"## {title}", "", _HEAD, "| --- | --- | --- | --- | --- |"]
    for item in options:
        where = ("E" if item.name in ENGINE_OPTIONS else "") + ("G" if item.name in _OF_GENERATE else "")
        rows.append(
            f"| `{item.name}` | {_default(item)} | {item.allowed or _KINDS[item.value_type]} "
            f"| {table_cell(item.help)} | {where} |"
        )
    return "\n".join([*rows, ""])


_HEAD = "| option | default | allowed | what it is | |"
_KINDS = {str: "text", bool: "true, false", tuple: "a list of text", dict: "a mapping"}


def _default(item: Option) -> str:
    engine = ENGINE_OPTIONS.get(item.name)
    text = table_cell(item.default_text)
    if engine is None or engine.default == item.default:
        return text
    return f"{text}; without a server {engine.default_text or 'none'}"


def table_cell(text: str) -> str:
    """Text that a table of Markdown shows as it is."""
    for sign in "\\|*<_":
        text = text.replace(sign, f"\\{sign}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
