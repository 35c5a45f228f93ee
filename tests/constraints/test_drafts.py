"""What a grammar suggests as drafts: only tokens that it allows, and never an error."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from inflight import SamplingParams, StructuredOutputs
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.constraints import drafts as drafting
from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.drafts import GrammarDrafts
from inflight.frontend.text.tokenizer import Tokenizer
from inflight.request import Request
from inflight.scheduling.drafts import Guess
from tests.constraints.schemas import schema
from tests.constraints.walking import allowed_ids, compiler, vocabulary, walk
from tests.support.requests import make_request

KEYS = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"first_name": {"type": "string"}, "age_in_years": {"type": "integer"}},
        "required": ["first_name", "age_in_years"],
        "additionalProperties": False,
    }
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_folder())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def request(constraint: StructuredOutputs | None, answer: list[int], **fields: Any) -> Request:
    """Return a request with some outputs, whose grammar is compiled."""
    if constraint is not None:
        compiler().compile(constraint)
    made = make_request(
        [5, 6], params=SamplingParams(max_tokens=500, structured_outputs=constraint), max_tokens=500, **fields
    )
    made.token_ids += answer
    return made


def proposed(drafts: GrammarDrafts, request: Request, most: int = 8) -> Guess:
    return drafts.propose(request, [], most)


def text(guess: Guess) -> str:
    return b"".join(vocabulary().pieces[token_id] for token_id in guess.token_ids).decode()


def test_forced_text_is_drafted_as_the_tokenizer_spells_it() -> None:
    fox = StructuredOutputs(regex="the (quick brown fox jumps over|slow) .*")
    drafts, begun, rest = GrammarDrafts(compiler()), ids("the quick"), ids("the quick brown fox jumps")
    rest = rest[len(begun) :]
    assert len(rest) > 3
    assert text(proposed(drafts, request(fox, ids("the")))) in ("", " "), "quick or slow"
    assert proposed(drafts, request(fox, begun), 16).token_ids[: len(rest)] == rest
    assert proposed(drafts, request(fox, begun), most=2).token_ids == rest[:2]
    assert drafts.propose(request(fox, begun), rest[:2], 1).token_ids == rest[2:3]


def test_key_is_drafted_behind_any_spelling_of_its_beginning() -> None:
    drafts = GrammarDrafts(compiler())
    assert text(proposed(drafts, request(KEYS, ids('{"fi')))).startswith("rst_name")
    assert (
        text(proposed(drafts, request(KEYS, [*ids('{"first_'), *map(ids("n a").__getitem__, (0,))])))
        == 'ame"'
    )


def test_special_token_is_drafted_where_it_is_forced() -> None:
    special = min(vocabulary().special_ids)
    drafts = GrammarDrafts(compiler())
    marked = StructuredOutputs(grammar=f'start: "abc" <[{special}]> "defg"\n')
    guess = proposed(drafts, request(marked, ids("a")))
    assert special in guess.token_ids
    assert text(guess).startswith("bc")


def answered(drafts: GrammarDrafts, constraint: StructuredOutputs, answer: list[int], **fields: Any) -> None:
    made = request(constraint, answer, **fields)
    assert proposed(drafts, made) is not None
    drafts.ended(made)


def test_answers_teach_how_the_grammar_goes_on() -> None:
    drafts = GrammarDrafts(compiler())
    single = [vocabulary().pieces.index(bytes([byte])) for byte in b'{"first_name": "Al", "age_in_years": 7}']
    unknown = request(KEYS, single[:14])  # {"first_name":
    assert text(proposed(drafts, unknown)) == ""
    for _ in range(5):
        answered(drafts, KEYS, single)
    assert text(proposed(drafts, unknown)).startswith(' "')
    assert proposed(drafts, request(KEYS, single[:3])).token_ids == single[3:11], "one letter each"
    assert proposed(drafts, request(KEYS, single[:14], cache_salt="other")).token_ids == []
    drafts.clear()
    assert proposed(drafts, request(KEYS, single[:14])).token_ids == []
    assert proposed(drafts, request(KEYS, single[:3])).token_ids != single[3:11]


def test_what_a_grammar_refuses_is_cut() -> None:
    drafts, whole = GrammarDrafts(compiler()), ids('{"first_name": "Al", "age_in_years": 7}')
    made = request(KEYS, whole[:1])
    assert drafts.num_allowed(made, whole[1:]) == len(whole) - 1
    assert drafts.num_allowed(made, [*whole[1:4], *ids("]"), *whole[4:]]) == 3
    assert drafts.num_allowed(made, []) == 0


def test_without_a_constraint_there_is_nothing_to_say() -> None:
    assert proposed(GrammarDrafts(compiler()), request(None, [7])).token_ids == []


def test_nothing_is_drafted_before_the_grammar_is_compiled() -> None:
    cold = GrammarCompiler(vocabulary)
    drafts, made = GrammarDrafts(cold), request(KEYS, ids('{"fi'))
    assert proposed(drafts, made).token_ids == []
    assert drafts.num_allowed(made, ids("rst")) == 0
    cold.compile(KEYS)
    assert text(proposed(drafts, made)).startswith("rst_name")


@pytest.mark.parametrize("answer", ["abc<end>", "abc<end><end>", "abx", "abxyz", "abcd"])
def test_nothing_follows_the_end_or_a_token_that_was_not_allowed(answer: str) -> None:
    drafts, (end,) = GrammarDrafts(compiler()), vocabulary().eos_token_ids
    pieces = answer.split("<end>")
    outputs = [*ids(pieces[0]), *[end] * (len(pieces) - 1)]
    made = request(StructuredOutputs(regex="abc"), outputs)
    for _ in range(2):
        assert proposed(drafts, made).token_ids == []
        assert drafts.num_allowed(made, ids("abc")) == 0
    drafts.ended(made)


def test_full_lexer_ends_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.constraints.compiler.MAX_STATES", 60)
    small = GrammarCompiler(vocabulary)
    long = StructuredOutputs(regex="([a-z]{1,40} [0-9]{1,40} ?)*(abc)+")
    small.compile(long)
    drafts = GrammarDrafts(small)
    made = request(long, [])
    rng = random.Random(0)
    for _ in range(60):
        made.token_ids += ids(rng.choice(("word 12 ", "abc 1 ", "zz 123456 ")))
        proposed(drafts, made)
        drafts.num_allowed(made, ids("abc 12 "))
    answer = drafts._answer(made)
    assert answer.state is not None
    assert answer.state.is_error()
    assert proposed(drafts, made).token_ids == []


def test_long_answers_are_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MAX_CONSUMED", 10)
    drafts = GrammarDrafts(compiler())
    made = request(StructuredOutputs(regex="(ab ?)*"), ids("ab ") * 20)
    count = len(made.token_ids) - made.num_prompt_tokens
    allowed = [drafts.num_allowed(made, ids("ab")) for _ in range(-(-count // 10) + 1)]
    assert allowed[0] == 0
    assert allowed[-1] > 0


def test_habits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MAX_SITUATIONS", 10)
    monkeypatch.setattr(drafting, "MAX_GRAMMARS", 3)
    drafts = GrammarDrafts(compiler())
    for number in range(6):
        answered(
            drafts,
            StructuredOutputs(regex=f"[a-z ]*{number}"),
            ids("the quick brown fox jumps over the lazy dog"),
        )
    assert len(drafts._habits) == 3
    assert all(len(habits._counts) <= 10 for habits in drafts._habits.values())


def test_drafts_are_allowed_along_random_texts() -> None:
    drafts, rng = GrammarDrafts(compiler()), random.Random(1)
    num_drafted = 0
    for seed in range(60):
        constraint = StructuredOutputs(json=schema(random.Random(seed)))
        answer = ids(walk(constraint, seed))
        made, matcher = request(constraint, []), compiler().compile(constraint).matcher()
        grammar: Any = matcher.state
        for token_id in answer:
            made.token_ids.append(token_id)
            matcher.advance([token_id])
            guess = proposed(drafts, made, rng.randint(1, 8))
            num_drafted += len(guess.token_ids)
            assert grammar.validate_tokens(guess.token_ids) == len(guess.token_ids)
            assert drafts.num_allowed(made, guess.token_ids) == len(guess.token_ids)
            if grammar.is_stopped():
                break
            token = rng.randrange(len(vocabulary().pieces))
            assert drafts.num_allowed(made, [token]) == (token in allowed_ids(matcher))
        drafts.ended(made)
    assert num_drafted > 300
