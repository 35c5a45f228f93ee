"""Changes to the logits before a token is chosen, in the order that users of other engines expect.

Each function works in place on logits [S, V] float32 and touches only the entries concerned. Tokens are
forbidden by adding -inf, so rules that forbid the same token can be applied in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.execution.sampling.plan import Allowed, BadWords, SamplingPlan
from inflight.execution.sampling.rows import SamplingRows


def adjust(logits: Tensor, plan: SamplingPlan, state: SamplingRows, lengths: Tensor, tokens: Tensor) -> None:
    """Apply all rules of `plan`. lengths [S], tokens [max_rows, max_len]"""
    flat = logits.view(-1)
    if plan.allowed is not None:
        _keep_allowed(logits, plan.allowed)
    for entry, mask in plan.masks.items():
        logits[entry].masked_fill_(~mask, -torch.inf)
    if plan.bad_words is not None:
        _forbid_bad_words(flat, plan.bad_words, plan.rows, state.num_prompt_tokens, lengths, tokens)
    if plan.stops is not None:
        entries, places = plan.stops
        too_short = lengths[entries] < state.min_length[plan.rows[entries]]
        flat.index_add_(0, places, _forbid_where(too_short))
    if plan.bias is not None:
        flat.index_add_(0, *plan.bias)
    if plan.penalties is not None:
        _penalise(logits, plan.penalties, plan.rows, state, lengths, tokens)


def _forbid_where(condition: Tensor) -> Tensor:
    return torch.zeros(condition.shape, device=condition.device).masked_fill_(condition, -torch.inf)


def _keep_allowed(logits: Tensor, allowed: Allowed) -> None:
    flat = logits.view(-1)
    values = flat[allowed.places]
    logits.index_fill_(0, allowed.entries, -torch.inf)
    flat[allowed.places] = values


def _forbid_bad_words(
    flat: Tensor, words: BadWords, rows: Tensor, num_prompt_tokens: Tensor, lengths: Tensor, tokens: Tensor
) -> None:
    """Forbid the last token of each bad word whose prefix was just generated. Prompt tokens are not matched."""
    row = rows[words.entries]  # [n]
    longest = words.prefixes.shape[1]
    back = torch.arange(-longest, 0, device=flat.device)
    positions = lengths[words.entries, None] + back  # [n, longest]
    is_output = positions >= num_prompt_tokens[row, None]
    recent = tokens[row[:, None], positions.clamp(min=0)]
    matches = (words.prefixes < 0) | ((recent == words.prefixes) & is_output)
    flat.index_add_(0, words.places, _forbid_where(matches.all(-1)))


def _penalise(
    logits: Tensor, entries: Tensor, rows: Tensor, state: SamplingRows, lengths: Tensor, tokens: Tensor
) -> None:
    """Apply the repetition penalty over the whole row, then frequency and presence penalties over its outputs.

    This works on the tokens seen instead of the whole vocabulary. A token seen twice computes the same value
    twice; positions past the row's end repeat its first token, which always exists.
    """
    row, length = rows[entries], lengths[entries, None]
    # A CPU can read the lengths without stalling, and skip the unused ends of the rows.
    width = int(length.max()) if logits.device.type == "cpu" else tokens.shape[1]
    positions = torch.arange(width, device=logits.device)
    seen = tokens[row, :width].long()  # [P, L]
    seen = torch.where(positions < length, seen, seen[:, :1])
    is_output = (positions >= state.num_prompt_tokens[row, None]) & (positions < length)

    chosen = logits[entries]  # [P, V]
    counts = torch.zeros_like(chosen).scatter_add_(1, seen, is_output.float()).gather(1, seen)
    values = chosen.gather(1, seen)
    repetition = state.repetition_penalty[row, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= state.frequency_penalty[row, None] * counts
    values -= state.presence_penalty[row, None] * (counts > 0)
    logits[entries] = chosen.scatter_(1, seen, values)
