"""Masks follow the tokens of their rows, also where the lexer that a constraint's requests share is full."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest

from inflight.constraints import compiler as compiling
from inflight.constraints.compiler import Grammar, GrammarCompiler
from inflight.constraints.native_matcher import UNKNOWN, NativeState
from inflight.events import RequestFailure
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission
from inflight.structured_outputs import StructuredOutputs
from tests.constraints.walking import vocabulary

# The lexer must remember which of the last 18 letters were an "a": every text leads it to new states.
HUNGRY = "[a-c]*a[a-c]{17}x"
CONSTRAINT = StructuredOutputs(regex=HUNGRY)
NUM_TOKENS = 60


class Masks:
    """The rows of a sampler, recording their latest masks."""

    vocab_size = len(vocabulary().pieces)

    def __init__(self) -> None:
        self.host_masks = np.zeros((16, -(-self.vocab_size // 32)), dtype=np.int32)
        self.latest = self.host_masks[:0]

    def set_masks(self, rows: Sequence[int]) -> None:
        self.latest = self.host_masks[list(rows)]


def follow(
    rows: ConstrainedRows, state: Masks, regex: str, token_ids: Sequence[int]
) -> tuple[list[bytes], dict[int, RequestFailure]]:
    """Run a request in row 0 that samples these tokens. Return its masks, and its failure if it has one."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex), max_tokens=len(token_ids))
    request = Request.create("r", [1], params, len(token_ids))
    rows.admit([Admission(0, request.current_spec())])
    masks = []
    for token_id in token_ids:
        step = rows.start([0])
        assert step is not None
        rows.finish(step)
        masks.append(state.latest.tobytes())
        failures = step.failures()
        if failures:
            return masks, failures
        expect(rows, step, [token_id])
    return masks, {}


def follow_drafting(
    rows: ConstrainedRows, state: Masks, regex: str, token_ids: Sequence[int], generator: random.Random
) -> tuple[list[bytes], dict[int, RequestFailure]]:
    """The same with drafts, of which some are wrong. The last token is sampled without."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex), max_tokens=len(token_ids))
    rows.admit([Admission(0, Request.create("r", [1], params, len(token_ids)).current_spec())])
    masks: list[bytes] = []
    while len(masks) < len(token_ids):
        rest = list(token_ids[len(masks) :])
        drafts = [
            token_id if generator.random() < 0.8 else piece(generator.choice("abc"))
            for token_id in rest[: generator.randint(0, min(4, len(rest) - 1))]
        ]
        step = rows.start([0] * (1 + len(drafts)), [-1, *drafts])
        assert step is not None
        rows.finish(step)
        masks.append(state.latest.tobytes())
        ahead = np.zeros((len(drafts), state.host_masks.shape[1]), dtype=np.int32)
        if drafts:
            rows.look_ahead(step, ahead)
        failures = step.failures()
        for sample, (draft, token_id) in enumerate(zip(drafts, rest, strict=False)):
            if draft != token_id or sample in failures:
                break
            masks.append(ahead[sample].tobytes())
        sample = len(masks) - 1 - len(token_ids) + len(rest)  # the last one that is taken
        if sample in failures:
            return masks, {0: failures[sample]}
        expect(rows, step, rest[: 1 + len(drafts)])
    return masks, {}


def expect(rows: ConstrainedRows, step: StepMasks, token_ids: list[int]) -> None:
    """Let a step sample these tokens, which arrive a moment later if masks are computed natively."""
    if not any(isinstance(row.matcher and row.matcher.state, NativeState) for row in step.constrained):
        rows.expect(step, lambda: token_ids)
        return
    arriving = np.full(len(token_ids) + 1, UNKNOWN, dtype=np.int32)
    rows.expect(step, lambda: token_ids, arriving)
    arriving[:-1] = token_ids


def letters(seed: int) -> list[int]:
    generator, pieces = random.Random(seed), vocabulary().pieces
    return [pieces.index(generator.choice((b"a", b"b", b"c"))) for _ in range(NUM_TOKENS)]


@pytest.fixture(params=[False, True], ids=["python", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether masks are computed by compiled threads."""
    return bool(request.param)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, native: bool) -> GrammarCompiler:
    """A compiler whose lexers fill up quickly."""
    monkeypatch.setattr(compiling, "MAX_STATES", 200)
    monkeypatch.setattr(compiling, "MAX_LARGE_STATES", 2000)
    return GrammarCompiler(vocabulary, native)


def test_masks_do_not_depend_on_earlier_requests_with_the_same_constraint(
    compiler: GrammarCompiler,
) -> None:
    state = Masks()
    rows = ConstrainedRows(state, compiler)
    for seed in range(40):
        masks, failures = follow(rows, state, HUNGRY, letters(seed))
        assert not failures
    alone = ConstrainedRows(Masks(), GrammarCompiler(vocabulary))
    assert masks == follow(alone, alone.state, HUNGRY, letters(39))[0]  # type: ignore[arg-type]
    rows.close()


