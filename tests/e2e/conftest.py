"""Each checkpoint is written once, and transformers answers each family's prompts once, for all tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.reference import Reference, transformers_reference
from tests.support.checkpoints import write_checkpoint, write_tokenizer

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A function: family and config fields -> the folder of a checkpoint with a tokenizer."""
    written: dict[str, Path] = {}

    def get(family: str = "llama", **fields: Any) -> Path:
        key = f"{family} {sorted(fields.items())}"
        if key not in written:
            written[key] = tmp_path_factory.mktemp(family)
            write_checkpoint(written[key], family, **fields)
            write_tokenizer(written[key])
        return written[key]

    return get


@pytest.fixture(scope="session")
def reference(folder: Folder) -> Callable[[str], Reference]:
    """A function: family -> what transformers says about its prompts."""
    references: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in references:
            references[family] = transformers_reference(folder(family))
        return references[family]

    return get
