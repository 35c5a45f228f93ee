"""Transfers of hidden states between stages: through shared memory, or directly between GPUs (CUDA IPC)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.peer_memory import HANDLE_BYTES, PeerMemory, copy_on_device
from inflight.execution.parallel.shared_memory import SharedStream
from inflight.execution.runner import StageLinks
from inflight.models.decoders.decoder import Decoder


class SharedLinks:
    """Implements `StageLinks` through shared memory. Every rank of a stage has all hidden states, and sends them to its
    counterpart in the next stage."""

    def __init__(self, memory: RankMemory, hidden_size: int) -> None:
        layout, rank = memory.ranks, memory.rank
        self._hidden_size = hidden_size
        self._previous: SharedStream | None = memory.hand_over(rank) if layout.stage(rank) else None
        is_last = layout.is_last_stage(rank)
        self._next: SharedStream | None = None if is_last else memory.hand_over(rank + layout.tensor)

    def receive(self, into: Tensor) -> None:
        assert self._previous is not None
        hidden = torch.empty(len(into), self._hidden_size)
        self._previous.read(0, hidden.data_ptr(), hidden.nbytes)
        into.copy_(hidden)

    def hand_over(self, hidden: Tensor) -> None:
        assert self._next is not None
        hidden = hidden.to("cpu", torch.float32).contiguous()
        self._next.write(hidden.data_ptr(), hidden.nbytes)


_LAUNCHED = b"\1"  # tells the next stage's host that a step's event may be waited for


def device_links(memory: RankMemory, decoder: Decoder) -> StageLinks:
    """Connect the stages: through the host where two GPUs cannot reach each other. Both ends decide the same."""
    layout, rank = memory.ranks, memory.rank
    device, hidden_size = decoder.device, decoder.spec.hidden_size
    num_values = layout.hand_over // layout.pipeline // torch.float32.itemsize
    region = num_values * decoder.kernels.compute_dtype.itemsize
    torch.cuda.set_device(device)
    next_stage: Ring | SharedLinks | None = None
    previous_stage: PeerRing | SharedLinks | None = None
    if not layout.is_last_stage(rank):
        reaches = _reach(device, layout.tensor)
        next_stage = Ring(memory, region, device) if reaches else SharedLinks(memory, hidden_size)
    if layout.stage(rank):
        reaches = _reach(device, -layout.tensor)
        previous_stage = PeerRing(memory, region, device) if reaches else SharedLinks(memory, hidden_size)
    return DeviceLinks(previous_stage, next_stage)


def _reach(device: torch.device, distance: int) -> bool:
    """Return whether this GPU and the one `distance` ranks away can access each other's memory."""
    count = torch.cuda.device_count()
    mine = device.index or 0
    other = (mine + distance) % count  # ranks take GPUs in order
    return mine == other or (
        torch.cuda.can_device_access_peer(mine, other) and torch.cuda.can_device_access_peer(other, mine)
    )


class DeviceLinks:
    """Implements `StageLinks`. Each end may be direct or through the host."""

    def __init__(
        self, previous_stage: PeerRing | SharedLinks | None, next_stage: Ring | SharedLinks | None
    ) -> None:
        self._previous = previous_stage
        self._next = next_stage

    def receive(self, into: Tensor) -> None:
        assert self._previous is not None
        self._previous.receive(into)

    def hand_over(self, hidden: Tensor) -> None:
        assert self._next is not None
        self._next.hand_over(hidden)


class Ring:
    """The sending end: a ring in memory of this stage's device, with a region and an event for each step in flight.

    As many steps are in flight as there are stages, so a region has been read before it is written again. The host
    notifies the next stage's host when a step is launched, and that one makes its device wait for the event. No host
    waits for a device.
    """

    def __init__(self, memory: RankMemory, region: int, device: torch.device) -> None:
        layout = memory.ranks
        self._stream: SharedStream = memory.hand_over(memory.rank + layout.tensor)
        self._region = region  # bytes
        self._buffer = PeerMemory(layout.pipeline * region)
        memory.before_close(self._buffer.close)
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(layout.pipeline)]  # type: ignore[no-untyped-call]
        self._count = 0
        handles = [event.ipc_handle() for event in self._events]  # type: ignore[no-untyped-call]
        self._stream.send(self._buffer.handle + b"".join(handles))
        self._device = device

    def hand_over(self, hidden: Tensor) -> None:
        index = self._count % len(self._events)
        self._count += 1
        hidden = hidden.contiguous()
        if hidden.nbytes > self._region:
            raise EngineError(f"hidden states of {hidden.nbytes} bytes do not fit a region of {self._region}")
        stream = torch.cuda.current_stream(self._device)
        copy_on_device(self._buffer.address + index * self._region, hidden.data_ptr(), hidden.nbytes, stream)
        self._events[index].record(stream)
        self._stream.write(_LAUNCHED, len(_LAUNCHED))


class PeerRing:
    """The receiving end: the ring of the previous stage."""

    def __init__(self, memory: RankMemory, region: int, device: torch.device) -> None:
        self._stream: SharedStream = memory.hand_over(memory.rank)
        self._region = region
        self._device = device
        self._memory = memory
        self._message = ctypes.create_string_buffer(len(_LAUNCHED))
        self._address: int | None = None
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def receive(self, into: Tensor) -> None:
        if self._address is None:
            self._open()
        assert self._address is not None
        assert into.is_contiguous()
        self._stream.read(0, ctypes.addressof(self._message), len(_LAUNCHED))
        index = self._count % len(self._events)
        self._count += 1
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._events[index])
        copy_on_device(into.data_ptr(), self._address + index * self._region, into.nbytes, stream)

    def _open(self) -> None:
        message = bytes(self._stream.receive(0))
        handle, events = message[:HANDLE_BYTES], message[HANDLE_BYTES:]
        size = len(events) // self._memory.ranks.pipeline
        opened = PeerMemory(0)
        self._memory.before_close(opened.close)
        self._address = opened.open(handle)
        self._events = [
            torch.cuda.Event.from_ipc_handle(self._device, events[start : start + size])  # type: ignore[no-untyped-call]
            for start in range(0, len(events), size)
        ]
