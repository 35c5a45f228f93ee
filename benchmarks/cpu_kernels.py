"""How fast the CPU kernels are, beside torch in the same run: `python -m benchmarks.cpu_kernels [--json]`.

The linear layers are those of a decoder of 0.6 billion weights. Each is held in as many copies as overflow
the caches, and the copies are used in turn, so weights come from memory as they do in a real step. Rates are
of the median run; the best run beside it tells how much the machine was disturbed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.cpu_sampling import SamplingResult, measure_sampling, show_sampling
from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import AttentionBackend, AttentionInputs, AttentionLayer, KVShape
from inflight.layers.attention.cpu import ComposedAttention, NativeAttention, TorchCpuAttention
from inflight.layers.kernels import Kernels, Linear
from inflight.layers.native.library import Library, native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.torch_kernels import TorchKernels

NUM_LAYERS = 28
# name, in features, out features, how many of them a step runs
SHAPES = (
    ("qkv", 1024, 4096, NUM_LAYERS),
    ("output", 2048, 1024, NUM_LAYERS),
    ("gate_up", 1024, 6144, NUM_LAYERS),
    ("down", 3072, 1024, NUM_LAYERS),
    ("logits", 1024, 151936, 1),
)
COPIES_BYTES = 256 << 20  # weights of one shape, in all its copies


@dataclass(frozen=True, slots=True)
class LinearResult:
    shape: str
    kernels: str
    num_tokens: int
    milliseconds: float
    best_milliseconds: float
    gflops: float
    gigabytes: float  # per second, of weights
    count: int  # layers of this shape in a step


@dataclass(frozen=True, slots=True)
class AttentionResult:
    backend: str
    batch: int
    context: int
    milliseconds: float  # one layer
    best_milliseconds: float
    gigabytes: float  # per second, of keys and values


def measure(parts: Sequence[Callable[[], object]], repeats: int) -> tuple[float, float]:
    """Median and best seconds of one part, all parts taken in turn, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        for part in parts:
            start = time.perf_counter()
            part()
            times.append(time.perf_counter() - start)
    del times[: len(parts)]
    return statistics.median(times), min(times)


