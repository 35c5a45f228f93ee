"""The public surface is deliberate, and cheap to import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import inflight
from inflight import errors

EXPORTS = {
    "LLM": "class",
    "AsyncEngine": "class",
    "AsyncEngineArgs": "class",
    "AsyncLLM": "class",
    "BeamSearchParams": "class",
    "CompletionOutput": "class",
    "InflightError": "class",
    "Policy": "class",
    "RequestOutput": "class",
    "SamplingParams": "class",
    "StructuredOutputs": "class",
    "__version__": "str",
}


def test_exported_names_are_exactly_these() -> None:
    assert sorted(inflight.__all__) == sorted(EXPORTS)
    assert len(inflight.__all__) == len(EXPORTS)
    assert dir(inflight) == sorted(EXPORTS)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_name_can_be_imported(name: str) -> None:
    value = getattr(inflight, name)
    if EXPORTS[name] == "class":
        assert isinstance(value, type)
        assert value.__name__ == name
        assert value.__doc__
    else:
        assert isinstance(value, str)


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = inflight.Engine


def test_version_equals_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert inflight.__version__ == version("inflight-llm")


def test_base_error_is_exported() -> None:
    assert inflight.InflightError is errors.InflightError


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(Path(inflight.__file__).parent.rglob("*.py")):
        for name in re.findall(r"^\s*class _?(\w+)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def imported_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


SERVER = {"transformers", "huggingface_hub", "fastapi", "uvicorn", "pydantic", "zmq", "msgspec", "ray"}


def test_package_and_command_line_do_not_import_torch() -> None:
    heavy = SERVER | {"torch", "numpy", "tokenizers", "safetensors"}
    assert not imported_by("import inflight, inflight.cli.main, inflight.errors") & heavy


def test_scheduler_does_not_import_torch() -> None:
    heavy = SERVER | {"torch", "numpy"}
    assert (
        not imported_by("import inflight.engine, inflight.scheduling, inflight.kv, tests.support.fake_runner")
        & heavy
    )


def test_engine_imports_only_what_it_needs() -> None:
    loaded = imported_by("import inflight.entrypoints.llm, inflight.entrypoints.async_engine")
    assert "torch" in loaded
    assert not loaded & SERVER
