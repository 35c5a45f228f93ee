"""What logprobs cost the host: `python -m benchmarks.logprobs [--requests 128] [--logprobs 0 5 20] [--json]`.

Nothing is computed: a runner returns the same tokens and candidates in every step, laid out as a GPU leaves them in
host memory. Columns are microseconds per request and token: `LLM.generate` end to end, as in `benchmarks.sampling`; the
same less what it takes without logprobs; reading every candidate of the outputs afterwards; the wire between an engine
process and its client, both ends; and the JSON of a chat completion. It is CPU time of the one thread that does all of
it, the best of all runs: other processes disturb it little.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import show
from inflight import LLM, SamplingParams
from inflight.engine.remote.wire import FromEngine, StepOutputs
from inflight.events import Delta
from inflight.execution.gpu.runner import GpuStepHandle
from inflight.execution.gpu.sampling import PendingLogprobs, PendingSamples
from inflight.frontend.output_processor import OutputProcessor
from inflight.processes.channel import SECRET_LENGTH, Codec
from inflight.scheduling.batch import Batch, Sampled
from inflight.server.formatters import Choice
from inflight.server.openai.formatters import ChatFormatter

PROMPT_LENGTH = 16


class CannedRunner:
    """A `Runner` whose tokens and logprobs were computed before."""

    def __init__(self, vocab_size: int, num_rows: int, width: int) -> None:
        self._wanted: dict[int, int] = {}  # row: number of logprobs
        generator = torch.Generator().manual_seed(0)
        ids = torch.rand((num_rows, vocab_size), generator=generator).argsort(-1)[:, :width]
        ids[:, 0] = ids[:, 1] if width > 1 else ids[:, 0]  # the sampled token is mostly the most likely one
        logprobs = torch.rand((num_rows, width), generator=generator).log()
        ranks = torch.arange(width).clamp(min=1).repeat(num_rows, 1)
        self._columns = torch.stack(
            (ids.to(torch.int32), logprobs.view(torch.int32), ranks.to(torch.int32)), 1
        ).contiguous()  # [rows, 3, width]

    def launch(self, batch: Batch) -> GpuStepHandle:
        for row, request in batch.admissions:
            self._wanted[row] = -1 if request.params.logprobs is None else request.params.logprobs
        entries = [entry for entry, samples in enumerate(batch.samples) if samples]
        columns = self._columns[: len(entries)]
        with_logprobs = [
            sample for sample, entry in enumerate(entries) if self._wanted[batch.rows[entry]] >= 0
        ]
        logprobs = None
        if with_logprobs:
            width = columns.shape[2]
            logprobs = PendingLogprobs(columns.flatten(), [width - 1] * len(with_logprobs), width)
        sampled = torch.stack((columns[:, 0, 0], torch.zeros(len(entries), dtype=torch.int32)))
        samples = PendingSamples(batch, entries, sampled, logprobs, with_logprobs)
        return GpuStepHandle(len(batch), [samples])

    def collect(self, handle: GpuStepHandle) -> Sampled:
        return handle.read()

    def close(self) -> None:
        """It holds nothing."""


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.thread_time()
    work()
    return time.thread_time() - start


def generate(llm: LLM, num_requests: int, num_tokens: int, logprobs: int | None) -> list[Any]:
    params = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=0, logprobs=logprobs, detokenize=False
    )
    prompts = [[5 + index % 40] * PROMPT_LENGTH for index in range(num_requests)]
    return llm.generate(prompts, params, use_tqdm=False)


def read_all(outputs: list[Any]) -> int:
    return sum(
        candidate.rank
        for output in outputs
        for position in output.outputs[0].logprobs
        for candidate in position.values()
    )


def deltas_of(runner: CannedRunner, num_requests: int) -> list[Delta]:
    batch = Batch(1, rows=list(range(num_requests)), samples=[True] * num_requests)
    sampled = runner.collect(runner.launch(batch))
    return [
        Delta(f"request-{entry}", token_ids, logprobs=sampled.logprobs[entry])
        for entry, token_ids in enumerate(sampled.token_ids)
    ]


def over_the_wire(deltas: list[Delta], num_steps: int) -> None:
    codec = Codec[FromEngine](bytes(SECRET_LENGTH), FromEngine)
    for _ in range(num_steps):
        message = StepOutputs(deltas=list(enumerate(deltas)))
        assert codec.decode(bytes(codec.encode(message))) is not None


def prompts_with_answers(
    llm: LLM, deltas: list[Delta], num_tokens: int, logprobs: int
) -> list[OutputProcessor]:
    """As a server has them when all answers are complete."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
    found = []
    for index, delta in enumerate(deltas):
        prompt = llm._engine.frontend.prepare(f"p{index}", [5] * PROMPT_LENGTH, params)
        request_id = prompt.answers[0].request.request_id
        for _ in range(num_tokens):
            assert delta.logprobs is not None
            prompt.push(Delta(request_id, delta.token_ids, logprobs=list(delta.logprobs)))
        found.append(prompt)
    return found


