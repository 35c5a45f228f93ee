"""Runs batches on a real model, on a CPU: rows that stay, inputs of one step, a forward pass, sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.constraints import GrammarCompiler
from inflight.execution.constrained_rows import ConstrainedRows
from inflight.execution.forward import ForwardPass, StageLinks
from inflight.execution.inputs import StepInputs
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.results import StepVectors, Ticket
from inflight.execution.sampling import SampledTensors, Sampler, VocabularyPart, cpu_sampler
from inflight.execution.threads import torch_threads
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.shard import Shard
from inflight.scheduling import Batch, Sampled

# Elements from which torch's threads pay for themselves on a CPU.
WORTH_SHARING = 1 << 21
# Seconds that another rank may take to compile a grammar: some of the processor, on a machine that is busy.
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
        part = _part_of(decoder.shard)
        self.sampler = cpu_sampler(max_rows, decoder.spec.vocab_size, part)
        self._logits = decoder.logits if part is None else decoder.own_logits
        self.constrained = ConstrainedRows(self.sampler.state, grammars)
        # The compiled sampler has threads of its own.
        self._sampling_threads = torch.get_num_threads() if isinstance(self.sampler, Sampler) else 1

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Ticket:
        inputs = self.forward.take_in(batch)
        for row, request in batch.admissions:
            if request.max_tokens:  # else it never samples
                self.sampler.state.set(row, request)
        self.constrained.admit(batch.admissions)
        rows = [batch.rows[entry] for entry in inputs.sampling_entries]
        masks = self.constrained.start(rows)
        ticket = Ticket(len(batch), inputs.sampling_entries, None, {})
        states = self.forward.run(batch, inputs)
        for piece, hidden in states.scored:
            targets = self.rows.tokens[piece.row, piece.targets].long()
            found = self.sampler.score_prompt(self._logits(hidden), targets, piece.wanted)
            ticket.prompt_logprobs.setdefault(piece.entry, []).append(found)
        if rows and self.decoder.generates:
            logits = self._logits(states.samples)
            if masks is not None:
                self.constrained.finish(masks)
                if masks.any_first and isinstance(self.decoder.shard.collective, SharedCollective):
                    self.decoder.shard.collective.allow(GRAMMAR_PATIENCE)
            ticket.sampled = self._sample(rows, inputs, logits).fetch()
            if masks is not None:
                self.constrained.drew(masks, rows, ticket.sampled.token_ids.tolist)
                ticket.failures = self.constrained.failures(masks, rows)
        if states.pooled_entries and self.decoder.pooling_head is not None:
            ticket.pooled = StepVectors(states.pooled_entries, self.decoder.pooling_head(states.pooled))
        return ticket

    def _sample(self, rows: list[int], inputs: StepInputs, logits: Tensor) -> SampledTensors:
        """One token for every entry that has caught up, written into its row for the next step to read.

        logits [S, vocab_size], or of this rank's tokens.
        """
        with torch_threads(self._sampling_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows, inputs.sampling_lengths, self.rows.tokens)
            self.rows.append(inputs.sampling_rows, inputs.sampling_lengths, sampled.token_ids)
        return sampled

    def collect(self, ticket: Ticket) -> Sampled:
        return ticket.read()

    def close(self) -> None:
        self.constrained.close()
        self.forward.close()


def _part_of(shard: Shard) -> VocabularyPart | None:
    """The tokens that this rank offers some of; None where it gets all logits."""
    ranks = shard.collective
    if not isinstance(ranks, SharedCollective):
        return None
    return VocabularyPart(shard.vocab, max(shard.vocab_sizes), ranks.call)
