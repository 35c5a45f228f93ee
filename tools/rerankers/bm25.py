"""BM25, the word-overlap ranking that the trained models are measured against.

Words are lower case, without a plural s; no word is left out, since those that all texts have weigh next to nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORDS = re.compile(r"[a-z0-9]+")


def _words(text: str) -> list[str]:
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") else word for word in _WORDS.findall(text.lower())
    ]


class Bm25:
    """Scores by the words of a collection of texts."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.k1, self.b = k1, b
        counted = [_words(text) for text in texts]
        self.mean_length = sum(map(len, counted)) / len(counted)
        found = Counter(word for words in counted for word in set(words))
        self.weights = {word: math.log(1 + (len(counted) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return [self._score(_words(query), _words(text)) for text in texts]

    def _score(self, query: Sequence[str], words: Sequence[str]) -> float:
        counts = Counter(words)
        long = self.k1 * (1 - self.b + self.b * len(words) / self.mean_length)
        return sum(
            self.weights.get(word, 0.0) * counts[word] * (self.k1 + 1) / (counts[word] + long)
            for word in query
        )
