"""Attention's part of a step: the plans of its kernels, and where new keys and values go, for every block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import ConfigError, EngineError
from inflight.execution.gpu.parts import Section, StepPart, put, put_items
from inflight.execution.gpu.rows import DeviceRows
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.step import HostStep, Ints
from inflight.layers.attention.backend import AttentionLayer, KVShape
from inflight.layers.attention.triton.backend import TableInputs, TritonAttention
from inflight.layers.attention.triton.plan import CHUNK_FIELDS, DECODE_FIELDS, MEMBER_FIELDS, PREFIX_FIELDS
from inflight.layers.attention.triton.planner import AttentionPlanner, DecodeWork
from inflight.layers.attention.triton.singles import SingleTokens
from inflight.layers.attention.triton.softmax import AttentionWorkspace, Items
from inflight.layers.attention.triton.tuning import HeadShape
from inflight.models.decoders.decoder import Decoder


@dataclass(frozen=True, slots=True)
class PlannedTables:
    """Block tables whose layers have the same plans: they keep the same tokens, and their heads have the same shape."""

    window: int | None
    planner: AttentionPlanner


class DeviceAttention(StepPart):
    def __init__(self, decoder: Decoder, shape: KVShape, rows: DeviceRows, max_decodes: int) -> None:
        self._rows = rows
        planners = _planners(decoder, shape, max_decodes)
        # By block table; None: no layer here has keys and values in it.
        self._planned = [
            None if planner is None else PlannedTables(window, planner)
            for window, planner in zip(shape.windows, planners, strict=True)
        ]
        self._plans = list(dict.fromkeys(plan for plan in self._planned if plan is not None))
        used = list(dict.fromkeys(plan.planner for plan in self._plans))
        # Where layers' heads differ, those sizes that all of them have a tile for.
        self.short_context_sizes = min(
            (planner.short_context_sizes for planner in used), key=len, default=range(0)
        )
        self.workspace = AttentionWorkspace.allocate(
            [planner.workspace_need for planner in used], rows.device
        )
        self._slot_mappings = [f"slot_mapping_{table}" for table in range(len(shape.windows))]
        self._decodes: list[DecodeWork] = []  # of the next step, by plan; empty: there are none
        self.tables: tuple[TableInputs | None, ...] = ()  # of the step that is open

    def single_tokens(self, layers: Sequence[AttentionLayer]) -> SingleTokens:
        """Return what plans single tokens of rows for these layers on the device."""
        rows, tunings = self._rows, {}
        for layer in layers:
            plan = self._planned[layer.table]
            assert plan is not None
            if plan.window is not None:
                raise ConfigError(
                    "speculative_config: on GPUs, layers that guess tokens cannot have windows so far"
                )
            tunings[layer.table] = plan.planner.tuning
        return SingleTokens(tunings, rows.block_tables, rows.block_size, self.workspace)

    def begin(self, step: HostStep) -> None:
        """Plan the decodes."""
        rows, count = self._rows, step.num_decodes
        self._decodes = []
        if not count:
            return
        contexts, entry_rows = step.context_lens[:count], step.rows[:count]
        self._decodes = [
            plan.planner.decodes(
                contexts,
                entry_rows,
                rows.mirror[self._planned.index(plan)],
                rows.version,
                step.only_decodes,
                plan.window,
            )
            for plan in self._plans
        ]
        step.prefix = any(work.prefix is not None for work in self._decodes)
        step.short_context = bool(self._decodes) and all(work.short_context for work in self._decodes)

    def sections(self, shape: StepShape) -> dict[str, Section]:
        sections = {name: Section(shape.num_tokens, -1) for name in self._slot_mappings}
        for index, plan in enumerate(self._plans):
            planner = plan.planner
            num_decode_items = planner.max_decode_items(shape.num_decodes)
            sections |= _item_sections(f"decode_{index}", num_decode_items * DECODE_FIELDS)
            if shape.chunks:
                num_chunk_items = planner.max_chunk_items(shape.num_tokens, shape.num_chunks)
                sections |= _item_sections(f"chunk_{index}", num_chunk_items * CHUNK_FIELDS)
            if _shares(shape, plan):
                sections |= _item_sections(f"prefix_{index}", planner.max_prefix_items * PREFIX_FIELDS)
                sections[f"members_{index}"] = Section(shape.num_decodes * MEMBER_FIELDS)
        return sections

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        for name, slot_mapping in zip(self._slot_mappings, step.slot_mapping, strict=True):
            put(sections[name], slot_mapping)
        for index, work in enumerate(self._decodes):
            _put_items(sections, f"decode_{index}", work.decode.items)
            if work.prefix is not None:
                _put_items(sections, f"prefix_{index}", work.prefix.items)
                put(sections[f"members_{index}"], work.members().reshape(-1))
        if step.only_decodes:
            return
        first = step.num_decodes
        starts, contexts, rows = step.query_starts[first:], step.context_lens[first:], step.rows[first:]
        for index, plan in enumerate(self._plans):
            chunks = plan.planner.chunks(starts, contexts, rows, plan.window)
            _put_items(sections, f"chunk_{index}", chunks.items)

    def open(self, shape: StepShape, sections: dict[str, Tensor]) -> None:
        self.tables = tuple(
            None if plan is None else self._inputs(shape, table, plan, sections)
            for table, plan in enumerate(self._planned)
        )

    def _inputs(
        self, shape: StepShape, table: int, plan: PlannedTables, sections: dict[str, Tensor]
    ) -> TableInputs:
        planner, index = plan.planner, self._plans.index(plan)
        max_chunks = planner.max_chunk_items(shape.num_tokens, shape.num_chunks)
        shares = _shares(shape, plan)
        return TableInputs(
            tuning=planner.tuning,
            slot_mapping=sections[self._slot_mappings[table]],
            block_tables=self._rows.block_tables[table],
            decodes=_items(sections, f"decode_{index}", planner.max_decode_items(shape.num_decodes)),
            prefixes=_items(sections, f"prefix_{index}", planner.prefix_programs) if shares else None,
            members=sections[f"members_{index}"] if shares else None,
            chunks=_items(sections, f"chunk_{index}", max_chunks) if shape.chunks else None,
        )


def _shares(shape: StepShape, plan: PlannedTables) -> bool:
    """Return whether decodes may share prefixes. With a window they do not: see `AttentionPlanner.decodes`."""
    return shape.prefix and plan.window is None


def _item_sections(name: str, size: int) -> dict[str, Section]:
    return {f"num_{name}_items": Section(1), f"{name}_items": Section(size)}


def _put_items(sections: dict[str, Ints], name: str, items: Ints) -> None:
    put_items(sections[f"{name}_items"], sections[f"num_{name}_items"], items)


def _items(sections: dict[str, Tensor], name: str, programs: int) -> Items:
    return Items(sections[f"{name}_items"], sections[f"num_{name}_items"], programs)


def _planners(decoder: Decoder, shape: KVShape, max_decodes: int) -> list[AttentionPlanner | None]:
    """Return the planner of each block table, one for all tables whose layers have heads of the same shape; None for
    tables of layers that other stages have."""
    backend, processors = decoder.attention, _num_processors(decoder.device)
    if not isinstance(backend, TritonAttention):
        raise EngineError(f"GpuRunner cannot plan for {type(backend).__name__}")
    is_quantized = any(layer.is_quantized for layer in shape.layers)
    planners: dict[HeadShape, AttentionPlanner] = {}
    of_tables: list[AttentionPlanner | None] = [None] * len(shape.windows)
    for layer in decoder.attention_layers:
        heads = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if heads not in planners:
            planners[heads] = AttentionPlanner(
                backend.tuning_for(heads),
                heads,
                shape.block_size,
                max_decodes,
                processors,
                is_quantized=is_quantized,
            )
        of_tables[layer.table] = planners[heads]
    return of_tables


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 in the interpreter, where splitting work gains nothing."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
