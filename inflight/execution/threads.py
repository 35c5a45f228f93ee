"""How many threads torch's own operations use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """How many threads torch's own operations use.

    Torch's idle threads spin for some milliseconds after every operation that they shared, and on a busy machine an
    operation waits for all of them: for the small tensors around a forward pass that costs far more than it saves.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
