"""Triton's interpreter without the work that it repeats: tests of kernels take less than half as long.

For each kernel it looks through all names of `triton.language` for the functions to replace, and does so again whenever
one function of a kernel calls another, though they stay replaced until the kernel is done. It writes down all number
types whenever it needs one of them. It makes the shape of each result anew, of objects. And it computes every addition
twice, to find overflows, but looks at what it found only in a mode for debugging. What kernels compute is the same with
and without this.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter


def repeat_less() -> None:
    """Call once, before kernels run."""
    _remember_number_types()
    _remember_shapes()
    _leave_equal_shapes_alone()
    _replace_once_per_launch()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # then overflows would be reported
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_number_types() -> None:
    find, dtypes = interpreter._get_np_dtype, {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    interpreter._get_np_dtype = remembered


def _remember_shapes() -> None:
    """Types and tensors of the same shape share the objects that describe it."""
    core = language.core
    make_type, shapes_of_types = core.block_type.__init__, {}
    shapes_of_tensors: dict[Any, Any] = {(): (core.constexpr(1), core.tuple([]))}

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape])
        if key not in shapes_of_types:
            make_type(self, element_ty, shape)  # which refuses what is no shape
            shapes_of_types[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, name = shapes_of_types[key]
        self.name = f"<{name}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes_of_tensors:
            sizes = [core.constexpr(size) for size in key]
            shapes_of_tensors[key] = core.constexpr(math.prod(key)), core.tuple(sizes)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes_of_tensors[key]

    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_tensor


def _leave_equal_shapes_alone() -> None:
    kind = type(interpreter.interpreter_semantic)
    broadcast = kind.broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    kind.broadcast_impl_value = broadcast_if_needed


def _replace_once_per_launch() -> None:
    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    reached: dict[Any, frozenset[int]] = {}  # function -> the modules of the language among its globals
    replaced: set[int] = set()  # those whose functions are replaced in the launch that goes on

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        # Kernels may compute with undefined memory whose results a mask discards. No GPU warns of that.
        with np.errstate(invalid="ignore"):
            return launch(self, *args, **kwargs)

    def replace_once(function: Any) -> Any:
        if function not in reached:
            values = {id(value) for value in function.__globals__.values()}
            reached[function] = frozenset(values & {id(language), id(language.core)})
        if replaced and reached[function] <= replaced:
            return None  # a call from within a kernel, whose result is not looked at
        replaced.update(reached[function])
        return replace(function)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = replace_once
