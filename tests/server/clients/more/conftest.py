"""Tests of more clients, for `make test-clients`, which installs them: not collected where they are not installed."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("cohere", "instructor", "langchain", "litellm", "llm", "pydantic_ai")

collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]
