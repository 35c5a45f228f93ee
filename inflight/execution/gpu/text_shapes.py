"""The sizes that steps of encoders are rounded up to: `shapes.py` for texts."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.execution.gpu.shapes import round_up, sizes_up_to

# As in `shapes.py`. A text cannot be split, so a full step is seldom quite full, and its time goes with its tokens:
# close together up to the largest. A captured shape costs little but the time to record it.
TEXT_TOKEN_STEPS = ((64, 16), (256, 32), (1024, 64), (2048, 128), (16384, 256), (1 << 30, 1024))
# How many texts there is room for: at least so many, and one for so many tokens. Room costs time, see `Items`.
TEXT_SIZES = ((8, 128), (32, 32), (128, 8))
# Texts of fewer than 32 tokens on average are usual in small steps only.
USUAL_SIZES, FEW_TOKENS, USUAL_SIZES_OF_FEW = 2, 1024, 3


@dataclass(frozen=True, slots=True)
class TextShape:
    """One graph. A step of this shape fills part of each."""

    num_tokens: int
    num_texts: int


class TextBuckets:
    """Which shapes there are."""

    def __init__(self, max_texts: int, max_tokens: int) -> None:
        self.max_texts = max_texts
        self.tokens = sizes_up_to(max_tokens, TEXT_TOKEN_STEPS)

    @property
    def largest(self) -> TextShape:
        return TextShape(self.tokens[-1], self._with_filling(self.tokens[-1]))

    def shape(self, num_tokens: int, num_texts: int) -> TextShape:
        """Of a step of so many tokens and texts."""
        size = round_up(num_tokens, self.tokens)
        return TextShape(size, round_up(num_texts, [*self._texts(size), self._with_filling(size)]))

    def usual(self) -> list[TextShape]:
        """What nearly all steps are like, those that take the most memory first."""
        return [
            TextShape(size, num_texts)
            for size in reversed(self.tokens)
            for num_texts in reversed(
                self._texts(size)[: USUAL_SIZES_OF_FEW if size <= FEW_TOKENS else USUAL_SIZES]
            )
        ]

    def _texts(self, num_tokens: int) -> list[int]:
        """Sizes for a step of so many tokens, ascending."""
        most = min(num_tokens, self.max_texts)
        sizes = (max(least, -(-num_tokens // each)) for least, each in TEXT_SIZES)
        return [*(size for size in sizes if size < most), most]

    def _with_filling(self, num_tokens: int) -> int:
        """The most texts there can be, if each is filled up by another (`TextRunner.padded`)."""
        return min(num_tokens, 2 * self.max_texts)
