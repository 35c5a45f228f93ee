"""Linear layers for few tokens, in every way they are cut and fused, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import MAX_SMALL, LinearTile, choose_small, token_bucket

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Without tensor cores and with them, each alone and split.
TILES = [
    LinearTile(block_m=4, block_n=16, block_k=64, num_warps=1, stages=1),
    LinearTile(block_m=4, block_n=32, block_k=32, split_k=3, num_warps=2, stages=1),
    LinearTile(block_m=16, block_n=32, block_k=32, num_warps=4, stages=3),
    LinearTile(block_m=16, block_n=16, block_k=16, split_k=4, num_warps=4, stages=2),
]


def normed64(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    if norm is None:
        return wide
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()


def reference(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    y = normed64(x, norm, eps) @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if activation is not None:
        left, right = y.chunk(2, dim=-1)
        if activation == "silu":
            left = torch.nn.functional.silu(left)
        else:
            left = torch.nn.functional.gelu(left, approximate="tanh")
        y = left * right
    return y if residual is None else residual.double() + y


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture
def workspace() -> SplitKWorkspace:
    made = SplitKWorkspace(torch.device(DEVICE), num_floats=1 << 16, num_tiles=64)
    made.partials.fill_(torch.nan)
    return made


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_every_fusion_in_every_tile_matches_float64(
    tile: LinearTile, activation: str | None, workspace: SplitKWorkspace
) -> None:
    """Neither 72 features nor 52 rows are a multiple of a tile."""
    torch.manual_seed(0)
    x, weight = draw(3, 72), draw(52, 72, scale=72**-0.5)
    num_out = 52 if activation is None else 26
    norm, bias, residual = draw(72), draw(52), draw(3, num_out)
    for use_norm, use_bias, use_residual in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
        parts = {
            "norm": norm if use_norm else None,
            "eps": 1e-5,
            "bias": bias if use_bias else None,
            "activation": activation,
            "residual": residual if use_residual else None,
        }
        out = poisoned(3, num_out, dtype=torch.float32)
        assert small_linear(x, weight, workspace, out=out, tile=tile, **parts) is out  # type: ignore[arg-type]
        assert_near(out, reference(x, weight, **parts), torch.float32)  # type: ignore[arg-type]
        assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9, 17, 33, 64])
def test_any_number_of_tokens_matches_float64(
    num_tokens: int, dtype: torch.dtype, workspace: SplitKWorkspace
) -> None:
    torch.manual_seed(num_tokens)
    x, weight, norm = draw(num_tokens, 80, dtype=dtype), draw(36, 80, dtype=dtype, scale=0.1), draw(80)
    out = poisoned(num_tokens, 36, dtype=dtype)
    small_linear(x, weight, workspace, norm=norm, eps=1e-6, out=out)
    assert_near(out, reference(x, weight, norm, 1e-6), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_in_place(dtype: torch.dtype, workspace: SplitKWorkspace) -> None:
    torch.manual_seed(1)
    x, weight, residual = (
        draw(5, 64, dtype=dtype),
        draw(48, 64, dtype=dtype, scale=0.1),
        draw(5, 48, dtype=dtype),
    )
    expected = reference(x, weight, residual=residual)
    tile = LinearTile(block_m=16, block_n=16, block_k=16, split_k=2, num_warps=4, stages=2)
    actual = small_linear(x, weight, workspace, residual=residual, out=residual, tile=tile)
    assert actual is residual
    assert_near(residual, expected, dtype)


def check_half_norms(linear: Callable[..., Tensor], num_tokens: int, dtype: torch.dtype) -> None:
    """One layer leaves half of a norm, another reads it; both with rows and features that fill no tile."""
    torch.manual_seed(7)
    x, weight, back = draw(num_tokens, 72), draw(52, 72, scale=72**-0.5), draw(36, 52, scale=52**-0.5)
    x, weight, back = x.to(dtype), weight.to(dtype), back.to(dtype)
    residual, norm = draw(num_tokens, 52, dtype=dtype), draw(52)
    expected = reference(x, weight, residual=residual)
    left = NextNorm(norm)
    out = linear(x, weight, residual=residual, out=residual, next_norm=left)
    assert_near(out, expected, dtype)
    assert left.scaled is not None
    assert left.squares is not None
    assert_near(left.scaled, out.double() * norm.double(), dtype)
    torch.testing.assert_close(left.squares.sum(0), out.float().square().sum(1))
    actual = linear(left.scaled, back, squares=left.squares, eps=1e-5)
    assert_near(actual, reference(out, back, norm, 1e-5), dtype)
    gated = linear(left.scaled, back, squares=left.squares, eps=1e-5, activation="silu")
    assert_near(gated, reference(out, back, norm, 1e-5, activation="silu"), dtype)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_norm_is_written_and_read(
    tile: LinearTile, dtype: torch.dtype, workspace: SplitKWorkspace
) -> None:
    check_half_norms(partial(small_linear, workspace=workspace, tile=tile), 3, dtype)
    assert not workspace.counters.any()


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.split_k > 1], ids=str)
def test_split_product_is_reproducible(tile: LinearTile, workspace: SplitKWorkspace) -> None:
    torch.manual_seed(2)
    x, weight, norm = draw(4, 100), draw(40, 100), draw(100)
    first = small_linear(x, weight, workspace, norm=norm, eps=1e-6, tile=tile)
    for _ in range(3):
        assert torch.equal(small_linear(x, weight, workspace, norm=norm, eps=1e-6, tile=tile), first)
    assert not workspace.counters.any()


def test_split_with_more_parts_than_features_matches_float64(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(3)
    x, weight = draw(2, 40), draw(20, 40)
    actual = small_linear(
        x,
        weight,
        workspace,
        tile=LinearTile(block_m=16, block_n=16, block_k=16, split_k=8, num_warps=4, stages=2),
    )
    assert_near(actual, reference(x, weight), torch.float32)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tokens_do_not_affect_each_other(tile: LinearTile, workspace: SplitKWorkspace) -> None:
    torch.manual_seed(4)
    x, weight, norm = draw(4, 72), draw(24, 72), draw(72)
    together = small_linear(x, weight, workspace, norm=norm, eps=1e-6, tile=tile)
    for token in range(4):
        alone = small_linear(x[token : token + 1], weight, workspace, norm=norm, eps=1e-6, tile=tile)
        assert torch.equal(alone[0], together[token])


def test_nothing_is_written_past_the_last_token_or_feature(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(5)
    x, weight = draw(3, 64), draw(20, 64)
    memory = poisoned(5 * 20, dtype=torch.float32)
    small_linear(x, weight, workspace, out=memory[20:80].view(3, 20))
    assert memory[:20].isnan().all()
    assert memory[80:].isnan().all()
    assert_near(memory[20:80].view(3, 20), reference(x, weight), torch.float32)


def test_logits_of_narrow_weights_are_float32(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(6)
    x, weight, norm = draw(2, 64, dtype=torch.bfloat16), draw(50, 64, dtype=torch.bfloat16), draw(64)
    out = poisoned(2, 50, dtype=torch.float32)
    small_linear(x, weight, workspace, norm=norm, eps=1e-6, out=out)
    torch.testing.assert_close(out.double(), reference(x, weight, norm, 1e-6), rtol=1e-5, atol=1e-4)
    assert not torch.equal(out, out.bfloat16().float())


def test_no_tokens_give_an_empty_result(workspace: SplitKWorkspace) -> None:
    assert small_linear(draw(0, 8), draw(6, 8), workspace).shape == (0, 6)


@pytest.mark.parametrize(
    ("rows", "features"), [(4096, 1024), (1024, 3072), (28672, 4096), (4096, 14336), (100, 72)]
)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_tiles_fit_the_workspace_and_the_chip(
    rows: int, features: int, itemsize: int, kilobytes: int
) -> None:
    """An Ada, an A100 and a Hopper; what a program computes with is in registers before Hopper."""
    workspace = SplitKWorkspace(torch.device("meta"))
    for num_tokens in range(1, MAX_SMALL + 1):
        bucket = token_bucket(num_tokens)
        tile = choose_small(bucket, rows, features, itemsize, 132, kilobytes << 10)
        assert tile.block_m >= num_tokens
        num_tiles = -(-rows // tile.block_n)
        if tile.split_k > 1:
            assert num_tiles <= len(workspace.counters)
            assert num_tiles * tile.split_k * tile.block_m * (tile.block_n + 1) <= len(workspace.partials)
        if tile.block_m > 4:
            stages = tile.stages - (kilobytes < 227)
            assert stages * tile.block_k * (tile.block_m + tile.block_n) * itemsize <= kilobytes << 10


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 1), (2, 2), (3, 16), (16, 16), (17, 32), (33, 64)])
def test_token_buckets(num_tokens: int, bucket: int) -> None:
    assert token_bucket(num_tokens) == bucket
