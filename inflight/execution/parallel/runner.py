"""The runners of several ranks. Rank 0's sends each step to the others, then computes its part; the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from inflight.engine.runner import Runner
from inflight.errors import DeviceLostError, InflightError
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.messages import (
    Begin,
    Begun,
    End,
    Loaded,
    RankStep,
    Report,
    SampledIds,
    decode,
    decode_results,
    encode,
    encode_results,
)
from inflight.execution.parallel.rank_processes import RankProcesses
from inflight.execution.parallel.shared_memory import SharedCollective, SharedStream
from inflight.execution.runner import torch_threads
from inflight.layers.native.library import Library
from inflight.models.decoders.spec import Collective
from inflight.scheduling.batch import Batch, Sampled


class FirstRank:
    """Rank 0's coordination of a step, besides its own part of the computation."""

    def __init__(self, ranks: RankProcesses, library: Library, collective: Collective | None) -> None:
        self.sampled: list[SampledIds] = []  # not yet sent to the other ranks
        self._ranks = ranks
        self._library = library
        self._collective = collective if isinstance(collective, SharedCollective) else None

    def wait_until_begun(self) -> None:
        self._ranks.wait_until_begun()
        if self._collective is not None:
            self._collective.watches = True

    def send(self, batch: Batch) -> None:
        """Send a step to every other rank."""
        # An encoding error is raised before any rank has received the step.
        self._ranks.send_encoded(encode(RankStep(batch, self.sampled)))
        self.sampled = []
        if self._collective is not None:
            self._collective.begin_step()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Limit threads to those of a rank, and turn errors into a lost device: the other ranks are in the middle of
        this step, which cannot be repeated."""
        before, self._library.threads = self._library.threads, self._ranks.layout.threads
        try:
            with torch_threads(1):
                yield
        except DeviceLostError:
            raise
        except Exception as error:
            lost = DeviceLostError(f"rank 0 of {self._ranks.layout.count}: {type(error).__name__}: {error}")
            self._ranks.fail(lost)
            raise lost from error
        finally:
            self._library.threads = before

    def check(self) -> None:
        """Raise if a rank is lost."""
        self._ranks.check()

    def end(self) -> None:
        if self._collective is not None:
            self._collective.watches = False
        with suppress(InflightError):  # they are gone already
            self._ranks.send(End())


class MirroredRunner:
    """Implements `Runner` for one stage: all ranks do the same, sampling included, so tokens need not be exchanged."""

    def __init__(self, runner: Runner[Any], first: FirstRank) -> None:
        self._runner = runner
        self._first = first

    def launch(self, batch: Batch) -> Any:
        self._first.send(batch)
        with self._first.in_step():
            return self._runner.launch(batch)

    def collect(self, handle: Any) -> Sampled:
        sampled = self._runner.collect(handle)
        self._first.check()  # a device stops waiting for a lost rank and continues with arbitrary data
        return sampled

    def close(self) -> None:
        self._runner.close()
        self._first.end()


class PipelineRunner:
    """Implements `Runner` for several stages: the first rank of the first stage. The last stage sends results in order.

    A step's tokens are sent to all ranks with the first step launched after it was collected: no earlier step contains
    its requests.
    """

    def __init__(self, follower: RankRunner, results: SharedStream, first: FirstRank) -> None:
        self._follower = follower
        self._results = results
        self._first = first

    def launch(self, batch: Batch) -> int:
        sampled = self._first.sampled
        self._first.send(batch)
        with self._first.in_step():
            self._follower.run(batch, sampled)
        return batch.step

    def collect(self, handle: int) -> Sampled:
        sampled = decode_results(self._results.receive(0))
        token_ids = [ids[0] for ids in sampled.token_ids if ids]
        if token_ids:
            self._first.sampled.append(SampledIds(handle, token_ids))
        return sampled

    def close(self) -> None:
        self._follower.close()
        self._first.end()


# ---- ranks that follow rank 0 ----


class TokenRows(Protocol):
    tokens: Tensor  # [max_rows, max_len]

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Store token number lengths[i] of row rows[i], [n] each."""


