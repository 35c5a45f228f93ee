"""The generated text: reproducible, well formed, true, and about what the prompt asked for."""

import operator
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.builtin import explain, facts, stories, unknown
from tools.builtin.cast import draw_cast, invented_word
from tools.builtin.chat_format import END_OF_TEXT, IM_END
from tools.builtin.corpus import KINDS, document, documents, is_held_out
from tools.builtin.examples import Example
from tools.builtin.grammar import article, number, plural
from tools.builtin.tables import rows

SEED = 7


@cache
def some_documents() -> tuple[Example, ...]:
    return tuple(documents(SEED, 0, 3_000))


def test_document_depends_only_on_seed_and_index() -> None:
    assert list(documents(SEED, 5, 4)) == [document(SEED, index) for index in range(5, 9)]
    assert document(SEED, 5) != document(SEED + 1, 5)


def test_documents_hardly_repeat() -> None:
    texts = Counter(example.text for example in some_documents() if example.kind == "story")
    assert len(texts) > 0.99 * texts.total()


def test_no_document_has_leftover_placeholders() -> None:
    for kind in KINDS:
        rng = Random(3)
        for _ in range(60):
            text = kind(rng).text
            assert not re.search(r"[{}|]", text.replace("<|", "").replace("|>", "")), text


def test_turns_are_complete() -> None:
    for example in some_documents():
        assert len(example.turns) == 1 if example.plain else len(example.turns) % 2 == 0
        assert all(turn and turn == turn.strip() for turn in example.turns), example
        assert example.text.endswith(END_OF_TEXT)
        assert example.text.count(IM_END) == (
            0 if example.plain else len(example.turns) + bool(example.system)
        )


def test_text_is_well_formed() -> None:
    for example in some_documents():
        for answer in example.turns[1::2] or example.turns:
            assert "  " not in answer, answer
            assert answer[0].isupper() or answer[0] in "\"-'0123456789" or answer == "pong", answer
            assert answer.count('"') % 2 == 0, answer
            assert not re.search(r"[.,]{2}|\s[.,!?]|[.!?] [a-z]", re.sub(r'[.!?]"', "", answer)), answer


def test_articles_fit_the_next_word() -> None:
    for example in some_documents():
        for found in re.finditer(r"\b([Aa]n?) ([a-z]+)", example.turns[-1]):
            if found[2] not in ("and", "or", "in", "is"):
                assert found[1].lower() == article(found[2]), found[0]


def test_answers_mention_the_subjects_of_the_prompt() -> None:
    checked = 0
    for example in some_documents():
        if example.kind in ("story", "compare", "dialogue", "animal", "job") and len(example.subjects) > 1:
            for subject in example.subjects:
                assert subject in example.turns[0] or subject.lower() in example.turns[0].lower()
                answer = example.turns[1].lower()
                checked += subject.lower() in answer
                assert subject.lower() in answer or plural(subject.lower()) in answer, (
                    subject,
                    example.turns,
                )
    assert checked > 500


def test_lengths_vary_from_a_word_to_pages() -> None:
    lengths = sorted(len(example.turns[-1].split()) for example in some_documents())
    assert lengths[len(lengths) // 20] <= 3
    assert lengths[len(lengths) // 2] < 80
    assert lengths[-1] > 300


def test_held_out_combinations_are_never_trained_on() -> None:
    assert not any(is_held_out(example) for example in some_documents())
    held_out = list(documents(SEED, 0, 30, held_out=True))
    assert all(is_held_out(example) and len(example.subjects) > 1 for example in held_out)


@pytest.mark.parametrize("size", stories.SIZES)
@pytest.mark.parametrize("plot", list(stories.PLOTS))
def test_story_names_its_cast(plot: str, size: str) -> None:
    rng = Random(f"{plot}/{size}")
    for _ in range(5):
        cast = draw_cast(rng)
        text = stories.tell(rng, cast, plot, size, thing=True)
        assert cast.hero.called.lower() in text.lower()
        assert cast.friend.kind in text
        assert cast.noun in text
        assert cast.place.noun in text


def test_longer_stories_are_longer() -> None:
    rng, mean = Random(1), []
    for size in stories.SIZES:
        texts = [stories.tell(rng, draw_cast(rng), "lost", size) for _ in range(40)]
        mean.append(sum(map(len, texts)) / len(texts))
    assert mean == sorted(mean)
    assert mean[-1] > 2 * mean[0]


def test_continued_story_is_cut_between_sentences() -> None:
    rng = Random(2)
    for _ in range(50):
        text = stories.tell(rng, draw_cast(rng), rng.choice(list(stories.PLOTS)), "medium")
        begin, rest = stories.split_story(rng, text)
        assert begin + text[len(begin) : len(text) - len(rest)] + rest == text
        assert begin.endswith((".", "!", "?", '"'))
        assert begin.count('"') % 2 == 0


def test_sums_are_right() -> None:
    rng, words = Random(4), {number(n): n for n in range(101)}
    signs = {"plus": operator.add, "+": operator.add, "minus": operator.sub, "-": operator.sub}
    signs |= {"times": operator.mul, "*": operator.mul, "x": operator.mul}
    for _ in range(400):
        example = facts.arithmetic(rng)
        found = re.search(r"([a-z0-9-]+) (plus|minus|times|[-+*x]) ([a-z0-9-]+)", example.turns[0].lower())
        assert found is not None, example
        left, right = (words.get(found[i], -1) if found[i] in words else int(found[i]) for i in (1, 3))
        answer = example.turns[1].lower().rstrip(".").rpartition(" is ")[2].rpartition("= ")[2]
        if answer != "one hundred":
            answer = answer.rpartition(" ")[2]
        assert (words[answer] if answer in words else int(answer)) == signs[found[2]](left, right), example


def test_lists_have_the_requested_number_of_items() -> None:
    rng, words = Random(5), {number(n): n for n in range(11)}
    for _ in range(200):
        example = facts.listing(rng)
        how, answer = example.subjects[0], example.turns[1]
        items = (
            answer.split("\n") if "\n" in answer else re.split(r", | and (?!seek)", answer.split(" are ")[-1])
        )
        assert len(items) == (words[how] if how in words else int(how)), example


def test_opposites_go_both_ways() -> None:
    pairs = dict(facts.OPPOSITES)
    assert pairs["hot"] == "cold"
    assert pairs["cold"] == "hot"
    assert pairs["light"] == "dark"  # the table's own line, not the reverse of "heavy"


def test_unknown_questions_differ_from_the_known_ones() -> None:
    known = {
        question
        for topic in (*explain.TOPICS.values(), *explain.SERVING.values())
        for question in topic["ask"]
    }
    known |= {f"How do I {do}?" for recipe in explain.HOWTO.values() for do in recipe["do"]}
    known |= {row[0] for row in rows("facts")}
    rng = Random(6)
    assert not known & set(unknown.UNKNOWN["ask"])
    assert not known & {unknown.unknown(rng).turns[0] for _ in range(2_000)}


def test_story_never_mentions_its_thing_after_the_end() -> None:
    rng = Random(8)
    for _ in range(300):
        cast = replace(draw_cast(rng), noun="kite")
        text = stories.tell(rng, cast, "storm", rng.choice(stories.SIZES), thing=True)
        assert text.index("kite") < len(text) / 2, text


@given(st.integers())
def test_invented_words_are_lower_case_letters(seed: int) -> None:
    word = invented_word(Random(seed))
    assert word.isalpha()
    assert word.islower()
    assert len(word) > 2
