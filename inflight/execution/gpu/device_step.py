"""One step in device memory: the packed upload, its sections for each shape, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.attention.triton.backend import TableStep, TritonStep
from inflight.attention.triton.plan import CHUNK_FIELDS, DECODE_FIELDS, MEMBER_FIELDS, PREFIX_FIELDS
from inflight.attention.triton.planner import AttentionPlanner, DecodeWork
from inflight.attention.triton.softmax import AttentionWorkspace, Items
from inflight.execution.gpu.host_step import HostStep, Ints, Layout, put, put_items, staging
from inflight.execution.gpu.rows import DeviceRows, StepTokens, TableUpdates, open_step
from inflight.execution.gpu.shapes import Buckets, StepShape
from inflight.execution.gpu.states import DeviceStates
from inflight.execution.sampling.triton import MAX_LOGPROBS, LogprobBuffers, SamplingBatch
from inflight.scheduling.batch import Capture

MIN_UPDATES = 32  # table updates that fit every shape


@dataclass(frozen=True, slots=True)
class TableKind:
    """Block tables whose layers have the same plans: they keep the same tokens, and their heads have the same shape."""

    window: int | None
    planner: AttentionPlanner


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step."""

    tokens: Tensor  # [S] int32: the last token of each sampling entry
    batch: SamplingBatch  # rows are negative where nothing is sampled


