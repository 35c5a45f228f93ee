"""One step on the host: a batch as arrays, packed into one int32 array for the upload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.scheduling import Batch

Ints = NDArray[np.int32]

ALIGNMENT = 4  # sections start at multiples of 16 bytes, for wide loads


@dataclass(frozen=True, slots=True)
class HostStep:
    """A batch as arrays: B entries, of which the first `num_decodes` decode; T tokens; S samples.

    The samples are the entries that sample a token, then those that end with a vector and only need hidden states.
    """

    num_decodes: int
    num_tokens: int
    rows: Ints  # [B]
    context_lens: Ints  # [B]
    query_starts: Ints  # [B + 1]
    token_rows: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [num_tables, T]
    sampling_entries: list[int]
    sample_tokens: Ints  # [S] the last token of each entry
    sample_rows: Ints  # [S], -1 where no token is sampled
    sample_lengths: Ints  # [S] the position that the sampled token will have

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.rows)


def host_step(batch: Batch, tables: Ints, block_size: int, pooled: Sequence[int] = ()) -> HostStep:
    """Convert a batch to arrays.

    `tables` [num_tables, max_rows, max_blocks] are the block tables, including this step's blocks. `pooled` entries end
    here. A decode is an entry of one token that was admitted in an earlier step and samples: in a step of only decodes,
    each token is a sample. (A request admitted in this step may share a block that this step fills, and must wait for
    it: see `AttentionBackend.attend`.)
    """
    rows, starts, counts = (
        np.array(part, dtype=np.int32) for part in (batch.rows, batch.starts, batch.counts)
    )
    lengths = starts + counts
    num_admitted = len(batch.admissions)
    num_old = len(rows) - num_admitted  # admissions come last
    ends = np.cumsum(counts, dtype=np.int32)
    sampling = [entry for entry, samples in enumerate(batch.samples) if samples]
    all_sample = len(sampling) == len(rows)
    num_decodes = num_old
    if not all_sample or batch.num_tokens > len(rows):
        others = np.flatnonzero((counts[:num_old] != 1) | ~np.array(batch.samples[:num_old], dtype=bool))
        num_decodes = int(others[0]) if len(others) else num_old
    if batch.num_tokens == len(rows):
        token_rows, positions = rows, starts
    else:
        token_rows = np.repeat(rows, counts)
        offsets = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + offsets
    slot_mapping = tables[:, token_rows, positions // block_size] * block_size + positions % block_size
    sample_tokens, sample_rows, sample_lengths = ends - 1, rows, lengths
    if not all_sample:
        chosen = [*sampling, *pooled]
        sample_tokens, sample_rows, sample_lengths = sample_tokens[chosen], rows[chosen], lengths[chosen]
        sample_rows[len(sampling) :] = -1
    query_starts = np.empty(len(rows) + 1, dtype=np.int32)
    query_starts[0] = 0
    query_starts[1:] = ends
    return HostStep(
        num_decodes=num_decodes,
        num_tokens=batch.num_tokens,
        rows=rows,
        context_lens=lengths,
        query_starts=query_starts,
        token_rows=token_rows,
        positions=positions,
        slot_mapping=slot_mapping,
        sampling_entries=sampling,
        sample_tokens=sample_tokens,
        sample_rows=sample_rows,
        sample_lengths=sample_lengths,
    )


class Layout:
    """The named sections of one packed array."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sections: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.sections[name] = slice(end, end + size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = end

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the sections as views of `buffer`."""
        return {name: buffer[section] for name, section in self.sections.items()}

    def on_host(self, array: Ints) -> dict[str, Ints]:
        return {name: array[section] for name, section in self.sections.items()}


def staging(size: int, device: torch.device) -> tuple[Tensor, Ints]:
    """Return pinned host memory for an asynchronous upload, as a tensor and as an array.

    Torch reuses such memory only after the copies from it are done, so nothing here needs to wait.
    """
    tensor = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor, tensor.numpy()


def put(section: Ints, values: NDArray[Any], rest: int) -> None:
    """Fill a section with these values, and the remainder with `rest`."""
    section[: len(values)] = values
    section[len(values) :] = rest


def put_items(section: Ints, items: Ints) -> int:
    """Write the items of a plan to a section; return their number."""
    section[: items.size] = items.reshape(-1)
    return len(items)
