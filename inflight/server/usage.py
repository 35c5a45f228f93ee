"""What each named key has used. There are as many as the keys file has: no request can add one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric

from inflight.events import RequestRecord

if TYPE_CHECKING:
    from inflight.server.keys import Caller


@dataclass(eq=False, slots=True)
class Usage:
    """Of one key since the start. Tokens count when they come, so those of requests that were cut short do too."""

    num_requests: int = 0  # generations that were not refused
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0

    def began(self, num_prompt_tokens: int) -> None:
        """A request is in the queue, with so many tokens in the prompts of all its answers."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens

    def waited(self, record: RequestRecord | None, seconds: float) -> None:
        """An answer is over, after so many seconds. It was in the queue until it was admitted, or to its end."""
        if record is None:
            self.queue_seconds += seconds
        elif (left := record.finished_at if record.admitted_at is None else record.admitted_at) is not None:
            self.queue_seconds += left - record.arrived_at


_FAMILIES = (
    ("key_requests", "Generations, by the name of the key", "num_requests"),
    ("key_prompt_tokens", "Prompt tokens of each key", "num_prompt_tokens"),
    ("key_generation_tokens", "Output tokens of each key", "num_output_tokens"),
    ("key_queue_seconds", "Time that answers of each key waited for admission", "queue_seconds"),
)


def families(model: str, callers: list[Caller]) -> Iterator[Metric]:
    """Counters of those who have a name."""
    named = [caller for caller in callers if caller.name]
    for name, text, attribute in _FAMILIES if named else ():
        found = CounterMetricFamily(f"inflight:{name}", text, labels=["model_name", "key"])
        for caller in named:
            found.add_metric([model, caller.name], getattr(caller.usage, attribute))
        yield found