def measure_linear(
    name: str,
    kernels: Kernels,
    dtype: torch.dtype,
    shape: tuple[str, int, int, int],
    sizes: list[int],
    repeats: int,
) -> list[LinearResult]:
    label, in_features, out_features, count = shape
    weight_bytes = in_features * out_features * dtype.itemsize
    weight = torch.randn(out_features, in_features).to(dtype)
    copies: list[Linear] = []
    for _ in range(max(1, COPIES_BYTES // weight_bytes)):
        copies.append(kernels.linear(in_features, out_features, dtype, bias=False))
        copies[-1].load(weight)
    results = []
    for num_tokens in sizes:
        x = torch.randn(num_tokens, in_features)
        seconds, best = measure([partial(linear, x) for linear in copies], repeats)
        flops = 2 * num_tokens * in_features * out_features
        results.append(
            LinearResult(
                shape=label,
                kernels=name,
                num_tokens=num_tokens,
                milliseconds=seconds * 1e3,
                best_milliseconds=best * 1e3,
                gflops=flops / seconds / 1e9,
                gigabytes=weight_bytes / seconds / 1e9,
                count=count,
            )
        )
    return results


def measure_attention(
    name: str, backend: AttentionBackend[AttentionInputs], context: int, repeats: int
) -> AttentionResult:
    batch, num_heads, num_kv_heads, head_dim, block_size = 16, 16, 8, 128, 16
    num_blocks = -(-context // block_size)
    shape = KVShape.from_layers([LayerKV(num_kv_heads, head_dim, head_dim)] * 4, block_size, torch.float32)
    caches = backend.allocate(shape, batch * num_blocks, torch.device("cpu")).layers
    for cache in caches:
        cache.fill_(0.01)
    tables = torch.randperm(batch * num_blocks).to(torch.int32).view(batch, num_blocks)
    last = context - 1
    inputs = AttentionInputs(
        positions=torch.full((batch,), last),
        query_starts=torch.arange(batch + 1, dtype=torch.int32),
        context_lens=torch.full((batch,), context, dtype=torch.int32),
        rows=torch.arange(batch, dtype=torch.int32),
        block_tables=tables[None],
        slot_mapping=tables[None, :, last // block_size].long() * block_size + last % block_size,
    )
    qkv = torch.randn(batch, (num_heads + 2 * num_kv_heads) * head_dim)

    sizes = num_heads, num_kv_heads, head_dim
    layers = [AttentionLayer(*sizes, None, None, 1e-6, None, head_dim**-0.5, None) for _ in caches]
    parts = [
        partial(backend.attend, qkv, layer, cache, inputs)
        for layer, cache in zip(layers, caches, strict=True)
    ]
    seconds, best = measure(parts, repeats)
    read = 2 * batch * context * num_kv_heads * head_dim * 4
    return AttentionResult(name, batch, context, seconds * 1e3, best * 1e3, read / seconds / 1e9)


def run(
    library: Library | None, sizes: list[int], repeats: int
) -> tuple[list[LinearResult], list[AttentionResult], list[SamplingResult]]:
    linears: list[LinearResult] = []
    for shape in SHAPES:
        contenders: list[tuple[str, Kernels, torch.dtype]] = [("torch", TorchKernels(), torch.float32)]
        if library is not None:
            native = NativeKernels(library)
            contenders += [("native", native, torch.float32), ("native bf16", native, torch.bfloat16)]
        for name, kernels, dtype in contenders:
            linears += measure_linear(name, kernels, dtype, shape, sizes, repeats)
    backends: list[tuple[str, AttentionBackend[AttentionInputs]]] = [
        ("torch", ComposedAttention(TorchKernels(), TorchCpuAttention()))
    ]
    if library is not None:
        backends.append(("native", NativeAttention(library)))
    attentions = [
        measure_attention(name, backend, context, repeats)
        for context in (128, 1024)
        for name, backend in backends
    ]
    return linears, attentions, measure_sampling(library, repeats)


def show(
    linears: list[LinearResult], attentions: list[AttentionResult], samplings: list[SamplingResult]
) -> None:
    print(f"{'layer':<9}{'kernels':<13}{'tokens':>6}{'ms':>10}{'best ms':>10}{'GFLOP/s':>10}{'GB/s':>8}")
    for r in linears:
        print(
            f"{r.shape:<9}{r.kernels:<13}{r.num_tokens:>6}{r.milliseconds:>10.3f}{r.best_milliseconds:>10.3f}"
            f"{r.gflops:>10.1f}{r.gigabytes:>8.1f}"
        )
    print(f"\n{'all linear layers of one step':<28}{'ms':>10}{'best ms':>10}{'best GFLOP/s':>14}")
    for num_tokens in sorted({r.num_tokens for r in linears}):
        for name in dict.fromkeys(r.kernels for r in linears):
            mine = [r for r in linears if (r.kernels, r.num_tokens) == (name, num_tokens)]
            total = sum(r.milliseconds * r.count for r in mine)
            best = sum(r.best_milliseconds * r.count for r in mine)
            gflop = sum(r.gflops * r.milliseconds / 1e3 * r.count for r in mine)
            print(f"{num_tokens:>6} tokens  {name:<13}{total:>10.1f}{best:>10.1f}{gflop / best * 1e3:>14.1f}")
    print(f"\n{'attention, one layer, decode':<36}{'ms':>9}{'best ms':>9}{'GB/s':>8}")
    for a in attentions:
        print(
            f"batch {a.batch} context {a.context:>5}  {a.backend:<13}{a.milliseconds:>9.3f}"
            f"{a.best_milliseconds:>9.3f}{a.gigabytes:>8.1f}"
        )
    show_sampling(samplings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 128, 512])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    linears, attentions, samplings = run(native_library(), options.tokens, options.repeats)
    if options.json:
        found = {
            "threads": torch.get_num_threads(),
            "linear": linears,
            "attention": attentions,
            "sampling": samplings,
        }
        print(json.dumps(found, default=asdict, indent=1))
    else:
        show(linears, attentions, samplings)


if __name__ == "__main__":
    main()
