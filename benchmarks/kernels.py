"""What the GPU kernels achieve, beside what the device can do: `python -m benchmarks.kernels [--json]`.

Each kernel runs in a captured graph over inputs that overflow the caches. Rates count the bytes that must move and the
operations that must be done, not those that are. `of limit` is the time that these would take at the ceilings measured
in the same run, over the time taken. Linear layers are "fused" with what stands before and after them, "composed" of
separate kernels around cuBLAS, or the product by "cublas" alone.

    python -m benchmarks.kernels --quantized --tune --seconds 400

measures quantized linear layers and experts instead, with a few tiles for each (`benchmarks/quantized.py`). `of limit`
is that of the bytes as they are held; `library` is cuBLAS with 8-bit operands, or after dequantizing.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass

import torch

from benchmarks.device_timing import Ceilings, measure_ceilings, seconds_of
from benchmarks.kernel_cases import GROUPS, Case, make_bench
from benchmarks.quantized import measure_quantized
from benchmarks.quantized_cases import SCHEMES, products_of
from benchmarks.report import show
from benchmarks.shapes import SHAPES


@dataclass(frozen=True, slots=True)
class Result:
    group: str
    name: str
    kernels: str
    microseconds: float
    terabytes: float  # per second
    teraflops: float  # per second
    of_limit: float | None


def measure(case: Case, device: torch.device, ceilings: Ceilings) -> Result:
    seconds = seconds_of(case.calls, device)
    limit = None
    if ceilings.read is not None and ceilings.matmul is not None:
        limit = max(case.num_bytes / ceilings.read, case.flops / ceilings.matmul) / 1e12 / seconds
    terabytes, teraflops = case.num_bytes / seconds / 1e12, case.flops / seconds / 1e12
    return Result(case.group, case.name, case.kernels, seconds * 1e6, terabytes, teraflops, limit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), help="several only with --quantized")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a step, or rows to sample")
    parser.add_argument(
        "--device", default="cuda", help="cpu only tries the program out, in Triton's interpreter"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quantized", action="store_true", help="measure quantized products")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--tune", action="store_true", help="try a few tiles for each quantized product")
    parser.add_argument("--seconds", type=float, default=480.0, help="time for all quantized products")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="to compile in"
    )
    options = parser.parse_args()
    if options.quantized:
        shapes = options.shape or ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"]
        products = products_of(shapes, options.schemes, options.tokens or [1, 32, 128, 8, 256, 8192])
        measure_quantized(
            products, options.device, options.tune, options.seconds, options.processes, options.json
        )
        return
    shape, *more = options.shape or ["qwen3-0.6b"]
    if more:
        parser.error("--shape must be one, except with --quantized")
    device = torch.device(options.device)
    bench = make_bench(shape, device, options.tokens)
    ceilings = measure_ceilings(device)
    results = [measure(case, device, ceilings) for group in options.groups for case in GROUPS[group](bench)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    reached = ", ".join(f"{key} {value:.3g}" for key, value in asdict(ceilings).items() if value is not None)
    show(
        f"{shape} on {name}; ceilings in 1e12 a second: {reached or 'not measured'}",
        ["kernel", "case", "how", "us", "TB/s", "TFLOP/s", "of limit"],
        [
            [r.group, r.name, r.kernels, r.microseconds, r.terabytes, r.teraflops, _percent(r.of_limit)]
            for r in results
        ],
        options.json,
        {
            "shape": shape,
            "device": name,
            "ceilings": asdict(ceilings),
            "results": [asdict(result) for result in results],
        },
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    main()
