"""The benchmark of quantized products, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_timing import Ceilings
from benchmarks.quantized import Result, Task, perform
from benchmarks.quantized_cases import SCHEMES, Product, make_problem, products_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_are_right(scheme: str) -> None:
    parts = [("tiny-moe", "expert gate_up"), ("tiny-moe", "expert down")]
    if scheme != "mxfp4":
        parts.append(("tiny", "output"))
    for shape, part in parts:
        chosen, *outcomes = perform(Task(Product(shape, part, scheme, 3), False, tune=False), DEVICE)
        assert outcomes == [(chosen[1], None)], (shape, part)


def test_tuning_tries_tiles_that_are_right() -> None:
    task = Task(Product("tiny", "qkv", "int8", 20), False, tune=True, left_out=frozenset({"other"}))
    chosen, *outcomes = perform(task, DEVICE)
    assert dict(outcomes)[str(chosen[1])] is None
    assert len(outcomes) > 5
    assert all(outcome is None for _, outcome in outcomes)


def test_wrong_results_and_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product("tiny", "output", "int8", 3)
    problem = make_problem(product, DEVICE, tune=True, copied=False)
    first, second, *_ = problem.candidates
    errors = {str(first): float("nan")}
    monkeypatch.setattr(type(problem), "error", lambda _, candidate: errors[str(candidate)], raising=True)
    _, *outcomes = perform(Task(product, False, tune=True), DEVICE)
    result = Result()
    for outcome in outcomes:
        result.add(*outcome)
    assert result.failures[str(first)] == "wrong result: relative error nan"
    assert result.failures[str(second)].startswith("KeyError")


def test_result_is_the_fastest_kernel_beside_the_one_chosen_now() -> None:
    result = Result()
    for message in (
        ("chosen", "a"),
        ("a", 3e-6),
        ("b", 2e-6),
        ("bf16", 1e-6),
        ("c", "failed"),
        ("limit", 1e-6),
    ):
        result.add(*message)
    assert (result.best, result.chosen, result.limit) == ("b", "a", 1e-6)
    assert result.failures == {"c": "failed"}


def test_products_of_all_models_and_their_limits() -> None:
    products = products_of(["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"], list(SCHEMES), [1, 8192])
    assert {product.num_tokens for product in products[: len(products) // 2]} == {1}
    assert Product("gpt-oss-20b", "expert down", "mxfp4", 1) in products
    assert Product("qwen3-30b-a3b", "expert down", "int4", 8192) in products
    problem = make_problem(Product("tiny", "down", "int4", 2), DEVICE, tune=False, copied=False)
    # 256 rows of 704 features: 6 groups, each with 4 bytes for a scale and a zero point.
    num_bytes = 256 * 6 * (64 + 4) + 2 * 2 * (256 + 704)
    assert problem.limit(Ceilings(read=1.0, copy=1.0, matmul=1e3)) == pytest.approx(num_bytes / 1e12)
