"""A float64 oracle of the sampler, one row at a time, and a bench for the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from inflight.execution.sampling.interface import Samples
from inflight.execution.sampling.native import NativeSampler, NativeSamplingRows
from inflight.execution.sampling.sampler import Sampler, SamplingRows
from inflight.layers.native.library import native_library
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
WORD = 0xFFFFFFFF
GARBAGE = -7  # behind a row's end: reading it as a token id would raise


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0xEF46EB25 & WORD
    x ^= x >> 15
    x = x * 0xDA7ACF6D & WORD
    return x ^ x >> 16


def bits(seed: int, position: int, token_ids: Words) -> Words:
    low, high = seed & WORD, seed >> 32 & WORD
    first, second = (
        mix((mix((mix((low + start) & WORD) + high) & WORD) + position) & WORD)
        for start in (0x3C6EF35F, 0xA54FF53A)
    )
    x = (token_ids * 0x9E3779B1 + first) & WORD
    x ^= x >> 16
    x = (x * 0xEF46EB25 & WORD) ^ second
    x ^= x >> 15
    x = x * 0xDA7ACF6D & WORD
    return np.asarray(x ^ x >> 16, dtype=np.uint64)


def uniform(words: Words) -> Floats:
    exact = (words >> 1).astype(np.float32) * np.float32(2**-31) + np.float32(2**-32)
    return np.asarray(np.minimum(exact, np.float32(1 - 2**-24)), dtype=np.float64)


@dataclass
class Job:
    """A request with the outputs it has so far, and the logits for its next token."""

    params: SamplingParams
    prompt: list[int]
    outputs: list[int]
    logits: NDArray[np.float32]
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.outputs

    def request(self) -> RequestSpec:
        request = Request.create(
            request_id="r",
            token_ids=self.token_ids,
            params=self.params,
            max_tokens=100,
            seed=self.seed,
            stop_ids=self.stop_ids,
            bad_word_ids=self.bad_words,
            num_prompt_tokens=len(self.prompt),
        )
        return request.current_spec()


def adjusted(job: Job) -> Floats:
    """Masks, bias and penalties."""
    params, x = job.params, job.logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x = np.where(np.isin(np.arange(len(x)), params.allowed_token_ids), x, -np.inf)
    for *prefix, last in job.bad_words:
        if len(prefix) <= len(job.outputs) and job.outputs[len(job.outputs) - len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(job.outputs) < params.min_tokens:
        x[list(job.stop_ids)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    for token_id in set(job.token_ids):
        penalty = params.repetition_penalty
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id in job.outputs:
        x[token_id] -= params.frequency_penalty
    for token_id in set(job.outputs):
        x[token_id] -= params.presence_penalty
    return x


def kept(x: Floats, params: SamplingParams, slack: float) -> set[int]:
    """Return which tokens may be sampled; x is tempered. `slack` moves the thresholds that rounding may move."""
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -np.inf]
    top = x[order[0]]
    if params.min_p > 0:
        reaches = x[order] >= top + np.log(params.min_p) - slack
        order = order[reaches | (order == order[0])]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = np.exp(x[order] - top)
        before = np.cumsum(mass) - mass
        order = order[before < (params.top_p + slack) * mass.sum()]
    return set(order.tolist()) or {int(np.argmax(x))}


def acceptable(job: Job) -> set[int]:
    """Return the right token and those that float32 may confuse with it."""
    x = adjusted(job)
    if job.params.temperature < 1e-5:
        return {int(i) for i in np.flatnonzero(x >= x.max() - 1e-4)}
    x = x / job.params.temperature
    position = len(job.token_ids)
    noise = -np.log(-np.log1p(-uniform(bits(job.seed, position, np.arange(len(x), dtype=np.uint64)))))
    answers: set[int] = set()
    for slack in (-1e-5, 0.0, 1e-5):
        ids = np.array(sorted(kept(x, job.params, slack)))
        scores = x[ids] + noise[ids]
        answers |= set(ids[scores >= scores.max() - 1e-4].tolist())
    return answers


def make_sampler(kind: str, max_rows: int, vocab_size: int) -> Sampler | NativeSampler:
    if kind == "torch":
        return Sampler(SamplingRows(max_rows, vocab_size))
    library = native_library()
    assert library is not None
    return NativeSampler(library, NativeSamplingRows(max_rows, vocab_size))


@dataclass
class Bench:
    """Jobs in rows of a small table."""

    default_kind: ClassVar[str] = "torch"

    jobs: Sequence[Job]
    max_rows: int = 16
    max_len: int = 64
    kind: str = field(default_factory=lambda: Bench.default_kind)  # of sampler: "torch" or "native"

    def __post_init__(self) -> None:
        self.sampler = make_sampler(self.kind, self.max_rows, len(self.jobs[0].logits))
        self.state: Any = self.sampler.state  # that kind's rows
        self.tokens = torch.full((self.max_rows, self.max_len), GARBAGE, dtype=torch.int32)
        # Rows from the top down: an entry's index is never by chance its row.
        self.rows = [self.max_rows - 1 - i for i in range(len(self.jobs))]
        for row, job in zip(self.rows, self.jobs, strict=True):
            self.state.set(row, job.request())
            self.tokens[row, : len(job.token_ids)] = torch.tensor(job.token_ids, dtype=torch.int32)

    def sample(self, entries: Sequence[int] | None = None) -> Samples:
        """Sample the given jobs, in that order; all of them by default."""
        entries = range(len(self.jobs)) if entries is None else entries
        logits = torch.from_numpy(np.stack([self.jobs[i].logits for i in entries]))
        lengths = torch.tensor([len(self.jobs[i].token_ids) for i in entries])
        rows = [self.rows[i] for i in entries]
        return self.sampler.sample(logits, rows, lengths, self.tokens)


def job(logits: Sequence[float] | NDArray[Any], **fields: Any) -> Job:
    """A job from its logits, the fields of `Job`, and sampling parameters for the rest."""
    own = {name: fields.pop(name) for name in ("seed", "stop_ids", "bad_words") if name in fields}
    prompt, outputs = fields.pop("prompt", [0]), fields.pop("outputs", [])
    return Job(SamplingParams(**fields), prompt, outputs, np.asarray(logits, dtype=np.float32), **own)


def sample_one(one: Job) -> int:
    return Bench([one]).sample().token_ids[0]
