"""The small rules of English."""

import pytest

from tools.builtin.grammar import a, capital, join, number, plural


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ("fox", "a fox"),
        ("owl", "an owl"),
        ("old clock", "an old clock"),
        ("unicorn", "a unicorn"),
        ("umbrella", "an umbrella"),
        ("hour", "an hour"),
        ("one-eyed cat", "a one-eyed cat"),
    ],
)
def test_article_follows_the_sound(phrase: str, expected: str) -> None:
    assert a(phrase) == expected


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("dog", "dogs"),
        ("fox", "foxes"),
        ("butterfly", "butterflies"),
        ("monkey", "monkeys"),
        ("mouse", "mice"),
        ("sheep", "sheep"),
        ("bus driver", "bus drivers"),
        ("witch", "witches"),
        ("octopus", "octopuses"),
    ],
)
def test_plurals_are_correct(noun: str, expected: str) -> None:
    assert plural(noun) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, "zero"), (13, "thirteen"), (20, "twenty"), (42, "forty-two"), (100, "one hundred")],
)
def test_numbers_are_spelled_correctly(n: int, expected: str) -> None:
    assert number(n) == expected


def test_numbers_are_all_different() -> None:
    assert len({number(n) for n in range(101)}) == 101


def test_words_are_joined_and_capitalized() -> None:
    assert join(["a"]) == "a"
    assert join(["a", "b"]) == "a and b"
    assert join(["a", "b", "c"], "or") == "a, b or c"
    assert capital("the McGregor") == "The McGregor"
    assert capital("") == ""
