"""Experts of many tokens: each expert multiplies all its tokens at once, in blocks of the same number of pairs.

    grouped_gate_up  block by block: activate(gate) * up, in the order of the blocks
    grouped_down     block by block: weighted products, in the order of the pairs
    combine          residual + sum over each token's pairs in order, and half of the next norm

Each weight tile is read once per block. Blocks are numbered expert by expert: `grouped_gate_up` finds out from the
experts' counts which pairs are in a block, and leaves it for `grouped_down`. The grid is for the worst case; programs
beyond the last block end at once: nothing depends on the host, and no pair is ever dropped. Sums are float32 and always
in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.expert_parts import Gate, gated
from inflight.layers.triton.held import HeldWeights
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm
from inflight.layers.triton.quantized_inputs import QuantizedInputs, quantize_rows, quantized
from inflight.layers.triton.routing import Chosen
from inflight.layers.triton.tuning import GroupedTile
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait, launch_options

_FEW = 64  # tokens up to which `combine` needs small tiles to fill the chip


@triton.jit
def _find_block(counts, block, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return a block's expert, the number of that expert's pairs in blocks before it, and of those from it on."""
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    blocks = (count + (BLOCK_M - 1)) // BLOCK_M
    # Count the experts all of whose blocks come before.
    expert_index = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    first = (block - tl.sum(tl.where(expert < expert_index, blocks, 0), 0)) * BLOCK_M
    return expert_index, first, tl.sum(tl.where(expert == expert_index, count, 0), 0) - first