class PendingTokens:
    """Tokens that another rank samples, from the launch of their step until they are written to the rows of this
    rank."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows
        self._expected: dict[int, tuple[Tensor, Tensor]] = {}  # by step: rows and lengths, [S] each
        self._admitted = torch.full((len(rows.tokens),), -1)  # by row: the step that admitted its request

    def expect(self, batch: Batch, rows: Tensor, lengths: Tensor) -> None:
        """Note that this step samples tokens number `lengths` [S] of `rows` [S], which arrive later."""
        for row, _ in batch.admissions:
            self._admitted[row] = batch.step
        if len(rows):
            self._expected[batch.step] = rows, lengths

    def write(self, sampled: list[SampledIds]) -> None:
        """Write arrived tokens, before the next step's admissions. Rows that changed their request since are
        skipped."""
        for step, token_ids in ((ids.step, ids.token_ids) for ids in sampled):
            for old in [number for number in self._expected if number < step]:
                del self._expected[old]  # the step failed
            rows, lengths = self._expected.pop(step)
            tokens = torch.tensor(token_ids)
            unchanged = self._admitted[rows] <= step
            self._rows.append(rows[unchanged], lengths[unchanged], tokens[unchanged])


class RankRunner(Protocol):
    def run(self, batch: Batch, sampled: list[SampledIds]) -> None: ...

    def close(self) -> None: ...


class StageRunner(Runner[Any], Protocol):
    @property
    def rows(self) -> TokenRows: ...


class LoadedRank(NamedTuple):
    """A rank that has loaded its part of the model."""

    make_runner: Callable[[Begin], Any]  # allocates its KV memory
    num_blocks: int | None = None  # that fit, where ranks have their own memory


def follow(loaded: LoadedRank, memory: RankMemory, report: Callable[[Report], None]) -> None:
    """Follow the first rank's messages until the process ends."""
    report(Loaded(loaded.num_blocks))
    steps = memory.steps()
    runner: RankRunner | None = None
    while True:
        match decode(steps.receive(memory.rank - 1)):
            case Begin() as begin:
                runner = rank_runner(loaded.make_runner(begin), memory)
                report(Begun())
            case RankStep(batch, sampled):
                assert runner is not None
                runner.run(batch, sampled)
            case End():
                if runner is not None:
                    runner.close()
                runner = None


def rank_runner(runner: Any, memory: RankMemory) -> RankRunner:
    """Wrap the runner of a rank by its role."""
    layout = memory.ranks
    if not layout.is_last_stage(memory.rank):
        return StageRank(runner)
    if layout.pipeline > 1 and memory.rank == layout.sampler:
        return SamplingRank(runner, memory.results())
    return MirroredRank(runner)


class StageRank:
    """A rank whose stage is not the last. The tokens of its steps arrive later from the last stage."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._pending = PendingTokens(runner.rows)

    def run(self, batch: Batch, sampled: list[SampledIds]) -> None:
        self._pending.write(sampled)
        self._runner.launch(batch)  # which also sends the hidden states to the next stage
        entries = [entry for entry, samples in enumerate(batch.samples) if samples]
        rows, lengths = torch.tensor(batch.rows), torch.tensor(batch.starts) + torch.tensor(batch.counts)
        self._pending.expect(batch, rows[entries], lengths[entries])

    def close(self) -> None:
        self._runner.close()


class MirroredRank:
    """A rank of the last stage that mirrors the first one there, sampling included: all sample the same tokens.

    Nobody reads its results. A step is waited for when the next is launched, so that the device always has work, but
    never more than two steps of it.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self._in_flight: Any = None

    def run(self, batch: Batch, sampled: list[SampledIds]) -> None:  # noqa: ARG002
        handle = self._runner.launch(batch)
        if self._in_flight is not None:
            self._runner.collect(self._in_flight)
        self._in_flight = handle

    def close(self) -> None:
        self._in_flight = None
        self._runner.close()


class SamplingRank:
    """The first rank of the last stage, with several stages: sends each step's results to rank 0.

    Its own rows already have the tokens that it samples.
    """

    def __init__(self, runner: Runner[Any], results: SharedStream) -> None:
        self._runner = runner
        self._results = results

    def run(self, batch: Batch, sampled: list[SampledIds]) -> None:  # noqa: ARG002
        handle = self._runner.launch(batch)
        self._results.send(encode_results(self._runner.collect(handle)))

    def close(self) -> None:
        self._runner.close()
