"""Python and the compiled library agree on structures field by field, and on numbers by name."""

from __future__ import annotations

import ctypes

import pytest

from inflight.layers.formats.gguf_blocks import BLOCKS
from inflight.layers.kernels import ACTIVATIONS, CLAMPED_SILU, GATES
from inflight.layers.native.build import NativeBuildError
from inflight.layers.native.library import Library, StructureLayout, native_library


@pytest.fixture(scope="module")
def library() -> Library:
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    return library


@pytest.mark.parametrize(
    ("description", "error"),
    [
        ("Pair 16 first:pointer:0:8 second:float:12:4", "Pair: second is at byte 12 and has 4 bytes"),
        ("Pair 16 first:pointer:0:8 second:int64:8:4", "Pair: second is at byte 8 and has 4 bytes"),
        ("Pair 24 first:pointer:0:8 second:int64:8:8", "Pair: the end is at byte 24"),
    ],
)
def test_structure_that_lies_elsewhere_in_memory_is_rejected(description: str, error: str) -> None:
    with pytest.raises(NativeBuildError, match=error):
        StructureLayout(description)


def test_structure_must_be_filled_completely(library: Library) -> None:
    with pytest.raises(TypeError, match=r"Matrix was not filled: .*\(group, groups\)"):
        library.matrix(panels=None, method=None, rows=1, groups=2)
    with pytest.raises(TypeError, match=r"Matrix was not filled: .*\(rows\)"):
        library.matrix(panels=None, method=None, group=1)


def test_structure_keeps_alive_what_it_points_to(library: Library) -> None:
    parts = library.matrix.array([library.matrix(panels=None, method=None, rows=7, group=0)])
    address = ctypes.addressof(parts)
    linear = library.linear_layer(parts=parts, num_parts=1, bias=None, in_features=1, out_features=7)
    assert linear.parts == address
    assert parts in linear.targets


def test_library_knows_all_names(library: Library) -> None:
    assert {*ACTIVATIONS, *GATES, CLAMPED_SILU} <= library.activations.keys()
    assert library.activations["none"] == 0
    for weights in ("f32", "bf16", "int8", "int4", *BLOCKS):
        assert library.method(weights, frozenset())
        assert library.method(weights, library.instructions)
    with pytest.raises(NativeBuildError, match="cannot multiply weights of type Q1_0"):
        library.method("Q1_0", frozenset())


def test_methods_use_only_allowed_instructions(library: Library) -> None:
    plain, best = (library.method("int8", names) for names in (frozenset[str](), library.instructions))
    assert (plain == best) == library.instructions.isdisjoint({"vnni", "amx_int8"})
