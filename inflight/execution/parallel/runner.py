"""The runner of several ranks, in the process of the first: every step is told to the others, then computed here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inflight.errors import DeviceLostError, InflightError
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.messages import Begin, Drawn, End, RankStep, encode
from inflight.execution.parallel.rank_processes import RankProcesses
from inflight.execution.results import Ticket
from inflight.execution.runner import ModelRunner
from inflight.execution.threads import torch_threads
from inflight.native.library import Library
from inflight.scheduling import Batch, Sampled


class TensorParallelRunner:
    """Implements `Runner`: the first rank of one stage. It samples, and tells what it drew with the next step."""

    def __init__(self, runner: ModelRunner, ranks: RankProcesses, library: Library, begin: Begin) -> None:
        self._runner = runner
        self._ranks = ranks
        self._library = library
        self._drawn: list[Drawn] = []
        collective = runner.decoder.shard.collective
        assert isinstance(collective, SharedCollective)
        self._collective = collective
        ranks.begin(begin)
        collective.watches = True

    def launch(self, batch: Batch) -> Ticket:
        message = encode(RankStep(batch, self._drawn))  # what cannot travel fails before anyone is told
        self._ranks.send_encoded(message)
        self._collective.begin_step()
        try:
            with self._own_threads():
                ticket = self._runner.launch(batch)
        except DeviceLostError:
            raise
        except Exception as error:
            # The others are somewhere in the middle of this step, and there is no way back to its beginning.
            lost = DeviceLostError(f"rank 0 of {self._ranks.layout.count}: {type(error).__name__}: {error}")
            self._ranks.fail(lost)
            raise lost from error
        self._drawn = []
        if ticket.sampled is not None:
            self._drawn.append(Drawn(batch.step, ticket.sampled.token_ids.tolist()))
        return ticket

    def collect(self, ticket: Ticket) -> Sampled:
        return self._runner.collect(ticket)

    def check(self) -> None:
        """Raises if a rank is lost: an idle engine would not notice."""
        self._ranks.check()

    def close(self) -> None:
        self._collective.watches = False
        self._runner.close()
        try:
            self._ranks.send(End())
        except InflightError:
            return  # they are gone

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """As many as each rank has; other engines in this process have theirs."""
        before, self._library.threads = self._library.threads, self._ranks.layout.threads
        try:
            with torch_threads(1):
                yield
        finally:
            self._library.threads = before
