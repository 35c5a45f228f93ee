"""Links between stages: through the host where GPUs cannot reach each other. Ranks are threads here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.execution.parallel import links
from inflight.execution.parallel.layout import RankLayout
from inflight.layers.torch_kernels import TorchKernels
from tests.execution.parallel.test_shared_memory import LIBRARY, memories

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="ranks need the compiled kernels")

HIDDEN_SIZE = 8


def test_hidden_states_go_through_the_host_where_gpus_cannot_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(links, "_reach", lambda *_: False)
    device = torch.device("cpu")
    decoder: Any = SimpleNamespace(
        device=device,
        spec=SimpleNamespace(hidden_size=HIDDEN_SIZE),
        kernels=TorchKernels(torch.bfloat16, device),
    )
    ranks = memories(RankLayout(1, 2, 1, 4096, 2 * 16 * HIDDEN_SIZE * 4, ()))
    first, last = (links.device_links(memory, decoder) for memory in ranks)
    for num_tokens in (3, 16, 1):
        hidden = torch.randn(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
        received = torch.empty_like(hidden)
        first.hand_over(hidden)
        last.receive(received)
        assert torch.equal(received, hidden)
