"""How layers on a GPU hold quantized weights.

Codes of 8 bits are held as their scheme has them. Four codes of 4 bits share a 16-bit word, in an order that
`triton/int4.py` and `triton/mxfp4.py` describe, and each group of columns of a row has 32 bits of scales and zero
points. Nothing here needs Triton: `inflight plan` counts the memory of a GPU on any machine.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.layers.formats.schemes import Codes, GroupedMatrix, GroupScheme, Scheme

_WIDE_GROUP = 128  # columns: of rows with a single scale, and of four groups of MXFP4


def has_gpu_kernels(scheme: Scheme, experts: bool = False) -> bool:
    """Return whether layers on a GPU hold this scheme, or their experts; if not, they hold plain weights."""
    if not isinstance(scheme, GroupScheme):
        return False
    groups: dict[Codes, tuple[int, ...]] = {"fp8": (0, 128), "fp4": (32,) if experts else ()}
    return scheme.group in groups.get(scheme.codes, (0, 32, 64, 128))


class Words(NamedTuple):
    """Matrices [N, K] of 4-bit codes, or some of them."""

    codes: Tensor  # [..., N, words] int16
    scales: Tensor  # [..., groups, N] int32
    group: int  # columns of a group


def empty_words(
    scheme: GroupScheme, num_rows: int, num_columns: int, device: torch.device, *count: int
) -> Words:
    """Return memory for one matrix, or for `count` of them."""
    group = _WIDE_GROUP if scheme.codes == "fp4" else scheme.group or _WIDE_GROUP
    num_groups = -(-num_columns // group)
    return Words(
        torch.empty(*count, num_rows, num_groups * group // 4, dtype=torch.int16, device=device),
        torch.zeros(*count, num_groups, num_rows, dtype=torch.int32, device=device),
        group,
    )


class WordScheme(GroupScheme):
    """A scheme of 4-bit codes whose matrices have the size that they have on a GPU. They cannot be computed with."""

    __slots__ = ()

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> GroupedMatrix:
        words = empty_words(self, num_rows, num_columns, device)
        return GroupedMatrix(self, num_columns, words.codes, words.scales)


def scheme_on_gpu(scheme: Scheme, experts: bool) -> Scheme | None:
    """Return a scheme of matrices as large as those of layers on a GPU; None: they hold plain weights."""
    if not has_gpu_kernels(scheme, experts):
        return None
    assert isinstance(scheme, GroupScheme)
    return WordScheme(**asdict(scheme)) if scheme.bits[scheme.codes] == 4 else scheme
