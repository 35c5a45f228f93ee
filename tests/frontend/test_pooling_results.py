"""Norms, scales, cosines and ranks, against torch in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.errors import EngineError, ParameterError
from inflight.events import Delta
from inflight.frontend.pooling_results import (
    Matrix,
    PooledVectors,
    check_top_n,
    classified,
    cosines,
    embedded,
    ranked,
    scored,
)

LOGITS: Matrix = np.array([[0.5, -2.0, 3.0], [800.0, -800.0, 1e30], [-1e-9, 0.0, 1e-9]], dtype=np.float32)
WIDE = torch.tensor(LOGITS, dtype=torch.float64)


def near(found: Matrix, expected: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7)


def test_scales_of_labels() -> None:
    near(classified(LOGITS, "logit"), WIDE)
    near(classified(LOGITS, "sigmoid"), torch.sigmoid(WIDE))
    near(classified(LOGITS, "softmax"), torch.softmax(WIDE, 1))


def test_scales_of_scores() -> None:
    near(scored(LOGITS[:, :1], "sigmoid"), torch.sigmoid(WIDE[:, 0]))
    near(scored(LOGITS[:, :1], "logit"), WIDE[:, 0])
    near(scored(LOGITS[:, :2], "softmax"), torch.softmax(WIDE[:, :2], 1)[:, 1])
    near(scored(LOGITS[:, :2], "logit"), WIDE[:, 1] - WIDE[:, 0])


def test_embeddings_are_cut_before_their_length_is_one() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    vectors[3] = 0
    wide = torch.tensor(vectors, dtype=torch.float64)
    near(embedded(vectors, None, False), wide)
    near(embedded(vectors, 3, True), torch.nn.functional.normalize(wide[:, :3]))


def test_cosines_with_one_query_or_many() -> None:
    vectors = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    wide = torch.tensor(vectors, dtype=torch.float64)
    near(cosines(vectors[:1], vectors[1:]), torch.cosine_similarity(wide[:1], wide[1:]))
    near(cosines(vectors[:3], vectors[3:]), torch.cosine_similarity(wide[:3], wide[3:]))


def test_ranks() -> None:
    scores = np.array([0.5, 2.0, 0.5, -1.0], dtype=np.float32)
    found = ranked(scores, list("abcd"), "logit", None)
    assert [(item.index, item.document) for item in found] == [(1, "b"), (0, "a"), (2, "c"), (3, "d")]
    assert [item.relevance_score for item in found] == [2.0, 0.5, 0.5, -1.0]
    assert [item.index for item in ranked(scores, list("abcd"), "logit", 2)] == [1, 0]
    assert ranked(scores[:0], [], "logit", 3) == []
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(ParameterError, match="top_n"):
            check_top_n(wrong)


def delta(*numbers: float, error: str | None = None) -> Delta:
    vector = np.array(numbers, dtype=np.float32).tobytes() if numbers else None
    return Delta(
        "0", [], finish_reason="error" if error else "stop", error=error, error_code=error, vector=vector
    )


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (delta(1.0, np.nan), "text 1 has results that are not finite"),
        (delta(1.0), "text 1 got 1 numbers: 2"),
        (delta(error="step_failed"), "text 1 failed: step_failed"),
        (delta(), "text 1 was ended: stop"),
    ],
)
def test_what_is_no_vector_is_an_error(last: Delta, said: str) -> None:
    found = PooledVectors(2, 2)
    found.put(0, delta(1.0, 2.0))
    with pytest.raises(EngineError, match=said):
        found.put(1, last)
    assert found.matrix[0].tolist() == [1.0, 2.0]
