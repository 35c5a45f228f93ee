"""The docs describe options as they are declared."""

from __future__ import annotations

import re

from inflight.server.config import SERVE_OPTIONS
from tools.options_page import PAGE, page

DOCS = PAGE.parent
FLAGS = {option.flag: option for option in SERVE_OPTIONS.values()}


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.options_page"


def test_flags_in_the_servers_page_exist() -> None:
    used = set(re.findall(r"`(--[a-z][a-z-]+)", (DOCS / "server.md").read_text(encoding="utf-8")))
    assert len(used) > 20
    assert used <= {*FLAGS, "--config"}