def test_request_that_fills_a_lexer_on_its_own_fails_alone(compiler: GrammarCompiler) -> None:
    state = Masks()
    rows = ConstrainedRows(state, compiler)
    token_ids = [letter for seed in range(60) for letter in letters(seed)]
    _, failures = follow(rows, state, HUNGRY, token_ids)
    assert "too many states" in failures[0].message
    assert not follow(rows, state, HUNGRY, letters(0))[1]


def test_masks_behind_drafts_are_those_without(compiler: GrammarCompiler) -> None:
    """Also where the lexer is full: behind a draft, or because of drafts that were refused."""
    state, generator = Masks(), random.Random(0)
    rows = ConstrainedRows(state, compiler)
    alone = ConstrainedRows(Masks(), GrammarCompiler(vocabulary))
    for seed in range(20):
        masks, failures = follow_drafting(rows, state, HUNGRY, letters(seed), generator)
        assert not failures
        assert masks == follow(alone, alone.state, HUNGRY, letters(seed))[0]  # type: ignore[arg-type]
    token_ids = [letter for seed in range(60) for letter in letters(seed)]
    masks, failures = follow_drafting(rows, state, HUNGRY, token_ids, generator)
    assert "too many states" in failures[0].message
    assert len(masks) == len(follow(rows, state, HUNGRY, token_ids)[0])
    rows.close()
    alone.close()


@pytest.mark.parametrize("native", [False])  # native matchers share no states
def test_cached_lexers_have_a_limited_number_of_states(compiler: GrammarCompiler) -> None:
    state = Masks()
    rows = ConstrainedRows(state, compiler)
    for number in range(compiling.MAX_CACHED_LARGE + 2):
        for seed in range(3):
            follow(rows, state, f"[a-c]*a[a-c]{{17}}x{number}", letters(seed))
    cached = [*compiler._cache._outcomes.values(), *compiler._large._outcomes.values()]
    are_large = [future.result().is_large for future in cached]
    assert are_large.count(True) == compiling.MAX_CACHED_LARGE
    assert are_large.count(False) <= compiling.MAX_CACHED
    small = compiler._cache._outcomes.popitem()[1].result()
    large = compiler._large._outcomes.popitem()[1].result()
    assert "200 >= 200" in error_when_full(small)
    assert "2000 >= 2000" in error_when_full(large)


def error_when_full(grammar: Grammar) -> str:
    for seed in range(100):
        matcher = grammar.matcher()
        for letter in letters(seed):
            matcher.advance([letter])
            matcher.state.compute_bitmask()
            if matcher.error:
                return matcher.error
    return ""


