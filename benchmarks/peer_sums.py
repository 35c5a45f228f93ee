"""What a sum over the memory of other ranks' GPUs takes, all but the link: `python -m benchmarks.peer_sums [--json]`.

Two ranks are two CUDA streams of this process on one GPU. Each replays a captured graph of sums, residual and half of
the next norm included, in every one of which they wait for each other. Beside it, the addition that one GPU needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from inflight.execution.parallel.device_collective import PeerCollective, buffer_bytes
from inflight.layers.triton.linear_parts import NextNorm

REGION_BYTES = 1 << 22
NUM_FEATURES = 4096
NUM_SUMS = 50  # of a graph
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class SumResult:
    num_tokens: int
    microseconds: float
    best_microseconds: float
    addition: float


class TwoRanks:
    def __init__(self) -> None:
        self._buffers = torch.zeros(2, buffer_bytes(2, REGION_BYTES), dtype=torch.uint8, device=DEVICE)
        self._lost = torch.ones(1, dtype=torch.int32, pin_memory=True)
        addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._ranks = [
            PeerCollective(rank, addresses, REGION_BYTES, self._lost.data_ptr(), DEVICE) for rank in range(2)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._norm = torch.rand(NUM_FEATURES, device=DEVICE)

    def measure(self, num_tokens: int, repeat: int) -> SumResult:
        self._lost.fill_(1)  # nobody waits while graphs are captured
        parts = [(_activations(num_tokens), _activations(num_tokens)) for _ in range(2)]
        graphs = [self._captured(rank, *part) for rank, part in enumerate(parts)]
        self._lost.fill_(0)
        times = sorted(self._replayed(graphs) for _ in range(repeat))
        x, hidden = parts[0]
        alone = _capture(self._streams[0], lambda: _repeat(lambda: hidden.add_(x)))
        addition = statistics.median(self._replayed([alone]) for _ in range(repeat))
        return SumResult(num_tokens, statistics.median(times), times[0], addition)

    def _captured(self, rank: int, x: Tensor, hidden: Tensor) -> torch.cuda.CUDAGraph:
        collective = self._ranks[rank]
        return _capture(
            self._streams[rank],
            lambda: _repeat(lambda: collective.add_sum(hidden, x, None, 1e-5, NextNorm(self._norm))),
        )

    def _replayed(self, graphs: list[torch.cuda.CUDAGraph]) -> float:
        """Microseconds for each sum."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(self._streams[rank]):
                if rank == 0:
                    start.record()
                graph.replay()
                if rank == 0:
                    end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1000 / NUM_SUMS


def _activations(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, NUM_FEATURES, device=DEVICE).bfloat16()


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(NUM_SUMS):
        call()


def _capture(stream: torch.cuda.Stream, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        work()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 256, 512])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ranks = TwoRanks()
    results = [ranks.measure(num_tokens, args.repeat) for num_tokens in args.tokens]
    if args.json:
        print(json.dumps([asdict(result) for result in results]))
        return
    print(
        f"{'tokens':>6} {'sum us':>8} {'best':>8} {'addition':>8}   2 ranks, {NUM_FEATURES} features, bfloat16"
    )
    for found in results:
        print(
            f"{found.num_tokens:>6} {found.microseconds:>8.1f} {found.best_microseconds:>8.1f} "
            f"{found.addition:>8.1f}"
        )


if __name__ == "__main__":
    main()
