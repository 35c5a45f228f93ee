"""Triton's interpreter without the work that it repeats: tests of kernels take a good third less.

For each kernel it looks through all names of `triton.language` for the functions to replace, and does so again whenever
one function of a kernel calls another, though they stay replaced until the kernel is done. And it writes down all
number types whenever it needs one of them. What kernels compute is the same with and without this.
"""

from __future__ import annotations

from typing import Any

from triton import language
from triton.runtime import interpreter


def repeat_less() -> None:
    """Call once, before kernels run."""
    _remember_number_types()
    _replace_once_per_launch()


def _remember_number_types() -> None:
    find, found = interpreter._get_np_dtype, {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    interpreter._get_np_dtype = remembered


def _replace_once_per_launch() -> None:
    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    reached: dict[Any, frozenset[int]] = {}  # function -> the modules of the language among its globals
    replaced: set[int] = set()  # those whose functions are replaced in the launch that goes on

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
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
