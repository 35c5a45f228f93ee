"""Which entries of a batch use which feature: index tensors for a list of rows, reused while the rows stay the same.

`entry` is a row of the step's logits [S, V]. A place (entry, token id) is stored flat, as entry * V + token_id,
so that one indexed operation reaches the logits of many requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from inflight.execution.sampling.rows import RowTraits, SamplingRows


@dataclass(frozen=True, slots=True)
class Allowed:
    """Entries that may sample only the tokens at `places`."""

    entries: Tensor  # [A]
    places: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class BadWords:
    """Word i forbids `places[i]` while the last outputs of its entry are `prefixes[i]`."""

    entries: Tensor  # [n]
    places: Tensor  # [n], of the last token of each word
    prefixes: Tensor  # [n, longest - 1], padded with -1 on the left


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The entries that use each feature; None where no entry does."""

    rows: Tensor  # [S] int64
    greedy: Tensor | None  # entries
    dense: Tensor | None  # entries that sample from the whole vocabulary
    top_k: dict[int, Tensor]  # candidates to sort -> entries
    nucleus: Tensor | None  # entries with top_p alone
    min_p: bool  # an entry of dense or nucleus uses min_p
    penalties: Tensor | None  # entries
    allowed: Allowed | None
    masks: dict[int, Tensor]  # [V] bool, by entry
    bad_words: BadWords | None
    stops: tuple[Tensor, Tensor] | None  # entries [n] and places [n]
    bias: tuple[Tensor, Tensor] | None  # places [n] and values [n]
    logprobs: Tensor | None  # entries with logprobs
    logprob_entries: tuple[int, ...] = ()  # the same, on the host
    logprob_counts: tuple[int, ...] = ()  # the number of most likely tokens of each

    @property
    def adjusts(self) -> bool:
        """Whether some logits change before a token is chosen."""
        parts = (self.allowed, self.bad_words, self.stops, self.bias, self.penalties)
        return bool(self.masks) or any(part is not None for part in parts)


def make_plan(state: SamplingRows, rows: Sequence[int]) -> SamplingPlan:
    return _Planner(state, [state.traits(row) for row in rows]).plan(rows)


@dataclass(slots=True)
class _Planner:
    state: SamplingRows
    traits: list[RowTraits]
    top_k: dict[int, list[int]] = field(default_factory=dict)

    def plan(self, rows: Sequence[int]) -> SamplingPlan:
        for entry, traits in enumerate(self.traits):
            if traits.width:
                self.top_k.setdefault(traits.width, []).append(entry)
        dense = [i for i, t in enumerate(self.traits) if not (t.greedy or t.width or t.nucleus)]
        logprobs = [(i, t.logprobs) for i, t in enumerate(self.traits) if t.logprobs is not None]
        return SamplingPlan(
            rows=self.state.upload(rows, torch.int64),
            greedy=self._entries([i for i, t in enumerate(self.traits) if t.greedy]),
            dense=self._entries(dense),
            top_k={width: self._index(entries) for width, entries in self.top_k.items()},
            nucleus=self._entries([i for i, t in enumerate(self.traits) if t.nucleus]),
            min_p=any(t.min_p and not t.width for t in self.traits),
            penalties=self._entries([i for i, t in enumerate(self.traits) if t.penalties]),
            allowed=self._allowed(),
            masks={i: t.mask for i, t in enumerate(self.traits) if t.mask is not None},
            bad_words=self._bad_words(),
            stops=self._stops(),
            bias=self._bias(),
            logprobs=self._entries([i for i, _ in logprobs]),
            logprob_entries=tuple(i for i, _ in logprobs),
            logprob_counts=tuple(count for _, count in logprobs),
        )

    def _index(self, entries: list[int]) -> Tensor:
        return self.state.upload(entries, torch.int64)

    def _entries(self, entries: list[int]) -> Tensor | None:
        return self._index(entries) if entries else None

    def _places(self, ids: dict[int, Tensor]) -> Tensor:
        vocab_size = self.state.vocab_size
        return torch.cat([entry * vocab_size + token_ids for entry, token_ids in ids.items()])

    def _owners(self, ids: dict[int, Tensor]) -> Tensor:
        """Return the entry of each place."""
        return self._index([entry for entry, token_ids in ids.items() for _ in range(len(token_ids))])

    def _allowed(self) -> Allowed | None:
        ids = {i: t.allowed_ids for i, t in enumerate(self.traits) if t.allowed_ids is not None}
        return Allowed(self._index(list(ids)), self._places(ids)) if ids else None

    def _stops(self) -> tuple[Tensor, Tensor] | None:
        ids = {i: t.stop_ids for i, t in enumerate(self.traits) if t.stop_ids is not None}
        return (self._owners(ids), self._places(ids)) if ids else None

    def _bias(self) -> tuple[Tensor, Tensor] | None:
        ids = {i: t.bias_ids for i, t in enumerate(self.traits) if t.bias_ids is not None}
        values = [t.bias_values for t in self.traits if t.bias_values is not None]
        return (self._places(ids), torch.cat(values)) if ids else None

    def _bad_words(self) -> BadWords | None:
        words = {i: t.bad_words for i, t in enumerate(self.traits) if t.bad_words is not None}
        if not words:
            return None
        longest = max(table.shape[1] for table in words.values())
        prefixes = [pad(t[:, :-1], (longest - t.shape[1], 0), value=-1) for t in words.values()]
        places = self._places({entry: table[:, -1] for entry, table in words.items()})
        return BadWords(self._owners(words), places, torch.cat(prefixes))
