"""The part of a step that a rank computes which does not sample."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inflight.execution.forward import ForwardPass
from inflight.execution.parallel.drawn_tokens import DrawnTokens
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.messages import (
    Begin,
    Begun,
    Drawn,
    End,
    Loaded,
    RankStep,
    Report,
    decode,
)
from inflight.models.decoder import Decoder
from inflight.scheduling import Batch


def follow(decoder: Decoder, memory: RankMemory, report: Callable[[Report], None]) -> None:
    """Do what the first rank says, for ever."""
    report(Loaded())
    steps = memory.steps()
    follower: Follower | None = None
    while True:
        match decode(steps.receive(memory.rank - 1)):
            case Begin() as begin:
                follower = Follower(decoder, begin)
                report(Begun())
            case RankStep(batch, drawn):
                assert follower is not None
                follower.run(batch, drawn)
            case End():
                follower = None


class Follower:
    """Does what the first rank does in the same step, up to the logits of its part of the vocabulary."""

    def __init__(self, decoder: Decoder, begin: Begin) -> None:
        self._decoder = decoder
        self._forward = ForwardPass(
            decoder, begin.num_blocks, begin.block_size, begin.max_rows, begin.max_len
        )
        self._drawn = DrawnTokens(self._forward.rows)

    @torch.inference_mode()
    def run(self, batch: Batch, drawn: list[Drawn]) -> None:
        self._drawn.write(drawn)
        inputs = self._forward.take_in(batch)
        self._drawn.expect(batch, inputs)
        states = self._forward.run(batch, inputs)
        for _ in self._forward.scores(states):
            pass
        if inputs.sampling_entries and self._decoder.generates:
            self._decoder.logits(states.samples)
