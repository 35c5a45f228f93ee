"""The runner of decoders on a CPU: permanent rows, one forward pass and one sampling pass per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.constraints.compiler import GrammarCompiler
from inflight.events import RequestFailure
from inflight.execution.constrained_rows import ConstrainedRows, StepMasks
from inflight.execution.parallel.shared_memory import SharedCollective
from inflight.execution.sampling.interface import Samples
from inflight.execution.sampling.native import cpu_sampler
from inflight.execution.sampling.sampler import Sampler
from inflight.execution.step import (
    HostStep,
    Ints,
    PooledRows,
    ScoredRows,
    StepVectors,
    failure,
    host_step,
)
from inflight.layers.attention.backend import AttentionInputs
from inflight.layers.recurrent import KeptTokens, StateInputs, allocate_states
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.predictor import NEVER
from inflight.scheduling.batch import Batch, Capture, Sampled


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch's own operations.

    Torch's idle threads spin for some milliseconds after every parallel operation, and on a busy machine an operation
    waits for all of them: for the small tensors around a forward pass that costs far more than it saves.
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


class Rows:
    """Tokens and block tables of all rows. Memory that is not used yet is never touched."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_tables: int = 1) -> None:
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.empty(max_rows, max_len, dtype=torch.int32)
        self._token_ids: Ints = self.tokens.numpy()  # the same memory
        # [num_tables, max_rows, max_blocks]: entries past a row's last block, and those before a table's window, are
        # meaningless.
        self.block_tables = torch.empty(num_tables, max_rows, max_blocks, dtype=torch.int32)
        self.tables: Ints = self.block_tables.numpy()  # the same memory

    def apply(self, batch: Batch) -> None:
        """Store the tokens of admitted requests and the newly allocated blocks."""
        for row, request in batch.admissions:
            ids = torch.frombuffer(request.token_ids, dtype=torch.int64)
            self.tokens[row, : len(ids)] = ids
        for row, first, block_ids, table in batch.tables:
            self.tables[table, row, first : first + len(block_ids)] = block_ids
        for entry, draft in batch.drafts.items():
            first = batch.starts[entry] + 1
            self._token_ids[batch.rows[entry], first : first + len(draft)] = draft

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Write the tokens just sampled: token_ids[i] becomes token lengths[i] of rows[i]."""
        self.tokens[rows, lengths] = token_ids.to(torch.int32)


@dataclass(slots=True)
class StepInputs:
    """The inputs of one forward pass: T tokens in B entries, and S samples."""

    host: HostStep
    token_ids: Tensor  # [T] int64
    attention: AttentionInputs
    sample_tokens: Tensor  # [S] int64, as in `HostStep`
    sampling_rows: Tensor  # [n] int64, of the samples that sample a token
    sampling_lengths: Tensor  # [n] int64


def to_tensors(step: HostStep, rows: Rows, captures: Sequence[Capture] | None = None) -> StepInputs:
    """Gather the step's tokens from the rows, and wrap its arrays. `captures`: None without recurrent layers."""
    token_rows, positions = torch.from_numpy(step.token_rows), _long(step.positions)
    attention = AttentionInputs(
        positions=positions,
        query_starts=torch.from_numpy(step.query_starts),
        context_lens=torch.from_numpy(step.context_lens),
        rows=torch.from_numpy(step.rows),
        block_tables=rows.block_tables,
        slot_mapping=_long(step.slot_mapping),
    )
    if captures is not None:
        starts = step.context_lens - np.diff(step.query_starts)
        kept = None
        if step.batch.drafts:
            kept = KeptTokens(step.batch.drafts, step.query_starts.tolist(), step.rows.tolist())
        attention.state = StateInputs(
            attention.query_starts, attention.rows, torch.from_numpy(starts), captures, kept
        )
    num_sampling = len(step.sampling_entries)
    return StepInputs(
        host=step,
        token_ids=rows.tokens[token_rows, positions].long(),
        attention=attention,
        sample_tokens=_long(step.sample_tokens),
        sampling_rows=_long(step.sampling_rows),
        sampling_lengths=_long(step.sample_lengths[:num_sampling]),
    )


