"""The samplers of several ranks, as threads: each has the logits of some tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from torch import Tensor

from inflight.execution.parallel.layout import RankLayout, RankMemory
from inflight.execution.parallel.starting import slot_bytes
from inflight.execution.sampling import LogprobTensors, NativeSampler, NativeSamplingRows, SampledTensors
from inflight.execution.sampling.native import VocabularyPart
from inflight.native.library import Library

T = TypeVar("T")


class RankSamplers:
    """A sampler made of several ranks, which must all return the same results."""

    def __init__(self, library: Library, state: NativeSamplingRows, size: int) -> None:
        self.state = state
        layout = RankLayout(size, 1, 1, slot_bytes(library, state.vocab_size, size), 0, ((0, 1),))
        if size == 1:
            self._parts = [range(state.vocab_size)]
            self._samplers = [NativeSampler(library, state)]
            return
        # Unevenly, and not at whole words of bits.
        cuts = [0, *(rank * state.vocab_size // size for rank in range(1, size)), state.vocab_size]
        self._parts = [range(cuts[rank], cuts[rank + 1]) for rank in range(size)]
        first = RankMemory(library, layout, 0, _lost)
        memories = [
            first,
            *(RankMemory(library, layout, rank, _lost, first.descriptor) for rank in range(1, size)),
        ]
        self._memories = memories
        self._samplers = []
        for memory, tokens in zip(memories, self._parts, strict=True):
            shared = memory.collective()
            assert shared is not None
            part = VocabularyPart(tokens, max(map(len, self._parts)), shared.call)
            self._samplers.append(NativeSampler(library, state, part))

    def sample(self, logits: Tensor, rows: Sequence[int], lengths: Tensor, tokens: Tensor) -> SampledTensors:
        actual = self._together(logits, lambda sampler, mine: sampler.sample(mine, rows, lengths, tokens))
        host = [one.to_host() for one in actual]
        assert all(_same(one.logprobs, host[0].logprobs) for one in host)
        assert all((one.token_ids, one.bad) == (host[0].token_ids, host[0].bad) for one in host)
        return actual[-1]

    def score_prompt(self, logits: Tensor, target_ids: Tensor, num: int) -> LogprobTensors:
        actual = self._together(logits, lambda sampler, mine: sampler.score_prompt(mine, target_ids, num))
        assert all(_same(one.to_host(), actual[0].to_host()) for one in actual)
        return actual[-1]

    def _together(self, logits: Tensor, call: Callable[[NativeSampler, Tensor], T]) -> list[T]:
        parts = [logits[:, part.start : part.stop].clone() for part in self._parts]
        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(call, self._samplers, parts))


def _same(a: object, b: object) -> bool:
    return repr(a) == repr(b)  # NaN and all


def _lost(code: int) -> NoReturn:
    raise AssertionError(f"a rank was lost: {code}")
