"""One request at a time: serving without batching, as a baseline."""

from collections.abc import Sequence

from inflight.request import Request
from inflight.scheduling.policy import Policy


class Sequential(Policy):
    def admits(self, request: Request, running: Sequence[Request]) -> bool:  # noqa: ARG002
        return not running
