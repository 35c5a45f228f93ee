"""What became of constraints that someone asked for: the latest of them, found once for all who ask the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from inflight.errors import ParameterError
from inflight.structured_outputs import StructuredOutputs

MAX_CHARACTERS = 4 << 20  # of the constraints kept in one place

T = TypeVar("T")


class KeptOutcomes(Generic[T]):
    """Refusals are outcomes too. For any thread."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[tuple[str, str], Future[T]] = OrderedDict()
        self._num_characters = 0

    def known(self, asked: StructuredOutputs) -> Future[T] | None:
        """The outcome, if it is there already."""
        key = asked.kind, asked.text
        with self._lock:
            found = self._outcomes.get(key)
            if found is not None:
                self._outcomes.move_to_end(key)
        return found if found is not None and found.done() else None

    def get(self, asked: StructuredOutputs, find: Callable[[StructuredOutputs], T]) -> T:
        """The outcome, which the first one to ask finds. Raises ParameterError, and what else finding it does."""
        key = asked.kind, asked.text
        with self._lock:
            found = self._outcomes.get(key)
            if found is not None:
                self._outcomes.move_to_end(key)
            else:
                future: Future[T] = Future()
                self._keep(key, future)
        if found is not None:
            return result_of(found)
        try:
            future.set_result(find(asked))
        except BaseException as error:
            if not isinstance(error, ParameterError):
                self._forget(key, future)  # another time it may go well
            future.set_exception(error)
        return result_of(future)

    def put(self, asked: StructuredOutputs, outcome: Future[T]) -> None:
        """Keep an outcome that is there, in place of any other."""
        key = asked.kind, asked.text
        with self._lock:
            if self._outcomes.pop(key, None) is not None:
                self._num_characters -= len(key[1])
            self._keep(key, outcome)

    def forget(self, asked: StructuredOutputs, outcome: T) -> None:
        """Find it anew for the next one to ask, unless another has taken its place already."""
        key = asked.kind, asked.text
        with self._lock:
            future = self._outcomes.get(key)
        if future is not None and future.done() and future.exception() is None and future.result() is outcome:
            self._forget(key, future)

    def _keep(self, key: tuple[str, str], future: Future[T]) -> None:
        self._outcomes[key] = future
        self._num_characters += len(key[1])
        while len(self._outcomes) > self._max_kept or self._num_characters > MAX_CHARACTERS:
            oldest, _ = self._outcomes.popitem(last=False)
            self._num_characters -= len(oldest[1])

    def _forget(self, key: tuple[str, str], future: Future[T]) -> None:
        with self._lock:
            if self._outcomes.get(key) is future:
                del self._outcomes[key]
                self._num_characters -= len(key[1])


def result_of(future: Future[T]) -> T:
    """Everyone gets an exception of their own: tracebacks would pile up on a shared one."""
    error = future.exception()
    if isinstance(error, ParameterError):
        raise ParameterError(*error.args, param=error.param, code=error.code)
    return future.result()
