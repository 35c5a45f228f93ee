"""A kernel's work on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Items:
    """What a plan (`plan.py`) becomes, as a captured graph needs it: room for many items, and how many there are.

    A program without an item costs about a microsecond, and where one fills a multiprocessor they come one after the
    other there: room should not be much more than needed.
    """

    table: Tensor  # int32, rows of the kernel's fields, flat or not
    count: Tensor  # [1] int32: rows from here on are not read
    programs: (
        int  # for each KV head. Of prefixes each takes items in turn; all others have one for every row.
    )
