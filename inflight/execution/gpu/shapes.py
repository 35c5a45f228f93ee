"""The shapes that steps of decoders and encoders are padded to, so that a few CUDA graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from inflight.execution.step import HostStep

# (bound, spacing): below each bound, sizes are this far apart.
DECODE_STEPS = ((1, 1), (2, 2), (8, 4), (64, 8), (256, 16), (512, 32), (1 << 30, 128))
TOKEN_STEPS = ((16, 16), (256, 64), (1024, 128), (2048, 256), (4096, 512), (1 << 30, 1024))
# More samples in a step with chunks are rare: such shapes are captured on first use.
USUAL_SAMPLES = 512
# (bound, sizes): numbers of samples for steps with chunks of up to `bound` tokens, beside the maximum. The more tokens
# a step has, the less sampling matters, so few sizes are enough.
SAMPLE_SIZES = ((1024, (64, 256, USUAL_SAMPLES)), (1 << 30, (64, USUAL_SAMPLES)))
# Decodes that share a prefix, as those of one agent do. Larger shapes are captured on first use.
USUAL_SHARING = 64
# Turns of samples (`HostStep.places`). Steps with more tokens are captured on first use.
FEWEST_TURNS, USUAL_TURNS = 4, 8
# Capacity for chunks costs time, see `Items`; more of them in one step are rare.
FEW_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of one graph. All but the flags are capacities, which a step may use in part."""

    num_tokens: int
    num_decodes: int
    num_chunks: int  # entries besides decodes
    num_samples: int
    prefix: bool  # whether decodes that share a prefix read it together
    scores: bool = False  # whether prompt tokens are scored, which needs the hidden states of all tokens
    short_context: bool = False  # whether all contexts are short, which uses a different tile
    places: int = 1  # samples of a row that are taken one after another: see `HostStep.places`
    runs: bool = False  # whether recurrent layers compute decodes with drafts
    predicts: bool = False  # whether the model's predictor reads all tokens

    @property
    def chunks(self) -> bool:
        return self.num_chunks > 0


class Buckets:
    """The available shapes. Small steps are rounded finely, because their time depends most on their size."""

    def __init__(
        self,
        max_entries: int,
        max_tokens: int,
        short_context_sizes: Collection[int] = (),
        max_samples: int | None = None,
        has_states: bool = False,
        has_predictor: bool = False,
    ) -> None:
        """`short_context_sizes`: numbers of decodes that have a variant for short contexts.

        `max_samples`: of a step whose decodes have drafts; None: there are none."""
        self.max_entries = max_entries
        self._has_states, self._has_predictor = has_states, has_predictor
        self.verifies = max_samples is not None
        self.max_samples = max_samples or max_entries
        self._short_context_sizes = short_context_sizes
        self.decodes = sizes_up_to(self.max_samples, DECODE_STEPS)
        self.tokens = token_sizes(max_tokens)

    def largest(self) -> tuple[StepShape, ...]:
        """Return the shapes that take the most memory."""
        tokens, samples = self.tokens[-1], self.max_samples
        mixed = self.mixed(tokens, samples, self.max_entries, samples, prefix=True)
        mixed = replace(mixed, predicts=self._has_predictor)
        return mixed, self.decode(samples, prefix=True, short_context=True)

    def usual(self) -> list[StepShape]:
        """Return the shapes of nearly all steps, largest first: later captures reuse the memory of earlier ones."""
        decodes = [
            self.decode(size, prefix=False, short_context=short_context)
            for size in self.decodes
            for short_context in (False, size in self._short_context_sizes)
        ]
        if self.verifies:
            plain = [self.decode(size, prefix=False) for size in self.decodes]
            if self._has_states:
                decodes += [replace(shape, **self._drafts(1, True)) for shape in plain]
            decodes += [
                replace(shape, **self._drafts(2, True)) for shape in plain if shape.num_tokens <= USUAL_TURNS
            ]
        sharing = [self.decode(size, prefix=True) for size in self.decodes if 1 < size <= USUAL_SHARING]
        mixed = [
            self.mixed(tokens, size, 1, size, prefix=False)
            for tokens in self.tokens
            for size in self._samples(tokens)
            if size <= USUAL_SAMPLES or tokens == self.tokens[-1]
        ]
        shapes = {*decodes, *sharing, *mixed}
        if self._has_predictor:
            shapes |= {replace(shape, predicts=True) for shape in shapes}
        return sorted(shapes, key=lambda shape: (-shape.num_tokens, -shape.num_samples))

    def shape_of(self, step: HostStep) -> StepShape:
        """Return the shape of a step."""
        num_decodes, drafts = step.num_decodes, self._drafts(step.places, step.draft_ids is not None)
        if step.predicts:
            drafts["predicts"] = True
        if step.only_decodes:
            return replace(self.decode(num_decodes, step.prefix, step.short_context), **drafts)
        num_chunks, num_samples = len(step.rows) - num_decodes, len(step.sample_tokens)
        shape = self.mixed(step.num_tokens, num_decodes, num_chunks, num_samples, step.prefix, step.scores)
        return replace(shape, **drafts)

    def _drafts(self, places: int, has_drafts: bool) -> dict[str, Any]:
        """Return the fields of a shape that depend on drafts."""
        return {"places": _rounded(places), "runs": self._has_states} if has_drafts else {}

    def decode(self, count: int, prefix: bool, short_context: bool = False) -> StepShape:
        """Return the shape of `count` entries with one token each."""
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
        """Return the shape of a step with chunks, and possibly decodes."""
        size = round_up(num_tokens, self.tokens)
        # Nearly all decodes sample, and few other entries do: one size serves both.
        decodes = min(round_up(max(num_decodes, num_samples), self._samples(size)), size)
        chunks = min(FEW_CHUNKS if num_chunks <= FEW_CHUNKS else self.max_entries, size)
        return StepShape(size, decodes, chunks, decodes, prefix, scores)

    def _samples(self, num_tokens: int) -> list[int]:
        """Return the numbers of samples available for a step of `num_tokens`."""
        sizes = next(sizes for bound, sizes in SAMPLE_SIZES if num_tokens <= bound)
        return [*(size for size in sizes if size < self.max_samples), self.max_samples]


