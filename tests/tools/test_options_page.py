"""What the docs say about options is what is declared."""

from __future__ import annotations

import re

from inflight.option import Option
from inflight.server.config import SERVE_OPTIONS
from tools.options_page import PAGE, page

DOCS = PAGE.parent
FLAGS = {option.flag: option for option in SERVE_OPTIONS.values()}
ROW = re.compile(r"^\| [^|]+ \| (`--[^|]+) \| ([^|]+) \|", re.M)


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.options_page"


def spelled(option: Option) -> str:
    """A default as the tables have it."""
    if option.help.startswith("Bytes"):
        return f"{option.default >> 20} MiB" if option.default >> 20 else f"{option.default >> 10} KiB"
    return f"{option.default:g} s" if option.unit == "seconds" else option.default_text


def test_limits_of_the_server_have_their_defaults() -> None:
    rows = ROW.findall((DOCS / "server.md").read_text(encoding="utf-8"))
    assert len(rows) >= 15  # that they are all is another test: server/test_limits_table.py
    for flags, default in rows:
        found = [FLAGS[flag] for flag in re.findall(r"`(--[a-z-]+)`", flags)]
        assert default == ", ".join(map(spelled, found))


def test_flags_in_the_servers_page_exist() -> None:
    used = set(re.findall(r"`(--[a-z][a-z-]+)", (DOCS / "server.md").read_text(encoding="utf-8")))
    assert len(used) > 20
    assert used <= {*FLAGS, "--config"}
