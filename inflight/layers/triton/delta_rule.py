"""The gated delta rule on a GPU: piece by piece for prompts, token by token for decodes.

A piece is at most `PIECE` consecutive tokens of an entry. Within a piece, with keys k, values v, weights b and log
decays g (summed from the piece's start), the tokens' updates u solve a triangular system, so that matrix products
replace the recurrence:

    (1 + A) u = b * (v - exp(g) * (k @ S))        A[i, j] = b[i] * exp(g[i] - g[j]) * (k[i] . k[j])  for j < i
    output    = exp(g) * (q @ S) + P @ u          P[i, j] = exp(g[i] - g[j]) * (q[i] . k[j])         for j <= i
    next S    = exp(g[-1]) * S + (exp(g[-1] - g) * k).T @ u

`prepare` inverts 1 + A for all pieces at once, `carry` takes the state S through the pieces of each entry, and `output`
computes the outputs of all pieces at once. A convolution comes first, for all tokens: it reads the inputs before the
entry from the row's state, which only later kernels change.

Decodes with drafts are runs of tokens. `verify` takes the state through a run without storing it. Once it is known
which drafts were sampled, `accept` does it again for those, and stores it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.layers.triton_utils.pdl import launch_dependents_then_wait

PIECE_FIELDS = 6  # token, length, row, first_token, fresh, capture
ENTRY_FIELDS = 6  # first_piece, num_pieces, row, fresh, first_token, num_tokens
RUN_FIELDS = PIECE_FIELDS  # those of a piece: a run is one


@triton.jit
def convolve(
    projected, rows, weight, items, num_items, token_rows, out, projected_stride, row_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, DECODES: tl.constexpr, FIELDS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Convolve and activate queries, keys and values; give queries and keys unit length, and scale queries."""
    head = tl.program_id(0)  # of queries, then of keys, then of values
    pid = tl.program_id(1)
    is_item = pid < tl.load(num_items)
    if DECODES:
        token, first_token = pid, pid
        length = tl.full([], 1, tl.int32)
        fresh = tl.full([], 0, tl.int32)
        row = tl.load(token_rows + pid)
        is_item = is_item & (row >= 0)
    else:
        item = items + pid * FIELDS
        token = tl.load(item)
        length = tl.load(item + 1)
        row = tl.load(item + 2)
        first_token = tl.load(item + 3)
        fresh = tl.load(item + 4)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    is_key = head < 2 * KEY_HEADS
    width = tl.where(is_key, KEY_DIM, VALUE_DIM)
    first = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
    i = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    there = (i < length)[:, None] & (d < width)[None, :]
    feature = first + d
    state = rows + row.to(tl.int64) * row_stride
    # Tokens before it are in the state, if there are any.
    history_end = tl.where(fresh == 0, first_token, -KERNEL)
    x = tl.zeros([TOKENS, DIM], tl.float32)
    for tap in tl.static_range(KERNEL):
        source = token + i + (tap - KERNEL + 1)
        in_request = source >= first_token
        source_at = projected + source.to(tl.int64)[:, None] * projected_stride + feature[None, :]
        new = tl.load(source_at, mask=there & in_request[:, None], other=0.0).to(tl.float32)
        factor = tl.load(weight + feature * KERNEL + tap, mask=d < width, other=0.0)
        x += new * factor[None, :]
        old_at = state + (KERNEL - 1 + source - first_token)[:, None] * conv_size + feature[None, :]
        is_old = there & (source < history_end)[:, None]
        if DECODES:
            x += tl.load(old_at, mask=is_old, other=0.0) * factor[None, :]
        else:
            if token + tap < history_end + KERNEL - 1:  # only pieces near the start of their entry
                x += tl.load(old_at, mask=is_old, other=0.0) * factor[None, :]
    x = x / (1.0 + tl.exp(-x))
    if is_key:
        x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        x *= tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    to = out + (token + i).to(tl.int64)[:, None] * conv_size + feature[None, :]
    tl.store(to, x, mask=there)


@triton.jit
def _log_decay(a, a_log, dt_bias):
    """Return how much the logarithm of the state changes with a token."""
    x = a + dt_bias
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return -tl.exp(a_log) * softplus


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normed_and_gated(x, norm, z, eps, DIM: tl.constexpr, AXIS: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, AXIS) / DIM + eps)
    scaled = x * (scale[:, None] if AXIS == 1 else scale)
    return scaled * norm * (z / (1.0 + tl.exp(-z)))