def test_long_outputs_can_be_replayed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was preempted or moved to another engine starts with all its outputs."""
    monkeypatch.setitem(compiling.LIMITS, "step_lexer_fuel", 2000)
    matcher = GrammarCompiler(vocabulary).compile(CONSTRAINT).matcher()
    matcher.advance([letter for seed in range(10) for letter in letters(seed)])
    assert matcher.error is None


@pytest.mark.parametrize("error", [MemoryError("no more"), RuntimeError("can't start new thread")])
def test_any_failure_to_compile_fails_only_its_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    state = Masks()
    rows = ConstrainedRows(state, compiler)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", Mock(side_effect=error))
        _, failures = follow(rows, state, HUNGRY, letters(0))
    assert failures[0].code == "constraint_failed"
    assert not follow(rows, state, HUNGRY, letters(0))[1]


class PanicException(BaseException):
    """A stand-in for the exception of a Rust panic, which is not an Exception."""


def test_panic_of_the_grammar_engine_fails_only_its_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Masks()
    rows = ConstrainedRows(state, compiler)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "first_error", Mock(side_effect=PanicException("index out of bounds")))
        _, failures = follow(rows, state, HUNGRY, letters(0))
    assert failures[0].code == "constraint_failed"


# ---- masks of the next step ----


def step(rows: ConstrainedRows, state: Masks, numbers: list[int], token_ids: list[int]) -> list[list[int]]:
    """Run a step that samples these tokens for these rows. Return the tokens that its masks allowed."""
    masks = rows.start(numbers)
    assert masks is not None
    rows.finish(masks)
    assert not masks.failures()
    expect(rows, masks, token_ids)
    bits = np.unpackbits(state.latest.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def admit(rows: ConstrainedRows, number: int, word: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=[word]), max_tokens=9)
    rows.admit([Admission(number, Request.create(f"r{number}", [1], params, 9).current_spec())])


def piece(letter: str) -> int:
    return vocabulary().pieces.index(letter.encode())


def test_next_masks_are_computed_before_the_next_step_starts() -> None:
    state = Masks()
    rows = ConstrainedRows(state, GrammarCompiler(vocabulary))
    admit(rows, 0, "xyz")
    step(rows, state, [0], [piece("x")])
    (job,) = [row.job for row in rows._rows.values()]
    assert job is not None
    job.result(30)
    allowed = np.unpackbits(state.host_masks[0].view(np.uint8), bitorder="little")
    assert allowed[piece("y")]
    assert piece("y") in step(rows, state, [0], [piece("y")])[0]
    assert rows._rows[0].job is not job
    rows.close()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_masks_follow_rows_that_come_go_and_pause(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, native: bool
) -> None:
    monkeypatch.setattr("inflight.constraints.matcher.num_cores", lambda: num_threads)
    state = Masks()
    rows = ConstrainedRows(state, GrammarCompiler(vocabulary, native))
    admit(rows, 0, "abc")
    admit(rows, 1, "xyz")
    allowed = step(rows, state, [0, 1], [piece("a"), piece("x")])
    assert [piece("a") in allowed[0], piece("x") in allowed[1]] == [True, True]
    admit(rows, 2, "mno")
    allowed = step(rows, state, [2, 0], [piece("m"), piece("b")])  # row 1 pauses
    assert [piece("m") in allowed[0], piece("b") in allowed[1]] == [True, True]
    admit(rows, 0, "uvw")  # a new request in row 0
    allowed = step(rows, state, [0, 1, 2], [piece("u"), piece("y"), piece("n")])
    assert [piece("u") in allowed[0], piece("y") in allowed[1], piece("n") in allowed[2]] == [True] * 3
    allowed = step(rows, state, [2, 1, 0], [piece("o"), piece("z"), piece("v")])
    assert [piece("o") in allowed[0], piece("z") in allowed[1], piece("v") in allowed[2]] == [True] * 3
    (end,) = vocabulary().eos_token_ids
    assert step(rows, state, [2, 1], [end, end]) == [[end], [end]]
    assert step(rows, state, [2, 1], [end, end]) == [[end], [end]]  # as with ignore_eos
    rows.close()


def test_forbidden_token_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr("inflight.constraints.matcher.num_cores", lambda: 4)
    state = Masks()
    rows = ConstrainedRows(state, GrammarCompiler(vocabulary, native))
    admit(rows, 0, "abc")
    admit(rows, 1, "xyz")
    step(rows, state, [0, 1], [piece("q"), piece("x")])
    masks = rows.start([0, 1])
    assert masks is not None
    rows.finish(masks)
    assert list(masks.failures()) == [0]
    assert not state.latest[0].any()
    assert state.latest[1].any()
    rows.close()


def test_masks_are_the_same_whichever_lexer_computes_them(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Rows of one constraint use several lexers, and rows that come later other ones than the first."""
    monkeypatch.setattr("inflight.constraints.matcher.num_cores", lambda: 4)
    monkeypatch.setattr(compiling, "MATCHERS_PER_LEXER", 2)
    state, shared = Masks(), GrammarCompiler(vocabulary, native)
    shared.compile(CONSTRAINT)
    monkeypatch.setattr(shared._threads, "submit", lambda _owner, work: work())
    rows = ConstrainedRows(state, shared)
    texts = [letters(seed) for seed in range(10)]
    alone = ConstrainedRows(Masks(), GrammarCompiler(vocabulary))
    expected = [follow(alone, alone.state, HUNGRY, text)[0] for text in texts]  # type: ignore[arg-type]
    for number in range(10):
        params = SamplingParams(structured_outputs=CONSTRAINT, max_tokens=NUM_TOKENS)
        request = Request.create(f"r{number}", [1], params, NUM_TOKENS)
        rows.admit([Admission(number, request.current_spec())])
    actual: list[list[bytes]] = [[] for _ in texts]
    for token_ids in zip(*texts, strict=True):
        step(rows, state, list(range(10)), list(token_ids))
        for masks, mask in zip(actual, state.latest, strict=True):
            masks.append(mask.tobytes())
    assert actual == expected
    assert len(shared.compile(CONSTRAINT)._lexers) > 1
    rows.close()
    alone.close()


def test_tokens_that_never_arrive_do_not_keep_rows_from_closing() -> None:
    rows = ConstrainedRows(Masks(), GrammarCompiler(vocabulary, native=True))
    admit(rows, 0, "xyz")
    masks = rows.start([0])
    assert masks is not None
    rows.finish(masks)
    rows.expect(masks, list, np.full(1, UNKNOWN, dtype=np.int32))
    rows.close()


def test_lost_device_ends_the_wait_for_masks() -> None:
    rows = ConstrainedRows(Masks(), GrammarCompiler(vocabulary, native=True))
    admit(rows, 0, "xyz")
    masks = rows.start([0])
    assert masks is not None
    rows.finish(masks)
    rows.expect(masks, Mock(side_effect=RuntimeError("lost")), np.full(1, UNKNOWN, dtype=np.int32))
    masks = rows.start([0])
    assert masks is not None
    with pytest.raises(RuntimeError, match="lost"):
        rows.finish(masks)
    rows.close()


def test_masks_are_computed_in_python_without_native_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "native_functions", lambda: None)
    state = Masks()
    rows = ConstrainedRows(state, GrammarCompiler(vocabulary, native=True))
    admit(rows, 0, "xy")
    for letter in "xy":
        masks = rows.start([0])
        assert masks is not None
        rows.finish(masks)
        allowed = np.unpackbits(state.latest.view(np.uint8), bitorder="little")
        assert allowed[piece(letter)]
        rows.expect(masks, lambda letter=letter: [piece(letter)], np.array([piece(letter)], dtype=np.int32))
    rows.close()
