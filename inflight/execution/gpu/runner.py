"""The runner of decoders on a GPU: the host plans and uploads a step, the device replays a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from inflight.constraints.compiler import GrammarCompiler
from inflight.execution.constrained_rows import StepMasks
from inflight.execution.gpu.attention import DeviceAttention
from inflight.execution.gpu.device import EagerSteps, StepGraphs, event_on, wait_for, watched
from inflight.execution.gpu.drafts import DeviceDrafts, DraftShape
from inflight.execution.gpu.parts import Layout, PackedUpload, StepPart, merged_sections, overridden
from inflight.execution.gpu.prompts import PromptScores, PromptVectors
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.sampling import DeviceSampling, PendingSamples
from inflight.execution.gpu.shapes import Buckets, StepShape
from inflight.execution.gpu.states import DeviceStates
from inflight.execution.runner import StageLinks
from inflight.execution.step import HostStep, ScoredRows, StepResult, host_step
from inflight.kv.snapshots import PROMPT_INTERVAL
from inflight.layers.attention.triton.backend import TritonInputs
from inflight.layers.recurrent import allocate_states
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Batch, Sampled


@dataclass(slots=True)
class GpuStepHandle:
    """A launched step. Its results are being copied to host memory, and are there once `done` has happened."""

    num_entries: int
    results: list[StepResult] = field(default_factory=list)
    done: torch.cuda.Event | None = None  # None where there is nothing to wait for

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def read(self) -> Sampled:
        self.wait()
        sampled = Sampled([])
        for result in self.results:
            result.read_into(sampled)
        if not sampled.token_ids:
            sampled.token_ids = [[] for _ in range(self.num_entries)]
        return sampled


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
        max_samples: int | None = None,
        max_guesses: int = 0,
    ) -> None:
        """`max_samples`: of a step whose decodes have drafts; None: there are none. `max_guesses`: what the model's
        predictor guesses for a request behind a step."""
        spec, device, shard = decoder.spec, decoder.device, decoder.shard
        self.decoder = decoder
        self.block_size = block_size
        self.links = links
        self.samples = decoder.generates and shard.is_last
        kv_shape = decoder.kv_shape(block_size)
        self.cache = decoder.attention.allocate(kv_shape, num_blocks, device)
        num_tables = len(kv_shape.windows)
        verifies = max_samples is not None
        self.rows = DeviceRows(max_rows, max_len, block_size, device, num_tables, max_tokens, verifies)
        self.attention = DeviceAttention(decoder, kv_shape, self.rows, max_samples or max_rows)
        states = allocate_states(decoder.state_sizes, self.cache.lanes, max_rows)
        self.states: DeviceStates | None = None
        if states:
            interval = PROMPT_INTERVAL * block_size
            self.states = DeviceStates(states, kv_shape.snapshot_blocks, interval, decoder, max_samples)
        self.sampling: DeviceSampling | None = None
        self.scores: PromptScores | None = None
        self.scored = ScoredRows()
        if self.samples:
            self.sampling = DeviceSampling(self.rows, spec.vocab_size, grammars, max_samples)
            self.scores = PromptScores(decoder, self.rows, self.scored, self.sampling.workspace)
        self.drafts: DeviceDrafts | None = None
        if decoder.predictor is not None and self.sampling is not None:
            parts = self.rows, self.attention, self.sampling
            self.drafts = DeviceDrafts(decoder, *parts, self.cache.layers, max_tokens, max_guesses)
        self.parts = self.step_parts()
        self._begin, self._fill, self._results = (
            overridden(self.parts, method) for method in ("begin", "fill", "results")
        )
        self.buckets = Buckets(
            max_rows,
            max_tokens,
            self.attention.short_context_sizes,
            max_samples,
            has_states=self.states is not None,
            has_predictor=self.drafts is not None,
        )
        self.upload: PackedUpload[StepShape] = PackedUpload(
            partial(merged_sections, self.parts), self.buckets.largest(), device
        )
        self.steps: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.steps = StepGraphs(self._compute) if graphs else EagerSteps(self._compute)
        # The two halves of a step, for steps that wait for masks.
        self.forward_steps: StepGraphs[StepShape, Tensor] | EagerSteps[StepShape, Tensor]
        self.forward_steps = self.steps.in_same_pool(self._forward)
        self.sampling_steps: StepGraphs[StepShape, None] | EagerSteps[StepShape, None]
        self.sampling_steps = self.steps.in_same_pool(self._sample_last)
        self._last_hidden: Tensor | None = None  # the input of `_sample_last`
        self.draft_steps: StepGraphs[DraftShape, Tensor | None] | EagerSteps[DraftShape, Tensor | None]
        self.draft_steps = self.steps.in_same_pool(self._draft)
        # The last step and what launches its second half, if that is still to be launched.
        self._unfinished: tuple[GpuStepHandle, Callable[[], None]] | None = None
        # The hidden states of the previous stage.
        num_received = 0 if shard.is_first else self.buckets.tokens[-1]
        dtype = decoder.kernels.compute_dtype
        self._received = torch.zeros(num_received, spec.hidden_size, dtype=dtype, device=device)

    def step_parts(self) -> list[StepPart]:
        """Return the parts of a step, in the order in which they are opened: `rows` gathers the tokens, so a part that
        changes them comes before it."""
        vectors = PromptVectors(self.decoder) if self.decoder.shard.is_last else None
        parts = self.rows, self.attention, self.states, self.sampling, self.scores, vectors, self.drafts
        return [part for part in parts if part is not None]

    # ---- a step ----

    def launch(self, batch: Batch) -> GpuStepHandle:
        with watched(self.decoder.device):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> GpuStepHandle:
        self._finish_last()
        self.change_rows(batch)
        step = host_step(batch, self.rows.mirror, self.block_size, split_decodes=True)
        masks = None if self.sampling is None else self.sampling.start_masks(step)
        shape, layout = self._send(step)
        if self.links is not None and len(self._received):
            self.links.receive(self._received[: step.num_tokens])
        if masks is None:
            hidden = self.steps.run(shape)
        else:
            self._last_hidden = hidden = self.forward_steps.run(shape)
        if self.links is not None and not self.decoder.shard.is_last:
            self.links.hand_over(hidden[: step.num_tokens])
        pending = [results(step, layout.on_device, hidden) for results in self._results]
        handle = GpuStepHandle(len(batch), [result for result in pending if result is not None])
        finish = partial(self._finish, handle, step, shape, masks)
        # Ranks gather logits together, and the others do not know when this one reads its results.
        if masks is None or self.decoder.shard.collective is not None:
            finish()
        else:
            self._unfinished = handle, finish
        return handle

    def change_rows(self, batch: Batch) -> None:
        """Give rows the batch's admissions and blocks."""
        if batch.admissions:
            for part in self.parts:
                part.admit(batch.admissions)
        self.rows.extend(batch.tables)

    def _send(self, step: HostStep) -> tuple[StepShape, Layout]:
        """Upload a step and return its shape, with the layout of that."""
        for begin in self._begin:
            begin(step)
        shape = self.buckets.shape_of(step)
        layout = self.upload.layout(shape)
        pinned, sections = self.upload.stage(layout)
        for fill in self._fill:
            fill(step, sections)
        self.upload.send(pinned)
        return shape, layout

    def _finish_last(self) -> None:
        """Launch the second half of the last step, if that was not done yet."""
        if self._unfinished is not None:
            (_, finish), self._unfinished = self._unfinished, None
            finish()

    @torch.inference_mode()
    def _finish(
        self, handle: GpuStepHandle, step: HostStep, shape: StepShape, masks: StepMasks | None
    ) -> None:
        """Launch what follows the forward pass: sampling, if masks had to be waited for, and copies of the results."""
        sampling, drafts = self.sampling, self.drafts
        samples: PendingSamples | None = None
        if sampling is not None and step.sampling_entries:
            if masks is not None:
                sampling.finish_masks(masks)
                self.sampling_steps.run(shape)
            samples = sampling.fetch(step, shape, masks)
            handle.results.append(samples)
        if drafts is not None and step.predicts:
            guesses = self.draft_steps.run(drafts.shape_of(step, shape))
            if guesses is not None:
                handle.results.append(drafts.fetch(step, guesses))
        handle.done = event_on(self.decoder.device)
        if masks is not None and samples is not None and sampling is not None:
            sampling.expect(masks, samples, handle.wait)

    def _compute(self, shape: StepShape) -> Tensor:
        """Enqueue the device's part of a step and return the hidden states of the samples.

        They are those of all tokens if prompts are scored or there is a next stage.
        """
        hidden = self._forward(shape)
        if self.samples:
            self._sample(shape, hidden)
        return hidden

    def _forward(self, shape: StepShape) -> Tensor:
        sections = self.upload.layout(shape).on_device
        for part in self.parts:
            part.open(shape, sections)
        inputs = self._inputs(shape, sections)
        decoder, caches = self.decoder, self.cache.layers
        layer_states = () if self.states is None else self.states.layers
        some = decoder.shard.is_last and shape.chunks and not (shape.scores or shape.predicts)
        outputs = sections["sample_tokens"] if some else None
        if not decoder.shard.is_first:
            return decoder.run_layers(
                self._received[: shape.num_tokens], caches, inputs, outputs, layer_states
            )
        token_ids = self.rows.token_ids(shape)
        if self.drafts is None or not shape.predicts:
            return decoder.forward(token_ids, caches, inputs, outputs, layer_states)
        inner: list[Tensor] = []
        hidden = decoder.forward(token_ids, caches, inputs, outputs, layer_states, inner)
        self.drafts.keep(hidden, inner)
        return hidden if shape.scores else hidden[sections["sample_tokens"]]

    def _inputs(self, shape: StepShape, sections: dict[str, Tensor]) -> TritonInputs:
        """Return the step that was opened last, as attention reads it."""
        attention, states = self.attention, self.states
        return TritonInputs(
            sections["positions"],
            sections["token_rows"],
            attention.tables,
            shape.short_context,
            attention.workspace,
            None if states is None else states.inputs,
        )

    def _draft(self, shape: DraftShape) -> Tensor | None:
        """Enqueue the predictor's passes behind a step."""
        assert self.drafts is not None
        sections = self.upload.layout(shape.step).on_device
        self.attention.open(shape.step, sections)
        return self.drafts.draft(shape, sections, self._inputs(shape.step, sections))

    def _sample_last(self, shape: StepShape) -> None:
        assert self._last_hidden is not None
        self._sample(shape, self._last_hidden)

    def _sample(self, shape: StepShape, hidden: Tensor) -> None:
        assert self.sampling is not None
        sections = self.upload.layout(shape).on_device
        logits = self.decoder.logits(hidden[sections["sample_tokens"]] if shape.scores else hidden)
        token_ids, bad = self.sampling.sample(logits, shape, sections)
        if self.states is not None:
            self.states.accept(shape, sections, token_ids, bad)

    def collect(self, handle: GpuStepHandle) -> Sampled:
        with watched(self.decoder.device):
            if self._unfinished is not None and self._unfinished[0] is handle:
                self._finish_last()
            return handle.read()

    # ---- before the first step ----

    @torch.inference_mode()
    def warm_up(self, shape: StepShape) -> None:
        """Run a step of this shape that is all padding, to compile and capture its kernels."""
        pinned, _ = self.upload.stage(self.upload.layout(shape))
        self.upload.send(pinned)
        self.steps.prepare(shape)
        if self.drafts is not None:
            for behind in self.drafts.usual(shape):
                self.draft_steps.prepare(behind)

    @torch.inference_mode()
    def warm_up_scoring(self) -> None:
        """Score as many prompt positions as are ever scored at once, to allocate what that takes."""
        if self.scores is not None:
            self.scores.warm_up_largest()

    @torch.inference_mode()
    def prepare(self, shapes: Collection[StepShape]) -> None:
        for shape in shapes:
            self.warm_up(shape)
        for part in self.parts:
            part.warm_up(shapes)
        wait_for(self.decoder.device)

    def close(self) -> None:
        wait_for(self.decoder.device)
        if self.sampling is not None:
            self.sampling.constrained.close()
        for graphs in (self.steps, self.forward_steps, self.sampling_steps, self.draft_steps):
            graphs.clear()
        self._last_hidden = self._unfinished = None
        if self.states is not None:
            self.states.layers.clear()
        self.cache.clear()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # return torch's cached memory to the device
