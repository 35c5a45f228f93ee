"""Hidden states from stage to stage between GPUs, straight from the memory of one to that of the other."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.forward import StageLinks
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.links import SharedLinks
from inflight.execution.parallel.peer_memory import HANDLE_BYTES, PeerMemory, copy_on_device
from inflight.execution.parallel.stream import SharedStream
from inflight.models.decoders.decoder import Decoder

_TOLD = b"\1"  # what a step is for the host of the stage behind: that it may be waited for


def device_links(memory: RankMemory, decoder: Decoder) -> StageLinks:
    """Through the host where a GPU does not reach that of the stage behind. Both ends find the same."""
    layout, rank = memory.ranks, memory.rank
    device, hidden_size = decoder.device, decoder.spec.hidden_size
    slot = (
        layout.hand_over // layout.pipeline // torch.float32.itemsize * decoder.kernels.compute_dtype.itemsize
    )
    torch.cuda.set_device(device)
    ahead: Ring | SharedLinks | None = None
    behind: PeerRing | SharedLinks | None = None
    if not layout.is_last_stage(rank):
        reaches = _reach(device, layout.tensor)
        ahead = Ring(memory, slot, device) if reaches else SharedLinks(memory, hidden_size)
    if layout.stage(rank):
        reaches = _reach(device, -layout.tensor)
        behind = PeerRing(memory, slot, device) if reaches else SharedLinks(memory, hidden_size)
    return DeviceLinks(behind, ahead)


def _reach(device: torch.device, distance: int) -> bool:
    """Whether this GPU and the one that is so many ranks away read each other's memory. Ranks take GPUs in order."""
    count = torch.cuda.device_count()
    mine = device.index or 0
    other = (mine + distance) % count
    return mine == other or (
        torch.cuda.can_device_access_peer(mine, other) and torch.cuda.can_device_access_peer(other, mine)
    )


class DeviceLinks:
    """Implements `StageLinks`, with either end in its own way."""

    def __init__(self, behind: PeerRing | SharedLinks | None, ahead: Ring | SharedLinks | None) -> None:
        self._behind = behind
        self._ahead = ahead

    def receive(self, into: Tensor) -> None:
        assert self._behind is not None
        self._behind.receive(into)

    def hand_over(self, hidden: Tensor) -> None:
        assert self._ahead is not None
        self._ahead.hand_over(hidden)


class Ring:
    """What a stage leaves for the one ahead, in memory of its own device: a slot and an event for each step in flight.

    As many steps are in flight as there are stages, so a slot has been read when it is written again. The host tells
    the other host of each step as soon as it is launched; that one has its device wait for the event. No host waits.
    """

    def __init__(self, memory: RankMemory, slot: int, device: torch.device) -> None:
        layout = memory.ranks
        self._stream: SharedStream = memory.hand_over(memory.rank + layout.tensor)
        self._slot = slot  # bytes
        self._buffer = PeerMemory(layout.pipeline * slot)
        memory.before_close(self._buffer.close)
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(layout.pipeline)]  # type: ignore[no-untyped-call]
        self._count = 0
        handles = [event.ipc_handle() for event in self._events]  # type: ignore[no-untyped-call]
        self._stream.send(self._buffer.handle + b"".join(handles))
        self._device = device

    def hand_over(self, hidden: Tensor) -> None:
        place = self._count % len(self._events)
        self._count += 1
        hidden = hidden.contiguous()
        if hidden.nbytes > self._slot:
            raise EngineError(f"a step of {len(hidden)} tokens is larger than what stages hand over")
        stream = torch.cuda.current_stream(self._device)
        copy_on_device(self._buffer.address + place * self._slot, hidden.data_ptr(), hidden.nbytes, stream)
        self._events[place].record(stream)
        self._stream.write(_TOLD, len(_TOLD))


class PeerRing:
    """The other end: the ring of the stage behind."""

    def __init__(self, memory: RankMemory, slot: int, device: torch.device) -> None:
        self._stream: SharedStream = memory.hand_over(memory.rank)
        self._slot = slot
        self._device = device
        self._memory = memory
        self._told = ctypes.create_string_buffer(len(_TOLD))
        self._address: int | None = None
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def receive(self, into: Tensor) -> None:
        if self._address is None:
            self._open()
        assert self._address is not None
        assert into.is_contiguous()
        self._stream.read(0, ctypes.addressof(self._told), len(_TOLD))
        place = self._count % len(self._events)
        self._count += 1
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._events[place])
        copy_on_device(into.data_ptr(), self._address + place * self._slot, into.nbytes, stream)

    def _open(self) -> None:
        told = bytes(self._stream.receive(0))
        handle, events = told[:HANDLE_BYTES], told[HANDLE_BYTES:]
        size = len(events) // self._memory.ranks.pipeline
        opened = PeerMemory(0)
        self._memory.before_close(opened.close)
        self._address = opened.open(handle)
        self._events = [
            torch.cuda.Event.from_ipc_handle(self._device, events[at : at + size])  # type: ignore[no-untyped-call]
            for at in range(0, len(events), size)
        ]
