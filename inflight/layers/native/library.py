"""The compiled library for Python: built if necessary, loaded and typed once per process."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from inflight.layers.native.build import NativeBuildError, build, cache_folder, find_compiler

logger = logging.getLogger(__name__)

# Addresses and sizes in the order of the C functions' arguments.
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_Function = Callable[..., Any]

_AGGREGATES = (ctypes.Structure, ctypes.Array)
_TYPES: dict[str, type[Any]] = {"pointer": _P, "int64": _L, "float": _F}


class StructureLayout:
    """A structure of the library, filled by the names of its fields."""

    def __init__(self, description: str) -> None:
        """Take a line of structures.cpp: "NAME SIZE FIELD:TYPE:OFFSET:SIZE ..."."""
        self.name, size, *fields = description.split()
        described = [field.split(":") for field in fields]
        types = [(name, _TYPES[type_name]) for name, type_name, _, _ in described]
        self._structure: Any = type(self.name, (ctypes.Structure,), {"_fields_": types, "targets": ()})
        self._fields = {name for name, _ in types}
        self._pointers = [name for name, type_name in types if type_name is _P]
        places = [(name, int(offset), int(width)) for name, _, offset, width in described]
        for name, offset, width in [*places, ("the end", int(size), 0)]:
            here = getattr(self._structure, name, None)
            actual = (here.offset, here.size) if here else (ctypes.sizeof(self._structure), 0)
            if actual != (offset, width):
                raise NativeBuildError(
                    f"{self.name}: {name} is at byte {offset} and has {width} bytes in the compiled library, "
                    f"but is at byte {actual[0]} and has {actual[1]} in Python"
                )

    def __call__(self, **values: Any) -> Any:
        """Return a structure with these values of all fields. It keeps the structures and arrays alive to which its
        pointers lead, but no tensors."""
        if values.keys() != self._fields:
            wrong = ", ".join(sorted(values.keys() ^ self._fields))
            raise TypeError(f"{self.name} was not filled: fields are missing or unknown ({wrong})")
        targets = [name for name in self._pointers if isinstance(values[name], _AGGREGATES)]
        if not targets:
            return self._structure(**values)
        addresses = {name: ctypes.addressof(values[name]) for name in targets}
        filled = self._structure(**{**values, **addresses})
        filled.targets = [values[name] for name in targets]
        return filled

    def array(self, items: Sequence[Any]) -> Any:
        """Return copies of structures side by side."""
        array = (self._structure * len(items))(*items)
        array.targets = [item.targets for item in items]
        return array


class Library:
    """The C functions. Tensors go in as `data_ptr()`, so callers keep them alive and check their layout."""

    def __init__(self, path: Path) -> None:
        self._dll = ctypes.CDLL(str(path))
        self.threads = num_threads()  # may be changed at any time
        self.panel = int(self._bind("panel", result=_L)())  # output features of one weight panel
        nodes = numa_nodes()
        self.num_nodes = max(1, len(nodes))
        self._place_team(nodes)
        self._describe(self._bind("structures", result=ctypes.c_char_p)().decode())
        self.instructions = _allowed(self._bind("instructions", result=ctypes.c_char_p)().decode())
        self.advise = self._bind("advise", _P, _L)
        self._method = self._bind("method", ctypes.c_char_p, ctypes.c_char_p, result=_P)
        self.linear = self._bind("linear", _P, _P, _P, _F, _P, _L, _L, _I, _I)
        self.gated_linear = self._bind("gated_linear", _P, _P, _P, _F, _P, _L, _L, _I)
        self.gather = self._bind("gather", _P, _P, _P, _L, _I)
        self.panel_bytes = self._bind("panel_bytes", _P, _L, _L, result=_L)
        self.experts = self._bind("experts", _P, _P, _P, _P, _P, _L, _I, _I)
        pack = (_P, _P, _L, _L, _L, _L, _L, _I)
        self.pack_f32 = self._bind("pack_f32", *pack)
        self.pack_bf16 = self._bind("pack_bf16", *pack)
        self.pack_int8 = self._bind("pack_int8", _P, _P, _P, _L, _L, _L, _I)
        self.pack_int4 = self._bind("pack_int4", _P, _P, _P, _P, _L, _L, _L, _L, _I)
        self.pack_blocks = self._bind("pack_blocks", _P, _P, _P, _L, _L, _I)
        self.rms_norm = self._bind("rms_norm", _P, _L, _L, _L, _L, _P, _P, _L, _F, _I)
        self.layer_norm = self._bind("layer_norm", _P, _P, _P, _P, _L, _L, _F, _I)
        self.add_layer_norm = self._bind("add_layer_norm", _P, _P, _P, _P, _L, _L, _F, _I)
        self.add = self._bind("add", _P, _P, _L, _I)
        self.softcap = self._bind("softcap", _P, _L, _F, _I)
        self.sigmoid_gate = self._bind("sigmoid_gate", _P, _P, *(_L,) * 4, _I)
        self.rotate = self._bind("rotate", _P, _L, _L, _L, _L, _P, _P, _L, _I)
        self.gate = self._bind("gate", _P, _P, _L, _L, _L, _I)
        self.attend_sequences = self._bind("attend_sequences", _P, _P, _P, *(_L,) * 4, _F, _I)
        self.attend = self._bind("attend", *(_P,) * 5, _L, _P, _I)
        self.decoder_layers = self._bind("decoder_layers", _P, _L, _P, _P, _I)
        self.delta_net = self._bind("delta_net", *(_P,) * 13, *(_L,) * 8, _F, _I)
        logprobs = (_P, _P, _P, _L, _I)
        self.sample = self._bind("sample", _P, _L, _L, *(_P,) * 4, _L, _P, _P, *logprobs)
        self.token_logprobs = self._bind("token_logprobs", _P, _L, _L, _P, *logprobs)
        # Operations of a group of ranks; these return 0, -1 or 1 + a rank: see group.cpp.
        member = (_P, _I, _I, _L, _I, _L)
        self.group_bytes = int(self._bind("group_bytes", result=_L)())
        self.stream_bytes = int(self._bind("stream_bytes", result=_L)())
        self.group_lose = self._bind("group_lose", _P)
        self.group_sum = self._bind("group_sum", *member, _P, _L, result=_I)
        self.group_gather = self._bind("group_gather", *member, _P, _L, _P, _P, result=_I)
        self.stream_write = self._bind("stream_write", _P, _P, _I, _L, _I, _P, _L, result=_I)
        self.stream_read = self._bind("stream_read", _P, _P, _I, _L, _I, _P, _L, result=_I)
        self.beat = self._bind("beat", _P, _L)

    def _describe(self, text: str) -> None:
        """Read what structures.cpp lists."""
        lines = [line.split(maxsplit=2) for line in text.splitlines()]
        layouts = {
            name: StructureLayout(f"{name} {fields}") for entry, name, fields in lines if entry == "structure"
        }
        numbers = {
            name: {word: number for number, word in enumerate(words.split())}
            for entry, name, words in lines
            if entry == "numbers"
        }
        self.activations, self.scores = numbers["Activation"], numbers["Scores"]
        self.matrix, self.linear_layer = layouts["Matrix"], layouts["Linear"]
        self.experts_layer, self.decoder_layer = layouts["Experts"], layouts["DecoderLayer"]
        self.heads, self.step = layouts["Heads"], layouts["Step"]

    def method(self, weights: str, instructions: frozenset[str]) -> int:
        """Return the best method that multiplies weights of this type by these instructions."""
        method = self._method(weights.encode(), " ".join(instructions).encode())
        if method is None:
            raise NativeBuildError(f"the compiled library cannot multiply weights of type {weights}")
        return int(method)

    def _place_team(self, nodes: dict[int, list[int]]) -> None:
        """Divide threads and weights between the machine's NUMA nodes."""
        if len(nodes) < 2:
            return
        starts = accumulate(map(len, nodes.values()), initial=0)
        place = self._bind("place_team", _P, _P, _P, _L)
        lists = [array("i", values) for values in (nodes, starts, chain.from_iterable(nodes.values()))]
        place(*(values.buffer_info()[0] for values in lists), len(nodes))

    def _bind(self, name: str, *arguments: type, result: type | None = None) -> _Function:
        function = getattr(self._dll, f"inflight_{name}", None)
        if function is None:
            raise NativeBuildError(f"the compiled library has no function inflight_{name}")
        function.argtypes = arguments
        function.restype = result
        return function  # type: ignore[no-any-return]


