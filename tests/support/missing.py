"""Tools that some tests need and not everyone has."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Without the tool tests are skipped, but never where CI runs."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