@triton.jit
def _decays(g):
    """Return exp(g[i] - g[j]) for j <= i; other elements are 1."""
    return tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))


@triton.jit
def _inverse(a, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, for a strictly lower triangular matrix.

    Forward substitution inverts the four blocks on the diagonal at once. With the remaining blocks, m = inverse @ rest
    is nilpotent: its fourth power is 0. (The matrix itself is, too, but its powers overflow where keys repeat.)
    """
    i = tl.arange(0, PIECE)
    size: tl.constexpr = PIECE // 4
    same = (i // size)[:, None] == (i // size)[None, :]
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse = identity
    for r in range(1, size):
        solved_here = same & (i % size == r)[:, None]
        row = tl.sum(tl.where(solved_here, a, 0.0), 0)  # of the block that each column belongs to
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(solved_here, identity - solved[None, :], inverse)
    m = tl.dot(inverse, tl.where(same, 0.0, a), input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    series = identity - m + square - tl.dot(m, square, input_precision=PRECISION)
    return tl.dot(series, inverse, input_precision=PRECISION)


@triton.jit
def prepare(
    projected, mixed, a_log, dt_bias, items, num_items, decayed_keys, updates, log_decays, projected_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIELDS: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Solve each piece's system for the two parts of its updates: u = updates - decayed_keys @ S."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    token = tl.load(item)
    length = tl.load(item + 1)
    is_item = tl.program_id(1) < tl.load(num_items)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    i = tl.arange(0, PIECE)
    kd = tl.arange(0, KEYS)
    vd = tl.arange(0, VALUES)
    is_token = i < length
    tokens = (token + i).to(tl.int64)
    has_key = is_token[:, None] & (kd < KEY_DIM)[None, :]
    has_value = is_token[:, None] & (vd < VALUE_DIM)[None, :]
    key_head = KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
    key_at = mixed + tokens[:, None] * conv_size + key_head * KEY_DIM + kd[None, :]
    value_at = mixed + tokens[:, None] * conv_size + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + vd[None, :]
    k = tl.load(key_at, mask=has_key, other=0.0)
    v = tl.load(value_at, mask=has_value, other=0.0)
    gates = projected + tokens * projected_stride + conv_size + VALUE_HEADS * VALUE_DIM + head
    weight = tl.where(is_token, _sigmoid(tl.load(gates, mask=is_token, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(gates + VALUE_HEADS, mask=is_token, other=0.0).to(tl.float32)
    change = _log_decay(a, tl.load(a_log + head), tl.load(dt_bias + head))
    g = tl.cumsum(tl.where(is_token, change, 0.0), 0)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * _decays(g) * weight[:, None]
    inverse = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), PIECE, PRECISION)
    from_values = (inverse * weight[None, :]).to(k.dtype)
    from_state = (inverse * (weight * tl.exp(g))[None, :]).to(k.dtype)
    u = tl.dot(from_values, v, input_precision=PRECISION)
    w = tl.dot(from_state, k, input_precision=PRECISION)
    tl.store(updates + (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + vd[None, :], u, mask=has_value)
    tl.store(decayed_keys + (tokens[:, None] * VALUE_HEADS + head) * KEY_DIM + kd[None, :], w, mask=has_key)
    tl.store(log_decays + tokens * VALUE_HEADS + head, g, mask=is_token)


@triton.jit
def _snapshot_pointers(blocks, block_ids, index, block_stride, PART: tl.constexpr):
    """Return where the values number `index` of a lane's part of a snapshot lie."""
    return blocks + tl.load(block_ids + index // PART).to(tl.int64) * block_stride + index % PART


@triton.jit
def _store_inputs(
    projected, state, to_blocks, block_ids, offset, block_stride, first_token, num_tokens, fresh, begin, end,
    projected_stride, CONV_SIZE: tl.constexpr, KERNEL: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Store the last inputs of the convolution, after `num_tokens` tokens of an entry, for features [begin, end).

    They go to the row's state, or with PART to a snapshot. Ascending taps never read what an earlier one stored.
    """
    f = begin + tl.arange(0, FEATURES)
    for tap in tl.static_range(KERNEL - 1):
        source = num_tokens - (KERNEL - 1) + tap  # counted from the entry's first token
        is_old = source < tl.where(fresh == 0, 0, -KERNEL)
        source_at = projected + (first_token + source).to(tl.int64) * projected_stride + f
        new = tl.load(source_at, mask=f < tl.where(source >= 0, end, 0), other=0.0).to(tl.float32)
        old = tl.load(
            state + (tap + num_tokens) * CONV_SIZE + f, mask=f < tl.where(is_old, end, 0), other=0.0
        )
        if PART:
            to = _snapshot_pointers(to_blocks, block_ids, offset + tap * CONV_SIZE + f, block_stride, PART)
        else:
            to = state + tap * CONV_SIZE + f
        tl.store(to, new + old, mask=f < end)


@triton.jit
def _load_piece(
    decayed_keys, mixed, updates, log_decays, token, length, head, key_head, vd, conv_size: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Load a piece's decayed keys, keys, updates, log decays, and the last of these."""
    i = tl.arange(0, PIECE)
    kd = tl.arange(0, KEYS)
    is_token = i < length
    tokens = (token + i).to(tl.int64)
    has_key = is_token[:, None] & (kd < KEY_DIM)[None, :]
    has_value = is_token[:, None] & (vd < VALUE_DIM)[None, :]
    w_at = decayed_keys + (tokens[:, None] * VALUE_HEADS + head) * KEY_DIM + kd[None, :]
    k_at = mixed + tokens[:, None] * conv_size + key_head * KEY_DIM + kd[None, :]
    u_at = updates + (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + vd[None, :]
    w = tl.load(w_at, mask=has_key, other=0.0)
    k = tl.load(k_at, mask=has_key, other=0.0)
    u = tl.load(u_at, mask=has_value, other=0.0)
    g = tl.load(log_decays + tokens * VALUE_HEADS + head, mask=is_token, other=0.0)
    end_decay = tl.sum(tl.where(i == length - 1, g, 0.0), 0)
    return w, k, u, g, end_decay


@triton.jit
def carry(
    projected, mixed, rows, decayed_keys, updates, log_decays, states, items, entries, num_entries,
    blocks, captures, offset, snapshot_blocks, projected_stride, row_stride, block_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, FIELDS: tl.constexpr, ENTRY_FIELDS: tl.constexpr, PIECE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take the state through the pieces of an entry, for some value features of a head. Store it before each piece for
    `output`, after the last one in the row, and where a piece says so in a snapshot."""
    head = tl.program_id(0)
    column = tl.program_id(1)
    entry = entries + tl.program_id(2) * ENTRY_FIELDS
    first_piece = tl.load(entry)
    num_pieces = tl.load(entry + 1)
    row = tl.load(entry + 2)
    fresh = tl.load(entry + 3)
    first_token = tl.load(entry + 4)
    num_tokens = tl.load(entry + 5)
    is_entry = tl.program_id(2) < tl.load(num_entries)
    launch_dependents_then_wait(PDL)
    if not is_entry:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    i = tl.arange(0, PIECE)
    kd = tl.arange(0, KEYS)
    vd = column * VALUES + tl.arange(0, VALUES)
    in_state = (kd < KEY_DIM)[:, None] & (vd < VALUE_DIM)[None, :]
    offsets = (head * KEY_DIM + kd)[:, None] * VALUE_DIM + vd[None, :]  # in the states of all heads
    state = rows + row.to(tl.int64) * row_stride
    state_at = state + (KERNEL - 1) * conv_size + offsets
    num_stored = tl.where(fresh == 0, KEY_DIM, 0)
    s = tl.load(state_at, mask=in_state & (kd < num_stored)[:, None], other=0.0)
    key_head = KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
    # This program's share of the convolution's inputs.
    programs = VALUE_HEADS * tl.num_programs(1)
    share = (conv_size + programs - 1) // programs
    begin = (head * tl.num_programs(1) + column) * share
    end = tl.minimum(begin + share, conv_size)
    item = items + first_piece * FIELDS
    before = states + first_piece.to(tl.int64) * (VALUE_HEADS * KEY_DIM * VALUE_DIM)
    token = first_token
    length = tl.load(item + 1)
    w, k, u, g, end_decay = _load_piece(
        decayed_keys, mixed, updates, log_decays, token, length, head, key_head, vd, conv_size, VALUE_HEADS,
        KEY_DIM, VALUE_DIM, PIECE, KEYS,
    )  # fmt: skip
    for number in range(num_pieces):
        capture = tl.load(item + 5)
        item += FIELDS
        # The next piece is loaded while this one is computed; after the last there is none.
        next_token = token + length
        next_length = tl.load(item + 1, mask=number + 1 < num_pieces, other=0)
        next_w, next_k, next_u, next_g, next_end_decay = _load_piece(
            decayed_keys, mixed, updates, log_decays, next_token, next_length, head, key_head, vd, conv_size,
            VALUE_HEADS, KEY_DIM, VALUE_DIM, PIECE, KEYS,
        )  # fmt: skip
        tl.store(before + offsets, s, mask=in_state)
        before += VALUE_HEADS * KEY_DIM * VALUE_DIM
        is_token = i < length
        u = u.to(tl.float32) - tl.dot(w, s.to(w.dtype), input_precision=PRECISION)
        has_value = is_token[:, None] & (vd < VALUE_DIM)[None, :]
        update_at = ((token + i).to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUE_DIM + vd[None, :]
        tl.store(updates + update_at, u, mask=has_value)
        decayed = (k.to(tl.float32) * tl.where(is_token, tl.exp(end_decay - g), 0.0)[:, None]).to(k.dtype)
        s = tl.dot(tl.trans(decayed), u.to(k.dtype), s * tl.exp(end_decay), input_precision=PRECISION)
        if capture >= 0:
            ids = captures + capture * snapshot_blocks
            index = offset + (KERNEL - 1) * conv_size + offsets
            # Pointers outside the state are not used, but block ids are read for them.
            to = _snapshot_pointers(blocks, ids, tl.where(in_state, index, 0), block_stride, PART)
            tl.store(to, s, mask=in_state)
            _store_inputs(
                projected, state, blocks, ids, offset, block_stride, first_token, next_token - first_token,
                fresh, begin, end, projected_stride, conv_size, KERNEL, FEATURES, PART,
            )  # fmt: skip
        token, length = next_token, next_length
        w, k, u, g, end_decay = next_w, next_k, next_u, next_g, next_end_decay
    tl.store(state_at, s, mask=in_state)
    _store_inputs(
        projected, state, blocks, captures, offset, block_stride, first_token, num_tokens, fresh, begin, end,
        projected_stride, conv_size, KERNEL, FEATURES, 0,
    )  # fmt: skip


@triton.jit
def output(
    projected, mixed, updates, log_decays, states, norm, items, num_items, out, projected_stride, out_stride, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    FIELDS: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of each piece from the state before it and its updates, normalised and gated."""
    head = tl.program_id(0)
    piece = tl.program_id(1)
    item = items + piece * FIELDS
    token = tl.load(item)
    length = tl.load(item + 1)
    is_item = piece < tl.load(num_items)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    i = tl.arange(0, PIECE)
    kd = tl.arange(0, KEYS)
    vd = tl.arange(0, VALUES)
    is_token = i < length
    tokens = (token + i).to(tl.int64)
    has_key = is_token[:, None] & (kd < KEY_DIM)[None, :]
    has_value = is_token[:, None] & (vd < VALUE_DIM)[None, :]
    query_head = head // (VALUE_HEADS // KEY_HEADS)
    query_at = mixed + tokens[:, None] * conv_size + query_head * KEY_DIM + kd[None, :]
    q = tl.load(query_at, mask=has_key, other=0.0)
    k = tl.load(query_at + KEY_HEADS * KEY_DIM, mask=has_key, other=0.0)
    value_at = (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + vd[None, :]
    u = tl.load(updates + value_at, mask=has_value, other=0.0)
    g = tl.load(log_decays + tokens * VALUE_HEADS + head, mask=is_token, other=0.0)
    in_state = (kd < KEY_DIM)[:, None] & (vd < VALUE_DIM)[None, :]
    before = states + (piece.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    s = tl.load(before + kd[:, None] * VALUE_DIM + vd[None, :], mask=in_state, other=0.0)
    weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decays(g)
    weights = tl.where(i[:, None] >= i[None, :], weights, 0.0)
    x = tl.dot(q, s, input_precision=PRECISION) * tl.exp(g)[:, None]
    x = tl.dot(weights.to(u.dtype), u, x, input_precision=PRECISION)
    gate_at = projected + tokens[:, None] * projected_stride + conv_size + head * VALUE_DIM + vd[None, :]
    z = tl.load(gate_at, mask=has_value, other=0.0).to(tl.float32)
    scale = tl.load(norm + vd, mask=vd < VALUE_DIM, other=0.0)
    y = _normed_and_gated(x, scale[None, :], z, eps, VALUE_DIM, 1)
    tl.store(out + tokens[:, None] * out_stride + head * VALUE_DIM + vd[None, :], y, mask=has_value)


@triton.jit
def _take_token(
    projected, mixed, s, token, head, kd, vd, a_log, dt_bias, projected_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return the state after one more token, the token's query, and where its gates begin."""
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    inputs = mixed + token.to(tl.int64) * conv_size
    query_head = head // (VALUE_HEADS // KEY_HEADS)
    q = tl.load(inputs + query_head * KEY_DIM + kd, mask=kd < KEY_DIM, other=0.0).to(tl.float32)
    k_at = inputs + (KEY_HEADS + query_head) * KEY_DIM + kd
    k = tl.load(k_at, mask=kd < KEY_DIM, other=0.0).to(tl.float32)
    v_at = inputs + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + vd
    v = tl.load(v_at, mask=vd < VALUE_DIM, other=0.0).to(tl.float32)
    gates = projected + token.to(tl.int64) * projected_stride + conv_size
    weight = _sigmoid(tl.load(gates + VALUE_HEADS * VALUE_DIM + head).to(tl.float32))
    a = tl.load(gates + VALUE_HEADS * (VALUE_DIM + 1) + head).to(tl.float32)
    decay = tl.exp(_log_decay(a, tl.load(a_log + head), tl.load(dt_bias + head)))
    update = weight * (v - decay * tl.sum(s * k[:, None], 0))
    return s * decay + k[:, None] * update[None, :], q, gates


@triton.jit
def decode(
    projected, mixed, rows, a_log, dt_bias, norm, token_rows, num_decodes, out, projected_stride, row_stride,
    out_stride, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Update the state of a head with one token, for some value features, and compute its output.

    A program that has the WHOLE head also normalises and gates it; otherwise `finish_decode` does.
    """
    head = tl.program_id(0)
    column = tl.program_id(1)
    token = tl.program_id(2)
    row = tl.load(token_rows + token)
    is_entry = (token < tl.load(num_decodes)) & (row >= 0)
    launch_dependents_then_wait(PDL)
    if not is_entry:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    kd = tl.arange(0, KEYS)
    vd = column * VALUES + tl.arange(0, VALUES)
    state = rows + row.to(tl.int64) * row_stride
    offsets = (KERNEL - 1) * conv_size + (head * KEY_DIM + kd)[:, None] * VALUE_DIM + vd[None, :]
    in_state = (kd < KEY_DIM)[:, None] & (vd < VALUE_DIM)[None, :]
    s = tl.load(state + offsets, mask=in_state, other=0.0)
    s, q, gates = _take_token(
        projected, mixed, s, token, head, kd, vd, a_log, dt_bias, projected_stride, KEY_HEADS, VALUE_HEADS,
        KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    tl.store(state + offsets, s, mask=in_state)
    x = tl.sum(s * q[:, None], 0)
    to = out + token.to(tl.int64) * out_stride + head * VALUE_DIM + vd
    if WHOLE:
        z = tl.load(gates + head * VALUE_DIM + vd, mask=vd < VALUE_DIM, other=0.0).to(tl.float32)
        scale = tl.load(norm + vd, mask=vd < VALUE_DIM, other=0.0)
        x = _normed_and_gated(x, scale, z, eps, VALUE_DIM, 0)
    tl.store(to, x, mask=vd < VALUE_DIM)
    programs = VALUE_HEADS * tl.num_programs(1)
    share = (conv_size + programs - 1) // programs
    begin = (head * tl.num_programs(1) + column) * share
    one, fresh = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    _store_inputs(
        projected, state, rows, token_rows, 0, 0, token, one, fresh, begin, tl.minimum(begin + share, conv_size),
        projected_stride, conv_size, KERNEL, FEATURES, 0,
    )  # fmt: skip


@triton.jit
def verify(
    projected, mixed, rows, a_log, dt_bias, norm, runs, num_runs, out, projected_stride, row_stride, out_stride, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a run, for some value features of a head, and leave the state as it is."""
    head = tl.program_id(0)
    run = runs + tl.program_id(2) * FIELDS
    first = tl.load(run)
    length = tl.load(run + 1)
    row = tl.load(run + 2)
    is_run = tl.program_id(2) < tl.load(num_runs)
    launch_dependents_then_wait(PDL)
    if not is_run:
        return
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    kd = tl.arange(0, KEYS)
    vd = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    state = rows + row.to(tl.int64) * row_stride
    offsets = (KERNEL - 1) * conv_size + (head * KEY_DIM + kd)[:, None] * VALUE_DIM + vd[None, :]
    in_state = (kd < KEY_DIM)[:, None] & (vd < VALUE_DIM)[None, :]
    s = tl.load(state + offsets, mask=in_state, other=0.0)
    for number in range(length):
        token = first + number
        s, q, gates = _take_token(
            projected, mixed, s, token, head, kd, vd, a_log, dt_bias, projected_stride, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        x = tl.sum(s * q[:, None], 0)
        if WHOLE:
            z = tl.load(gates + head * VALUE_DIM + vd, mask=vd < VALUE_DIM, other=0.0).to(tl.float32)
            scale = tl.load(norm + vd, mask=vd < VALUE_DIM, other=0.0)
            x = _normed_and_gated(x, scale, z, eps, VALUE_DIM, 0)
        to = out + token.to(tl.int64) * out_stride + head * VALUE_DIM + vd
        tl.store(to, x, mask=vd < VALUE_DIM)


@triton.jit
def accept(
    projected, mixed, rows, a_log, dt_bias, runs, num_runs, drafts, sampled, bad, projected_stride, row_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr, FIELDS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Take the state of a head through the tokens of a run up to the first draft that was not sampled before it.

    drafts [S] are -1 for tokens that are not drafts; sampled and bad [S] are the tokens sampled after each.
    """
    head = tl.program_id(0)
    column = tl.program_id(1)
    run = runs + tl.program_id(2) * FIELDS
    first = tl.load(run)
    length = tl.load(run + 1)
    row = tl.load(run + 2)
    is_run = tl.program_id(2) < tl.load(num_runs)
    launch_dependents_then_wait(PDL)
    if not is_run:
        return
    count = tl.full([], 1, tl.int32)
    is_right = tl.full([], 1, tl.int32)
    for token in range(first + 1, first + length):
        same = tl.load(drafts + token) == tl.load(sampled + token - 1)
        is_right = tl.where(same & (tl.load(bad + token - 1) == 0), is_right, 0)
        count += is_right
    conv_size: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    kd = tl.arange(0, KEYS)
    vd = column * VALUES + tl.arange(0, VALUES)
    state = rows + row.to(tl.int64) * row_stride
    offsets = (KERNEL - 1) * conv_size + (head * KEY_DIM + kd)[:, None] * VALUE_DIM + vd[None, :]
    in_state = (kd < KEY_DIM)[:, None] & (vd < VALUE_DIM)[None, :]
    s = tl.load(state + offsets, mask=in_state, other=0.0)
    for number in range(count):
        token = first + number
        s, _, _ = _take_token(
            projected, mixed, s, token, head, kd, vd, a_log, dt_bias, projected_stride, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM,
        )  # fmt: skip
    tl.store(state + offsets, s, mask=in_state)
    programs = VALUE_HEADS * tl.num_programs(1)
    share = (conv_size + programs - 1) // programs
    begin = (head * tl.num_programs(1) + column) * share
    fresh = tl.full([], 0, tl.int32)
    _store_inputs(
        projected, state, rows, runs, 0, 0, first, count, fresh, begin, tl.minimum(begin + share, conv_size),
        projected_stride, conv_size, KERNEL, FEATURES, 0,
    )  # fmt: skip


@triton.jit
def finish_decode(
    projected, outputs, norm, token_rows, num_decodes, out, projected_stride, out_stride, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CONV_SIZE: tl.constexpr, HEADS: tl.constexpr,
    VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and gate the outputs of decodes, some heads at a time."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token = tl.program_id(1)
    is_entry = (token < tl.load(num_decodes)) & (tl.load(token_rows + token) >= 0)
    launch_dependents_then_wait(PDL)
    if not is_entry:
        return
    vd = tl.arange(0, VALUES)
    there = (head < VALUE_HEADS)[:, None] & (vd < VALUE_DIM)[None, :]
    offsets = head[:, None] * VALUE_DIM + vd[None, :]
    x = tl.load(outputs + token.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + offsets, mask=there, other=0.0)
    z = tl.load(
        projected + token.to(tl.int64) * projected_stride + CONV_SIZE + offsets, mask=there, other=0.0
    )
    scale = tl.load(norm + vd, mask=vd < VALUE_DIM, other=0.0)
    y = _normed_and_gated(x, scale[None, :], z.to(tl.float32), eps, VALUE_DIM, 1)
    tl.store(out + token.to(tl.int64) * out_stride + offsets, y, mask=there)
