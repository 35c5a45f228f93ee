"""The special tokens that a tokenizer puts around a text, or a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from inflight.errors import ModelError


@dataclass(frozen=True, slots=True)
class TextFrame:
    """Read from the post-processor once, so that texts can be tokenized, cut and joined apart from each other:

    before, the text, after        or        before, the first text, between, the second text, after
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    between: tuple[int, ...] = ()
    # Where the second segment begins (token type 1), counted from the end of the first text; None: all are of type 0.
    second_offset: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def around_pair(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """All ids, and where the second segment begins; 0: there is none."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        offset = self.second_offset
        return ids, 0 if offset is None else len(self.before) + len(first) + offset


def frame_of(backend: Any, pair: bool) -> TextFrame:
    """What a `tokenizers.Tokenizer` puts around a text or a pair."""
    found = backend.encode("a", "b") if pair else backend.encode("a")
    groups = [(which, list(group)) for which, group in groupby(enumerate(found.sequence_ids), lambda x: x[1])]
    texts = [which for which, _ in groups if which is not None]
    if texts != ([0, 1] if pair else [0]):
        what = "two texts" if pair else "a text"
        raise ModelError(f"this tokenizer does not put {what} together in the order given: it cannot be used")
    parts: list[list[int]] = [[]]
    for which, group in groups:
        if which is None:
            parts[-1] = [found.ids[place] for place, _ in group]
        else:
            parts.append([])
    second = found.type_ids.index(1) if pair and 1 in found.type_ids else None
    end_of_first = next(group[-1][0] + 1 for which, group in groups if which == 0)
    return TextFrame(
        before=tuple(parts[0]),
        between=tuple(parts[1]) if pair else (),
        after=tuple(parts[-1]),
        second_offset=None if second is None else second - end_of_first,
    )