def as_json(llm: LLM, prompts: list[OutputProcessor], logprobs: int) -> int:
    tokenizer = llm._engine.frontend.tokenizer
    formatter = ChatFormatter(
        "id", "model", created=0, tokenizer=tokenizer, fingerprint="fp", num_logprobs=logprobs
    )
    choices = [Choice(index, prompt, prompt.answers[0], False) for index, prompt in enumerate(prompts)]
    return len(b"".join(formatter.whole(choices)))


def measure(llm: LLM, num_requests: int, num_tokens: int, logprobs: int | None) -> dict[str, float]:
    width = 1 + (logprobs or 0)
    runner = CannedRunner(llm.vocab_size, num_requests, width)
    llm._engine.core.runner = runner
    outputs: list[Any] = []
    found = {"generate": seconds(lambda: outputs.extend(generate(llm, num_requests, num_tokens, logprobs)))}
    if logprobs is not None:
        found["read"] = seconds(lambda: read_all(outputs))
        deltas = deltas_of(runner, num_requests)
        found["wire"] = seconds(lambda: over_the_wire(deltas, num_tokens))
        prompts = prompts_with_answers(llm, deltas, num_tokens, logprobs)
        found["json"] = seconds(lambda: as_json(llm, prompts, logprobs))
    return {name: 1e6 * value / num_requests / num_tokens for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--logprobs", type=int, nargs="+", default=[0, 5, 20])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llm = LLM(
        device="cpu",
        max_num_seqs=options.requests,
        max_model_len=PROMPT_LENGTH + options.tokens,
        num_blocks=options.requests * (PROMPT_LENGTH + options.tokens) // 8,
        enable_prefix_caching=False,
        show_progress=False,
    )
    cases: list[int | None] = [None, *options.logprobs]
    runs: dict[int | None, list[dict[str, float]]] = {case: [] for case in cases}
    with llm:
        for _ in range(options.repeat + 1):
            for case in cases:  # in turn, so that what else the machine does meets all of them
                runs[case].append(measure(llm, options.requests, options.tokens, case))
    costs = {
        case: {name: min(run[name] for run in found[1:]) for name in found[0]} for case, found in runs.items()
    }
    plain = costs[None]["generate"]
    rows, data = [], []
    for case, cost in costs.items():
        extra = cost["generate"] - plain
        row = (
            "none" if case is None else case,
            cost["generate"],
            *(("-",) * 4 if case is None else (extra, cost["read"], cost["wire"], cost["json"])),
        )
        rows.append(row)
        data.append(
            dict(zip(("logprobs", "generate", "for_logprobs", "read", "wire", "json"), row, strict=True))
        )
    title = f"µs per request and token, {options.requests} requests"
    columns = ("logprobs", "generate", "for logprobs", "reading them", "wire", "chat JSON")
    show(title, columns, rows, options.json, {"benchmark": "logprobs", "rows": data})


if __name__ == "__main__":
    main()
