"""The process that tries grammars, run as a script by `trial.py`: compile one, and take its first steps.

It has the model's own vocabulary, and less memory, time and stack than whoever compiles the grammar afterwards. It is
ended by the system where it wants more, which is all that happens to anyone. Nothing of inflight is imported but the
vocabulary, by its path, so that it starts soon.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STEPS = 8
NICENESS = 5  # on a busy machine it gets about a third of the time that the server and a CPU engine get
HEADER = struct.Struct("!I")
_PAGE = resource.getpagesize()


def main() -> None:
    memory, stack, vocabulary = map(int, sys.argv[1:])
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's are for the parent
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(vocabulary, "rb") as file:
        tokenizer = read_tokenizer(file.read())
    resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    send(b"ready")
    while (job := receive()) is not None:
        limit_memory(memory)
        message = json.loads(job)
        seconds = message.pop("seconds")
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor; the signal ends the process
        error = attempt(tokenizer, **message)
        seconds_left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        send(json.dumps([error, seconds - seconds_left]).encode())


def read_tokenizer(data: bytes) -> LLTokenizer:
    spec = importlib.util.spec_from_file_location("vocabulary", Path(__file__).with_name("vocabulary.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["vocabulary"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer: LLTokenizer = module.Vocabulary.unpacked(data).tokenizer()
    return tokenizer


def limit_memory(memory: int) -> None:
    """So much more than there is now."""
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):  # some systems have no such limit
        return


def attempt(tokenizer: LLTokenizer, grammar: str, limits: dict[str, Any]) -> str:
    """Why it cannot be used; nothing if it can."""
    from llguidance import LLMatcher, LLParserLimits

    state = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    return first_error(state, tokenizer.eos_token)


def first_error(state: LLMatcher, end: int) -> str:
    """Of what is compiled, or of the first steps along some text that does not end where it might."""
    for step in range(STEPS):
        if state.is_error():
            return state.get_error()
        mask = bytearray(state.compute_bitmask())
        if step == 0 and not any(mask):
            return state.get_error() or "no text can match it"
        mask[end // 8] &= ~(1 << end % 8)
        allowed = mask.rstrip(b"\0")
        if not allowed or state.is_stopped():
            break
        state.consume_token(8 * len(allowed) + allowed[-1].bit_length() - 9)  # the last one
    return state.get_error()


def receive() -> bytes | None:
    """One message from the parent; None once it is gone."""
    header = read_exactly(HEADER.size)
    return None if header is None else read_exactly(HEADER.unpack(header)[0])


def read_exactly(size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(body: bytes) -> None:
    data = memoryview(HEADER.pack(len(body)) + body)
    while data:
        data = data[os.write(0, data) :]


if __name__ == "__main__":
    main()
