"""The kernels' random numbers: the same bits as on the CPU, and the same Gumbel noise but for rounding."""

# mypy: disallow_untyped_decorators=False, disallow_untyped_defs=False, disallow_incomplete_defs=False
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight.execution.sampling.gumbel import log_exponential, noise_bits, noise_key
from inflight.execution.sampling.interface import seed_words
from inflight.execution.sampling.triton import gumbel as noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = [0, 1, -1, 12345, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 0x0123456789ABCDEF]
NUM_IDS = 4096


@triton.jit
def _noise_kernel(
    seed_low, seed_high, positions, logits, bits, scores, inverse_temperature, NUM: tl.constexpr
):
    row = tl.program_id(0)
    ids = tl.arange(0, NUM)
    first, second = noise.noise_key(
        tl.load(seed_low + row), tl.load(seed_high + row), tl.load(positions + row)
    )
    tl.store(bits + row * NUM + ids, noise._bits(first, second, ids).to(tl.int32, bitcast=True))
    x = tl.load(logits + ids)
    tl.store(scores + row * NUM + ids, noise.gumbel_scores(x, inverse_temperature, first, second, ids))


def test_bits_are_equal_and_scores_are_close() -> None:
    low, high = (torch.tensor(part, dtype=torch.int32) for part in zip(*map(seed_words, SEEDS), strict=True))
    positions = torch.tensor([0, 1, 2, 77, 131071, 5, 6, 7, 8], dtype=torch.int32)
    logits = torch.randn(NUM_IDS, generator=torch.Generator().manual_seed(0)) * 5
    bits = torch.empty(len(SEEDS), NUM_IDS, dtype=torch.int32, device=DEVICE)
    scores = torch.empty(len(SEEDS), NUM_IDS, device=DEVICE)
    on_device = [tensor.to(DEVICE) for tensor in (low, high, positions, logits)]
    _noise_kernel[(len(SEEDS),)](*on_device, bits, scores, 1 / 0.7, NUM=NUM_IDS)

    key, token_ids = noise_key(low, high, positions), torch.arange(NUM_IDS, dtype=torch.int32)
    assert torch.equal(bits.cpu(), noise_bits(key, token_ids))
    expected = logits.double() / 0.7 - log_exponential(key, token_ids).double()
    assert (scores.cpu().double() - expected).abs().max() < 2e-5