def _rounded(places: int) -> int:
    """Return how many turns a step takes that needs this many: one, or four, or the next power of two."""
    return 1 if places == 1 else max(FEWEST_TURNS, 1 << (places - 1).bit_length())


def token_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens that steps with chunks are rounded up to."""
    return sizes_up_to(max_tokens, TOKEN_STEPS)


def sizes_up_to(largest: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Return sizes in ascending order, up to and including `largest`."""
    sizes: list[int] = []
    size = 0
    for bound, spacing in steps:
        while size < min(bound, largest):
            size = min(size + spacing - size % spacing, largest)
            sizes.append(size)
    return sizes


def round_up(count: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, count)]


# (bound, spacing) for encoders. A text cannot be split, so full steps are seldom completely full, and their time
# depends on their tokens: sizes are close together up to the largest. Capturing a shape costs little but time.
TEXT_TOKEN_STEPS = ((64, 16), (256, 32), (1024, 64), (2048, 128), (16384, 256), (1 << 30, 1024))
# (minimum, tokens per text): capacities for texts. Capacity costs time, see `Items`.
TEXT_SIZES = ((8, 128), (32, 32), (128, 8))
# Texts of fewer than 32 tokens on average are common only in small steps.
USUAL_SIZES, FEW_TOKENS, USUAL_SIZES_OF_FEW = 2, 1024, 3


@dataclass(frozen=True, slots=True)
class TextShape:
    """The shape of one graph of an encoder: capacities, which a step may use in part."""

    num_tokens: int
    num_texts: int


class TextBuckets:
    """The available shapes of steps of an encoder."""

    def __init__(self, max_texts: int, max_tokens: int) -> None:
        self.max_texts = max_texts
        self.tokens = sizes_up_to(max_tokens, TEXT_TOKEN_STEPS)

    @property
    def largest(self) -> TextShape:
        return TextShape(self.tokens[-1], self._with_filling(self.tokens[-1]))

    def shape(self, num_tokens: int, num_texts: int) -> TextShape:
        """Return the shape of a step of `num_tokens` tokens in `num_texts` texts."""
        size = round_up(num_tokens, self.tokens)
        return TextShape(size, round_up(num_texts, [*self._texts(size), self._with_filling(size)]))

    def usual(self) -> list[TextShape]:
        """Return the shapes of nearly all steps, largest first."""
        return [
            TextShape(size, num_texts)
            for size in reversed(self.tokens)
            for num_texts in reversed(
                self._texts(size)[: USUAL_SIZES_OF_FEW if size <= FEW_TOKENS else USUAL_SIZES]
            )
        ]

    def _texts(self, num_tokens: int) -> list[int]:
        """Return the capacities for texts of a step of `num_tokens`, ascending."""
        most = min(num_tokens, self.max_texts)
        sizes = (max(least, -(-num_tokens // tokens_per_text)) for least, tokens_per_text in TEXT_SIZES)
        return [*(size for size in sizes if size < most), most]

    def _with_filling(self, num_tokens: int) -> int:
        """Return the most texts there can be if each has a filler text (`TextRunner.padded`)."""
        return min(num_tokens, 2 * self.max_texts)
