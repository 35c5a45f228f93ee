"""Reading the text tables in data/: the words and sentence templates that the generator combines.

Two layouts. A *row* table has one record a line, its fields between bars. A *section* table has records that
start with `== name`, each with lists under `[key]` headings, one template a line. Lines with `#` are comments.
"""

from functools import cache
from pathlib import Path
from random import Random

DATA = Path(__file__).parent / "data"
Sections = dict[str, dict[str, tuple[str, ...]]]


def _lines(name: str, folder: Path) -> list[str]:
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@cache
def rows(name: str, folder: Path = DATA) -> tuple[tuple[str, ...], ...]:
    """The records of a row table."""
    return tuple(tuple(field.strip() for field in line.split("|")) for line in _lines(name, folder))


@cache
def sections(name: str, folder: Path = DATA) -> Sections:
    """The records of a section table: record name -> key -> templates."""
    records: dict[str, dict[str, list[str]]] = {}
    record: dict[str, list[str]] = {}
    templates: list[str] = []
    for line in _lines(name, folder):
        if line.startswith("== "):
            record = records.setdefault(line[3:], {})
        elif line.startswith("[") and line.endswith("]"):
            templates = record.setdefault(line[1:-1], [])
        else:
            templates.append(line)
    return {title: {key: tuple(lines) for key, lines in keys.items()} for title, keys in records.items()}


def words(name: str) -> tuple[str, ...]:
    """One of the plain word lists in words.txt; a phrase may go on in the next line."""
    return tuple(word.strip() for word in " ".join(sections("words")[name]["words"]).split(","))


def pick(rng: Random, lists: dict[str, tuple[str, ...]], key: str, held_out: bool) -> str:
    """One of the lines under this key: of those held out, if they are asked for and there are any."""
    held = lists.get(f"{key} held out", ()) if held_out else ()
    return rng.choice(held or lists[key])
