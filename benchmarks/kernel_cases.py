"""The GPU kernels as a model of a given shape uses them, for `benchmarks.kernels` to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device_timing import Call, num_copies
from benchmarks.shapes import SHAPES
from inflight.execution.sampling.triton.rows import TritonSamplingRows
from inflight.execution.sampling.triton.sample import (
    LogprobBuffers,
    SamplingBatch,
    SamplingWorkspace,
    sample_tokens,
)
from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.attention.triton.chunk import chunk_attention
from inflight.layers.attention.triton.decode import decode_attention
from inflight.layers.attention.triton.plan import Ints
from inflight.layers.attention.triton.planner import AttentionPlanner
from inflight.layers.attention.triton.rope_write import rope_write
from inflight.layers.attention.triton.softmax import AttentionWorkspace, Items
from inflight.layers.attention.triton.tuning import HeadShape
from inflight.layers.attention.triton.tuning import choose as choose_tuning
from inflight.layers.kernels import Residual
from inflight.layers.rotary import Rope
from inflight.layers.triton.elementwise import gate, rms_norm
from inflight.layers.triton.tuning import MAX_TOKENS, num_multiprocessors
from inflight.layers.triton_kernels import TritonKernels, TritonLinear
from inflight.layers.triton_utils.pdl import supports_pdl
from inflight.request import Request
from inflight.sampling_params import SamplingParams

BLOCK_SIZE = 16
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: calls that do the same on different inputs."""

    group: str
    name: str
    kernels: str
    calls: list[Call]
    num_bytes: int  # that a call must move
    flops: int = 0  # that a call must do


@dataclass(frozen=True, slots=True)
class Bench:
    """Sizes of the model and where it runs."""

    device: torch.device
    tokens: list[int]
    hidden: int
    inner: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    decodes: list[tuple[int, int]]  # batch, context
    chunks: list[int]
    dtype: torch.dtype = field(default=torch.bfloat16)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def linear_cases(bench: Bench) -> Iterator[Case]:
    hidden, inner, queries = bench.hidden, bench.inner, bench.num_heads * bench.head_dim
    fused = TritonKernels(bench.dtype, bench.device, few_tokens=MAX_TOKENS)
    composed = TritonKernels(bench.dtype, bench.device, few_tokens=0)
    norm = {size: torch.ones(size, device=bench.device) for size in (hidden, inner, queries)}
    for name, rows, features in (
        ("qkv", bench.qkv_size, hidden),
        ("output", hidden, queries),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("logits", bench.vocab, hidden),
    ):
        layers: dict[str, list[TritonLinear]] = {"composed": [], "fused": []}
        for _ in range(num_copies(2 * rows * features)):
            layer = TritonLinear(fused, features, rows, bias=False)
            layer.load(bench.randn(rows, features) * features**-0.5)
            same = TritonLinear(composed, features, rows, bias=False)
            same.weights = layer.weights
            layers["fused"].append(layer)
            layers["composed"].append(same)
        for num_tokens in bench.tokens:
            x = bench.randn(num_tokens, features)
            weight, adds = norm[features], name in ("output", "down")
            residual = Residual(bench.randn(num_tokens, rows), None) if adds else Residual(x, weight)
            contenders = {"composed": residual}
            if num_tokens <= MAX_TOKENS:
                contenders["fused"] = residual if adds else _written(fused, residual, bench)

            def call(
                residual: Residual,
                layer: TritonLinear,
                name: str = name,
                x: Tensor = x,
                weight: Tensor = weight,
            ) -> object:
                if name in ("output", "down"):
                    return layer.add_to(residual, x, None, EPS, norm[hidden])
                if name == "gate_up":
                    return layer.gated(residual, EPS, "silu")
                if name == "logits":
                    return layer.logits(x, weight, EPS)
                return layer.normed(residual, EPS)

            case, num_bytes = f"{name} M={num_tokens}", 2 * rows * features
            work = num_bytes * num_tokens
            calls: list[Call] = [_bind(F.linear, x, layer.weights.codes[0]) for layer in layers["fused"]]
            yield Case("linear", case, "cublas", calls, num_bytes, work)
            for label, read in contenders.items():
                calls = [_bind(call, read, layer) for layer in layers[label]]
                yield Case("linear", case, label, calls, num_bytes, work)


def _written(kernels: TritonKernels, residual: Residual, bench: Bench) -> Residual:
    """The residual as the layer before leaves it: with half of its norm, where that is done."""
    before = TritonLinear(kernels, bench.inner, bench.hidden, bias=False)
    x = torch.zeros(len(residual.x), bench.inner, dtype=bench.dtype, device=bench.device)
    return before.add_to(residual, x, None, EPS, residual.norm)


