"""Triton's interpreter, without what it does over and over to no effect.

Most of an interpreted kernel's time is bookkeeping around numpy: types and shapes that are made anew for each
operation, rules of promotion and broadcasting that are gone through again. Here each is made once. What kernels compute
stays the same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def hurry() -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # sums of integers twice, which nothing reports
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_member
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = _make_handle
    interpreter.InterpreterBuilder.create_splat = _splat
    tl.core.block_type.__init__ = _by_shape(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _make_tensor
    tl.core._unwrap_if_constexpr = _unless_tensor(tl.core._unwrap_if_constexpr)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _as_before(semantic.binary_op_type_checking_impl)


def _patched_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """For each call of one function of a kernel by another, `tl` is searched for what the launch has replaced."""
    modules: dict[Callable[..., Any], list[Any]] = {}

    def patch_if_needed(fn: Callable[..., Any]) -> Any:
        if fn not in modules:
            modules[fn] = [x for x in (tl, tl.core) if any(x is value for value in fn.__globals__.values())]
        done = modules[fn] and not any(tl.core.is_builtin(module.load) for module in modules[fn])
        return interpreter._LangPatchScope() if done else patch(fn)

    return patch_if_needed


_CHECKED = tl.core.builtin(lambda: None).__code__  # of what `builtin` puts around a function, which only asks for this:
_SEMANTIC = interpreter.interpreter_semantic


def _patch_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    if member.__code__ is _CHECKED:
        member = member.__wrapped__

    def patched(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _SEMANTIC
        return member(*args, **kwargs)

    scope.set_attr(obj, name, patched)


def _make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """A view: nothing is written into what an operation has returned."""
    return interpreter.TensorHandle(_spread(arg.data, ret_ty.shape.values), arg.dtype.scalar)


def _spread(data: Any, shape: Any) -> Any:
    if data.size == 1:
        return np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    return np.broadcast_to(data, shape)


def _unless_tensor(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = (tl.core.tensor, int, float, bool)
    return lambda x: x if type(x) in plain else unwrap(x)


def _as_before(check: Callable[..., Any]) -> Callable[..., Any]:
    """Operands as they were last made alike: numbers are tensors already, the types of two tensors are known."""
    tensor = tl.core.tensor
    numbers: dict[Any, Any] = {}
    types: dict[Any, Any] = {}

    def alike(self: Any, lhs: Any, rhs: Any, *flags: Any, **more: Any) -> Any:
        first, second = type(lhs) is tensor, type(rhs) is tensor
        if more or not (first or second):
            return check(self, lhs, rhs, *flags, **more)
        if first and second:
            return of_tensors(self, lhs, rhs, flags)
        of, number = (lhs, rhs) if first else (rhs, lhs)
        if type(number) not in (int, float, bool):
            return check(self, lhs, rhs, *flags)
        key = of.type.name, type(number), number, first, flags
        if key not in numbers:
            found = check(self, lhs, rhs, *flags)
            if found[1 - first] is not of:
                return found
            numbers[key] = found[first]
        return (of, numbers[key]) if first else (numbers[key], of)

    def of_tensors(self: Any, lhs: Any, rhs: Any, flags: Any) -> Any:
        key = lhs.type.name, rhs.type.name, flags
        if key not in types:
            types[key] = [x.type for x in check(self, lhs, rhs, *flags)]
        return [as_one(self, x, into) for x, into in zip((lhs, rhs), types[key], strict=True)]

    def as_one(self: Any, x: Any, into: Any) -> Any:
        if x.type.name == into.name:
            return x
        if x.dtype.name != into.scalar.name:
            x = self.cast(x, into.scalar)
            if x.type.name == into.name:
                return x
        spread = _spread(x.handle.data, into.shape.values)
        return tensor(interpreter.TensorHandle(spread, x.handle.dtype), into)

    return alike


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
