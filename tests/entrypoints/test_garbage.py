"""The collector is as it was after a run, whatever happened in it."""

from __future__ import annotations

import gc

import pytest

from inflight import LLM, SamplingParams
from inflight.entrypoints.offline import paused_collection
from tests.support.steps import observe


def test_collection_is_paused_and_then_restored() -> None:
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collection_is_paused_during_a_run() -> None:
    seen = []
    with LLM(show_progress=False, num_blocks=64) as llm:
        observe(llm._engine.core, lambda _: seen.append(gc.isenabled()))
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