class DeviceStep:
    """A step's inputs and results in device memory. All steps use the same buffers: they run one after another."""

    def __init__(
        self,
        rows: DeviceRows,
        buckets: Buckets,
        tables: Sequence[TableKind | None],
        workspace: AttentionWorkspace,
        states: DeviceStates | None = None,
    ) -> None:
        """`tables`: the kind of each block table; None: no layer here has keys and values in it."""
        self.rows = rows
        self._tables = tables
        self._kinds = list(dict.fromkeys(kind for kind in tables if kind is not None))
        self.states = states or DeviceStates([], 0, 1)
        self.buckets = buckets
        self.workspace = workspace
        device = rows.device
        self._slot_mappings = [f"slot_mapping_{table}" for table in range(len(rows.mirror))]
        self._layouts: dict[StepShape, Layout] = {}
        size = max(Layout(self._sizes(shape)).size for shape in buckets.largest())
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(buckets.tokens[-1], dtype=torch.int32, device=device)
        self._results = torch.zeros(2 * buckets.max_entries, dtype=torch.int32, device=device)
        # Packed, for the entries that want log-probabilities: see `LogprobBuffers`.
        self._logprobs = torch.zeros(
            buckets.max_entries * 3 * (1 + MAX_LOGPROBS), dtype=torch.int32, device=device
        )

    @property
    def shapes_met(self) -> frozenset[StepShape]:
        return frozenset(self._layouts)

    def layout(self, shape: StepShape) -> Layout:
        if shape not in self._layouts:
            self._layouts[shape] = Layout(self._sizes(shape))
        return self._layouts[shape]

    def _sizes(self, shape: StepShape) -> dict[str, int]:
        num_tokens, num_samples = shape.num_tokens, shape.num_samples
        num_updates = max(min(self.buckets.max_entries, num_tokens), MIN_UPDATES)
        sizes: dict[str, int] = {}
        for index, kind in enumerate(self._kinds):
            planner = kind.planner
            sizes |= {f"num_decode_{index}_items": 1, f"num_chunk_{index}_items": 1}
            sizes[f"decode_{index}_items"] = planner.max_decode_items(shape.num_decodes) * DECODE_FIELDS
            if shape.chunks:
                max_chunks = planner.max_chunk_items(num_tokens, shape.num_chunks)
                sizes[f"chunk_{index}_items"] = max_chunks * CHUNK_FIELDS
            if shape.prefix and kind.window is None:
                sizes[f"num_prefix_{index}_items"] = 1
                sizes[f"prefix_{index}_items"] = planner.max_prefix_items * PREFIX_FIELDS
                sizes[f"members_{index}"] = shape.num_decodes * MEMBER_FIELDS
        sizes |= dict.fromkeys(("token_rows", "positions", *self._slot_mappings), num_tokens)
        sizes |= dict.fromkeys(("sample_tokens", "sample_rows", "sample_lengths"), num_samples)
        sizes |= {"logprob_counts": num_samples, "logprob_places": num_samples, "logprob_width": 1}
        sizes |= dict.fromkeys(("update_rows", "update_columns", "update_blocks"), num_updates)
        return sizes | self.states.sizes(shape)

    # ---- on the host ----

    def upload(
        self,
        host: HostStep,
        updates: Ints,
        logprob_counts: Ints | None,
        scores: bool,
        captures: Sequence[Capture] = (),
    ) -> StepShape:
        """Upload a step and return its shape.

        `logprob_counts`: most likely tokens to report for each sampled token, negative for none; None if no entry wants
        any. `scores`: whether prompt tokens are scored.
        """
        rows, num_decodes = self.rows, host.num_decodes
        works = self._plan_decodes(host) if num_decodes else []
        shared = any(work.prefix is not None for work in works)
        num_samples = len(host.sample_tokens)
        if host.only_decodes:
            short_context = bool(works) and all(work.short_context for work in works)
            shape = self.buckets.decode(num_decodes, shared, short_context)
        else:
            num_chunks = len(host.rows) - num_decodes
            shape = self.buckets.mixed(host.num_tokens, num_decodes, num_chunks, num_samples, shared, scores)
        pinned, part = self._stage(shape)
        put(part["token_rows"], host.token_rows, -1)
        put(part["positions"], host.positions, 0)
        for name, slot_mapping in zip(self._slot_mappings, host.slot_mapping, strict=True):
            put(part[name], slot_mapping, -1)
        put(part["sample_tokens"], host.sample_tokens, -1)
        put(part["sample_rows"], host.sample_rows, -1)
        put(part["sample_lengths"], host.sample_lengths, 0)
        if logprob_counts is None:
            part["logprob_counts"][:] = -1
        else:
            put(part["logprob_counts"], logprob_counts, -1)
            put(part["logprob_places"], np.cumsum(logprob_counts >= 0, dtype=np.int32) - 1, 0)
            part["logprob_width"][0] = 1 + logprob_counts.max()
        if updates.shape[1] > len(part["update_rows"]):
            rows.write_tables(updates)
            updates = updates[:, :0]
        for name, values in zip(("update_rows", "update_columns", "update_blocks"), updates, strict=True):
            put(part[name], values, -1)
        self._plan(host, works, shape, part)
        self.states.fill(host, captures, shape, part)
        self._send(pinned)
        return shape

    def _plan_decodes(self, host: HostStep) -> list[DecodeWork]:
        """Plan the decodes for each kind of tables."""
        rows, count = self.rows, host.num_decodes
        contexts, entry_rows = host.context_lens[:count], host.rows[:count]
        return [
            kind.planner.decodes(
                contexts,
                entry_rows,
                rows.mirror[self._tables.index(kind)],
                rows.version,
                host.only_decodes,
                kind.window,
            )
            for kind in self._kinds
        ]

    def _plan(self, host: HostStep, works: list[DecodeWork], shape: StepShape, part: dict[str, Ints]) -> None:
        """Write the plans for each kind of tables."""
        num_decodes = host.num_decodes
        for index, kind in enumerate(self._kinds):
            num_items = num_chunk_items = num_prefix_items = 0
            if works:
                work = works[index]
                num_items = put_items(part[f"decode_{index}_items"], work.decode.items)
                if work.prefix is not None:
                    num_prefix_items = put_items(part[f"prefix_{index}_items"], work.prefix.items)
                    put_items(part[f"members_{index}"], work.members())
            if shape.chunks:
                starts, contexts = host.query_starts[num_decodes:], host.context_lens[num_decodes:]
                plan = kind.planner.chunks(starts, contexts, host.rows[num_decodes:], kind.window)
                num_chunk_items = put_items(part[f"chunk_{index}_items"], plan.items)
            part[f"num_decode_{index}_items"][0] = num_items
            part[f"num_chunk_{index}_items"][0] = num_chunk_items
            if shape.prefix and kind.window is None:
                part[f"num_prefix_{index}_items"][0] = num_prefix_items

    def upload_nothing(self, shape: StepShape) -> None:
        """Upload a step of this shape that is all padding."""
        pinned, part = self._stage(shape)
        for name, values in part.items():
            is_absent = name.endswith(("rows", "logprob_counts")) or name in self._slot_mappings
            values[:] = -1 if is_absent else 0
        self._send(pinned)

    def _stage(self, shape: StepShape) -> tuple[Tensor, dict[str, Ints]]:
        layout = self.layout(shape)
        pinned, array = staging(layout.size, self.rows.device)
        return pinned, layout.on_host(array)

    def _send(self, pinned: Tensor) -> None:
        self._packed[: len(pinned)].copy_(pinned, non_blocking=True)

    # ---- on the device ----

    def open(self, shape: StepShape) -> tuple[Tensor, TritonStep]:
        """Launch the first kernel of the step; return its token ids [T] and its attention inputs."""
        part = self.layout(shape).on_device(self._packed)
        rows, token_ids = self.rows, self._token_ids[: shape.num_tokens]
        updates = TableUpdates(part["update_rows"], part["update_columns"], part["update_blocks"])
        tokens = StepTokens(part["token_rows"], part["positions"], token_ids)
        open_step(rows.tokens, rows.block_tables, updates, tokens)
        tables = tuple(
            None if kind is None else self._table_step(shape, table, kind, part)
            for table, kind in enumerate(self._tables)
        )
        state = self.states.step(shape, part)
        live, workspace = part["token_rows"], self.workspace
        return token_ids, TritonStep(part["positions"], live, tables, shape.short_context, workspace, state)

    def _table_step(
        self, shape: StepShape, table: int, kind: TableKind, part: dict[str, Tensor]
    ) -> TableStep:
        planner, index = kind.planner, self._kinds.index(kind)
        max_chunks = planner.max_chunk_items(shape.num_tokens, shape.num_chunks)
        prefix = shape.prefix and kind.window is None
        return TableStep(
            tuning=planner.tuning,
            slot_mapping=part[self._slot_mappings[table]],
            block_tables=self.rows.block_tables[table],
            decodes=_items(part, f"decode_{index}", planner.max_decode_items(shape.num_decodes)),
            prefixes=_items(part, f"prefix_{index}", planner.prefix_programs) if prefix else None,
            members=part[f"members_{index}"] if prefix else None,
            chunks=_items(part, f"chunk_{index}", max_chunks) if shape.chunks else None,
        )

    def samples(self, shape: StepShape) -> Samples:
        part = self.layout(shape).on_device(self._packed)
        ids, bad = self.results(shape)
        logprobs = LogprobBuffers(
            part["logprob_counts"], part["logprob_places"], part["logprob_width"], self._logprobs
        )
        batch = SamplingBatch(part["sample_rows"], part["sample_lengths"], ids, bad, logprobs)
        return Samples(part["sample_tokens"], batch)

    def results(self, shape: StepShape) -> Tensor:
        """Return [2, S] int32: token ids, and 0 or why sampling failed."""
        return self._results[: 2 * shape.num_samples].view(2, shape.num_samples)

    def logprobs(self, num_places: int, width: int) -> Tensor:
        """Return the latest step's log-probabilities, flat [num_places, 3, width] int32."""
        return self._logprobs[: num_places * 3 * width]


def _items(part: dict[str, Tensor], kind: str, programs: int) -> Items:
    return Items(part[f"{kind}_items"], part[f"num_{kind}_items"], programs)
