"""Token counts: how many tokens a request has, has computed and has in flight.

Every change of these counts is made here, so that a new way to gain or lose tokens has to be right only once:

    admit, release     a request gets blocks, which may already hold its prefix; it gives them back
    decode, schedule   a step being formed computes tokens of the request, and may sample one more
    withdraw           the request is preempted while that step is being formed
    accept, complete   the step is collected: the sampled tokens are known, or nothing was sampled
    fail               the step failed, and whatever was in flight is lost

`Request` draws how the counts relate.
"""

from __future__ import annotations

from inflight.request import Request


class TokenCounts:
    """Updates the counts of all requests of one engine."""

    __slots__ = ("num_resident",)

    def __init__(self) -> None:
        self.num_resident = 0  # computed tokens of all requests that hold blocks

    def admit(self, request: Request) -> None:
        """Count the tokens of the shared blocks that the request's table begins with as computed."""
        request.num_computed = request.num_cached = request.kv_capacity
        self.num_resident += request.num_computed

    def release(self, request: Request) -> None:
        """Count nothing as computed any more: the request gives up its blocks."""
        self.num_resident -= request.num_computed
        request.num_computed = 0

    def decode(self, request: Request) -> None:
        """Schedule the one token that the request is behind, and sample another one."""
        num_tokens = request.num_tokens
        request.num_computed = num_tokens
        request.num_tokens = num_tokens + 1
        request.num_in_flight += 1
        self.num_resident += 1

    def schedule(self, request: Request, count: int) -> tuple[bool, bool]:
        """Schedule the next `count` tokens. Return whether that is all it has, and whether another one is sampled."""
        request.num_computed += count
        self.num_resident += count
        catches_up = request.num_computed == request.num_tokens
        samples = catches_up and request.num_tokens < request.max_total
        request.num_tokens += samples
        request.num_in_flight += catches_up
        return catches_up, samples

    def withdraw(self, request: Request, catches_up: bool, samples: bool) -> None:
        """Take back what `decode` or `schedule` counted as in flight. `release` follows, and forgets the rest."""
        request.num_tokens -= samples
        request.num_in_flight -= catches_up

    def accept(self, request: Request, num_accepted: int, num_written: int = 0) -> None:
        """Count the tokens that a step sampled: `num_accepted` in place of the one that was in flight.

        The step may have written the KV of some of them already, as one that verifies draft tokens does. These
        `num_written` count as computed, so that no later step computes them again. At least the last token remains to
        be computed, and nothing is resident for a request that was preempted meanwhile.
        """
        request.num_in_flight -= 1
        if num_accepted == 1:
            return
        request.num_tokens += num_accepted - 1
        if num_written and request.block_ids:
            num_written = min(num_written, num_accepted - 1)
            request.num_computed += num_written
            self.num_resident += num_written
            assert request.num_computed <= request.kv_capacity, "KV was written beyond the request's blocks"

    def complete(self, request: Request) -> None:
        """Count an entry that caught up with its request and sampled nothing, or whose result is dropped."""
        request.num_in_flight -= 1

    def fail(self, request: Request) -> None:
        """Return to the tokens that are known."""
        request.num_in_flight = 0
        request.num_tokens = len(request.token_ids)
