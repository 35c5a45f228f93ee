"""The runner of decoders on a GPU: the host plans and uploads a step, the device replays a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.attention.backend import KVShape
from inflight.attention.triton.backend import TritonAttention
from inflight.attention.triton.planner import AttentionPlanner
from inflight.attention.triton.softmax import AttentionWorkspace
from inflight.attention.triton.tuning import HeadShape
from inflight.constraints import UNKNOWN, GrammarCompiler
from inflight.errors import EngineError
from inflight.events import PositionLogprobs, RequestFailure
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.execution.gpu.device import EagerSteps, StepGraphs, event_on, to_host, wait_for, watched
from inflight.execution.gpu.device_step import DeviceStep, TableKind
from inflight.execution.gpu.host_step import HostStep, Ints, host_step
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.shapes import Buckets, StepShape
from inflight.execution.gpu.states import DeviceStates
from inflight.execution.results import PROMPT_LOGITS_AT_ONCE, PooledRows, ScoredRows, StepVectors, failure
from inflight.execution.runner import StageLinks
from inflight.execution.sampling.triton import (
    RankTokens,
    SamplingWorkspace,
    TritonSamplingRows,
    read_logprobs,
    sample_by_ranks,
    sample_tokens,
    score_all,
)
from inflight.kv.snapshots import PROMPT_INTERVAL
from inflight.layers.recurrent import allocate_states
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.spec import GatheringCollective
from inflight.scheduling import Batch, Sampled


class PendingLogprobs(NamedTuple):
    """Log-probabilities being copied to host memory, packed for `read_logprobs`."""

    results: Tensor
    counts: list[int]
    width: int

    def read(self) -> list[PositionLogprobs]:
        return read_logprobs(self.results, self.counts, self.width)


@dataclass(slots=True)
class GpuStepHandle:
    """A launched step. Its results are being copied to host memory, and are there once `done` has happened."""

    num_entries: int
    sampling_entries: list[int]
    prompt_logprobs: list[tuple[int, PendingLogprobs]]  # by entry, in order of position
    pooled: StepVectors | None
    # [2, S] int32 in host memory, padded: token ids, and 0 or why sampling failed.
    sampled: Tensor | None = None
    logprobs: PendingLogprobs | None = None  # for `logprob_entries`, in order
    logprob_entries: list[int] = field(default_factory=list)
    done: torch.cuda.Event | None = None  # None where there is nothing to wait for
    # By sample, where the constraint failed.
    failures: dict[int, RequestFailure] = field(default_factory=dict)

    def token_ids(self) -> list[int]:
        """Return the sampled tokens, and some padding."""
        assert self.sampled is not None
        if self.done is not None:
            self.done.synchronize()
        token_ids: list[int] = self.sampled[0].tolist()
        return token_ids

    def read(self) -> Sampled:
        if self.done is not None:
            self.done.synchronize()
        result = self._read_tokens()
        if self.logprobs is not None:
            positions = zip(self.logprob_entries, self.logprobs.read(), strict=True)
            result.logprobs = {entry: [position] for entry, position in positions}
        for entry, piece in self.prompt_logprobs:
            result.prompt_logprobs.setdefault(entry, []).extend(piece.read())
        if self.pooled is not None:
            self.pooled.read_into(result)
        return result

    def _read_tokens(self) -> Sampled:
        if self.sampled is None:
            return Sampled([[] for _ in range(self.num_entries)])
        token_ids, bad = self.sampled.tolist()
        entries = self.sampling_entries
        tokens = [[token_id] for token_id in token_ids[: len(entries)]]
        if len(entries) < self.num_entries:
            by_entry = dict(zip(entries, tokens, strict=True))
            tokens = [by_entry.get(entry, []) for entry in range(self.num_entries)]
        result = Sampled(tokens)
        if any(bad):
            result.errors = {
                entry: self.failures.get(index) or failure(code)
                for index, (entry, code) in enumerate(zip(entries, bad, strict=False))
                if code
            }
        return result


class GpuRunner:
    """Implements `Runner`. `launch` does not wait for the device, unless rows are constrained: their masks depend on
    the previous step's tokens. A thread computes them as soon as those are known. Such a step is launched in two
    halves: the forward pass at once, and sampling before the next step is launched, or when the results are read. In
    between, the host schedules the next step, and hardly ever has to wait for masks.

    With `graphs`, each step shape is captured once and replayed. Without (and on a CPU under Triton's interpreter, as
    in tests) every kernel is launched by itself.

    With `links` there are other stages. `launch` may wait for the previous stage's host, and where GPUs cannot reach
    each other's memory, for the devices too. Only the last stage samples.
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
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> None:
        if not isinstance(decoder.attention, TritonAttention):
            raise EngineError(f"GpuRunner cannot plan for {type(decoder.attention).__name__}")
        spec, device = decoder.spec, decoder.device
        self.decoder = decoder
        self.block_size = block_size
        kv_shape = decoder.kv_shape(block_size)
        self.cache = decoder.attention.allocate(kv_shape, num_blocks, device)
        self.rows = DeviceRows(max_rows, max_len, block_size, device, len(kv_shape.windows))
        self.links = links
        self.samples = decoder.generates and decoder.shard.is_last
        sampled_vocab_size = spec.vocab_size if self.samples else 1  # buffer sizes depend on it
        self.sampling = TritonSamplingRows(max_rows, sampled_vocab_size, device)
        self.constrained = ConstrainedRows(self.sampling, grammars, partial(_use_device, device))
        self.scored = ScoredRows()
        self.pooled = PooledRows()
        self.sampling_workspace = SamplingWorkspace.allocate(max_rows, sampled_vocab_size, device)
        shard = decoder.shard
        self._vocabulary: RankTokens | None = None
        if shard.collective is not None:
            assert isinstance(shard.collective, GatheringCollective)
            self._vocabulary = RankTokens(shard.vocab.start, shard.vocab_sizes, shard.collective)
        planners = _planners(decoder, kv_shape, max_rows)
        used = [planner for planner in dict.fromkeys(planners) if planner is not None]
        # Where kinds of layers differ, those sizes that all of them have a tile for.
        short_context_sizes = min(
            (planner.short_context_sizes for planner in used), key=len, default=range(0)
        )
        self.buckets = Buckets(max_rows, max_tokens, short_context_sizes)
        workspace = AttentionWorkspace.allocate([planner.workspace_need for planner in used], device)
        tables = [
            None if planner is None else TableKind(window, planner)
            for window, planner in zip(kv_shape.windows, planners, strict=True)
        ]
        states = allocate_states(decoder.state_sizes, self.cache.slots, max_rows)
        self.states = DeviceStates(states, kv_shape.snapshot_blocks, PROMPT_INTERVAL * block_size)
        self.step = DeviceStep(self.rows, self.buckets, tables, workspace, self.states)
        self.steps: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)
        # The two halves of a step, for steps that wait for masks.
        self.forward_steps: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.forward_steps = self.steps.beside(self._forward)
        self.sampling_steps: StepGraphs[StepShape, None] | EagerSteps[StepShape, None]
        self.sampling_steps = self.steps.beside(self._sample_last)
        self._last_hidden: Tensor | None = None  # the input of `_sample_last`
        # The last step and what launches its second half, if that is still to be launched.
        self._unfinished: tuple[GpuStepHandle, Callable[[], None]] | None = None
        # The hidden states of the previous stage.
        num_received = 0 if decoder.shard.is_first else self.buckets.tokens[-1]
        dtype = decoder.kernels.compute_dtype
        self._received = torch.zeros(num_received, spec.hidden_size, dtype=dtype, device=device)

    # ---- a step ----

    def launch(self, batch: Batch) -> GpuStepHandle:
        with watched(self.decoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> GpuStepHandle:
        self._finish_last()
        self.rows.admit(batch.admissions)
        if self.samples:
            sampling = [admission for admission in batch.admissions if admission.request.max_tokens]
            self.sampling.set_many(sampling, self.rows.tokens)
            self.constrained.admit(batch.admissions)
        self.scored.admit(batch.admissions)
        self.pooled.admit(batch.admissions)
        updates = self.rows.extend(batch.tables)
        is_last = self.decoder.shard.is_last
        pooled = self.pooled.ending(batch) if is_last else []
        host = host_step(batch, self.rows.mirror, self.block_size, pooled)
        entries = host.sampling_entries if self.samples else []
        counts = self.sampling.logprob_counts(host.sample_rows[: len(entries)])
        scores = is_last and self.scored.any_in(batch)
        sampling_rows: list[int] = host.sample_rows[: len(entries)].tolist() if self.constrained.any else []
        masks = self.constrained.start(sampling_rows)
        self.states.copy(batch)
        shape = self.step.upload(host, updates, counts, scores, batch.captures)
        if self.links is not None and len(self._received):
            self.links.receive(self._received[: host.num_tokens])
        if masks is None:
            hidden = self.steps.run(shape)
        else:
            self._last_hidden = hidden = self.forward_steps.run(shape)
        if self.links is not None and not is_last:
            self.links.hand_over(hidden[: host.num_tokens])
        prompt_logprobs = self._score_prompts(batch, hidden) if scores else []
        vectors = self._pool(pooled, host, shape, hidden) if pooled else None
        handle = GpuStepHandle(len(batch), entries, prompt_logprobs, vectors)
        finish = partial(self._finish, handle, shape, counts, masks)
        # Ranks sample together, and the others do not know when this one reads its results.
        if masks is None or self._vocabulary is not None:
            finish()
        else:
            self._unfinished = handle, finish
        return handle

    def _finish_last(self) -> None:
        """Launch the second half of the last step, if that was not done yet."""
        if self._unfinished is not None:
            (_, finish), self._unfinished = self._unfinished, None
            finish()

    @torch.inference_mode()
    def _finish(
        self, handle: GpuStepHandle, shape: StepShape, counts: Ints | None, masks: StepMasks | None
    ) -> None:
        """Launch what follows the forward pass: sampling, if masks had to be waited for, and copies of the results."""
        entries = handle.sampling_entries
        if masks is not None:
            self.constrained.finish(masks)
            self.sampling_steps.run(shape)
            handle.failures = masks.failures()
        if entries:
            handle.sampled = to_host(self.step.results(shape), None if masks is None else UNKNOWN)
        if counts is not None:
            pairs = zip(entries, counts, strict=True)
            handle.logprob_entries = [entry for entry, count in pairs if count >= 0]
            num_logprobs, width = counts[counts >= 0].tolist(), 1 + int(counts.max())
            results = to_host(self.step.logprobs(len(num_logprobs), width))
            handle.logprobs = PendingLogprobs(results, num_logprobs, width)
        handle.done = event_on(self.decoder.device)
        if masks is not None:
            assert handle.sampled is not None
            self.constrained.expect(masks, handle.token_ids, handle.sampled[0].numpy())

    def _compute(self, shape: StepShape) -> Tensor:
        """Enqueue the device's part of a step and return the hidden states of the samples.

        They are those of all tokens if prompts are scored or there is a next stage.
        """
        hidden = self._forward(shape)
        if self.samples:
            self._sample(shape, hidden)
        return hidden

    def _forward(self, shape: StepShape) -> Tensor:
        token_ids, inputs = self.step.open(shape)
        shard, caches, states = self.decoder.shard, self.cache.layers, self.states.layers
        some = shard.is_last and shape.chunks and not shape.scores
        outputs = self.step.samples(shape).tokens if some else None
        if shard.is_first:
            return self.decoder.forward(token_ids, caches, inputs, outputs, states)
        return self.decoder.run_layers(self._received[: shape.num_tokens], caches, inputs, outputs, states)

    def _sample_last(self, shape: StepShape) -> None:
        assert self._last_hidden is not None
        self._sample(shape, self._last_hidden)

    def _sample(self, shape: StepShape, hidden: Tensor) -> None:
        samples = self.step.samples(shape)
        logits = self.decoder.own_logits(hidden[samples.tokens] if shape.scores else hidden)
        state, tokens, workspace = self.sampling, self.rows.tokens, self.sampling_workspace
        if self._vocabulary is None:
            sample_tokens(logits, samples.batch, state, tokens, workspace)
        else:
            sample_by_ranks(logits, self._vocabulary, samples.batch, state, tokens, workspace)

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[tuple[int, PendingLogprobs]]:
        """Score the prompt tokens that this step predicts. hidden [T, hidden_size]"""
        scored = []
        for piece in self.scored.pieces(batch, len(self.rows.tokens)):
            logits = self.decoder.logits(hidden[piece.predicting])
            targets = self.rows.tokens[piece.row, piece.targets]
            results = score_all(logits, targets, piece.num_logprobs, self.sampling_workspace)
            counts = [min(piece.num_logprobs, logits.shape[1])] * piece.size
            scored.append((piece.entry, PendingLogprobs(to_host(results), counts, 1 + counts[0])))
        return scored

    def _pool(
        self, entries: list[int], host: HostStep, shape: StepShape, hidden: Tensor
    ) -> StepVectors | None:
        """Return the vectors of these entries, whose samples come last.

        The head computes all samples of the shape, so that it sees few sizes.
        """
        head = self.decoder.pooling_head
        if head is None:
            return None
        vectors = head(hidden[self.step.samples(shape).tokens] if shape.scores else hidden)
        end = len(host.sample_tokens)
        return StepVectors(entries, to_host(vectors[end - len(entries) : end]))

    def collect(self, handle: GpuStepHandle) -> Sampled:
        with watched(self.decoder.device):
            if self._unfinished is not None and self._unfinished[0] is handle:
                self._finish_last()
            return handle.read()

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Run a step of this shape that is all padding, to compile and capture its kernels."""
        self.step.upload_nothing(shape)
        self.steps.prepare(shape)

    @torch.inference_mode()
    def warm_up_scoring(self) -> None:
        """Score as many prompt positions as are ever scored at once, to allocate what that takes."""
        if not self.samples:
            return
        size = min(PROMPT_LOGITS_AT_ONCE, len(self.rows.tokens))
        shape = size, self.decoder.spec.hidden_size
        hidden = torch.zeros(shape, dtype=self.decoder.kernels.compute_dtype, device=self.decoder.device)
        targets = torch.zeros(size, dtype=torch.int32, device=self.decoder.device)
        score_all(self.decoder.logits(hidden), targets, 1, self.sampling_workspace)

    @torch.inference_mode()
    def warm_up_pooling(self, num_samples: int) -> None:
        """Apply the pooling head, if there is one, to a full step."""
        if self.decoder.pooling_head is not None:
            shape = num_samples, self.decoder.spec.hidden_size
            dtype, device = self.decoder.kernels.compute_dtype, self.decoder.device
            self.decoder.pooling_head(torch.zeros(shape, dtype=dtype, device=device))

    def prepare(self, shapes: Collection[StepShape]) -> None:
        for shape in shapes:
            self.warm_up(shape)
        for num_samples in {shape.num_samples for shape in shapes if shape.chunks}:
            self.warm_up_pooling(num_samples)
        if self.samples:
            self.sampling.warm_up(self.rows.tokens)
        self.states.warm_up()
        wait_for(self.decoder.device)

    def close(self) -> None:
        wait_for(self.decoder.device)
        self.constrained.close()
        for graphs in (self.steps, self.forward_steps, self.sampling_steps):
            graphs.clear()
        self._last_hidden = self._unfinished = None
        self.states.layers.clear()
        self.cache.clear()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # return torch's cached memory to the device


def _use_device(device: torch.device) -> None:
    """Make a device the current one of a thread that waits for its events and allocates pinned memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _planners(decoder: Decoder, shape: KVShape, max_rows: int) -> list[AttentionPlanner | None]:
    """Return the planner of each block table, one for all tables whose layers have heads of the same shape; None for
    tables of layers that other stages have."""
    backend, processors = decoder.attention, _num_processors(decoder.device)
    assert isinstance(backend, TritonAttention)
    is_quantized = any(layer.is_quantized for layer in shape.layers)
    planners: dict[HeadShape, AttentionPlanner] = {}
    of_tables: list[AttentionPlanner | None] = [None] * len(shape.windows)
    for layer in decoder.attention_layers:
        heads = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if heads not in planners:
            planners[heads] = AttentionPlanner(
                backend.tuning_for(heads),
                heads,
                shape.block_size,
                max_rows,
                processors,
                is_quantized=is_quantized,
            )
        of_tables[layer.table] = planners[heads]
    return of_tables


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 in the interpreter, where splitting work gains nothing."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
