"""The parts of a step, and its upload: one packed array, in which every part declares, fills and opens sections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.step import HostStep, Ints, StepResult
from inflight.scheduling.batch import Admission

ALIGNMENT = 4  # sections start at multiples of 16 bytes, for wide loads

ShapeT = TypeVar("ShapeT", bound=Hashable)


class Section(NamedTuple):
    """A named range of the upload."""

    size: int  # int32 words
    padding: int = 0  # the value of words that a step does not fill; a warm-up step fills none


class StepPart:
    """The contribution of one feature of the rows to a step. A part overrides the methods that it needs.

    For every step, `GpuRunner` calls each method for all parts in order, and the methods in the order in which they
    stand here. Only `open` is part of a captured graph.
    """

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Rows get other requests. Not called if there are none."""

    def begin(self, step: HostStep) -> None:
        """Do what precedes the upload, and set in `step` what its shape depends on."""

    def sections(self, shape: StepShape) -> dict[str, Section]:  # noqa: ARG002
        """Return the sections that a step of this shape needs. Called once per shape."""
        return {}

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        """Write the step into the sections, on the host. They contain their padding."""

    def open(self, shape: StepShape, sections: dict[str, Tensor]) -> None:
        """Enqueue what precedes the forward pass, and keep what its layers read."""

    def results(self, step: HostStep, sections: dict[str, Tensor], hidden: Tensor) -> StepResult | None:  # noqa: ARG002
        """Enqueue what follows the forward pass; return what will be read once the device is done.

        `hidden` [S, hidden_size] are those of the samples, or [T, hidden_size] if prompts are scored or there is a next
        stage.
        """
        return None

    def warm_up(self, shapes: Collection[StepShape]) -> None:
        """Compile what steps of these shapes launch outside of their graphs."""


def overridden(parts: Sequence[StepPart], method: str) -> list[Any]:
    """Return this method of the parts that have one, so that a step makes no calls that do nothing."""
    nothing = getattr(StepPart, method)
    return [getattr(part, method) for part in parts if getattr(type(part), method) is not nothing]


def merged_sections(parts: Sequence[StepPart], shape: StepShape) -> dict[str, Section]:
    """Return the sections of all parts. Every part may read those of others, so their names must differ."""
    sections: dict[str, Section] = {}
    for part in parts:
        declared = part.sections(shape)
        if clash := sections.keys() & declared.keys():
            raise EngineError(f"{type(part).__name__} declares sections of another part: {sorted(clash)}")
        sections |= declared
    return sections


class Layout:
    """Where the sections of one shape lie in the packed array."""

    on_device: dict[str, Tensor]  # those of the array in device memory

    def __init__(self, sections: Mapping[str, Section]) -> None:
        self.slices: dict[str, slice] = {}
        end = 0
        for name, section in sections.items():
            self.slices[name] = slice(end, end + section.size)
            end += -(-section.size // ALIGNMENT) * ALIGNMENT
        self.padding = np.zeros(end, dtype=np.int32)
        for name, section in sections.items():
            self.padding[self.slices[name]] = section.padding

    @property
    def size(self) -> int:
        return len(self.padding)


class PackedUpload(Generic[ShapeT]):
    """A step's inputs in device memory. All steps use the same buffer: they run one after another."""

    def __init__(
        self,
        sections: Callable[[ShapeT], Mapping[str, Section]],
        largest: Iterable[ShapeT],
        device: torch.device,
    ) -> None:
        """`largest`: the shapes that have the largest uploads."""
        self._sections = sections
        self._device = device
        self._layouts: dict[ShapeT, Layout] = {}
        size = max(Layout(sections(shape)).size for shape in largest)
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def shapes_met(self) -> frozenset[ShapeT]:
        return frozenset(self._layouts)

    def layout(self, shape: ShapeT) -> Layout:
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = Layout(self._sections(shape))
            layout.on_device = {name: self._packed[part] for name, part in layout.slices.items()}
        return layout

    def stage(self, layout: Layout) -> tuple[Tensor, dict[str, Ints]]:
        """Return host memory that contains padding, whole and as sections."""
        pinned, array = staging(layout.size, self._device)
        array[:] = layout.padding
        return pinned, {name: array[part] for name, part in layout.slices.items()}

    def send(self, pinned: Tensor) -> None:
        self._packed[: len(pinned)].copy_(pinned, non_blocking=True)


def staging(size: int, device: torch.device) -> tuple[Tensor, Ints]:
    """Return pinned host memory for an asynchronous upload, as a tensor and as an array.

    Torch reuses such memory only after the copies from it are done, so nothing here needs to wait.
    """
    tensor = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor, tensor.numpy()


def put(section: Ints, values: NDArray[Any]) -> None:
    """Fill the beginning of a section with values [n]."""
    section[: len(values)] = values


def put_items(section: Ints, count: Ints, items: Ints) -> None:
    """Write the items of a plan to a section, and their number to another one."""
    section[: items.size] = items.reshape(-1)
    count[0] = len(items)
