"""What one request may cost its neighbours: steps of an engine with the dearest requests that are allowed.

    python -m benchmarks.request_cost [--answers 1,16,128] [--total N] [--json]

The built-in model computes a neighbour's tokens beside a request of n answers: plain, or with the longest lists (bad
words, stop ids, biases, allowed ids) that `--max-listed-tokens` of a server lets n answers have. Told are the median
time of a step in which all of them decode, and what coming in takes the engine (reading the messages, adding, the first
step); both also as a multiple of what n plain answers take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.report import show
from inflight import SamplingParams
from inflight.config import EngineConfig
from inflight.engine.remote.wire import Add, ToEngine, encode_add
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.processes.channel import SECRET_LENGTH, Codec
from inflight.request import Request
from inflight.sampling_params import MAX_BAD_WORDS
from inflight.server.config import SERVE_OPTIONS

NUM_STEPS = 40


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of request to its neighbour, in milliseconds."""

    kind: str
    num_answers: int
    num_items: int
    step_ms: float
    entry_ms: float


def bad_words(engine: LoadedEngine, num_tokens: int) -> list[str]:
    """Different words, whose tokens, alone and after a space, are nearly so many."""
    assert engine.frontend.tokenizer is not None
    words: list[str] = []
    total = 0
    for number in range(MAX_BAD_WORDS):
        word = "".join(chr(97 + (number >> shift) % 26) + "q" for shift in (0, 4, 8, 12))
        total += sum(
            map(len, engine.frontend.tokenizer.encode_batch([word, f" {word}"], add_special_tokens=False))
        )
        if total > num_tokens:
            break
        words.append(word)
    return words


def kinds(engine: LoadedEngine, num_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    size = engine.frontend.input_processor.vocab_size
    ids = [number % size for number in range(num_tokens)]  # a list may have an id twice
    yield "plain", {}
    yield "bad words", {"bad_words": bad_words(engine, num_tokens)}
    yield "stop ids", {"stop_token_ids": [min(i, size - 2) for i in ids], "min_tokens": NUM_STEPS}
    yield "biases", {"logit_bias": dict.fromkeys(ids, -1.0)}
    yield "allowed ids", {"allowed_token_ids": ids}


def measure(engine: LoadedEngine, kind: str, num_answers: int, options: dict[str, Any]) -> Cost:
    core, codec = engine.core, Codec[ToEngine](bytes(SECRET_LENGTH), ToEngine)
    plain = SamplingParams(max_tokens=2 * NUM_STEPS, temperature=0, ignore_eos=True)
    params = SamplingParams(n=num_answers, max_tokens=NUM_STEPS, ignore_eos=True, seed=0, **options)
    neighbour = engine.frontend.prepare("neighbour", [5, 6, 7], plain).answers[0].request
    answers = engine.frontend.prepare("dear", [5, 6, 7], params).answers
    frames = [bytes(encode_add(codec, call, answer.request)) for call, answer in enumerate(answers)]
    core.add(neighbour)
    for _ in range(8):
        core.step()
    start = time.perf_counter()
    for frame in frames:
        message = codec.decode(frame)
        assert isinstance(message, Add)
        core.add(Request(message.request))
    core.step()
    entry = time.perf_counter() - start
    steps = []
    for _ in range(NUM_STEPS - 4):
        start = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - start)
    while core.has_work:
        core.step()
    num_items = sum(len(value) for value in options.values() if not isinstance(value, int))
    return Cost(kind, num_answers, num_items, 1e3 * statistics.median(steps), 1e3 * entry)


def run(all_answers: list[int], total: int, repeats: int) -> list[Cost]:
    engine = load_engine(EngineConfig.create(max_num_seqs=160, num_blocks=4096))
    found = []
    for num_answers in all_answers:
        cases = [*kinds(engine, total // num_answers)]
        # In turn, so that what else the machine does meets all of them.
        rounds = [
            [measure(engine, kind, num_answers, options) for kind, options in cases] for _ in range(repeats)
        ]
        for costs in zip(*rounds, strict=True):
            step, entry = (min(getattr(cost, name) for cost in costs) for name in ("step_ms", "entry_ms"))
            found.append(Cost(costs[0].kind, num_answers, costs[0].num_items, step, entry))
    engine.core.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", default="1,16,128")
    parser.add_argument(
        "--total",
        type=int,
        default=SERVE_OPTIONS["max_listed_tokens"].default,
        help="listed tokens times answers",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs = run([*map(int, arguments.answers.split(","))], arguments.total, arguments.repeats)
    rows, data = [], []
    for cost in costs:
        plain = next(other for other in costs if other.num_answers == cost.num_answers)
        step, entry = cost.step_ms / plain.step_ms, cost.entry_ms / plain.entry_ms
        rows.append((cost.kind, cost.num_answers, cost.num_items, cost.step_ms, step, cost.entry_ms, entry))
        keys = ("kind", "answers", "items", "step_ms", "step_ratio", "entry_ms", "entry_ratio")
        data.append(dict(zip(keys, rows[-1], strict=True)))
    columns = ("beside", "answers", "items each", "step ms", "to plain", "coming in ms", "to plain")
    show(
        "steps beside one request", columns, rows, arguments.json, {"benchmark": "request_cost", "rows": data}
    )


if __name__ == "__main__":
    main()
