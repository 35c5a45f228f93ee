"""Runs batches on a GPU: the host plans and uploads, the device replays."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from inflight.attention.triton.backend import TritonAttention
from inflight.attention.triton.planner import AttentionPlanner
from inflight.constraints import GrammarCompiler
from inflight.errors import EngineError
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.execution.device import event_on, to_host, wait_for, watched
from inflight.execution.forward import StageLinks
from inflight.execution.gpu.device_step import DeviceStep
from inflight.execution.gpu.graphs import EagerSteps, StepGraphs
from inflight.execution.gpu.host_step import HostStep, host_step
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.shapes import Buckets, StepShape
from inflight.execution.gpu.ticket import GpuTicket, ToldLogprobs
from inflight.execution.results import PROMPT_LOGITS_AT_ONCE, PooledRows, ScoredRows, StepVectors
from inflight.execution.sampling.triton import (
    DrawRows,
    RankTokens,
    SamplingWorkspace,
    draw,
    draw_by_ranks,
    score_all,
)
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.shard import GatheringCollective
from inflight.scheduling import Batch, Sampled


class GpuRunner:
    """Implements `Runner`. No part of `launch` waits for the device, unless rows are constrained: their masks depend on
    the tokens of the step before. Then the forward pass is on its way already, and only what draws is launched after
    the wait.

    With `graphs`, each shape of step is captured once and replayed. Without (and on a CPU under Triton's
    interpreter, where tests run it) every kernel is launched by itself.

    With `links` there are other stages. `launch` may wait for the host of the one behind, and for devices too where
    these do not reach each other. Only the last stage samples.
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
        self.caches = decoder.attention.allocate(decoder.kv_shape(block_size), num_blocks, device)
        self.rows = DeviceRows(max_rows, max_len, block_size, device)
        self.links = links
        self.samples = decoder.generates and decoder.shard.is_last
        num_drawn_from = spec.vocab_size if self.samples else 1  # memory goes with it
        self.sampling = DrawRows(max_rows, num_drawn_from, device)
        self.constrained = ConstrainedRows(self.sampling, grammars, in_thread=False)
        self.scored = ScoredRows()
        self.pooled = PooledRows()
        self.draw_workspace = SamplingWorkspace.allocate(max_rows, num_drawn_from, device)
        shard = decoder.shard
        self._vocabulary: RankTokens | None = None
        if shard.collective is not None:
            assert isinstance(shard.collective, GatheringCollective)
            self._vocabulary = RankTokens(shard.vocab.start, shard.vocab_sizes, shard.collective)
        processors = _num_processors(device)
        planner = AttentionPlanner(
            decoder.attention.tuning, spec.num_kv_heads, block_size, max_rows, processors
        )
        self.buckets = Buckets(max_rows, max_tokens, planner.short_context_sizes)
        workspace = planner.workspace(spec.num_heads, spec.num_kv_heads, spec.head_dim, device)
        self.step = DeviceStep(self.rows, self.buckets, planner, workspace)
        self.steps: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)
        # The two halves of a step, for those that have masks to wait for.
        self.forwards: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.forwards = self.steps.beside(self._forward)
        self.draws: StepGraphs[StepShape, None] | EagerSteps[StepShape, None]
        self.draws = self.steps.beside(self._draw_last)
        self._last_hidden: Tensor | None = None  # what `_draw_last` draws from
        # What the stage before has made of a step's tokens.
        num_received = 0 if decoder.shard.is_first else self.buckets.tokens[-1]
        dtype = decoder.kernels.compute_dtype
        self._received = torch.zeros(num_received, spec.hidden_size, dtype=dtype, device=device)

    # ---- a step ----

    def launch(self, batch: Batch) -> GpuTicket:
        with watched(self.decoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> GpuTicket:
        self.rows.admit(batch.admissions)
        if self.samples:
            drawing = [admission for admission in batch.admissions if admission.request.max_tokens]
            self.sampling.set_many(drawing, self.rows.tokens)
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
        drawn_rows: list[int] = host.sample_rows[: len(entries)].tolist() if self.constrained.any else []
        masks = self.constrained.start(drawn_rows)
        shape = self.step.upload(host, updates, counts, scores)
        if self.links is not None and len(self._received):
            self.links.receive(self._received[: host.num_tokens])
        hidden = self.steps.run(shape) if masks is None else self._run_constrained(shape, masks)
        if self.links is not None and not is_last:
            self.links.hand_over(hidden[: host.num_tokens])
        prompt_logprobs = self._score_prompts(batch, hidden) if scores else []
        vectors = self._pool(pooled, host, shape, hidden) if pooled else None
        drawn = to_host(self.step.results(shape)) if entries else None
        logprobs, logprob_entries = None, []
        if counts is not None:
            logprob_entries = [entry for entry, count in zip(entries, counts, strict=True) if count >= 0]
            told, width = counts[counts >= 0].tolist(), 1 + int(counts.max())
            logprobs = ToldLogprobs(to_host(self.step.logprobs(len(told), width)), told, width)
        ticket = GpuTicket(
            len(batch),
            entries,
            drawn,
            logprobs,
            logprob_entries,
            prompt_logprobs,
            vectors,
            event_on(self.decoder.device),
        )
        if masks is not None:
            self.constrained.drew(masks, drawn_rows, ticket.token_ids)
            ticket.failures = self.constrained.failures(masks, drawn_rows)
        return ticket

    def _run_constrained(self, shape: StepShape, masks: StepMasks) -> Tensor:
        """The masks are computed while the device is busy with the step before, or with this one's forward pass."""
        self._last_hidden = hidden = self.forwards.run(shape)
        self.constrained.finish(masks)
        self.draws.run(shape)
        return hidden

    def _compute(self, shape: StepShape) -> Tensor:
        """The device's part: a token for each sample that is drawn. Returns the hidden states of all samples, or of all
        tokens if the shape scores or the next stage wants them."""
        hidden = self._forward(shape)
        if self.samples:
            self._draw(shape, hidden)
        return hidden

    def _forward(self, shape: StepShape) -> Tensor:
        token_ids, inputs = self.step.open(shape)
        shard = self.decoder.shard
        some = shard.is_last and shape.chunks and not shape.scores
        wanted = self.step.samples(shape).tokens if some else None
        if shard.is_first:
            return self.decoder.forward(token_ids, self.caches, inputs, wanted)
        return self.decoder.run_layers(self._received[: shape.num_tokens], self.caches, inputs, wanted)

    def _draw_last(self, shape: StepShape) -> None:
        assert self._last_hidden is not None
        self._draw(shape, self._last_hidden)

    def _draw(self, shape: StepShape, hidden: Tensor) -> None:
        samples = self.step.samples(shape)
        logits = self.decoder.own_logits(hidden[samples.tokens] if shape.scores else hidden)
        state, tokens, workspace = self.sampling, self.rows.tokens, self.draw_workspace
        if self._vocabulary is None:
            draw(logits, samples.draws, state, tokens, workspace)
        else:
            draw_by_ranks(logits, self._vocabulary, samples.draws, state, tokens, workspace)

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[tuple[int, ToldLogprobs]]:
        """The logprobs of prompt tokens that this step predicts. hidden [T, hidden_size]"""
        found = []
        for piece in self.scored.pieces(batch, len(self.rows.tokens)):
            logits = self.decoder.logits(hidden[piece.predicting])
            targets = self.rows.tokens[piece.row, piece.targets]
            results = score_all(logits, targets, piece.wanted, self.draw_workspace)
            counts = [min(piece.wanted, logits.shape[1])] * piece.size
            found.append((piece.entry, ToldLogprobs(to_host(results), counts, 1 + counts[0])))
        return found

    def _pool(
        self, entries: list[int], host: HostStep, shape: StepShape, hidden: Tensor
    ) -> StepVectors | None:
        """The vectors of these entries, whose samples come last. The head computes all samples of the shape, so that it
        meets few sizes."""
        head = self.decoder.pooling_head
        if head is None:
            return None
        vectors = head(hidden[self.step.samples(shape).tokens] if shape.scores else hidden)
        end = len(host.sample_tokens)
        return StepVectors(entries, to_host(vectors[end - len(entries) : end]))

    def collect(self, ticket: GpuTicket) -> Sampled:
        with watched(self.decoder.device):
            return ticket.read()

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Try a step of this shape that computes nothing: its kernels are compiled then, and captured."""
        self.step.upload_nothing(shape)
        self.steps.prepare(shape)

    @torch.inference_mode()
    def warm_up_scoring(self) -> None:
        """Score as many prompt positions as are scored at once, with all that takes memory there."""
        if not self.samples:
            return
        size = min(PROMPT_LOGITS_AT_ONCE, len(self.rows.tokens))
        shape = size, self.decoder.spec.hidden_size
        hidden = torch.zeros(shape, dtype=self.decoder.kernels.compute_dtype, device=self.decoder.device)
        targets = torch.zeros(size, dtype=torch.int32, device=self.decoder.device)
        score_all(self.decoder.logits(hidden), targets, 1, self.draw_workspace)

    @torch.inference_mode()
    def warm_up_pooling(self, num_samples: int) -> None:
        """Apply the head, if there is one, to as many samples as a step has."""
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
        wait_for(self.decoder.device)

    def close(self) -> None:
        wait_for(self.decoder.device)
        self.constrained.close()
        for graphs in (self.steps, self.forwards, self.draws):
            graphs.clear()
        self._last_hidden = None
        self.caches.clear()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what was freed; others may want it


def _num_processors(device: torch.device) -> int:
    """In the interpreter programs run one after the other: splitting gains nothing there."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
