"""The sizes that steps are rounded up to, so that a few captured graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

# Below each bound, sizes are this far apart.
DECODE_STEPS = ((1, 1), (2, 2), (8, 4), (64, 8), (256, 16), (512, 32), (1 << 30, 128))
TOKEN_STEPS = ((16, 16), (256, 64), (1024, 128), (2048, 256), (4096, 512), (1 << 30, 1024))
# More samples in a step with chunks are rare: such shapes are captured when they are met.
USUAL_SAMPLES = 512
# Sampling takes the smaller a part of a step with chunks, the more tokens it has: few sizes are enough, and up to each
# bound these, beside as many as there can be.
SAMPLE_SIZES = ((1024, (64, 256, USUAL_SAMPLES)), (1 << 30, (64, USUAL_SAMPLES)))
# Decodes that share a prefix, as those of one agent do. More of them are captured when they are met.
USUAL_SHARING = 64
# Room for chunks costs time, see `Items`; more of them in one step are rare.
FEW_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class StepShape:
    """One graph. All but the flags are capacities: a step of this shape fills part of each."""

    num_tokens: int
    num_decodes: int
    num_chunks: int  # entries besides decodes
    num_samples: int
    prefix: bool  # whether decodes that share a prefix read it together
    scores: bool = False  # whether prompt tokens are scored: the hidden states of all tokens are wanted
    short_context: bool = False  # whether all contexts are short, which has a tile of its own

    @property
    def chunks(self) -> bool:
        return self.num_chunks > 0


class Buckets:
    """Which sizes there are. Small steps are rounded finely: their time goes with their size soonest."""

    def __init__(self, max_entries: int, max_tokens: int, short_context_sizes: Collection[int] = ()) -> None:
        """`short_context_sizes`: of decodes whose contexts may be short."""
        self.max_entries = max_entries
        self._short_context_sizes = short_context_sizes
        self.decodes = sizes_up_to(max_entries, DECODE_STEPS)
        self.tokens = token_sizes(max_tokens)

    def largest(self) -> tuple[StepShape, ...]:
        """The steps that take the most memory."""
        tokens, entries = self.tokens[-1], self.max_entries
        mixed = self.mixed(tokens, entries, entries, entries, prefix=True)
        return mixed, self.decode(entries, prefix=True, short_context=True)

    def usual(self) -> list[StepShape]:
        """What nearly all steps are like, those that take the most memory first: what is captured later finds room in
        what the largest took."""
        decodes = [
            self.decode(size, prefix=False, short_context=short_context)
            for size in self.decodes
            for short_context in (False, size in self._short_context_sizes)
        ]
        sharing = [self.decode(size, prefix=True) for size in self.decodes if 1 < size <= USUAL_SHARING]
        mixed = [
            self.mixed(tokens, size, 1, size, prefix=False)
            for tokens in self.tokens
            for size in self._samples(tokens)
            if size <= USUAL_SAMPLES or tokens == self.tokens[-1]
        ]
        return sorted({*decodes, *sharing, *mixed}, key=lambda shape: (-shape.num_tokens, -shape.num_samples))

    def decode(self, count: int, prefix: bool, short_context: bool = False) -> StepShape:
        """A step of `count` entries with one token each."""
        size = round_up(count, self.decodes)
        return StepShape(size, size, 0, size, prefix, short_context=short_context)

    def mixed(
        self,
        num_tokens: int,
        num_decodes: int,
        num_chunks: int,
        num_samples: int,
        prefix: bool,
        scores: bool = False,
    ) -> StepShape:
        """A step with chunks, and maybe decodes beside them."""
        size = round_up(num_tokens, self.tokens)
        # Nearly all decodes sample, and few others do: one size serves both.
        decodes = min(round_up(max(num_decodes, num_samples), self._samples(size)), size)
        chunks = min(FEW_CHUNKS if num_chunks <= FEW_CHUNKS else self.max_entries, size)
        return StepShape(size, decodes, chunks, decodes, prefix, scores)

    def _samples(self, num_tokens: int) -> list[int]:
        """Sizes for a step of so many tokens."""
        sizes = next(sizes for bound, sizes in SAMPLE_SIZES if num_tokens <= bound)
        return [*(size for size in sizes if size < self.max_entries), self.max_entries]


def token_sizes(max_tokens: int) -> list[int]:
    """Of steps with chunks."""
    return sizes_up_to(max_tokens, TOKEN_STEPS)


def sizes_up_to(largest: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Ascending, up to and including `largest`."""
    sizes: list[int] = []
    size = 0
    for bound, spacing in steps:
        while size < min(bound, largest):
            size = min(size + spacing - size % spacing, largest)
            sizes.append(size)
    return sizes


def round_up(count: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, count)]