def elementwise_cases(bench: Bench) -> Iterator[Case]:
    weight, pdl = torch.ones(bench.hidden, device=bench.device), supports_pdl(bench.device)
    for num_tokens in bench.tokens:
        size = 2 * num_tokens * bench.hidden
        xs = [bench.randn(num_tokens, bench.hidden) for _ in range(num_copies(size))]
        calls: list[Call] = [_bind(rms_norm, x, weight, EPS, pdl) for x in xs]
        yield Case("elementwise", f"rms_norm T={num_tokens}", "triton", calls, 2 * size)
        size = 2 * num_tokens * bench.inner
        pairs = [bench.randn(num_tokens, 2 * bench.inner) for _ in range(num_copies(2 * size))]
        calls = [_bind(gate, pair, "silu", pdl) for pair in pairs]
        yield Case("elementwise", f"silu * up T={num_tokens}", "triton", calls, 3 * size)


def attention_layer(bench: Bench, max_position: int) -> AttentionLayer:
    weight = torch.ones(bench.head_dim, device=bench.device)
    table = Rope(1e6, bench.head_dim).table(max_position, bench.device)
    return AttentionLayer(
        bench.num_heads,
        bench.num_kv_heads,
        bench.head_dim,
        q_norm=weight,
        k_norm=weight,
        eps=EPS,
        cos_sin=table,
        scale=bench.head_dim**-0.5,
        window=None,
    )


def make_caches(bench: Bench, num_blocks: int) -> list[Tensor]:
    shape = (num_blocks, 2, bench.num_kv_heads, BLOCK_SIZE, bench.head_dim)
    return [bench.randn(*shape) for _ in range(num_copies(2 * int(np.prod(shape))))]


def rope_cases(bench: Bench) -> Iterator[Case]:
    layer = attention_layer(bench, max(bench.tokens))
    for num_tokens in bench.tokens:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=bench.device)
        slot_mapping = torch.randperm(num_blocks * BLOCK_SIZE, device=bench.device)[:num_tokens].int()
        qkvs = [
            bench.randn(num_tokens, bench.qkv_size)
            for _ in range(num_copies(2 * num_tokens * bench.qkv_size))
        ]
        cache = make_caches(bench, num_blocks)[0]
        heads = (bench.num_heads, bench.num_kv_heads, bench.head_dim)
        norms, pdl = (layer.q_norm, layer.k_norm, EPS), supports_pdl(bench.device)
        calls: list[Call] = [
            _bind(rope_write, qkv, positions, slot_mapping, layer.cos_sin, *norms, cache, *heads, pdl)
            for qkv in qkvs
        ]
        # All is read; queries and keys are written back, keys and values to the cache.
        written = bench.num_heads + 3 * bench.num_kv_heads
        num_bytes = 2 * num_tokens * (bench.qkv_size + written * bench.head_dim)
        yield Case("rope_write", f"T={num_tokens}", "triton", calls, num_bytes)


def planner_for(bench: Bench, max_entries: int) -> AttentionPlanner:
    heads = HeadShape(bench.num_heads, bench.num_kv_heads, bench.head_dim)
    tuning = choose_tuning(bench.dtype, heads.head_dim, heads.group, bench.device)
    num_processors = num_multiprocessors(bench.device)
    return AttentionPlanner(tuning, heads, BLOCK_SIZE, max_entries, num_processors, share_prefixes=False)


