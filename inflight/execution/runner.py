"""Runs batches on a real model, on a CPU: rows that stay, inputs of one step, a forward pass, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.backend import AttentionInputs
from inflight.constraints import GrammarCompiler
from inflight.execution.constrained_rows import ConstrainedRows
from inflight.execution.results import PooledRows, ScoredRows, StepVectors, Ticket
from inflight.execution.sampling import SampledTensors, Sampler, cpu_sampler, prompt_logprobs
from inflight.models.decoder import Decoder
from inflight.scheduling import Batch, Sampled

# Elements from which torch's threads pay for themselves on a CPU.
WORTH_SHARING = 1 << 21


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
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.caches = decoder.attention.allocate(decoder.kv_shape(block_size), num_blocks, decoder.device)
        self.rows = Rows(max_rows, max_len, block_size, decoder.device)
        self.sampler = cpu_sampler(max_rows, decoder.spec.vocab_size)
        self.constrained = ConstrainedRows(self.sampler.state, grammars)
        self.scored = ScoredRows()
        self.pooled = PooledRows()
        # The compiled sampler has threads of its own.
        self._sampling_threads = torch.get_num_threads() if isinstance(self.sampler, Sampler) else 1

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Ticket:
        with torch_threads(1):
            self.rows.apply(batch)
            for row, request in batch.admissions:
                if request.max_tokens:  # else it never samples
                    self.sampler.state.set(row, request)
            self.constrained.admit(batch.admissions)
            self.scored.admit(batch.admissions)
            self.pooled.admit(batch.admissions)
            inputs = build_inputs(batch, self.rows, self.block_size)
        rows = [batch.rows[entry] for entry in inputs.sampling_entries]
        masks = self.constrained.start(rows)
        ticket = Ticket(len(batch), inputs.sampling_entries, None, {})
        pooled, num_samples = self.pooled.ending(batch), len(inputs.sampling_entries)
        wanted = inputs.sampling_tokens
        if pooled:
            wanted = torch.cat((wanted, inputs.last_tokens(pooled)))
        if self.scored.any_in(batch):
            hidden = self._forward(inputs, None)
            for piece in self.scored.pieces(batch):
                logits = self.decoder.logits(hidden[piece.predicting])
                targets = self.rows.tokens[piece.row, piece.targets].long()
                found = prompt_logprobs(logits, targets, piece.wanted)
                ticket.prompt_logprobs.setdefault(piece.entry, []).append(found)
            hidden = hidden[wanted]
        else:
            all_sample = num_samples == len(inputs.token_ids)
            hidden = self._forward(inputs, None if all_sample else wanted)
        if num_samples and self.decoder.generates:
            if masks is not None:
                self.constrained.finish(masks)
            ticket.sampled = self._sample(rows, inputs, hidden[:num_samples]).fetch()
            if masks is not None:
                self.constrained.drew(masks, rows, ticket.sampled.token_ids.tolist)
                ticket.failures = self.constrained.failures(masks, rows)
        if pooled and self.decoder.pooling_head is not None:
            ticket.pooled = StepVectors(pooled, self.decoder.pooling_head(hidden[num_samples:]))
        return ticket

    def _forward(self, inputs: StepInputs, wanted: Tensor | None) -> Tensor:
        return self.decoder.forward(inputs.token_ids, self.caches, inputs.attention, wanted)

    def _sample(self, rows: list[int], inputs: StepInputs, hidden: Tensor) -> SampledTensors:
        """One token for every entry that has caught up, written into its row for the next step to read.

        hidden [S, hidden_size].
        """
        logits = self.decoder.logits(hidden)
        with torch_threads(self._sampling_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows, inputs.sampling_lengths, self.rows.tokens)
            self.rows.append(inputs.sampling_rows, inputs.sampling_lengths, sampled.token_ids)
        return sampled

    def collect(self, ticket: Ticket) -> Sampled:
        return ticket.read()

    def close(self) -> None:
        self.constrained.close()
        self.caches.clear()


# ---- what stays between steps ----


class Rows:
    """Tokens and block tables of all rows. Memory of rows and places not used yet is never touched."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.empty(max_rows, max_len, dtype=torch.int32, device=device)
        # [max_rows, max_blocks]: entries past a row's last block are meaningless.
        self.block_tables = torch.empty(max_rows, max_blocks, dtype=torch.int32, device=device)

    def apply(self, batch: Batch) -> None:
        """Take in the requests that got a row and the blocks that were handed out."""
        for row, request in batch.admissions:
            ids = torch.frombuffer(request.token_ids, dtype=torch.int64)
            self.tokens[row, : len(ids)] = ids
        for row, first, block_ids in batch.tables:
            self.block_tables[row, first : first + len(block_ids)] = torch.tensor(
                block_ids, dtype=torch.int32
            )

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Write the tokens just sampled: token_ids[i] becomes token lengths[i] of rows[i]."""
        self.tokens[rows, lengths] = token_ids.to(torch.int32)


# ---- one step ----


@dataclass(slots=True)
class StepInputs:
    """What one forward pass reads. T tokens in B entries, S of which sample."""

    token_ids: Tensor  # [T] int64
    attention: AttentionInputs
    sampling_entries: list[int]  # [S] indices into the batch
    sampling_tokens: Tensor  # [S] int64, the last token of each sampling entry
    sampling_rows: Tensor  # [S] int64
    sampling_lengths: Tensor  # [S] int64, the position that the sampled token will have

    def last_tokens(self, entries: list[int]) -> Tensor:
        """The last token of each of these entries, as an index into the step's."""
        return self.attention.query_starts[1:][entries].long() - 1


def build_inputs(batch: Batch, rows: Rows, block_size: int) -> StepInputs:
    """Gather tokens, positions and places from the rows: per-token work is all in tensors."""
    device = rows.tokens.device
    columns = torch.tensor(
        [batch.rows, batch.starts, batch.counts], dtype=torch.int64, device=device
    )  # [3, B]
    row_ids, starts, counts = columns
    lengths = starts + counts  # [B]
    ends = counts.cumsum(0)  # [B]
    if batch.num_tokens == len(batch):  # one token each
        token_rows, positions = row_ids, starts
    else:
        token_rows = row_ids.repeat_interleave(counts)  # [T]
        first_places = (ends - counts).repeat_interleave(counts)  # [T]
        offsets = torch.arange(batch.num_tokens, device=device) - first_places
        positions = starts.repeat_interleave(counts) + offsets
    blocks = rows.block_tables[token_rows, positions // block_size].long()
    attention = AttentionInputs(
        positions=positions,
        query_starts=torch.cat((ends.new_zeros(1), ends)).int(),
        context_lens=lengths.int(),
        rows=row_ids.int(),
        block_tables=rows.block_tables,
        kv_places=blocks * block_size + positions % block_size,
    )
    sampling = [index for index, samples in enumerate(batch.samples) if samples]
    chosen = slice(None) if len(sampling) == len(batch) else sampling
    return StepInputs(
        token_ids=rows.tokens[token_rows, positions].long(),
        attention=attention,
        sampling_entries=sampling,
        sampling_tokens=(ends - 1)[chosen],
        sampling_rows=row_ids[chosen],
        sampling_lengths=lengths[chosen],
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """How many threads torch's own operations use.

    Torch's idle threads spin for some milliseconds after every operation that they shared, and on a busy machine an
    operation waits for all of them: for the small tensors around a forward pass that costs far more than it saves.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
