"""The trial of grammars, run as a script by `trial.py`: compile what the standard input has, take a few steps in it.

Only how long that takes counts, and that it ends. So it has a vocabulary of single bytes, and mistakes in a grammar
are none of its business. Nothing of inflight is imported, so that it starts soon.
"""

from __future__ import annotations

import json
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STEPS = 16


def main() -> None:
    seconds, memory = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.loads(sys.stdin.buffer.read())
    limits = LLParserLimits(**job["limits"], verbose_errors=False)
    tokenizer = LLTokenizer("byte", slices=[])
    for grammar in job["grammars"]:
        walk(LLMatcher(tokenizer, grammar, log_level=0, limits=limits))


def walk(state: LLMatcher) -> None:
    for _ in range(STEPS):
        mask = state.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        if state.is_error() or not allowed or not state.consume_token(allowed[-1]):
            break


if __name__ == "__main__":
    main()
