"""Tests that need a GPU: not collected where there is none. Everything else is tested in Triton's
interpreter, beside the code (tests/attention, tests/layers, tests/execution)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from tests.support.checkpoints import write_checkpoint

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

Ask = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function: family and config fields -> a folder."""
    written: dict[str, Path] = {}

    def get(family: str, **fields: Any) -> Path:
        key = f"{family} {sorted(fields.items())}"
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp(family), family, **fields)
        return written[key]

    return get


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The prompts are short, long, and some share a prefix."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(200) for _ in range(count)]

    shared = ids(200)
    return [ids(rng.randint(1, 100)) for _ in range(12)] + [shared + ids(1 + i) for i in range(4)]


@pytest.fixture
def ask(prompts: list[list[int]]) -> Ask:
    """A function: folder, parameters and options -> the tokens of every answer."""

    def get(folder: Path, params: SamplingParams | None = None, **options: Any) -> list[list[int]]:
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks": 400} | options
        params = params or SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
        with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return get
