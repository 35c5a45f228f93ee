"""A conversation over HTTP with a model that has KV groups: no turn computes what an earlier one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Backend, live_server
from tests.support.checkpoints import write_checkpoint, write_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "gemma3": {"sliding_window": 24},
}
NUM_TURNS, NUM_OUTPUTS, BLOCK_SIZE = 20, 10, 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_of_twenty_turns_is_computed_once(family: str, tmp_path: Path) -> None:
    """Up to the last, partly filled block of each turn, and the output that ends it."""
    write_tokenizer(write_checkpoint(tmp_path, family, **FAMILIES[family]))
    backend = Backend(model=tmp_path, block_size=BLOCK_SIZE, num_blocks=3000, device="cpu")
    try:
        with live_server(backend) as live:
            history = [5, 6, 7]
            num_computed = 0
            for turn in range(NUM_TURNS):
                options = {"temperature": 0, "max_tokens": NUM_OUTPUTS, "ignore_eos": True}
                answer = live.complete(history, **options, return_token_ids=True)
                usage = answer["usage"]
                assert usage["prompt_tokens"] == len(history)
                num_computed += len(history) - usage["prompt_tokens_details"]["cached_tokens"]
                history = [*history, *answer["choices"][0]["token_ids"], 20 + turn, 3, 4]
            shown = live.http.get("/v1/memory").json()["groups"]
        groups = backend.run(backend.engine.stats()).kv.groups
        assert set(groups) == (
            {"all tokens", "snapshots"} if family == "qwen3.5" else {"all tokens", "window 24"}
        )
        assert shown == groups
        num_new = len(history) - 3 - NUM_TURNS * NUM_OUTPUTS  # tokens of prompts that no turn generated
        assert num_computed <= num_new + NUM_TURNS * BLOCK_SIZE
    finally:
        backend.close()
