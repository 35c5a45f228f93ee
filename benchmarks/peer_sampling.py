"""Sampling time of two ranks with half of the logits each, without the link: `python -m benchmarks.peer_sampling`.

Two ranks are two CUDA streams of this process on one GPU, as in `benchmarks.peer_sums`. Each replays a captured graph
of sampling, and reads from the other what its rows need: see `execution/sampling/triton/rank_candidates.py`. For
comparison: one rank that has all logits, with the whole GPU to itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from inflight import SamplingParams
from inflight.execution.parallel.device_collective import PeerCollective, buffer_bytes
from inflight.execution.sampling.triton import (
    LogprobBuffers,
    RankTokens,
    SamplingBatch,
    SamplingWorkspace,
    TritonSamplingRows,
    sample_by_ranks,
    sample_tokens,
)
from inflight.request import Request

SLOT = 1 << 24
NUM_DRAWS = 10  # of a graph
DEVICE = torch.device("cuda")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T=0.8": {"temperature": 0.8},
    "top_k=50 top_p=0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "presence_penalty": {"temperature": 0.8, "presence_penalty": 1.0},
    "logprobs=5": {"temperature": 0, "logprobs": 5},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(frozen=True, slots=True)
class DrawResult:
    kind: str
    num_rows: int
    two_ranks: float  # microseconds, this and the next two
    best_of_two: float
    one_rank: float


class DrawingRank:
    """Rows that all want the same, and the logits that a rank has of them."""

    def __init__(self, params: SamplingParams, logits: Tensor, whole_size: int) -> None:
        num_rows = len(logits)
        self.logits = logits
        self.tokens = torch.zeros(num_rows, 4, dtype=torch.int32, device=DEVICE)
        self.state = TritonSamplingRows(num_rows, whole_size, DEVICE)
        requests = [Request.create("r", [0], params, 2, seed=row).current_spec() for row in range(num_rows)]
        self.state.set_many(list(enumerate(requests)), self.tokens)
        self.workspace = SamplingWorkspace.allocate(num_rows, whole_size, DEVICE)
        rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        zeros, ones = torch.zeros_like(rows), torch.ones_like(rows)
        count = -1 if params.logprobs is None else params.logprobs
        results = torch.zeros(num_rows * 3 * (2 + count), dtype=torch.int32, device=DEVICE)
        logprobs = LogprobBuffers(ones * count, rows, ones[:1] * (1 + max(count, 0)), results)
        self.batch = SamplingBatch(rows, ones, zeros.clone(), zeros.clone(), logprobs)

    def sample(self, part: RankTokens | None) -> None:
        for _ in range(NUM_DRAWS):
            if part is None:
                sample_tokens(self.logits, self.batch, self.state, self.tokens, self.workspace)
            else:
                sample_by_ranks(self.logits, part, self.batch, self.state, self.tokens, self.workspace)


def measure(kind: str, num_rows: int, vocab_size: int, repeat: int) -> DrawResult:
    torch.manual_seed(0)
    params = SamplingParams(**KINDS[kind])
    logits = torch.randn(num_rows, vocab_size, device=DEVICE) * 3
    halves = logits.tensor_split(2, dim=1)
    sizes = [half.shape[1] for half in halves]
    buffers = torch.zeros(2, buffer_bytes(2, SLOT), dtype=torch.uint8, device=DEVICE)
    lost = torch.ones(1, dtype=torch.int32, pin_memory=True)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    graphs, ranks, parts = [], [], []
    for rank, half in enumerate(halves):  # nobody waits for a lost rank while graphs are captured
        addresses = [buffer.data_ptr() for buffer in buffers]
        collective = PeerCollective(rank, addresses, SLOT, lost.data_ptr(), DEVICE)
        parts.append(RankTokens(sum(sizes[:rank]), sizes, collective))
        ranks.append(DrawingRank(params, half.contiguous(), vocab_size))
        graphs.append(_capture(streams[rank], ranks[rank], parts[rank]))
    lost.fill_(0)
    whole = DrawingRank(params, logits, vocab_size)
    alone = _capture(streams[0], whole, None)
    one = statistics.median(_replayed([alone], streams) for _ in range(repeat))
    two = [_replayed(graphs, streams) for _ in range(repeat)]
    assert all(torch.equal(each.batch.ids, whole.batch.ids) for each in ranks)
    return DrawResult(kind, num_rows, statistics.median(two), min(two), one)


def _capture(stream: torch.cuda.Stream, rank: DrawingRank, part: RankTokens | None) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        rank.sample(part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        rank.sample(part)
    return graph


def _replayed(graphs: list[torch.cuda.CUDAGraph], streams: list[torch.cuda.Stream]) -> float:
    """Return the microseconds of each sampling step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for rank, graph in enumerate(graphs):
        with torch.cuda.stream(streams[rank]):
            if rank == 0:
                start.record()
            graph.replay()
            if rank == 0:
                end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000 / NUM_DRAWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(
            f"{'kind':<22} {'rows':>5} {'2 ranks us':>10} {'best':>7} {'1 rank us':>10}   {args.vocab_size} tokens"
        )
    results = []
    for kind in KINDS:
        for num_rows in args.rows:
            found = measure(kind, num_rows, args.vocab_size, args.repeat)
            results.append(found)
            if not args.json:
                two = f"{found.two_ranks:>10.1f} {found.best_of_two:>7.1f}"
                print(f"{found.kind:<22} {found.num_rows:>5} {two} {found.one_rank:>10.1f}", flush=True)
    if args.json:
        print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
