"""Triton's interpreter, without what it does over and over to no effect.

Most of an interpreted kernel's time is bookkeeping around numpy: types and shapes that are made anew for each
operation. Here each is made once. What kernels compute stays the same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def hurry() -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # sums of integers twice, which nothing reports
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.core.block_type.__init__ = _by_shape(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _make_tensor
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)


def _patched_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """For each call of one function of a kernel by another, `tl` is searched for what the launch has replaced."""
    modules: dict[Callable[..., Any], list[Any]] = {}

    def patch_if_needed(fn: Callable[..., Any]) -> Any:
        if fn not in modules:
            modules[fn] = [x for x in (tl, tl.core) if any(x is value for value in fn.__globals__.values())]
        done = modules[fn] and not any(tl.core.is_builtin(module.load) for module in modules[fn])
        return interpreter._LangPatchScope() if done else patch(fn)

    return patch_if_needed


def _by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_type(dtype)
        return known[name]

    return look_up


def _by_shape(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            make(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])
        self.element_ty = element_ty

    return make_once


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants(*type.shape.values) if type.is_block() else _constants()


@cache
def _constants(*shape: int) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_others
