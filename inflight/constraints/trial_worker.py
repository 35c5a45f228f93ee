"""The sandboxed process that tries grammars, run as a script by `validator.py`.

It writes and compiles a grammar and takes its first steps with the model's own vocabulary, and with less memory, time
and stack than the engine that does the same afterwards. A grammar that needs more ends only this process.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.constraints.attempts import GrammarSource
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.processes.sandbox_worker import isolate, serve

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Rejection = tuple[str, str | None, str | None]  # what a ParameterError says: its message, parameter and code

STEPS = 8
NICENESS = 5  # on a busy machine, about a third of the CPU time that the server and a CPU engine get
_PAGE = resource.getpagesize()


def main() -> None:
    memory, stack, vocabulary = map(int, sys.argv[1:])
    os.nice(NICENESS)
    isolate()
    with open(vocabulary, "rb") as file:
        tokens = Vocabulary.unpacked(file.read())
    tokenizer, special_texts = tokens.tokenizer(), tokens.special_texts()
    del tokens
    resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    def answer(request: dict[str, Any]) -> str | Rejection:
        limit_memory(memory)
        try:
            return attempt(tokenizer, special_texts, GrammarSource(**request["source"]), request["limits"])
        except MemoryError:
            os.abort()

    serve(answer, signal.ITIMER_PROF)  # limits CPU time


def limit_memory(memory: int) -> None:
    """Limit the address space to this many bytes more than the process uses now."""
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):  # some systems lack this limit
        return


def attempt(
    tokenizer: LLTokenizer, special_texts: Collection[str], source: GrammarSource, limits: dict[str, Any]
) -> str | Rejection:
    """Return why a grammar cannot be used, or an empty string if it can."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = source.lark(special_texts)
    except ParameterError as error:
        return str(error), error.param, error.code
    state = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    return first_error(state, tokenizer.eos_token)


def first_error(state: Any, end: int) -> str:
    """Return the error of a grammar or of its first steps along a text that does not end early; empty if none."""
    for step in range(STEPS):
        if state.is_error():
            return str(state.get_error())
        mask = bytearray(state.compute_bitmask())
        if step == 0 and not any(mask):
            return str(state.get_error()) or "no text can match it"
        mask[end // 8] &= ~(1 << end % 8)
        allowed = mask.rstrip(b"\0")
        if not allowed or state.is_stopped():
            break
        state.consume_token(8 * len(allowed) + allowed[-1].bit_length() - 9)  # the last allowed token
    return str(state.get_error())


if __name__ == "__main__":
    main()
