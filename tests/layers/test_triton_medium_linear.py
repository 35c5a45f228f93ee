"""Linear layers for some dozens of tokens, in every way they are cut and fused, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from inflight.layers.triton import medium_linear as module
from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.tuning import MAX_TOKENS, LinearTile, choose_medium
from inflight.layers.triton_utils.padding import padded_empty, readable_rows
from tests.layers.test_triton_small_linear import (
    DEVICE,
    TOLERANCE,
    assert_near,
    check_half_norms,
    draw,
    poisoned,
    reference,
)

TILES = [
    LinearTile(block_m=16, block_n=32, block_k=32, num_warps=4, stages=3),
    LinearTile(block_m=16, block_n=16, block_k=16, split_k=2, num_warps=4, stages=2),
    LinearTile(block_m=32, block_n=32, block_k=16, split_k=3, num_warps=4, stages=2),
]


@pytest.fixture
def workspace() -> SplitKWorkspace:
    made = SplitKWorkspace(torch.device(DEVICE), num_floats=1 << 16, num_tiles=64)
    made.partials.fill_(torch.nan)
    return made


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_every_fusion_in_every_tile_matches_float64(
    tile: LinearTile, activation: str | None, workspace: SplitKWorkspace
) -> None:
    """Neither 37 tokens, 72 features nor 52 rows are a multiple of a tile."""
    torch.manual_seed(0)
    x, weight = draw(37, 72), draw(52, 72, scale=72**-0.5)
    num_out = 52 if activation is None else 26
    bias, residual = draw(52), draw(37, num_out)
    for use_bias, use_residual in [(1, 0), (0, 1)]:
        parts = {
            "bias": bias if use_bias else None,
            "activation": activation,
            "residual": residual if use_residual else None,
        }
        out = poisoned(37, num_out, dtype=torch.float32)
        assert medium_linear(x, weight, workspace, out=out, tile=tile, **parts) is out  # type: ignore[arg-type]
        assert_near(out, reference(x, weight, **parts), torch.float32)  # type: ignore[arg-type]
        assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 33, 64, 65, 200])
def test_any_number_of_tokens_matches_float64(
    num_tokens: int, dtype: torch.dtype, workspace: SplitKWorkspace
) -> None:
    torch.manual_seed(num_tokens)
    x, weight = draw(num_tokens, 80, dtype=dtype), draw(36, 80, dtype=dtype, scale=0.1)
    out = poisoned(num_tokens, 36, dtype=dtype)
    medium_linear(x, weight, workspace, out=out)
    assert_near(out, reference(x, weight), dtype)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_residual_is_added_in_place(tile: LinearTile, workspace: SplitKWorkspace) -> None:
    torch.manual_seed(1)
    x, weight, residual = draw(20, 64), draw(48, 64, scale=0.1), draw(20, 48)
    expected = reference(x, weight, residual=residual)
    assert medium_linear(x, weight, workspace, residual=residual, out=residual, tile=tile) is residual
    assert_near(residual, expected, torch.float32)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_norm_is_written_and_read(
    tile: LinearTile, dtype: torch.dtype, workspace: SplitKWorkspace
) -> None:
    check_half_norms(partial(medium_linear, workspace=workspace, tile=tile), 37, dtype)
    assert not workspace.counters.any()


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.split_k > 1], ids=str)
def test_split_product_is_reproducible(tile: LinearTile, workspace: SplitKWorkspace) -> None:
    torch.manual_seed(2)
    x, weight = draw(20, 100), draw(40, 100)
    first = medium_linear(x, weight, workspace, tile=tile)
    for _ in range(3):
        assert torch.equal(medium_linear(x, weight, workspace, tile=tile), first)


def test_split_with_more_parts_than_features_matches_float64(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(3)
    x, weight = draw(20, 40), draw(20, 40)
    actual = medium_linear(
        x,
        weight,
        workspace,
        tile=LinearTile(block_m=16, block_n=16, block_k=16, split_k=8, num_warps=4, stages=2),
    )
    assert_near(actual, reference(x, weight), torch.float32)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37, 64])
def test_memory_behind_the_tokens_reaches_no_result(
    tile: LinearTile, num_tokens: int, workspace: SplitKWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy engine reads whole tiles; here the interpreter stands in for it."""
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "can_describe", lambda x, weight: True)  # noqa: ARG005
    torch.manual_seed(8)
    x = padded_empty(num_tokens, 64, torch.bfloat16, torch.device(DEVICE))
    x.as_strided((readable_rows(x, 128), 64), (64, 1)).fill_(torch.nan)
    x.copy_(draw(num_tokens, 64))
    weight, residual = (
        draw(48, 64, dtype=torch.bfloat16, scale=0.1),
        draw(num_tokens, 48, dtype=torch.bfloat16),
    )
    expected = reference(x, weight, residual=residual)
    left = NextNorm(draw(48))
    medium_linear(x, weight, workspace, residual=residual, out=residual, next_norm=left, tile=tile)
    assert_near(residual, expected, torch.bfloat16)
    assert left.squares is not None
    torch.testing.assert_close(left.squares.sum(0), residual.float().square().sum(1))
    gated = medium_linear(x, weight, workspace, activation="silu", tile=tile)
    assert_near(gated, reference(x, weight, activation="silu"), torch.bfloat16)


def test_nothing_is_written_past_the_last_token_or_feature(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(5)
    x, weight = draw(3, 64), draw(20, 64)
    memory = poisoned(5 * 20, dtype=torch.float32)
    medium_linear(x, weight, workspace, out=memory[20:80].view(3, 20))
    assert memory[:20].isnan().all()
    assert memory[80:].isnan().all()
    assert_near(memory[20:80].view(3, 20), reference(x, weight), torch.float32)


def test_logits_of_narrow_weights_are_float32(workspace: SplitKWorkspace) -> None:
    torch.manual_seed(6)
    x, weight = draw(40, 64, dtype=torch.bfloat16), draw(50, 64, dtype=torch.bfloat16)
    out = poisoned(40, 50, dtype=torch.float32)
    medium_linear(x, weight, workspace, out=out)
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-4)
    assert not torch.equal(out, out.bfloat16().float())


def test_no_tokens_give_an_empty_result(workspace: SplitKWorkspace) -> None:
    assert medium_linear(draw(0, 8), draw(6, 8), workspace).shape == (0, 6)


def test_too_small_workspace_is_rejected(workspace: SplitKWorkspace) -> None:
    with pytest.raises(AssertionError, match="too many to split"):
        medium_linear(
            draw(64, 16),
            draw(16 * 64, 16),
            workspace,
            tile=LinearTile(block_m=16, block_n=16, block_k=16, split_k=2, num_warps=4, stages=2),
        )


@pytest.mark.parametrize(
    ("rows", "features"), [(4096, 1024), (1024, 3072), (28672, 4096), (4096, 14336), (100, 72)]
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_workspace_and_the_chip(rows: int, features: int, itemsize: int) -> None:
    workspace = SplitKWorkspace(torch.device("meta"))
    for num_tokens in range(1, MAX_TOKENS + 1):
        tile = choose_medium(num_tokens, rows, features, itemsize, 132, 227 << 10)
        if tile.split_k > 1:
            workspace.check(-(-rows // tile.block_n) * -(-num_tokens // tile.block_m), tile)
        held = tile.stages * tile.block_k * (tile.block_m + tile.block_n) * itemsize
        assert held <= 227 << 10, "shared memory of a Hopper"
