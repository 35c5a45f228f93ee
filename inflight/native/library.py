"""The compiled library for Python: built if necessary, loaded and typed once per process."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from array import array
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from inflight.native.build import NativeBuildError, build, cache_folder, find_compiler

logger = logging.getLogger(__name__)

# Addresses and sizes in the order of the C functions' arguments.
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_Function = Callable[..., Any]

# Numbered as in activations.h; 0 is none.
ACTIVATION_NUMBERS = {"gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4, "tanh": 5}
# Numbered as in experts.cpp.
SCORE_NUMBERS = {"softmax": 0, "sigmoid": 1, "chosen": 2}
GATE_NUMBERS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped_silu": 3}
# Numbered as in instructions.h.
INSTRUCTION_NUMBERS = {"avx512_bf16": 1, "amx_bf16": 2, "vnni": 4, "amx_int8": 8}
# For each type of weights, the instructions that its methods need and their numbers as in narrow.h, the best first.
# Without a method, bfloat16 weights are multiplied in float32.
METHODS = {
    "bf16": (("amx_bf16", 2), ("avx512_bf16", 1), ("", 0)),
    "int8": (("amx_int8", 5), ("vnni", 4), ("", 3)),
    "int4": (("vnni", 7), ("", 6)),
}


class PackedMatrix(ctypes.Structure):
    """A matrix of an expert, as `Matrix` in experts.cpp."""

    _fields_ = (("panels", _P), ("method", _L), ("group", _L))


class ExpertLayer(ctypes.Structure):
    """A layer of experts, as `Layer` in experts.cpp."""

    _fields_ = (
        ("gate_up", ctypes.POINTER(PackedMatrix)),
        ("down", ctypes.POINTER(PackedMatrix)),
        ("gate_up_bias", _P),
        ("down_bias", _P),
        ("correction", _P),
        ("scales", _P),
        ("tokens", _P),
        ("gate_up_parts", _L),
        ("hidden", _L),
        ("inner", _L),
        ("experts", _L),
        ("first_held", _L),
        ("held", _L),
        ("top_k", _L),
        ("scores", _L),
        ("normalise", _L),
        ("groups", _L),
        ("top_groups", _L),
        ("gate", _L),
        ("scale", _F),
        ("limit", _F),
    )


class LinearMatrix(ctypes.Structure):
    """A linear layer, as `Matrix` in decoder.cpp."""

    _fields_ = (
        ("weight", _P),
        ("bias", _P),
        ("in_features", _L),
        ("out_features", _L),
        ("method", _L),
        ("group", _L),
    )


class DecoderLayer(ctypes.Structure):
    """A layer of a decoder and its part of the KV cache, as `Layer` in decoder.cpp."""

    _fields_ = (
        ("attention_norm", _P),
        ("mlp_norm", _P),
        ("qkv", LinearMatrix),
        ("output", LinearMatrix),
        ("gate_up", LinearMatrix),
        ("down", LinearMatrix),
        ("query_norm", _P),
        ("key_norm", _P),
        ("value_norm", _P),
        ("cos_sin", _P),
        ("positions", _P),  # the library sets them
        ("rotary_dim", _L),
        ("head_eps", _F),
        ("sinks", _P),
        ("heads", _L),
        ("kv_heads", _L),
        ("head_dim", _L),
        ("window", _L),
        ("table", _L),
        ("scale", _F),
        ("softcap", _F),
        ("gate", _L),
        ("eps", _F),
        ("cache", _P),
        ("scales", _P),
        ("block_size", _L),
        ("block_stride", _L),
    )


class DecoderStep(ctypes.Structure):
    """A step of a decoder, as `Step` in decoder.cpp."""

    _fields_ = (
        ("positions", _P),
        ("query_starts", _P),
        ("context_lens", _P),
        ("rows", _P),
        ("tables", _P),
        ("slot_mapping", _P),
        ("entries", _L),
        ("tokens", _L),
        ("table_size", _L),
        ("table_stride", _L),
    )


class Library:
    """The C functions. Tensors go in as `data_ptr()`, so callers keep them alive and check their layout."""

    def __init__(self, path: Path) -> None:
        self._dll = ctypes.CDLL(str(path))
        self.threads = num_threads()  # may be changed at any time
        self.panel = int(self._bind("panel", result=_L)())  # output features of one weight panel
        nodes = numa_nodes()
        self.num_nodes = max(1, len(nodes))
        self._place_team(nodes)
        self.instructions = _allowed(int(self._bind("instructions", result=_L)()))
        self.depth_bf16 = self._bind("depth_bf16", _L, result=_L)
        self.advise = self._bind("advise", _P, _L)
        multiply = (_P, _P, _P, _P, _L, _L, _L, _I, _I)
        self.multiply_f32 = self._bind("multiply_f32", *multiply)
        self.multiply_bf16 = self._bind("multiply_bf16", *multiply)
        narrow = (*(_P,) * 5, *(_L,) * 5, _F)
        self.linear = self._bind("linear", *narrow, _I, _I, _I)
        self.gated_linear = self._bind("gated_linear", *narrow, _L, _I)
        self.panel_bytes = self._bind("panel_bytes", _L, _L, _L, result=_L)
        self.gguf_pack = self._bind("gguf_pack", _L, _P, _P, _L, _L, _I)
        self.gguf_gather = self._bind("gguf_gather", _L, _P, _P, _P, _L, _L, _I)
        experts = (_P, _P, _P, _P, _P, _L, _I, _I)
        self.experts_f32 = self._bind("experts_f32", *experts)
        self.experts_bf16 = self._bind("experts_bf16", *experts)
        pack = (_P, _P, _L, _L, _L, _L, _L, _I)
        self.pack_f32 = self._bind("pack_f32", *pack)
        self.pack_bf16 = self._bind("pack_bf16", *pack)
        gather = (_P, _P, _P, _L, _L, _I)
        self.gather_f32 = self._bind("gather_f32", *gather)
        self.gather_bf16 = self._bind("gather_bf16", *gather)
        self.pack_int8 = self._bind("pack_int8", _P, _P, _P, _L, _L, _L, _I)
        self.pack_int4 = self._bind("pack_int4", _P, _P, _P, _P, _L, _L, _L, _L, _I)
        self.gather_int8 = self._bind("gather_int8", _P, _P, _P, _L, _L, _I)
        self.gather_int4 = self._bind("gather_int4", _P, _P, _P, _L, _L, _L, _I)
        self.rms_norm = self._bind("rms_norm", _P, _L, _L, _L, _L, _P, _P, _L, _F, _I)
        self.layer_norm = self._bind("layer_norm", _P, _P, _P, _P, _L, _L, _F, _I)
        self.add_layer_norm = self._bind("add_layer_norm", _P, _P, _P, _P, _L, _L, _F, _I)
        self.add = self._bind("add", _P, _P, _L, _I)
        self.softcap = self._bind("softcap", _P, _L, _F, _I)
        self.sigmoid_gate = self._bind("sigmoid_gate", _P, _P, *(_L,) * 4, _I)
        self.rotate = self._bind("rotate", _P, _L, _L, _L, _L, _P, _P, _L, _I)
        self.gate = self._bind("gate", _P, _P, _L, _L, _L, _I)
        self.attend_sequences = self._bind("attend_sequences", _P, _P, _P, *(_L,) * 4, _F, _I)
        strided = (_P, _L, _L)
        prepare = (*(_P,) * 5, _L, _F)
        self.attend = self._bind("attend", *strided * 3, *prepare, *(_P,) * 9, *(_L,) * 9, _F, _F, _I)
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


def _allowed(available: int) -> frozenset[str]:
    """Return the names of the instructions in the bits of `available`, without those that INFLIGHT_INSTRUCTIONS, a list
    separated by commas, leaves out."""
    names = {name for name, number in INSTRUCTION_NUMBERS.items() if number & available}
    listed = os.environ.get("INFLIGHT_INSTRUCTIONS")
    return frozenset(names if listed is None else names & set(listed.split(",")))


def best_method(kind: str, instructions: frozenset[str]) -> int:
    """Return the number of the best method for weights of this kind among those that need only these instructions."""
    return next(number for name, number in METHODS[kind] if not name or name in instructions)


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
