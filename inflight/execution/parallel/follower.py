"""What a rank does in a step that another one tells it of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from inflight.constraints import GrammarCompiler
from inflight.engine.runner import Runner
from inflight.execution.forward import ForwardPass
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.links import SharedLinks
from inflight.execution.parallel.messages import (
    Begin,
    Begun,
    DrawnIds,
    End,
    Loaded,
    RankStep,
    Report,
    decode,
    encode_results,
)
from inflight.execution.parallel.pending_tokens import PendingTokens
from inflight.execution.runner import ModelRunner
from inflight.models.decoder import Decoder
from inflight.scheduling import Batch


class RankRunner(Protocol):
    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None: ...

    def close(self) -> None: ...


class LoadedRank(NamedTuple):
    """What a rank has before it is told to begin."""

    decoder: Decoder
    grammars: GrammarCompiler
    num_blocks: int | None = None  # that it has room for, where ranks have memory of their own
    # Of ranks that all do the same, sampling included: the runner that the first one has.
    make_runner: Callable[[Begin], Runner[Any]] | None = None


def follow(loaded: LoadedRank, memory: RankMemory, report: Callable[[Report], None]) -> None:
    """Do what the first rank says, for ever."""
    decoder, grammars, num_blocks, make_runner = loaded
    report(Loaded(num_blocks))
    steps = memory.steps()
    runner: RankRunner | None = None
    while True:
        match decode(steps.receive(memory.rank - 1)):
            case Begin() as begin:
                if make_runner is not None:
                    runner = MirroredRank(make_runner(begin))
                elif memory.rank == memory.ranks.sampler:
                    runner = SamplingRank(decoder, begin, memory, grammars)
                else:
                    runner = Follower(decoder, begin, memory)
                report(Begun())
            case RankStep(batch, drawn):
                assert runner is not None
                runner.run(batch, drawn)
            case End():
                if runner is not None:
                    runner.close()
                runner = None


class MirroredRank:
    """A rank that does all that the first one does. Nobody asks what its steps brought: one is waited for when the next
    is launched, so that the device has always work and never more than two steps of it."""

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self._last: Any = None

    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:  # noqa: ARG002
        ticket = self._runner.launch(batch)
        if self._last is not None:
            self._runner.collect(self._last)
        self._last = ticket

    def close(self) -> None:
        self._last = None
        self._runner.close()


class Follower:
    """A rank that does not sample: its layers over its part of them and, on the last stage, the logits of its part of
    the vocabulary."""

    def __init__(self, decoder: Decoder, begin: Begin, memory: RankMemory) -> None:
        self._decoder = decoder
        links = SharedLinks(memory, decoder.spec.hidden_size)
        self._forward = ForwardPass(
            decoder, begin.num_blocks, begin.block_size, begin.max_rows, begin.max_len, links
        )
        self._drawn = PendingTokens(self._forward.rows)

    @torch.inference_mode()
    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:
        self._drawn.write(drawn)
        inputs = self._forward.take_in(batch)
        self._drawn.expect(batch, inputs)
        if not self._decoder.shard.is_last:
            self._forward.pass_on(inputs)
            return
        states = self._forward.run(batch, inputs)
        for _ in self._forward.scores(states):
            pass
        if inputs.sampling_entries and self._decoder.generates:
            self._decoder.logits(states.samples)

    def close(self) -> None:
        self._forward.close()


class SamplingRank:
    """The first rank of the last stage, where the first stage is another: tells the first rank what each step brought.
    The tokens that it draws are in its rows already."""

    def __init__(
        self, decoder: Decoder, begin: Begin, memory: RankMemory, grammars: GrammarCompiler | None
    ) -> None:
        links = SharedLinks(memory, decoder.spec.hidden_size)
        sizes = begin.num_blocks, begin.block_size, begin.max_rows, begin.max_len
        self._runner = ModelRunner(decoder, *sizes, grammars, links)
        self._results = memory.results()

    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:  # noqa: ARG002
        ticket = self._runner.launch(batch)
        self._results.send(encode_results(self._runner.collect(ticket)))

    def close(self) -> None:
        self._runner.close()
