"""Measures what a constraint costs: a mask on a vocabulary of 150,000 tokens, all masks of a step, a grammar, a step.

    python -m benchmarks.constraints [--json] [--device cpu] [--shape qwen3-0.6b] [--rows 16] [--only steps]

Masks are those along valid answers. The masks of a step are those of 64 rows, from the moment their last tokens are
known; sampling waits for what is left of them a millisecond later. The decode step is that of the built-in model, or
of random weights of a `--shape` with the large vocabulary, with `--rows` rows: all constrained by a schema whose
answers do not end, against none, in turns in one process. Every row has its own seed, so they are in different states
of the grammar. The first token is that of a short prompt.

With `--breakdown`, `--only steps` also prints where the time of a step's masks goes, in medians: from the tokens of the
last step to the masks, how long the host waits for these, and how long it takes to pass them to the sampler. With
INFLIGHT_NATIVE=0, masks are computed by a thread in Python.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dummy import spelling, write_checkpoint
from benchmarks.offline import decode_ms
from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight import LLM, AsyncEngine, SamplingParams, StructuredOutputs
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.matcher import MaskBatch, MaskFiller, Matcher
from inflight.constraints.vocabulary import Vocabulary
from inflight.execution.constrained_rows import ConstrainedRows, MaskTimes
from inflight.execution.sampling.interface import host_masks
from inflight.frontend.input_processor import vocabulary_of
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.request import Request
from inflight.scheduling.batch import Admission

VOCAB_SIZE = 151_936
NUM_STEPS = 120
NUM_MASKED_ROWS = 64
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z]{1,10}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "note"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["string", "integer"][i % 2]} for i in range(100)},
    "required": [f"field_{i}" for i in range(100)],
    "additionalProperties": False,
}
CASES: dict[str, StructuredOutputs] = {
    "schema": StructuredOutputs(json=PERSON),
    "schema, 100 properties": StructuredOutputs(json=WIDE),
    "any JSON object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[A-Z][a-z]+ (and|or) [0-9]{1,4}( [a-z]+){20}"),
}
PLAIN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "here": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "here", "tags"],
    "additionalProperties": False,
}
ENDLESS = {
    name: StructuredOutputs(json={"type": "array", "items": schema, "minItems": 1000})
    for name, schema in (("plain", PLAIN), ("bounds, patterns", PERSON))
}


def vocabulary() -> Vocabulary:
    """Bytes, numbers, punctuation in runs, and words with and without a space: what large vocabularies hold."""
    marks = ["".join(run) for size in (2, 3) for run in itertools.product(' "{}[]:,\n', repeat=size)]
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [text.encode() for text in (*map(str, range(10, 1000)), *marks)]
    pieces += [chr(0x4E00 + i).encode() for i in range(20_000)]
    for number in range(VOCAB_SIZE // 3):  # more than enough
        for text in (spelling(number), " " + spelling(number), spelling(number).capitalize()):
            pieces.append(text.encode())
    pieces = list(dict.fromkeys(pieces))[: VOCAB_SIZE - 1]
    return Vocabulary([*pieces, b"<end>"], frozenset({VOCAB_SIZE - 1}), (VOCAB_SIZE - 1,))


def mask_seconds(words: Vocabulary, matcher: Matcher, seed: int) -> list[float]:
    """CPU time of every mask along one answer of random tokens, with the token's own step in the grammar."""
    filler, generator = MaskFiller(), random.Random(seed)
    mask = np.empty(-(-VOCAB_SIZE // 32), dtype=np.int32)
    times: list[float] = []
    token_ids: list[int] = []
    while len(times) < 200:
        start = time.thread_time()  # others may want this core too
        matcher.advance(token_ids)
        MaskBatch(filler, [matcher], [0]).fill(mask[None])
        times.append(time.thread_time() - start)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_ids = [int(generator.choice(allowed))]
        if token_ids[0] in words.eos_token_ids:
            break
    return times


def measure_masks() -> list[tuple[Any, ...]]:
    words = vocabulary()
    compiler = GrammarCompiler(lambda: words)
    compiler.compile(StructuredOutputs(choice=["a"]))  # the tokenizer
    rows = []
    for name, asked in CASES.items():
        start = time.perf_counter()
        grammar = compiler.compile(asked)
        compile_seconds = time.perf_counter() - start
        cold = mask_seconds(words, grammar.matcher(), 0)
        times: list[float] = []
        for seed in range(1, 21):
            times += mask_seconds(words, grammar.matcher(), seed)
        p99 = float(np.percentile(times, 99))
        found = (compile_seconds * 1e3, statistics.fmean(times) * 1e6, p99 * 1e6, max(times) * 1e6)
        rows.append((name, *found, statistics.fmean(cold) * 1e6, max(cold) * 1e6))
    return rows


class _Masks:
    """The rows of a sampler, which keep their latest masks."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.host_masks = host_masks(NUM_MASKED_ROWS, vocab_size)
        self.latest = self.host_masks[:0]

    def set_masks(self, rows: Sequence[int]) -> None:
        self.latest = self.host_masks[list(rows)]


def measure_step_masks() -> list[tuple[Any, ...]]:
    """Measure the masks of one step, and how long sampling waits for them if it comes a millisecond later."""
    tokenizer = Tokenizer.load(checkpoint_folder())
    assert tokenizer.eos_token_id is not None
    small = vocabulary_of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    results: list[tuple[Any, ...]] = []
    for words in (small, vocabulary()):
        compiler = GrammarCompiler(partial(_identity, words))
        for name, constraint in ENDLESS.items():
            waits = []
            for other_seconds in (0.0, 0.001):
                state = _Masks(len(words.pieces))
                rows = ConstrainedRows(state, compiler)
                seconds = _waiting_seconds(rows, state, constraint, other_seconds)
                rows.close()
                waits.append(1e6 * statistics.median(seconds))
            results.append((len(words.pieces), name, NUM_MASKED_ROWS, *waits))
    return results


def _identity(words: Vocabulary) -> Vocabulary:
    return words


def _waiting_seconds(
    rows: ConstrainedRows, state: _Masks, constraint: StructuredOutputs, other_seconds: float
) -> list[float]:
    generator = np.random.default_rng(1)
    numbers = list(range(NUM_MASKED_ROWS))
    params = SamplingParams(max_tokens=NUM_STEPS, structured_outputs=constraint)
    for number in numbers:
        request = Request.create(f"r{number}", [1], params, NUM_STEPS)
        rows.admit([Admission(number, request.current_spec())])
    waits: list[float] = []
    for _ in range(NUM_STEPS):
        if other_seconds:
            time.sleep(other_seconds)
        start = time.perf_counter()
        masks = rows.start(numbers)
        assert masks is not None
        rows.finish(masks)
        waits.append(time.perf_counter() - start)
        bits = np.unpackbits(state.latest.view(np.uint8), axis=1, bitorder="little")
        token_ids = [int(generator.choice(np.flatnonzero(row))) for row in bits]
        rows.expect(masks, lambda token_ids=token_ids: token_ids)
    return waits[NUM_STEPS // 4 :]  # the first ones warm up


def engine_options(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Of the model that was asked for, which is written into the folder if it is not the built-in one."""
    options: dict[str, Any] = {"device": arguments.device} if arguments.device else {}
    if arguments.shape is None:
        return options
    config = {**SHAPES[arguments.shape], "vocab_size": VOCAB_SIZE, "eos_token_id": VOCAB_SIZE - 1}
    model = write_checkpoint(Path(folder) / "model", config, vocabulary().pieces)
    return {**options, "model": str(model), "load_format": "dummy", "dtype": arguments.dtype}


def breakdown(llm: LLM, num_rows: int) -> list[tuple[Any, ...]]:
    """Return medians in µs of what happens to the masks of a step."""
    runner: Any = llm._engine.core.runner
    rows: ConstrainedRows = getattr(runner, "sampling", runner).constrained  # on GPUs a part of the step
    results: list[tuple[Any, ...]] = []
    for name, constraint in ENDLESS.items():
        times: list[MaskTimes] = []
        rows.times = times
        _decode_ms(llm, constraint, num_rows)
        rows.times = None
        known = [each for each in times if each.tokens_at][NUM_STEPS // 4 :]
        phases = (
            [each.filled_at - each.tokens_at for each in known],
            [each.wanted_at - each.tokens_at for each in known],
            [each.ready_at - each.wanted_at for each in known],
            [each.passed_at - each.ready_at for each in known],
        )
        results.append((name, num_rows, *(1e6 * statistics.median(phase) for phase in phases)))
    return results


def measure_steps(
    options: dict[str, Any], arguments: argparse.Namespace
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the times of steps, and where those of masks go if that is wanted."""
    with LLM(show_progress=False, **options) as llm:
        asked = [None, *ENDLESS.values()]
        for each in asked:  # graphs, and what is compiled
            _decode_ms(llm, each, arguments.rows)
        runs = [  # by turns: machines have moods
            [_decode_ms(llm, each, arguments.rows) for each in asked] for _ in range(arguments.repeats)
        ]
        phases = breakdown(llm, arguments.rows) if arguments.breakdown else []
    without, *beside = (statistics.median(times) for times in zip(*runs, strict=True))
    steps = [
        (name, arguments.rows, without, took, 100 * (took / without - 1))
        for name, took in zip(ENDLESS, beside, strict=True)
    ]
    return steps, phases


async def measure_first_token(options: dict[str, Any], repeats: int) -> list[tuple[Any, ...]]:
    """A request at a time, with and without a schema that nobody has compiled, of an engine in its own process."""
    async with await AsyncEngine.start(in_process=False, **options) as engine:
        both: list[tuple[float, float]] = []
        for number in range(repeats + 1):  # the first one warms up
            names = [f"field_{i}_{number}" for i in range(100)]
            schema = {**WIDE, "properties": {name: {"type": "string"} for name in names}, "required": names}
            plain, constrained = None, StructuredOutputs(json=schema)
            both.append((await _first_token_ms(engine, plain), await _first_token_ms(engine, constrained)))
    without, cold = (statistics.median(times[1:]) for times in zip(*both, strict=True))
    return [(without, cold, cold - without)]


async def _first_token_ms(engine: AsyncEngine, asked: StructuredOutputs | None) -> float:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=1, structured_outputs=asked)
    start = time.perf_counter()
    async for _ in engine.generate(list(range(5, 37)), params):
        pass
    return 1e3 * (time.perf_counter() - start)


def _decode_ms(llm: LLM, asked: StructuredOutputs | None, num_rows: int) -> float:
    """The median time between the ends of two steps that only decode."""
    params = [
        SamplingParams(
            temperature=1.0, seed=row, max_tokens=NUM_STEPS, ignore_eos=True, structured_outputs=asked
        )
        for row in range(num_rows)
    ]
    with llm.recorded() as steps:
        llm.generate([[5, 6, 7, 8]] * num_rows, params, use_tqdm=False)
    return decode_ms(steps, num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", default="auto", help="of the weights of a shape")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", choices=["masks", "steps"], help="measure only the masks of a step, or steps"
    )
    parser.add_argument("--breakdown", action="store_true", help="with --only steps: where masks spend time")
    arguments = parser.parse_args()
    step_columns = ("schema", "rows", "step ms", "constrained ms", "more %")
    if arguments.only == "steps":
        with tempfile.TemporaryDirectory() as folder:
            steps, phases = measure_steps(engine_options(arguments, folder), arguments)
        show("a decode step", step_columns, steps, arguments.json, {})
        if phases:
            phase_columns = (
                "schema",
                "rows",
                "tokens to masks µs",
                "tokens to host wants µs",
                "wait µs",
                "upload µs",
            )
            show("masks of a step", phase_columns, phases, arguments.json, {})
        return
    step_masks = measure_step_masks()
    mask_columns = ("tokens", "schema", "rows", "all masks µs", "left after 1 ms µs")
    if arguments.only == "masks":
        show("masks of one step", mask_columns, step_masks, arguments.json, {})
        return
    masks = measure_masks()
    columns = ("constraint", "compile ms", "mask µs", "p99 µs", "worst µs", "cold µs", "cold worst µs")
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(arguments, folder)
        steps, _ = measure_steps(options, arguments)
        first = asyncio.run(measure_first_token(options, arguments.repeats))
    first_columns = ("first token ms", "with a cold schema ms", "more ms")
    if arguments.json:
        data = {
            "benchmark": "constraints",
            "masks": masks,
            "step_masks": step_masks,
            "steps": steps,
            "first_token": first,
        }
        print(json.dumps(data))
        return
    show(f"masks over {VOCAB_SIZE} tokens", columns, masks, False, {})
    show("masks of one step", mask_columns, step_masks, False, {})
    show("a decode step", step_columns, steps, False, {})
    show("the first token, with a schema of 100 properties that is new", first_columns, first, False, {})


if __name__ == "__main__":
    main()
