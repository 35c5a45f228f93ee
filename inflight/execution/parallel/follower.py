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
from inflight.execution.parallel.pending_tokens import PendingTokens, TokenRows
from inflight.execution.parallel.stream import SharedStream
from inflight.execution.runner import ModelRunner
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling import Batch


class RankRunner(Protocol):
    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None: ...

    def close(self) -> None: ...


class StageRunner(Runner[Any], Protocol):
    @property
    def rows(self) -> TokenRows: ...


class LoadedRank(NamedTuple):
    """What a rank has before it is told to begin."""

    decoder: Decoder
    grammars: GrammarCompiler
    num_blocks: int | None = None  # that it has room for, where ranks have memory of their own
    # On GPUs, where every rank has the runner that the first one has.
    make_runner: Callable[[Begin], Any] | None = None


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
                    runner = rank_runner(make_runner(begin), memory)
                elif memory.ranks.is_last_stage(memory.rank):
                    links = SharedLinks(memory, decoder.spec.hidden_size)
                    sizes = begin.num_blocks, begin.block_size, begin.max_rows, begin.max_len
                    runner = rank_runner(ModelRunner(decoder, *sizes, grammars, links), memory)
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


def rank_runner(runner: Any, memory: RankMemory) -> RankRunner:
    """What a rank does with its runner: one on a GPU, or any of the last stage."""
    layout = memory.ranks
    if not layout.is_last_stage(memory.rank):
        return StageRank(runner)
    if layout.pipeline > 1 and memory.rank == layout.sampler:
        return SamplingRank(runner, memory.results())
    return MirroredRank(runner)


class StageRank:
    """A rank on a GPU whose stage is not the last: what its steps draw others tell it later."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._drawn = PendingTokens(runner.rows)

    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:
        self._drawn.write(drawn)
        self._runner.launch(batch)  # which also hands over what comes of it
        entries = [entry for entry, samples in enumerate(batch.samples) if samples]
        rows, lengths = torch.tensor(batch.rows), torch.tensor(batch.starts) + torch.tensor(batch.counts)
        self._drawn.expect(batch, rows[entries], lengths[entries])

    def close(self) -> None:
        self._runner.close()


class MirroredRank:
    """A rank of the last stage that does all that the first one there does, sampling included: they offer each other
    what each knows of its tokens, and all draw the same. Nobody asks what its steps brought: one is waited for when the
    next is launched, so that a device has always work and never more than two steps of it."""

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
    """A rank on a CPU whose stage is not the last: what its steps draw others tell it later."""

    def __init__(self, decoder: Decoder, begin: Begin, memory: RankMemory) -> None:
        links = SharedLinks(memory, decoder.spec.hidden_size)
        self._forward = ForwardPass(
            decoder, begin.num_blocks, begin.block_size, begin.max_rows, begin.max_len, links
        )
        self._drawn = PendingTokens(self._forward.rows)

    @torch.inference_mode()
    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:
        self._drawn.write(drawn)
        inputs = self._forward.take_in(batch)
        self._drawn.expect(batch, inputs.sampling_rows, inputs.sampling_lengths)
        self._forward.pass_on(inputs)

    def close(self) -> None:
        self._forward.close()


class SamplingRank:
    """The first rank of the last stage, where the first stage is another: tells the first rank what each step brought.
    The tokens that it draws are in its rows already."""

    def __init__(self, runner: Runner[Any], results: SharedStream) -> None:
        self._runner = runner
        self._results = results

    def run(self, batch: Batch, drawn: list[DrawnIds]) -> None:  # noqa: ARG002
        ticket = self._runner.launch(batch)
        self._results.send(encode_results(self._runner.collect(ticket)))

    def close(self) -> None:
        self._runner.close()
