"""Runs batches on a GPU: the host plans and uploads, the device replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.triton.backend import TritonAttention
from inflight.attention.triton.planner import AttentionPlanner
from inflight.errors import DeviceLostError, EngineError
from inflight.execution.gpu.device_step import DeviceStep
from inflight.execution.gpu.graphs import EagerSteps, StepGraphs
from inflight.execution.gpu.host_step import HostStep, host_step
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.shapes import Buckets, StepShape
from inflight.execution.results import NOT_FINITE, ScoredRows, Ticket
from inflight.execution.sampling import Sampler, SamplingRows
from inflight.execution.sampling.triton import SamplingWorkspace, draw
from inflight.models.decoder import Decoder
from inflight.request import Request, SamplingParams
from inflight.scheduling import Batch, RowRequest, Sampled


@dataclass(slots=True)
class GpuTicket:
    """A launched step. Its results are on their way to host memory, and there once `done` has happened."""

    num_entries: int
    sampling_entries: list[int]
    drawn: Tensor | None  # [2, S] int32 in host memory, padded: token ids, and whether the logits were bad
    rest: Ticket | None  # instead, where the step did not sample by itself
    done: torch.cuda.Event | None  # None where there is nothing to wait for

    def read(self) -> Sampled:
        if self.done is not None:
            self.done.synchronize()
        if self.rest is not None:
            return self.rest.read()
        if self.drawn is None:
            return Sampled([[] for _ in range(self.num_entries)])
        token_ids, bad = self.drawn.tolist()
        entries = self.sampling_entries
        drawn = [[token_id] for token_id in token_ids[: len(entries)]]
        if len(entries) < self.num_entries:
            by_entry = dict(zip(entries, drawn, strict=True))
            drawn = [by_entry.get(entry, []) for entry in range(self.num_entries)]
        result = Sampled(drawn)
        if any(bad):
            # What is drawn here has no parameters that forbid tokens.
            found = zip(entries, bad, strict=False)
            result.errors = {entry: NOT_FINITE for entry, is_bad in found if is_bad}
        return result


class GpuRunner:
    """Implements `Runner`. No part of `launch` waits for the device.

    With `graphs`, each shape of step is captured once and replayed. Without (and on a CPU under Triton's
    interpreter, where tests run it) every kernel is launched by itself.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_len: int,
        max_tokens: int,
        graphs: bool = True,
    ) -> None:
        if not isinstance(decoder.attention, TritonAttention):
            raise EngineError(f"GpuRunner cannot plan for {type(decoder.attention).__name__}")
        spec, device = decoder.spec, decoder.device
        self.decoder = decoder
        self.block_size = block_size
        self.caches = decoder.attention.allocate(decoder.kv_shape(block_size), num_blocks, device)
        self.rows = DeviceRows(max_rows, max_len, block_size, device)
        self.sampling = SamplingRows(max_rows, spec.vocab_size, device)
        self.sampler = Sampler(self.sampling)
        self.scored = ScoredRows()
        self.draw_workspace = SamplingWorkspace.allocate(max_rows, spec.vocab_size, device)
        processors = _num_processors(device)
        planner = AttentionPlanner(
            decoder.attention.tuning, spec.num_kv_heads, block_size, max_rows, processors
        )
        self.buckets = Buckets(max_rows, max_tokens, planner.short_context_sizes)
        workspace = planner.workspace(spec.num_heads, spec.num_kv_heads, spec.head_dim, device)
        self.step = DeviceStep(self.rows, self.buckets, planner, workspace)
        self.steps: StepGraphs[Tensor] | EagerSteps[Tensor]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)

    # ---- a step ----

    def launch(self, batch: Batch) -> GpuTicket:
        with self._watching_the_device():
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> GpuTicket:
        self.rows.admit(batch.admissions)
        self.sampling.set_many(batch.admissions)
        self.scored.admit(batch.admissions)
        updates = self.rows.extend(batch.tables)
        host = host_step(batch, self.rows.mirror, self.block_size)
        draws = self.sampling.special_rows.isdisjoint(batch.rows) and not self.scored.any_in(batch)
        shape = self.step.upload(host, updates, draws)
        hidden = self.steps.run(shape)
        if draws:
            return self._ticket(len(batch), host, shape)
        return self._sample_apart(batch, host, hidden)

    def _compute(self, shape: StepShape) -> Tensor:
        """The device's part: one token per sample if the shape has any, else hidden states [T, hidden_size]."""
        token_ids, inputs = self.step.open(shape)
        if not shape.num_samples:
            return self.decoder.forward(token_ids, self.caches, inputs)
        samples = self.step.samples(shape)
        wanted = samples.tokens if shape.chunks else None
        hidden = self.decoder.forward(token_ids, self.caches, inputs, wanted)
        draw(
            self.decoder.logits(hidden),
            samples.rows,
            samples.lengths,
            self.sampling,
            self.rows.tokens,
            samples.ids,
            samples.bad,
            self.draw_workspace,
        )
        return samples.ids

    def _ticket(self, num_entries: int, host: HostStep, shape: StepShape) -> GpuTicket:
        drawn = self._to_host(self.step.results(shape)) if host.sampling_entries else None
        return GpuTicket(num_entries, host.sampling_entries, drawn, None, self._event())

    def _sample_apart(self, batch: Batch, host: HostStep, hidden: Tensor) -> GpuTicket:
        """Steps in which somebody asks for more than a plain draw: penalties, masks, logprobs."""
        ticket = Ticket(
            len(batch),
            host.sampling_entries,
            None,
            self.scored.score(batch, self.decoder, hidden, self.rows.tokens),
        )
        if host.sampling_entries:
            device = self.decoder.device
            tokens, rows, lengths = (
                self.sampling.upload(part.tolist(), torch.int64).to(device)
                for part in (host.sample_tokens, host.sample_rows, host.sample_lengths)
            )
            logits = self.decoder.logits(hidden[tokens])
            sampled = self.sampler.sample(logits, host.sample_rows.tolist(), lengths, self.rows.tokens)
            self.rows.tokens[rows, lengths] = sampled.token_ids.int()
            ticket.sampled = sampled.fetch()
        return GpuTicket(len(batch), host.sampling_entries, None, ticket, self._event())

    def collect(self, ticket: GpuTicket) -> Sampled:
        with self._watching_the_device():
            return ticket.read()

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Try a step of this shape that computes nothing: its kernels are compiled then, and captured."""
        self.step.upload_nothing(shape)
        self.steps.prepare(shape)

    @torch.inference_mode()
    def warm_up_sampler(self) -> None:
        """Sample every row outside the graph, with all that takes memory there."""
        params = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.1, logprobs=1)
        rows = range(len(self.rows.tokens))
        request = RowRequest.of(Request("", [0], params, max_tokens=1))
        self.sampling.set_many([(row, request) for row in rows])
        lengths = torch.ones(len(rows), dtype=torch.int64, device=self.decoder.device)
        shape = len(rows), self.decoder.spec.hidden_size
        hidden = lengths.new_zeros(shape, dtype=self.decoder.kernels.compute_dtype)
        self.sampler.sample(self.decoder.logits(hidden), rows, lengths, self.rows.tokens)
        for row in rows:
            self.sampling.clear(row)

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        for shape in shapes:
            self.warm_up(shape)
        self._wait()

    def close(self) -> None:
        self._wait()
        self.steps.clear()
        self.caches.clear()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what was freed; others may want it

    # ---- the device, which in tests may be a CPU ----

    @contextmanager
    def _watching_the_device(self) -> Iterator[None]:
        """After some errors (an illegal access, an ECC error) every later call fails too, until the process ends."""
        if self.decoder.device.type == "cuda":
            # Every thread has a device of its own: the first, unless told.
            torch.cuda.set_device(self.decoder.device)
        try:
            yield
        except RuntimeError as error:
            try:
                self._wait()
            except RuntimeError:
                raise DeviceLostError(f"the GPU is lost: {str(error).splitlines()[0]}") from error
            raise

    def _event(self) -> torch.cuda.Event | None:
        if self.decoder.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _to_host(self, tensor: Tensor) -> Tensor:
        on_gpu = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return host.copy_(tensor, non_blocking=on_gpu)

    def _wait(self) -> None:
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()


def _num_processors(device: torch.device) -> int:
    """In the interpreter programs run one after the other: splitting gains nothing there."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
