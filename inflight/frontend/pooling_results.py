"""What a head returned becomes embeddings, probabilities and scores. Rows are texts; all is float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.errors import EngineError, ParameterError, shown
from inflight.events import Delta
from inflight.outputs import RerankResult
from inflight.pooling import Scale

Matrix = NDArray[np.float32]

SMALLEST_NORM = 1e-12  # an embedding of nothing but zeros stays one


class PooledVectors:
    """The vectors of one call's texts as they come, in the texts' order."""

    def __init__(self, num_texts: int, size: int) -> None:
        self.matrix: Matrix = np.empty((num_texts, size), dtype=np.float32)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def put(self, index: int, delta: Delta) -> None:
        """Take in the last delta of a text. Raises EngineError where it has no vector to use."""
        if delta.error is not None:
            raise EngineError(f"text {index} failed: {delta.error}", code=delta.error_code)
        if delta.vector is None:
            raise EngineError(f"text {index} was ended: {delta.finish_reason}", code="aborted")
        vector = np.frombuffer(delta.vector, dtype=np.float32)
        if vector.shape != self.matrix.shape[1:]:
            raise EngineError(f"text {index} got {vector.size} numbers: {self.matrix.shape[1]} were expected")
        if not np.isfinite(vector).all():
            raise EngineError(
                f"text {index} has results that are not finite: the model's weights or its precision are to blame",
                code="logits_not_finite",
            )
        self.matrix[index] = vector
        if delta.record is not None:
            self.num_prompt_tokens += delta.record.num_prompt_tokens
            self.num_cached_tokens += delta.record.num_cached_tokens


def embedded(vectors: Matrix, dimensions: int | None, normalize: bool) -> Matrix:
    """Embeddings of the size that is wanted; cut first, so that their length is 1 then."""
    vectors = vectors[:, :dimensions]
    return _unit(vectors) if normalize else vectors


def _unit(vectors: Matrix) -> Matrix:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return _matrix(vectors / np.maximum(lengths, SMALLEST_NORM))


def classified(logits: Matrix, scale: Scale) -> Matrix:
    """One number for each label, on a scale."""
    if scale == "sigmoid":
        return _sigmoid(logits)
    return _softmax(logits) if scale == "softmax" else logits


def scored(logits: Matrix, scale: Scale) -> Matrix:
    """One number for each pair: of one logit, or of two, of which the second speaks for the document and the first
    against it."""
    if logits.shape[1] == 1:
        return classified(logits, scale)[:, 0]
    return _softmax(logits)[:, 1] if scale == "softmax" else logits[:, 1] - logits[:, 0]


def cosines(queries: Matrix, documents: Matrix) -> Matrix:
    """Of each document and its query: there is one for all, or one for each."""
    return _matrix(np.sum(_unit(queries) * _unit(documents), axis=1))


def check_top_n(top_n: object) -> None:
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise ParameterError(f"top_n is {shown(top_n)}: it must be an integer of at least 1", param="top_n")


def ranked(
    scores: Matrix, documents: str | Sequence[str], scale: Scale, top_n: int | None
) -> list[RerankResult]:
    """The best first; of equal ones, the one that was given first."""
    given = [documents] if isinstance(documents, str) else documents
    order = np.argsort(-scores, kind="stable")[:top_n]
    return [RerankResult(int(place), float(scores[place]), given[place], scale) for place in order]


def _sigmoid(x: Matrix) -> Matrix:
    small = np.exp(-np.abs(x))  # never overflows
    return _matrix(np.where(x >= 0, 1, small) / (1 + small))


def _softmax(x: Matrix) -> Matrix:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return _matrix(weights / weights.sum(axis=1, keepdims=True))


def _matrix(found: Any) -> Matrix:
    return np.asarray(found, dtype=np.float32)
