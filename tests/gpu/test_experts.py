"""Experts on the GPU against float64, at sizes of real models, and how their use is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.layers.kernels import ExpertRouting, ExpertsShape, Residual
from inflight.layers.triton_kernels import TritonKernels
from tests.layers.test_experts import expected_output, random_weights

ROUTING = ExpertRouting(num_experts=16, top_k=4, scores="softmax", normalise=True)
HIDDEN, INNER = 256, 192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "same_experts"),
    # With the same experts for all tokens: of 8 less than a tile, of 64 whole tiles, of 300 one tile too many, and of
    # the other experts nothing.
    [*((size, False) for size in (1, 3, 8, 100, 300, 1500)), *((size, True) for size in (8, 64, 300))],
)
def test_experts_match_float64_in_all_sizes_of_steps(
    dtype: torch.dtype, num_tokens: int, same_experts: bool
) -> None:
    torch.manual_seed(num_tokens)
    weights = random_weights(ROUTING, HIDDEN, INNER, dtype)
    # Clear winners: rounding must not change which experts are chosen.
    clear = torch.zeros(ROUTING.num_experts, HIDDEN)
    clear[:, : ROUTING.num_experts] = 8 * torch.eye(ROUTING.num_experts)
    weights = replace(weights, router=clear.to(dtype))
    x = torch.randn(num_tokens, HIDDEN)
    for token in range(num_tokens):
        order = torch.arange(ROUTING.num_experts) if same_experts else torch.randperm(ROUTING.num_experts)
        x[token, : ROUTING.num_experts] = order / 4.0
    x = x.to(dtype)
    norm = torch.ones(HIDDEN)
    expected = expected_output(weights, x, norm)
    experts = TritonKernels(dtype, "cuda").experts(ExpertsShape(HIDDEN, INNER, ROUTING, dtype, "silu"))
    weights.load(experts)
    live = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")
    live[num_tokens // 2 + 1 :: 3] = -1
    actual = experts.add_to(Residual(x.cuda().clone(), norm.cuda()), 1e-6, norm.cuda(), live).x.cpu()
    is_live = live.cpu() >= 0
    added, reference = (actual.double() - x.double())[is_live], (expected - x.double())[is_live]
    limit = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    assert ((added - reference).norm() / reference.norm()).item() < limit
    assert torch.equal(actual[~is_live], x[~is_live])


@pytest.mark.parametrize("num_tokens", [3, 40, 300])
def test_token_that_is_not_a_number_leaves_the_others_alone(num_tokens: int) -> None:
    torch.manual_seed(0)
    weights = random_weights(ROUTING, HIDDEN, INNER, torch.bfloat16)
    experts = TritonKernels(torch.bfloat16, "cuda").experts(
        ExpertsShape(HIDDEN, INNER, ROUTING, torch.bfloat16, "silu")
    )
    weights.load(experts)
    x, norm = torch.randn(num_tokens, HIDDEN).bfloat16().cuda(), torch.ones(HIDDEN).cuda()
    expected = experts.add_to(Residual(x.clone(), norm), 1e-6, norm).x
    x[1] = torch.nan
    actual = experts.add_to(Residual(x.clone(), norm), 1e-6, norm).x
    assert actual[1].isnan().all()
    others = torch.arange(num_tokens).cuda() != 1
    assert torch.equal(actual[others], expected[others])


def test_every_token_is_counted_in_every_layer(
    checkpoint: Callable[..., Path], prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks": 400}
    with LLM(
        checkpoint("qwen3-moe"),
        skip_tokenizer_init=True,
        show_progress=False,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        assert llm.stats().experts is None, "warm-up steps do not count"
        with llm.recorded() as steps:
            llm.generate(prompts, params, use_tqdm=False)
        experts = llm.stats().experts
    readings = [step.experts.tokens for step in steps if step.experts is not None]
    layers = [sum(map(sum, layer)) for layer in zip(*readings, strict=True)]
    num_tokens = sum(map(len, prompts)) + 31 * len(prompts)
    # The last layer computes only the tokens that are sampled from.
    assert layers == [3 * num_tokens] * (len(layers) - 1) + [3 * 32 * len(prompts)]
    assert experts is not None
    assert sum(experts.tokens) == sum(layers)
