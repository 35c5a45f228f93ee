"""Tools that some tests need and not everyone has."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test because a tool is missing. On CI it fails instead."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
