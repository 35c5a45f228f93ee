"""Requests on their way into an engine, all at once or as steps need them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from inflight.engine.core import EngineCore
from inflight.request import Request

# Requests that wait beyond those that fill a step: among them the policy looks for one that fits into what is left.
SPARE = 16


class RequestFeed:
    """Lazily, only as many requests wait in the engine as fill its next step: the others are made while the device
    computes, and the first step waits for none but its own."""

    def __init__(self, core: EngineCore, requests: Iterable[Request], lazily: bool) -> None:
        self._core = core
        self._requests = iter(requests)
        limits = core.scheduler.limits
        self._enough = limits.max_num_batched_tokens if lazily else sys.maxsize
        # A step has places for only so many, however short they are.
        self._least_cost = -(-limits.max_num_batched_tokens // limits.max_num_seqs)
        self._ends = [0]  # the tokens of the first n requests
        self.added: list[str] = []  # request ids
        self.is_empty = False

    def fill(self) -> None:
        """To be called before every step."""
        while not self.is_empty and self._num_waiting_tokens() < self._enough:
            request = next(self._requests, None)
            if request is None:
                self.is_empty = True
            else:
                self._core.add(request)
                self.added.append(request.request_id)
                self._ends.append(self._ends[-1] + max(request.num_tokens, self._least_cost))

    def _num_waiting_tokens(self) -> int:
        """Without the spare requests. Those that wait are, nearly always, those that came last."""
        num_waiting = min(self._core.scheduler.pool.num_waiting, len(self.added))
        if num_waiting <= SPARE:
            return 0
        return self._ends[-1 - SPARE] - self._ends[-1 - num_waiting]