def _allowed(available: str) -> frozenset[str]:
    """Return the instructions in a space-separated list that INFLIGHT_INSTRUCTIONS, a comma-separated list, allows."""
    names = frozenset(available.split())
    listed = os.environ.get("INFLIGHT_INSTRUCTIONS")
    return names if listed is None else names & set(listed.split(","))


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[int, list[int]]:
    """Return the processors that this process may use by NUMA node, or nothing where that is not known."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    usable, nodes = os.sched_getaffinity(0), {}
    for file in folder.glob("node[0-9]*/cpulist"):
        try:
            ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
        except OSError:
            return {}
        listed = {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
        if processors := sorted(listed & usable):
            nodes[int(file.parent.name.removeprefix("node"))] = processors
    return dict(sorted(nodes.items()))


def num_threads() -> int:
    """Return OMP_NUM_THREADS, or by default the number of cores available to this process."""
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal() and int(number) > 0:
        return int(number)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    try:  # hyperthreads of one core share its arithmetic units: one thread keeps them busy
        files = [Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in processors]
        return len({file.read_text() for file in files})
    except OSError:
        return len(processors)


@cache
def native_library() -> Library | None:
    """Return the library, or None if it is not available or disabled by INFLIGHT_NATIVE=0."""
    if os.environ.get("INFLIGHT_NATIVE") == "0":
        return None
    return open_library(find_compiler(), cache_folder())


def open_library(compiler: str | None, folder: Path) -> Library | None:
    """Build the library with `compiler` in `folder` and load it. Returns None, with a warning, if that fails."""
    try:
        if os.name != "posix":
            raise NativeBuildError(f"this is {os.name!r}, and they are compiled on POSIX systems only")
        if compiler is None:
            raise NativeBuildError("no C++ compiler was found (set CXX to name one)")
        return _open(compiler, folder)
    except (NativeBuildError, OSError) as error:
        logger.warning(
            "The CPU kernels cannot be compiled; falling back to plain torch, which is slower. %s", error
        )
        return None


def _open(compiler: str, folder: Path) -> Library:
    try:
        return Library(build(compiler, folder))
    except PermissionError:
        # The home folder is not writable. A loaded library outlives its file.
        with tempfile.TemporaryDirectory() as scratch:
            return Library(build(compiler, Path(scratch)))
