"""The runner of several ranks, in the process of the first: every step is told to the others, then computed here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from inflight.engine.runner import Runner
from inflight.errors import DeviceLostError, InflightError
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.follower import RankRunner
from inflight.execution.parallel.messages import DrawnIds, End, RankStep, decode_results, encode
from inflight.execution.parallel.rank_processes import RankProcesses
from inflight.execution.parallel.stream import SharedStream
from inflight.execution.threads import torch_threads
from inflight.models.decoders.shard import Collective
from inflight.native.library import Library
from inflight.scheduling import Batch, Sampled


class FirstRank:
    """What rank 0 does in a step besides its own part."""

    def __init__(self, ranks: RankProcesses, library: Library, collective: Collective | None) -> None:
        self.drawn: list[DrawnIds] = []  # that the others have yet to be told of
        self._ranks = ranks
        self._library = library
        self._collective = collective if isinstance(collective, SharedCollective) else None

    def wait_until_begun(self) -> None:
        self._ranks.wait_until_begun()
        if self._collective is not None:
            self._collective.watches = True

    def tell(self, batch: Batch) -> None:
        """Every other rank."""
        # What cannot travel fails here, before anyone was told.
        self._ranks.send_encoded(encode(RankStep(batch, self.drawn)))
        self.drawn = []
        if self._collective is not None:
            self._collective.begin_step()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """With as many threads as each rank has: other engines in this process have theirs. An error here is the end:
        the other ranks are somewhere in the middle of this step, and there is no way back to its beginning."""
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
        """Raises if a rank is lost."""
        self._ranks.check()

    def end(self) -> None:
        if self._collective is not None:
            self._collective.watches = False
        with suppress(InflightError):  # they are gone
            self._ranks.send(End())


class MirroredRunner:
    """Implements `Runner`: the first of ranks that all do the same, sampling included. They draw the same tokens, so
    nobody need be told of them."""

    def __init__(self, runner: Runner[Any], first: FirstRank) -> None:
        self._runner = runner
        self._first = first

    def launch(self, batch: Batch) -> Any:
        self._first.tell(batch)
        with self._first.in_step():
            return self._runner.launch(batch)

    def collect(self, ticket: Any) -> Sampled:
        found = self._runner.collect(ticket)
        self._first.check()  # a device stops waiting for a rank that is lost, and goes on with whatever is there
        return found

    def close(self) -> None:
        self._runner.close()
        self._first.end()


class PipelineRunner:
    """Implements `Runner`: the first rank of the first stage. Results come from the last one, step by step.
    What a step drew is told to all ranks with the first step that is launched after it was collected: no earlier one
    has tokens of its requests."""

    def __init__(self, follower: RankRunner, results: SharedStream, first: FirstRank) -> None:
        self._follower = follower
        self._results = results
        self._first = first

    def launch(self, batch: Batch) -> int:
        drawn = self._first.drawn
        self._first.tell(batch)
        with self._first.in_step():
            self._follower.run(batch, drawn)
        return batch.step

    def collect(self, ticket: int) -> Sampled:
        sampled = decode_results(self._results.receive(0))
        token_ids = [ids[0] for ids in sampled.token_ids if ids]
        if token_ids:
            self._first.drawn.append(DrawnIds(ticket, token_ids))
        return sampled

    def close(self) -> None:
        self._follower.close()
        self._first.end()