@triton.jit(do_not_specialize=["num_tokens", "max_blocks"])
def _grouped_kernel(
    x,  # GATED: [T, K], else [max_blocks * BLOCK_M, K] in the order of the blocks
    x_scales,  # [rows of x, groups] float32 of quantized inputs, or None
    factors,  # [T] float32, or None: the half of the norm that is left to do
    weight,  # [E, num_rows, K]; of MXFP4 and int4 words
    scales,  # of quantized weights, and their zero points: see `held.py`
    zeros,
    bias,  # [E, num_rows], or None
    counts,  # [E] int32
    pairs,  # [E, T] int32
    blocks,  # [3, max_blocks] int32: what `_find_block` returns; GATED: written here
    weights,  # [T * TOP_K] float32, or None
    out,  # GATED: [max_blocks * BLOCK_M, num_rows // 2], else [T * TOP_K, num_rows]
    num_rows,
    K,
    num_experts,
    num_tokens,
    max_blocks,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,  # 0: no gate
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    MULTIPLY: tl.constexpr,  # a function like `multiply_plain_pairs`
    GROUP: tl.constexpr,
    QUANTIZE: tl.constexpr,  # whether inputs are quantized, too
):
    block, tile = tl.program_id(0) % max_blocks, tl.program_id(0) // max_blocks
    GATED: tl.constexpr = ACTIVATION != 0
    k = tl.arange(0, BLOCK_K)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    m = tl.arange(0, BLOCK_M)
    launch_dependents_then_wait(PDL)
    if GATED:
        expert_index, first, num_pairs = _find_block(counts, block, num_experts, BLOCK_M, BLOCK_E)
        if tile == 0:
            tl.store(blocks + block, expert_index)
            tl.store(blocks + max_blocks + block, first)
            tl.store(blocks + 2 * max_blocks + block, num_pairs)
    else:
        expert_index = tl.load(blocks + block)
        first = tl.load(blocks + max_blocks + block)
        num_pairs = tl.load(blocks + 2 * max_blocks + block)
    if num_pairs > 0:
        expert = expert_index.to(tl.int64)
        is_live = m < num_pairs
        pair = tl.load(pairs + expert * num_tokens + first + m, mask=is_live, other=0)
        block_row = (block * BLOCK_M + m).to(tl.int64)
        if GATED:
            x_row = (pair // TOP_K).to(tl.int64)
        else:
            x_row = block_row
        x_rows = x + x_row * K
        acc = MULTIPLY(
            x_rows, x_scales, x_row, weight, scales, zeros, expert, row, k, num_rows, is_live, K, GROUP, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WEIGHTS_LEFT, PRECISION, QUANTIZE,
        )  # fmt: skip
        if factors is not None:
            scale = tl.load(factors + pair // TOP_K, mask=is_live, other=0.0)
            acc *= scale[None, :] if WEIGHTS_LEFT else scale[:, None]
        if bias is not None:
            extra = tl.load(bias + expert * num_rows + row).to(tl.float32)
            acc += extra[:, None] if WEIGHTS_LEFT else extra[None, :]
        if GATED:
            WIDTH: tl.constexpr = BLOCK_N // 2
            if WEIGHTS_LEFT:
                gate, up = tl.split(tl.permute(tl.reshape(acc, [WIDTH, 2, BLOCK_M]), [0, 2, 1]))
            else:
                gate, up = tl.split(tl.reshape(acc, [BLOCK_M, WIDTH, 2]))
            values = gated(gate, up, ACTIVATION, LIMIT)
            column = tile * WIDTH + tl.arange(0, WIDTH)
            num_columns = num_rows // 2
            target = block_row
        else:
            values = acc
            column = n
            num_columns = num_rows
            target = pair.to(tl.int64)
            if weights is not None:
                factor = tl.load(weights + pair, mask=is_live, other=0.0)
                values *= factor[None, :] if WEIGHTS_LEFT else factor[:, None]
        values = values.to(out.dtype.element_ty)
        exists = column < num_columns
        if WEIGHTS_LEFT:
            where = target[None, :] * num_columns + column[:, None]
            tl.store(out + where, values, mask=exists[:, None] & is_live[None, :])
        else:
            where = target[:, None] * num_columns + column[None, :]
            tl.store(out + where, values, mask=exists[None, :] & is_live[:, None])


@triton.jit(do_not_specialize=["max_blocks"])
def _quantize_blocks_kernel(
    x,  # [max_blocks * BLOCK_M, K] in the order of the blocks
    blocks,  # [3, max_blocks] int32
    codes,
    scales,  # [max_blocks * BLOCK_M, groups] float32
    K,
    max_blocks,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    launch_dependents_then_wait(PDL)
    if row % BLOCK_M < tl.load(blocks + 2 * max_blocks + row // BLOCK_M):
        group = tl.arange(0, BLOCK // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        places = row.to(tl.int64) * K + column
        values, scale = quantized(tl.load(x + places, mask=column < K, other=0.0), 1, codes.dtype.element_ty)
        tl.store(codes + places, values, mask=column < K)
        num_groups = tl.cdiv(K, GROUP)
        tl.store(scales + row.to(tl.int64) * num_groups + group, scale, mask=group < num_groups)


@triton.jit
def _combine_kernel(
    y,  # [T * TOP_K, num_out]
    ids,  # [T, TOP_K] int32
    counts,  # [E] int32
    residual,  # [T, num_out], or None
    next_weight,
    out,
    scaled,
    squares_left,
    num_tokens,
    num_out,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(num_out, BLOCK_N)
    token, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < num_out
    next_weights = next_weight
    if next_weight is not None:
        next_weights = tl.load(next_weight + n, mask=mask, other=0.0)
    launch_dependents_then_wait(PDL)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BLOCK_E)
        tl.store(counts + expert, 0, mask=expert < num_experts)  # for the next step
    place = token.to(tl.int64) * num_out + n
    before = tl.zeros([BLOCK_N], out.dtype.element_ty)
    if residual is not None:
        before = tl.load(residual + place, mask=mask, other=0.0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token.to(tl.int64) * TOP_K + index
        # Rows of no expert are read, too: the load need not wait for the id.
        values = tl.load(y + pair * num_out + n, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(tl.load(ids + pair) < num_experts, values, 0.0)
    total += before.to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=mask)
    if next_weight is not None:
        wide = values.to(tl.float32)
        tl.store(scaled + place, (wide * next_weights).to(values.dtype), mask=mask)
        tl.store(squares_left + tile * num_tokens + token, tl.sum(tl.where(mask, wide * wide, 0.0), 0))


def grouped_gate_up(
    x: Tensor,  # [T, K]
    matrices: HeldWeights,
    chosen: Chosen,
    block_m: int,
    gate: Gate,
    tile: GroupedTile,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return [blocks * block_m, inner] in the order of the blocks, where rows of no pair are undefined, and the
    blocks."""
    inner = matrices.codes.shape[1] // 2
    max_blocks = _max_blocks(chosen, len(matrices.codes), block_m)
    out = torch.empty(max_blocks * block_m, inner, dtype=x.dtype, device=x.device)
    blocks = torch.empty(3, max_blocks, dtype=torch.int32, device=x.device)
    inputs: Tensor | QuantizedInputs = x
    if _quantizes_before(matrices, tile):
        inputs = quantize_rows(x, group=matrices.group, pdl=pdl, dtype=matrices.codes.dtype)
    _launch(inputs, matrices, chosen, blocks, block_m, None, out, gate, tile, pdl)
    return out, blocks


def grouped_down(
    x: Tensor,
    matrices: HeldWeights,
    chosen: Chosen,
    blocks: Tensor,
    block_m: int,
    tile: GroupedTile,
    out_dtype: torch.dtype,
    pdl: bool = False,
) -> Tensor:
    """Return the weighted products [T * top_k, num_out] in the order of the pairs; rows of padding are undefined."""
    out = torch.empty(chosen.ids.numel(), matrices.codes.shape[1], dtype=out_dtype, device=x.device)
    inputs: Tensor | QuantizedInputs = x
    if _quantizes_before(matrices, tile):
        inputs = _quantize_blocks(x, matrices, blocks, block_m, pdl)
    _launch(inputs, matrices, chosen, blocks, block_m, chosen.weights, out, Gate(0), tile, pdl)
    return out


def _max_blocks(chosen: Chosen, num_experts: int, block_m: int) -> int:
    num_pairs = chosen.ids.numel()
    return max(1, min(num_pairs, num_experts + num_pairs // block_m))


def _quantizes_before(matrices: HeldWeights, tile: GroupedTile) -> bool:
    """Return whether inputs are quantized in a separate kernel, and not where they are multiplied."""
    return matrices.quantizes_inputs and tile.quantize_first


def _quantize_blocks(
    x: Tensor, matrices: HeldWeights, blocks: Tensor, block_m: int, pdl: bool
) -> QuantizedInputs:
    """Quantize the rows of pairs; those of no pair stay undefined."""
    num_rows, num_features = x.shape
    group = matrices.group
    codes = torch.empty(num_rows, num_features, dtype=matrices.codes.dtype, device=x.device)
    num_groups = triton.cdiv(num_features, group) if group else 1
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_features)
    _quantize_blocks_kernel[(num_rows,)](
        x,
        blocks,
        codes,
        scales,
        num_features,
        blocks.shape[1],
        BLOCK_M=block_m,
        GROUP=group or block,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(pdl),
    )
    return QuantizedInputs(codes, scales, x.dtype)


def _launch(
    x: Tensor | QuantizedInputs,
    matrices: HeldWeights,
    chosen: Chosen,
    blocks: Tensor,
    block_m: int,
    weights: Tensor | None,
    out: Tensor,
    gate: Gate,
    tile: GroupedTile,
    pdl: bool,
) -> None:
    assert chosen.groups is not None
    num_tokens, top_k = chosen.ids.shape
    num_experts, num_rows, _ = matrices.codes.shape
    codes, x_scales = (x, None) if isinstance(x, Tensor) else (x.codes, x.scales)
    num_features = codes.shape[1]
    max_blocks = blocks.shape[1]
    block_k = matrices.group or tile.block_k
    _grouped_kernel[(max_blocks * triton.cdiv(num_rows, tile.block_n),)](
        codes,
        x_scales,
        chosen.factors if gate.activation else None,
        matrices.codes,
        matrices.scales,
        matrices.zeros,
        matrices.bias,
        chosen.groups.counts,
        chosen.groups.pairs,
        blocks,
        weights,
        out,
        num_rows,
        num_features,
        num_experts,
        num_tokens,
        max_blocks,
        LIMIT=gate.limit,
        ACTIVATION=gate.activation,
        TOP_K=top_k,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        EVEN_K=num_features % block_k == 0,
        STAGES=tile.stages,
        WEIGHTS_LEFT=tile.weights_left,
        PRECISION="ieee" if codes.dtype == torch.float32 else "tf32",
        PDL=pdl,
        MULTIPLY=matrices.multiply_pairs,
        GROUP=matrices.group,
        QUANTIZE=matrices.quantizes_inputs,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )


def combine(
    y: Tensor,  # [T * top_k, num_out]
    chosen: Chosen,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return the sum over each token's pairs [T, num_out], added to the residual in place if there is one.

    The experts' counts become zero.
    """
    assert chosen.groups is not None
    num_tokens, top_k = chosen.ids.shape
    num_out, num_experts = y.shape[1], len(chosen.groups.counts)
    out = residual
    if out is None:
        out = padded_empty(num_tokens, num_out, dtype, y.device)
    block = min(256 if num_tokens <= _FEW else 1024, triton.next_power_of_2(num_out))
    num_tiles = triton.cdiv(num_out, block)
    next_weight, scaled, squares = allocate_next_norm(next_norm, out, num_tiles)
    if num_tokens:
        _combine_kernel[(num_tokens * num_tiles,)](
            y,
            chosen.ids,
            chosen.groups.counts,
            residual,
            next_weight,
            out,
            scaled,
            squares,
            num_tokens,
            num_out,
            num_experts,
            TOP_K=top_k,
            BLOCK_N=block,
            BLOCK_E=triton.next_power_of_2(num_experts),
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out
