"""Token ids of lists on the device, drawn as batches of pairs or of single texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.rerankers.dataset import Arrays
from tools.rerankers.tokenizer import CLS, SEP, SPECIAL

_CLS, _SEP = SPECIAL.index(CLS), SPECIAL.index(SEP)
# Lists are drawn with others of about the same length, so that little is padding.
_BOUNDS = (24, 48, 96, 10_000)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the models take; each [batch, length]."""

    ids: Tensor
    types: Tensor
    mask: Tensor


def sequences(parts: list[tuple[Tensor, Tensor]], most: int) -> Inputs:
    """[CLS] first [SEP] or [CLS] first [SEP] second [SEP], built on the device.

    Each part is (ids [batch, room], lengths [batch]) without special tokens. What is longer than `most` is cut at the
    end of the last part.
    """
    (first, first_lengths), *rest = parts
    batch, device = first.shape[0], first.device
    second, second_lengths = rest[0] if rest else (first[:, :1], torch.zeros_like(first_lengths))
    specials = 2 + len(rest)
    if rest:
        second_lengths = second_lengths.clamp(max=most - specials - first_lengths)
    else:
        first_lengths = first_lengths.clamp(max=most - specials)
    totals = first_lengths + second_lengths + specials
    length = -(-int(totals.max()) // 8) * 8  # what attention kernels like best
    place = torch.arange(length, device=device).expand(batch, -1)
    one, total = first_lengths[:, None], totals[:, None]
    in_second = place - one - 2
    ids = torch.where(
        place <= one,
        first.gather(1, (place - 1).clamp(0, first.shape[1] - 1)),
        second.gather(1, in_second.clamp(0, second.shape[1] - 1)),
    )
    ids = torch.where(place == 0, _CLS, ids)
    ids = torch.where((place == one + 1) | (place == total - 1), _SEP, ids)
    mask = place < total
    return Inputs(torch.where(mask, ids, 0), ((in_second >= 0) & mask).long(), mask)


class Lists:
    """All lists of a corpus, on the device."""

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        def load(key: str) -> Tensor:
            return torch.from_numpy(arrays[key]).to(device)

        self.device = device
        self.queries, self.query_lengths = load("queries").long(), load("query_lengths").long()
        self.texts, self.text_lengths = load("texts"), load("text_lengths").long()
        self.grades, self.keys = load("grades"), torch.from_numpy(arrays["keys"].astype(np.int64)).to(device)
        self.longest = np.asarray(arrays["text_lengths"]).max(1)

    @staticmethod
    def read(folder: Path) -> Arrays:
        names = ("queries", "query_lengths", "texts", "text_lengths", "grades", "keys")
        return {name: np.load(folder / f"{name}.npy") for name in names}

    def __len__(self) -> int:
        return len(self.longest)

    def batches(self, tokens: int, seed: int) -> Iterator[Tensor]:
        """Endless batches of indices of lists of about the same length, with about so many tokens of text each."""
        generator = np.random.default_rng(seed)
        bucket = np.searchsorted(_BOUNDS, self.longest, side="left")
        while True:
            found: list[Tensor] = []
            for number in np.unique(bucket):
                places = np.flatnonzero(bucket == number)
                generator.shuffle(places)
                room = int(self.longest[places].max()) + 12  # the query and the special tokens
                size = min(max(4, tokens // (room * self.texts.shape[1])), len(places))
                found += [
                    torch.from_numpy(places[start : start + size]).to(self.device)
                    for start in range(0, len(places) - size + 1, size)
                ]
            for index in generator.permutation(len(found)):
                yield found[index]

    def query(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries[index], self.query_lengths[index]

    def text(self, index: Tensor, place: Tensor | int) -> tuple[Tensor, Tensor]:
        """The texts at a place of each list."""
        lengths = self.text_lengths[index, place]
        return self.texts[index, place, : int(lengths.max())].long(), lengths
