"""The hash, the uniforms made of it, and the distribution of the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.execution.sampling.gumbel import NoiseKey, noise_bits, noise_key, uniform
from inflight.execution.sampling.interface import seed_words
from inflight.request import Request
from inflight.sampling_params import SEED_RANGE, SamplingParams
from tests.execution.sampling import sampler_oracle as oracle

SEEDS = [0, 1, -1, 12345, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0x0123456789ABCDEF]


def keys(seeds: list[int], positions: list[int]) -> NoiseKey:
    low, high = zip(*map(seed_words, seeds), strict=True)
    return noise_key(*(torch.tensor(part, dtype=torch.int32) for part in (low, high, positions)))


def all_bits(seeds: list[int], positions: list[int], num_ids: int) -> Tensor:
    """[R, n] as unsigned values in int64."""
    token_ids = torch.arange(num_ids, dtype=torch.int32)
    return noise_bits(keys(seeds, positions), token_ids).long() & 0xFFFFFFFF


def test_bits_are_the_documented_function() -> None:
    positions = [0, 1, 2, 77, 131071, 5, 6, 7, 8]
    actual = all_bits(SEEDS, positions, 64).tolist()
    token_ids = np.arange(64, dtype=np.uint64)
    reference = [oracle.bits(*key, token_ids).tolist() for key in zip(SEEDS, positions, strict=True)]
    assert actual == reference


def test_int64_arithmetic_gives_the_same_bits() -> None:
    """The int32 path relies on wrapping products; here nothing wraps."""
    key, word = keys([99], [7]), 0xFFFFFFFF
    x = (torch.arange(5000) * 0x9E3779B1 + (int(key.first) & word)) & word
    x ^= x >> 16
    x = (x * 0xEF46EB25 & word) ^ (int(key.second) & word)
    x ^= x >> 15
    x = x * 0xDA7ACF6D & word
    x ^= x >> 16
    assert torch.equal(all_bits([99], [7], 5000)[0], x)


def test_gathered_candidate_has_the_bits_of_its_id() -> None:
    key = keys([3, 4], [10, 11])
    full = noise_bits(key, torch.arange(300, dtype=torch.int32))
    some = torch.tensor([[5, 299, 0], [17, 17, 200]], dtype=torch.int32)
    assert torch.equal(noise_bits(key, some), full.gather(1, some.long()))


@pytest.mark.parametrize("seed", SEED_RANGE)
def test_ends_of_the_seed_range_are_usable(seed: int) -> None:
    low, high = seed_words(seed)
    assert (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF == seed % 2**64


def test_flipping_an_input_bit_flips_every_output_bit_half_of_the_time() -> None:
    rng = np.random.default_rng(1)
    n = 1 << 14
    seeds = [int(s) for s in rng.integers(0, 2**63, n)]
    positions = torch.from_numpy(rng.integers(0, 1 << 20, n)).int()
    token_ids = torch.from_numpy(rng.integers(0, 1 << 18, (n, 1))).int()
    low, high = (torch.tensor(part, dtype=torch.int32) for part in zip(*map(seed_words, seeds), strict=True))

    def words(low: Tensor, high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        return noise_bits(noise_key(low, high, positions), token_ids)[:, 0].long() & 0xFFFFFFFF

    base = words(low, high, positions, token_ids)
    outputs = torch.arange(32)
    for argument, num_bits in enumerate((32, 32, 20, 18)):
        for bit in range(num_bits):
            changed = [low, high, positions, token_ids]
            changed[argument] = changed[argument] ^ torch.tensor(1 << bit).int()
            flips = (base ^ words(*changed))[:, None] >> outputs & 1  # [n, 32]
            # The standard deviation of a fair share is 0.0039 here: this allows six of them.
            assert (flips.double().mean(0) - 0.5).abs().max() < 0.024, (argument, bit)


def test_bits_are_evenly_spread_over_ids_and_over_positions() -> None:
    over_ids = all_bits([11], [3], 1 << 17)[0]
    over_positions = all_bits([11] * (1 << 14), list(range(1 << 14)), 8).view(-1)
    for words in (over_ids, over_positions):
        for shift in (0, 8, 16, 24):
            counts = torch.bincount(words >> shift & 0xFF, minlength=256).double()
            expected = len(words) / 256
            # 255 degrees of freedom: mean 255, deviation 22.6.
            assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 22.6


def test_streams_of_neighbouring_seeds_and_positions_do_not_correlate() -> None:
    rows = uniform(all_bits([0, 1, 2**32, 0, 0], [0, 0, 0, 1, 2], 1 << 16).int())
    correlation = torch.corrcoef(rows.double()) - torch.eye(5)
    assert correlation.abs().max() < 6 / 2**8


def test_uniforms_lie_strictly_inside_and_keep_their_resolution() -> None:
    words = [0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFE, 0xFFFFFFFF]
    actual = uniform(torch.tensor(words).int())
    assert actual.tolist() == oracle.uniform(np.array(words, dtype=np.uint64)).tolist()
    assert actual.min() > 0
    assert actual.max() < 1
    assert actual[2] / actual[0] == 3  # 2^-32 and 3 * 2^-32: 31 bits down there
    assert torch.isfinite((-torch.log1p(-actual)).log()).all()


def samples(kind: str, params: SamplingParams, logits: list[float], num: int) -> Tensor:
    """`num` samples: 256 seeds times num / 256 positions."""
    sampler = oracle.make_sampler(kind, 256, len(logits))
    for row in range(256):
        request = Request.create("r", [0], params, max_tokens=1, seed=1000 + row)
        sampler.state.set(row, request.current_spec())
    tokens = torch.zeros(256, 1, dtype=torch.int32)
    repeated = torch.tensor(logits).repeat(256, 1)
    positions = (torch.full((256,), 1 + position) for position in range(num // 256))
    actual = [
        sampler.sample(repeated.clone(), range(256), lengths, tokens).token_ids for lengths in positions
    ]
    return torch.tensor(actual).flatten()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"temperature": 2.0, "top_k": 5}, 5),
        ({"top_p": 0.8}, 3),
        ({"min_p": 0.15}, 4),
    ],
)
def test_samples_follow_the_distribution(each_sampler: str, options: dict[str, float], kept: int) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits = [0.0, 2.0, -1.0, 1.5, 0.25, -3.0, 1.0, -0.5]
    num = 256 * 50
    probs = torch.tensor(logits, dtype=torch.float64).div(params.temperature).softmax(0)
    probs[probs.argsort(descending=True)[kept:]] = 0
    expected = num * probs / probs.sum()
    counts = torch.bincount(samples(each_sampler, params, logits, num), minlength=8).double()
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < 30  # at most 7 degrees of freedom: p = 0.0001


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.6}, {"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 90, "top_p": 0.9}],
)
def test_samples_of_many_tokens_follow_the_distribution(each_sampler: str, options: dict[str, float]) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    logits = np.random.default_rng(6).normal(scale=1.5, size=300).astype(np.float32)
    num = 256 * 60
    x = logits.astype(np.float64) / params.temperature
    kept = sorted(oracle.kept(x, params, 0.0))
    probs = np.exp(x[kept]) / np.exp(x[kept]).sum()
    counts = torch.bincount(samples(each_sampler, params, logits.tolist(), num), minlength=300).numpy()
    assert counts[kept].sum() == num
    likely = num * probs >= 8  # the others are taken together
    expected = np.append(num * probs[likely], num * probs[~likely].sum() + 1e-9)
    actual = np.append(counts[kept][likely], counts[kept][~likely].sum())
    freedom = int(likely.sum())
    assert ((actual - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_rare_token_of_a_large_vocabulary_is_sampled_with_its_probability(each_sampler: str) -> None:
    """Half of the mass lies on 20,000 tokens of 25e-6 each, which must all have their chance."""
    size = 20_000
    logits = [0.0] * size + [float(np.log(size))]
    actual = samples(each_sampler, SamplingParams(), logits, 256 * 2)
    rare = actual[actual < size]
    assert abs(len(rare) / len(actual) - 0.5) < 0.13  # deviation 0.022
    assert abs(rare.double().mean() / size - 0.5) < 0.11  # deviation 0.018
    assert len(set(rare.tolist())) > 0.97 * len(rare)