def _long(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


class StageLinks(Protocol):
    """Transfers hidden states between pipeline stages, each of which has some of the layers."""

    def receive(self, into: Tensor) -> None:
        """Receive [num_tokens, hidden_size] from the previous stage."""

    def hand_over(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""


class RecentTokens:
    """Which of the first tokens of the vocabulary nearly all recent ones are among.

    Vocabularies begin with their most frequent tokens, more or less: merges are numbered as they were learned. Where
    few tokens are likely, a predictor saves most of the LM head.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts = [0.0] * 32  # by the number of bits of the token's id
        self._total = 0.0

    def note(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._counts[token_id.bit_length()] += 1
        self._total += len(token_ids)
        if self._total > RECENT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    @property
    def num_likely(self) -> int:
        """The number of first tokens: a power of two, or all."""
        if self._total < KNOWN_FROM:
            return self._vocab_size
        missed, bits = 0.0, len(self._counts)
        while bits > LEAST_BITS and missed + self._counts[bits - 1] <= MISSED * self._total:
            bits -= 1
            missed += self._counts[bits]
        return min(1 << (bits - 1), self._vocab_size)


RECENT, KNOWN_FROM = 4096, 64  # tokens
MISSED = 0.02  # share of recent tokens that may be unlikely
LEAST_BITS = 14

# Elements from which torch's threads pay off on a CPU.
WORTH_SHARING = 1 << 21
# Extra seconds for another rank to compile a grammar, on a busy machine.
GRAMMAR_PATIENCE = 30.0


class ModelRunner:
    """Implements `Runner` on a CPU: permanent rows, one forward pass and one sampling pass per step.

    With `links` there are other stages: this process has some of the layers, and only the last stage samples.
    """

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
        self._is_first, self._is_last = decoder.shard.is_first, decoder.shard.is_last  # of the stages
        self._links = links
        self._block_size = block_size
        kv_shape = decoder.kv_shape(block_size)
        self.cache = decoder.attention.allocate(kv_shape, num_blocks, decoder.device)
        self.rows = Rows(max_rows, max_len, block_size, len(kv_shape.windows))
        self._states = allocate_states(decoder.state_sizes, self.cache.lanes, max_rows)
        self.scored = ScoredRows()
        self._pooled = PooledRows()
        self.sampler = cpu_sampler(max_rows, decoder.spec.vocab_size)
        self.constrained = ConstrainedRows(self.sampler.state, grammars)
        self._recent = RecentTokens(decoder.spec.vocab_size)
        # The compiled sampler has its own threads.
        self._sampling_threads = torch.get_num_threads() if isinstance(self.sampler, Sampler) else 1

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Sampled:
        """Compute the step: its handle is the results."""
        inputs, result = self._prepare(batch), Sampled([[] for _ in range(len(batch))])
        if not self._is_last:
            assert self._links is not None
            self._links.hand_over(self._forward(inputs, None))
            return result
        for row, request in batch.admissions:
            if request.max_tokens:  # else it never samples
                self.sampler.state.set(row, request)
        self.constrained.admit(batch.admissions)
        step, num_sampling = inputs.host, len(inputs.sampling_rows)
        samples = step.first_samples
        masks = self.constrained.start(step.sampling_rows[samples].tolist())
        of_all: Tensor | None = None  # hidden states of all tokens, where they are needed
        inner: list[Tensor] = []  # what the predictor reads inside the decoder
        if batch.wanted_drafts or self.scored.any_in(batch):
            of_all = self._forward(inputs, None, inner if batch.wanted_drafts else None)
            self._score(batch, of_all, result)
            hidden = of_all[inputs.sample_tokens]
        else:
            all_sample = num_sampling == len(inputs.token_ids)
            hidden = self._forward(inputs, None if all_sample else inputs.sample_tokens)
        if samples and self.decoder.generates:
            self._sample(inputs, samples, self.decoder.logits(hidden[:num_sampling]), masks, result)
        if batch.drafts and inputs.attention.state is not None:
            inputs.attention.state.take_back([len(token_ids) for token_ids in result.token_ids])
        if step.pooled_entries and self.decoder.pooling_head is not None:
            vectors = self.decoder.pooling_head(hidden[num_sampling:])
            StepVectors(step.pooled_entries, vectors).read_into(result)
        if batch.wanted_drafts and of_all is not None:
            self._draft(inputs, self.decoder.first_states(of_all, inner), result)
        return result

    def _prepare(self, batch: Batch) -> StepInputs:
        """Store the batch's admissions and blocks, and return the inputs of its forward pass."""
        with torch_threads(1):
            self.rows.apply(batch)
            self.scored.admit(batch.admissions)
            self._pooled.admit(batch.admissions)
            for states in self._states:
                for row, block_ids in batch.restores:
                    states.restore(row, block_ids)
                for row, block_ids in batch.saves:
                    states.save(row, block_ids)
            step = host_step(batch, self.rows.tables, self._block_size)
            if pooled := self._pooled.ending(batch):
                step.pool(pooled)
            return to_tensors(step, self.rows, batch.captures if self._states else None)

    def _forward(
        self, inputs: StepInputs, outputs: Tensor | None, inner: list[Tensor] | None = None
    ) -> Tensor:
        """Run the layers that are here, and return the hidden states of these tokens, or of all."""
        decoder, caches, states = self.decoder, self.cache.layers, self._states
        if self._is_first:
            return decoder.forward(inputs.token_ids, caches, inputs.attention, outputs, states, inner)
        assert self._links is not None
        hidden = torch.empty(len(inputs.token_ids), decoder.spec.hidden_size)
        self._links.receive(hidden)
        return decoder.run_layers(hidden, caches, inputs.attention, outputs, states)

    def _score(self, batch: Batch, hidden: Tensor, result: Sampled) -> None:
        """Score the tokens of prompts whose requests want that."""
        for piece in self.scored.pieces(batch):
            targets = self.rows.tokens[piece.row, piece.targets].long()
            logits = self.decoder.logits(hidden[piece.predicting])
            self.scored.read_logits(logits)
            logprobs = self.sampler.score_prompt(logits, targets, piece.num_logprobs)
            result.prompt_logprobs.setdefault(piece.entry, []).extend(logprobs)

    def _sample(
        self, inputs: StepInputs, samples: list[int], logits: Tensor, masks: StepMasks | None, result: Sampled
    ) -> None:
        """Sample a token for every entry that has caught up, and write it to its row for the next step.

        Where it is the draft that follows, sample another one behind it, and so on: every token is sampled behind known
        ones, with the mask, the penalties and the random numbers that it would have without drafts.

        logits [S, vocab_size].
        """
        drafts, entries, place = inputs.host.batch.drafts, inputs.host.sampling_entries, 0
        while samples:
            # Usually all: indexing would copy.
            part = slice(None) if len(samples) == len(entries) else torch.tensor(samples)
            rows, lengths = inputs.sampling_rows[part], inputs.sampling_lengths[part]
            if place:
                masks = self.constrained.start(rows.tolist())
            if masks is not None:
                self.constrained.finish(masks)
                if masks.any_first and isinstance(self.decoder.shard.collective, SharedCollective):
                    self.decoder.shard.collective.allow(GRAMMAR_PATIENCE)
            sampled = self._choose(logits[part], rows, lengths)
            failures: dict[int, RequestFailure] = {}
            if masks is not None:
                failures = masks.failures()
            right: list[int] = []
            again: list[int] = []  # the samples of this pass that are followed by those
            for index, sample in enumerate(samples):
                entry, token_id = entries[sample], sampled.token_ids[index]
                result.token_ids[entry].append(token_id)
                if sampled.bad[index]:
                    result.errors[entry] = failures.get(index) or failure(sampled.bad[index])
                elif drafts and drafts.get(entry, ())[place : place + 1] == [token_id]:
                    right.append(sample + 1)
                    again.append(index)
            for index, position in sampled.logprobs.items():
                result.logprobs.setdefault(entries[samples[index]], []).append(position)
            if masks is not None:
                if drafts:
                    self.constrained.advance(masks, sampled.token_ids, again)
                else:
                    self.constrained.expect(masks, partial(list, sampled.token_ids))
            samples = right
            place += 1
        self.constrained.expect_others()

    def _choose(self, logits: Tensor, rows: Tensor, lengths: Tensor) -> Samples:
        """Choose token number lengths[i] of rows[i] from logits[i], and write it to its row."""
        with torch_threads(self._sampling_threads if logits.numel() >= WORTH_SHARING else 1):
            sampled = self.sampler.sample(logits, rows.tolist(), lengths, self.rows.tokens)
            self.rows.append(rows, lengths, torch.tensor(sampled.token_ids))
        return sampled

    def _draft(self, inputs: StepInputs, states: Tensor, result: Sampled) -> None:
        """Let the predictor read all tokens of the step, states [T, hidden_size], and guess what follows the last right
        one of each entry.

        Its keys and values of refused drafts, and those that guesses of guesses leave behind, are overwritten before
        anything reads them, as the decoder's own.
        """
        decoder, predictor, caches = self.decoder, self.decoder.predictor, self.cache.layers
        assert predictor is not None
        for sampled_ids in result.token_ids:
            self._recent.note(sampled_ids)
        batch, num_refused = inputs.host.batch, result.num_refused(inputs.host.batch)
        entries = [
            entry
            for entry, count in enumerate(batch.wanted_drafts)
            if count and result.token_ids[entry] and entry not in result.errors
        ]
        counts = [count - num_refused.get(entry, 0) for entry, count in enumerate(batch.counts)]
        read_ahead = int(predictor.reads_tokens)
        if read_ahead:
            for entry in entries:
                counts[entry] += 1  # what was sampled
            of_rows = Batch(batch.step, batch.rows, batch.starts, counts, batch.samples, sum(counts))
            read = to_tensors(host_step(of_rows, self.rows.tables, self._block_size), self.rows)
            first, token_ids = read.attention, read.token_ids
        else:
            first, tokens = inputs.attention, self.rows.tokens
            following = (first.positions + 1).clamp_(max=tokens.shape[1] - 1)
            token_ids = tokens[torch.from_numpy(inputs.host.token_rows), following].long()
        last = first.query_starts.long()[entries] + torch.tensor(counts)[entries] - 1
        rows, positions = first.rows[entries].long(), first.positions[last]
        lengths = positions + 2 - read_ahead
        # What follows refused drafts, or the end of a request, may be anything.
        token_ids.clamp_(0, decoder.spec.vocab_size - 1)
        if predictor.keeps_tokens:
            x = decoder.predict(token_ids, states, caches, first, last)
        elif entries:
            at_ends = self._single_tokens(rows, positions, ahead=1)
            x = decoder.predict(token_ids[last], states[last], caches, at_ends)
        masks = self.constrained.start(rows.tolist())
        if masks is not None:
            self.constrained.finish(masks)
        while entries:
            sampled = self._choose(self._draft_logits(x), rows, lengths)
            for entry, token_id, bad in zip(entries, sampled.token_ids, sampled.bad, strict=True):
                if not bad:
                    result.drafts.setdefault(entry, []).append(token_id)
            kept = [
                index
                for index, entry in enumerate(entries)
                if not sampled.bad[index] and len(result.drafts[entry]) < batch.wanted_drafts[entry]
            ]
            if masks is not None:  # later ones would need a matcher that has seen the guesses before
                self.sampler.state.lift_masks([row.row for row in masks.constrained])
                masks = None
            entries, token_ids = [entries[i] for i in kept], torch.tensor(sampled.token_ids)[kept]
            rows, lengths, positions = rows[kept], lengths[kept] + 1, positions[kept]
            if entries:
                states = predictor.next_states(x[kept])
                if predictor.keeps_tokens:
                    positions = positions + 1
                single = self._single_tokens(rows, positions, ahead=not predictor.keeps_tokens)
                x = decoder.predict(token_ids, states, caches, single)

    def _draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the predictor's logits [S, vocab_size], in which rare tokens may have none."""
        decoder = self.decoder
        if decoder.shard.collective is not None:
            return decoder.predicted_logits(hidden)
        logits = decoder.predicted_logits(hidden, self._recent.num_likely)
        num_rare = decoder.spec.vocab_size - logits.shape[1]
        return logits if not num_rare else F.pad(logits, (0, num_rare), value=NEVER)

    def _single_tokens(self, rows: Tensor, positions: Tensor, ahead: int) -> AttentionInputs:
        """Return the inputs of attention for one token of each row, which is rotated as if it were so many ahead."""
        size, tables = self._block_size, self.rows.block_tables
        return AttentionInputs(
            positions=positions + ahead,
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
            context_lens=positions.int() + 1,
            rows=rows.int(),
            block_tables=tables,
            slot_mapping=tables[:, rows, positions // size].long() * size + positions % size,
        )

    def collect(self, handle: Sampled) -> Sampled:
        return handle

    def close(self) -> None:
        self.constrained.close()
        self.cache.clear()
        self._states.clear()
