"""The runner of several ranks, in rank 0's process: it sends each step to the other ranks, then computes its part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from inflight.engine.runner import Runner
from inflight.errors import DeviceLostError, InflightError
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.follower import RankRunner
from inflight.execution.parallel.messages import End, RankStep, SampledIds, decode_results, encode
from inflight.execution.parallel.rank_processes import RankProcesses
from inflight.execution.parallel.shared_memory import SharedStream
from inflight.execution.runner import torch_threads
from inflight.models.decoders.spec import Collective
from inflight.native.library import Library
from inflight.scheduling import Batch, Sampled


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
