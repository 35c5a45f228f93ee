"""Sampling 16 rows of a large vocabulary on a CPU, in torch and compiled: a part of `benchmarks.cpu_kernels`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.execution.runner import torch_threads
from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows
from inflight.execution.sampling.sampler import Sampler, SamplingRows
from inflight.layers.native.library import Library
from inflight.request import Request
from inflight.sampling_params import SamplingParams

NUM_ROWS = 16
VOCAB_SIZE = 151936
LENGTH = 200  # tokens of each row, half of them outputs
SPREAD = 3.0  # standard deviation of the logits

TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "top_p=0.95": TOP_P,
    "top_k=50 top_p=0.95": TOP_P | {"top_k": 50},
    "top_k=5000": {"temperature": 0.8, "top_k": 5000},
    "min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties, top_p": TOP_P
    | {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "mask": {"temperature": 0.0, "allowed_token_ids": range(0, VOCAB_SIZE, 2)},
    "mask, top_p": TOP_P | {"allowed_token_ids": range(0, VOCAB_SIZE, 2)},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "all of them": TOP_P
    | {"top_k": 50, "repetition_penalty": 1.1, "allowed_token_ids": range(0, VOCAB_SIZE, 2), "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class SamplingResult:
    case: str
    sampler: str
    milliseconds: float  # one step of all rows
    best_milliseconds: float


def measure_sampling(library: Library | None, repeats: int) -> list[SamplingResult]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * SPREAD
    tokens = torch.randint(VOCAB_SIZE, (NUM_ROWS, LENGTH), dtype=torch.int32, generator=generator)
    results = []
    for case, options in CASES.items():
        samplers: list[tuple[str, Sampler | NativeSampler]] = [
            ("torch", Sampler(SamplingRows(NUM_ROWS, VOCAB_SIZE)))
        ]
        if library is not None:
            native = NativeSampler(library, NativeSamplingRows(NUM_ROWS, VOCAB_SIZE))
            samplers.append(("native", native))
        for name, sampler in samplers:
            for row in range(NUM_ROWS):
                prompt, params = tokens[row, : LENGTH // 2].tolist(), SamplingParams(**options)
                request = Request.create("", prompt, params, max_tokens=LENGTH, seed=row)
                sampler.state.set(row, request.current_spec())
            # As the runner has it: torch's threads, which spin when idle, stand in the way of others.
            with torch_threads(torch.get_num_threads() if name == "torch" else 1):
                seconds = [_step(sampler, logits.clone(), tokens) for _ in range(repeats + 1)][1:]
            results.append(SamplingResult(case, name, statistics.median(seconds) * 1e3, min(seconds) * 1e3))
    return results


def _step(sampler: Sampler | NativeSampler, logits: Tensor, tokens: Tensor) -> float:
    lengths = torch.full((NUM_ROWS,), LENGTH)
    start = time.perf_counter()
    sampler.sample(logits, range(NUM_ROWS), lengths, tokens)
    return time.perf_counter() - start


def show_sampling(results: list[SamplingResult]) -> None:
    print(f"\n{f'sampling, {NUM_ROWS} rows of {VOCAB_SIZE:,}':<36}{'ms':>9}{'best ms':>9}")
    for r in results:
        print(f"{r.case:<23}{r.sampler:<13}{r.milliseconds:>9.2f}{r.best_milliseconds:>9.2f}")
