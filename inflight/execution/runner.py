"""The runner of decoders on a CPU: one forward pass and one sampling pass per step."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.constraints import GrammarCompiler
from inflight.execution.constrained_rows import ConstrainedRows
from inflight.execution.forward import ForwardPass, StageLinks, StepInputs, torch_threads
from inflight.execution.parallel.shared_memory import SharedCollective
from inflight.execution.results import StepHandle, StepVectors
from inflight.execution.sampling import SampledTensors, Sampler, VocabularyPart, cpu_sampler
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.shard import Shard
from inflight.scheduling import Batch, Sampled

# Elements from which torch's threads pay off on a CPU.
WORTH_SHARING = 1 << 21
# Extra seconds for another rank to compile a grammar, on a busy machine.
GRAMMAR_PATIENCE = 30.0


class ModelRunner:
    """Implements `Runner` on a CPU: permanent rows, one forward pass and one sampling pass per step."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> None:
        self.decoder = decoder
        self.forward = ForwardPass(decoder, num_blocks, block_size, max_rows, max_len, links)
        self.rows = self.forward.rows
        part = _vocabulary_part(decoder.shard)
        self.sampler = cpu_sampler(max_rows, decoder.spec.vocab_size, part)
        self._logits = decoder.logits if part is None else decoder.own_logits
        self.constrained = ConstrainedRows(self.sampler.state, grammars)
        # The compiled sampler has its own threads.
        self._sampling_threads = torch.get_num_threads() if isinstance(self.sampler, Sampler) else 1

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        inputs = self.forward.prepare(batch)
        for row, request in batch.admissions:
            if request.max_tokens:  # else it never samples
                self.sampler.state.set(row, request)
        self.constrained.admit(batch.admissions)
        rows = [batch.rows[entry] for entry in inputs.sampling_entries]
        masks = self.constrained.start(rows)
        handle = StepHandle(len(batch), inputs.sampling_entries, None, {})
        states = self.forward.run(batch, inputs)
        for piece, hidden in states.scored:
            targets = self.rows.tokens[piece.row, piece.targets].long()
            logprobs = self.sampler.score_prompt(self._logits(hidden), targets, piece.num_logprobs)
            handle.prompt_logprobs.setdefault(piece.entry, []).append(logprobs)
        if rows and self.decoder.generates:
            logits = self._logits(states.samples)
            if masks is not None:
                self.constrained.finish(masks)
                if masks.any_first and isinstance(self.decoder.shard.collective, SharedCollective):
                    self.decoder.shard.collective.allow(GRAMMAR_PATIENCE)
            handle.sampled = self._sample(rows, inputs, logits).fetch()
            if masks is not None:
                self.constrained.expect(masks, rows, handle.sampled.token_ids.tolist)
                handle.failures = self.constrained.failures(masks, rows)
        if states.pooled_entries and self.decoder.pooling_head is not None:
            handle.pooled = StepVectors(states.pooled_entries, self.decoder.pooling_head(states.pooled))
        return handle

    def _sample(self, rows: list[int], inputs: StepInputs, logits: Tensor) -> SampledTensors:
        """Sample one token for every entry that has caught up, and write it to its row for the next step.

        logits [S, vocab_size], or of this rank's part of the vocabulary.
        """
        with torch_threads(self._sampling_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows, inputs.sampling_lengths, self.rows.tokens)
            self.rows.append(inputs.sampling_rows, inputs.sampling_lengths, sampled.token_ids)
        return sampled

    def collect(self, handle: StepHandle) -> Sampled:
        return handle.read()

    def close(self) -> None:
        self.constrained.close()
        self.forward.close()


def _vocabulary_part(shard: Shard) -> VocabularyPart | None:
    """Return the part of the vocabulary whose logits this rank has; None if it has all of them."""
    collective = shard.collective
    if not isinstance(collective, SharedCollective):
        return None
    return VocabularyPart(shard.vocab, max(shard.vocab_sizes), collective.call)