def decode_cases(bench: Bench) -> Iterator[Case]:
    for batch, context in bench.decodes:
        planner = planner_for(bench, batch)
        blocks = -(-context // BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
        rows = np.arange(batch, dtype=np.int32)
        work = planner.decodes(np.full(batch, context, dtype=np.int32), rows, tables, 0)
        items = on_device(bench, work.decode.items)
        layer = attention_layer(bench, 1)
        workspace = AttentionWorkspace.allocate([planner.workspace_need], bench.device)
        qkv = bench.randn(batch, bench.qkv_size)
        out = torch.empty_like(
            qkv[:, : bench.num_heads * bench.head_dim], memory_format=torch.contiguous_format
        )
        device_tables, tuning = torch.from_numpy(tables).to(bench.device), planner.tuning
        calls: list[Call] = [
            _bind(
                decode_attention,
                *(
                    qkv,
                    cache,
                    device_tables,
                    items,
                    workspace,
                    layer,
                    tuning.decode_for(batch, work.short_context),
                    tuning.pdl,
                    out,
                ),
            )
            for cache in make_caches(bench, batch * blocks)
        ]
        per_token = bench.num_kv_heads * bench.head_dim
        num_bytes = 2 * 2 * batch * context * per_token
        flops = 4 * batch * context * bench.num_heads * bench.head_dim
        yield Case("decode", f"batch {batch} context {context}", "triton", calls, num_bytes, flops)


def on_device(bench: Bench, items: Ints) -> Items:
    count = torch.tensor([len(items)], dtype=torch.int32, device=bench.device)
    return Items(torch.from_numpy(items).to(bench.device), count, programs=len(items))


def chunk_cases(bench: Bench) -> Iterator[Case]:
    for length in bench.chunks:
        planner = planner_for(bench, 1)
        blocks = -(-length // BLOCK_SIZE)
        ends = np.array([0, length], dtype=np.int32)
        plan = planner.chunks(ends, ends[1:], np.zeros(1, dtype=np.int32))
        work = on_device(bench, plan.items)
        layer = attention_layer(bench, 1)
        workspace = AttentionWorkspace.allocate([planner.workspace_need], bench.device)
        qkv = bench.randn(length, bench.qkv_size)
        out = bench.randn(length, bench.num_heads * bench.head_dim)
        tables = torch.arange(blocks, dtype=torch.int32, device=bench.device).unsqueeze(0)
        cache, tuning = make_caches(bench, blocks)[0], planner.tuning
        calls: list[Call] = [
            _bind(
                chunk_attention,
                *(qkv, cache, tables, work, workspace, layer),
                *(tuning.chunk, tuning.descriptors, tuning.pdl, out),
            )
        ]
        flops = 2 * length * (length + 1) * bench.num_heads * bench.head_dim  # half of the square
        yield Case("prefill", f"{length} tokens", "triton", calls, qkv.nbytes + out.nbytes, flops)


def sampling_cases(bench: Bench) -> Iterator[Case]:
    for label, params in (
        ("greedy", SamplingParams(temperature=0)),
        ("temperature", SamplingParams(temperature=0.6)),
        ("top_p", SamplingParams(temperature=0.6, top_p=0.95)),
        ("top_k top_p", SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
    ):
        for num_rows in bench.tokens:
            if num_rows > 256:
                continue
            state = TritonSamplingRows(num_rows, bench.vocab, bench.device)
            requests = [
                Request.create("r", [0], params, 4, seed=row).current_spec() for row in range(num_rows)
            ]
            tokens = torch.zeros(num_rows, 4, dtype=torch.int32, device=bench.device)
            state.set_many(list(enumerate(requests)), tokens)
            rows = torch.arange(num_rows, dtype=torch.int32, device=bench.device)
            zeros, ones = torch.zeros_like(rows), torch.ones_like(rows)
            nothing = LogprobBuffers(-ones, zeros, ones[:1], zeros)
            batch = SamplingBatch(rows, ones, zeros.clone(), zeros.clone(), nothing)
            workspace = SamplingWorkspace.allocate(num_rows, bench.vocab, bench.device)
            copies = num_copies(4 * num_rows * bench.vocab, most=8)
            calls: list[Call] = [
                _bind(sample_tokens, logits.float() * 3, batch, state, tokens, workspace)
                for logits in (bench.randn(num_rows, bench.vocab) for _ in range(copies))
            ]
            yield Case("sampling", f"{label} S={num_rows}", "triton", calls, 4 * num_rows * bench.vocab)


GROUPS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "linear": linear_cases,
    "elementwise": elementwise_cases,
    "rope_write": rope_cases,
    "decode": decode_cases,
    "prefill": chunk_cases,
    "sampling": sampling_cases,
}


def _bind(function: Callable[..., object], *arguments: Any) -> Call:
    return lambda: function(*arguments)


def make_bench(shape: str, device: torch.device, tokens: list[int] | None) -> Bench:
    config = SHAPES[shape]
    tiny = shape == "tiny"
    return Bench(
        device=device,
        tokens=tokens or ([1, 3] if tiny else [1, 8, 16, 32, 64, 128, 256, 2048, 8192]),
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        vocab=config["vocab_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        decodes=[(2, 40)]
        if tiny
        else [(1, 300), (1, 8192), (8, 1024), (32, 512), (32, 8192), (128, 512), (128, 2048), (256, 1024)],
        chunks=[48] if tiny else [1024, 4096, 8192],
    )
