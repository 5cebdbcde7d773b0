"""A faster Triton interpreter: caches the bookkeeping that it repeats for every operation.

Most of an interpreted kernel's time is bookkeeping around numpy: types and shapes are created anew for each operation,
rules of promotion and broadcasting are evaluated again. Here each is computed once, and the commonest operations call
numpy directly once it is known which numpy operations they are. Results stay the same, bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
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
    tl.core._unwrap_if_constexpr = _unless_kept(tl.core._unwrap_if_constexpr)
    methods = interpreter.InterpreterBuilder
    methods.binary_op = _watched(methods.binary_op, lambda lhs, operation: operation)
    methods.create_idiv = _watched(methods.create_idiv, lambda lhs: _divide)
    methods.create_addptr = _watched(methods.create_addptr, _offset)
    interpreter.ReduceOps.generic_reduce = _fold
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)


def _patched_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Skips patching `tl`, which Triton repeats whenever a kernel calls another function, if the launch has done it."""
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

    plan = (_OF_TENSORS if obj is tl.core.tensor else _OF_THE_LANGUAGE if obj in (tl, tl.core) else {}).get(name)
    if plan is not None:
        if (obj, name) not in _planned:
            _planned[obj, name] = plan(name, patched)
        patched = _planned[obj, name]
    scope.set_attr(obj, name, patched)


# How an operation on given types is computed is recorded once, and reused. --------------------------------------------

Plan = Callable[..., Any]
_planned: dict[Any, Plan] = {}
_seen: deque[tuple[Callable[[Any, Any], Any], Any, Any]] = deque(maxlen=2)  # the last operations of two arrays
_PLAIN = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"fp16", "fp32", "fp64"}
_ALL = slice(None)


def _watched(compute: Plan, array: Callable[..., Callable[[Any, Any], Any]]) -> Plan:
    """A method of the builder that also records what it computes from two arrays."""

    def watch(self: Any, lhs: Any, rhs: Any, *how: Any) -> Any:
        _seen.append((array(lhs, *how), lhs, rhs))
        return compute(self, lhs, rhs, *how)

    return watch


def _divide(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


def _offset(pointer: Any) -> Callable[[Any, Any], Any]:
    width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    return lambda x, y: x + width * y.astype(np.uint64)


def _mould(result: Any) -> Callable[[Any], Any]:
    """Makes tensors of a result's type and shape from other data."""
    kind, type, dtype, numel, shape = result.handle.dtype, result.type, result.dtype, result.numel, result.shape
    handle_class, tensor_class = interpreter.TensorHandle, tl.core.tensor
    new = object.__new__

    def make(data: Any) -> Any:
        handle, tensor = new(handle_class), new(tensor_class)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        tensor.handle, tensor.type, tensor.dtype, tensor.numel, tensor.shape = handle, type, dtype, numel, shape
        return tensor

    return make


def _plan_operator(name: str, slow: Plan) -> Plan:
    """Plans an operator on two tensors, or a tensor and a number. numpy broadcasts by the rules that Triton has."""
    plans: dict[Any, Plan] = {}
    tensor, constant = tl.core.tensor, tl.constexpr
    mirrored = name.startswith("__r")

    def operate(self: Any, other: Any, **options: Any) -> Any:
        kind = type(other)
        if options or type(self) is not tensor:
            return slow(self, other, **options)
        if kind is constant:
            other = other.value
            kind = type(other)
        if kind is tensor:
            key = self.type.name, other.type.name
        elif kind is int or (kind is float and other != 0):  # zeros have signs
            key = self.type.name, kind, other
        else:
            return slow(self, other)
        if key not in plans:
            return learn(key, self, other)
        return plans[key](self, other)

    def learn(key: Any, self: Any, other: Any) -> Any:
        _seen.clear()
        result = slow(self, other)
        plans[key] = slow
        if len(_seen) == 1 and not any(x in str(key) for x in ("bf16", "fp8")):  # whose arrays hold bits
            compute, first, second = _seen.pop()
            left, right, into, make = first.data.dtype, second.data.dtype, result.handle.data.dtype, _mould(result)
            swap = not self.dtype.is_ptr() if first.dtype.is_ptr() else mirrored
            number = None if type(other) is tensor else (first if swap else second).data.reshape(-1)[:1].copy()

            def plan(self: Any, other: Any) -> Any:
                x, y = self.handle.data, other.handle.data if number is None else number
                if swap:
                    x, y = y, x
                if x.dtype != left:
                    x = x.astype(left)
                if y.dtype != right:
                    y = y.astype(right)
                data = compute(x, y)
                return make(data if data.dtype == into else data.astype(into))

            plans[key] = plan
        return result

    return operate


def _plan_index(name: str, slow: Plan) -> Plan:
    """Plans x[:, None] and the like."""
    plans: dict[Any, Plan] = {}

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not self.type.is_block() or any(x is not None and x != _ALL for x in slices):
            return slow(self, slices)
        key = self.type.name, *[x is None for x in slices]
        if key not in plans:
            plans[key] = _mould(slow(self, slices))
        return plans[key](self.handle.data[slices])

    return index


def _plan_cast(name: str, slow: Plan) -> Plan:
    plans: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}

    def cast(self: Any, dtype: Any, *more: Any, **options: Any) -> Any:
        dtype = dtype.value if type(dtype) is tl.constexpr else dtype
        if self.dtype is dtype and not more and not options:
            return self
        if type(dtype) is not tl.dtype or more or options or not {self.dtype.name, dtype.name} <= _PLAIN:
            return slow(self, dtype, *more, **options)
        key = self.type.name, dtype.name
        if key not in plans:
            result = slow(self, dtype)
            plans[key] = result.handle.data.dtype, _mould(result)
        into, make = plans[key]
        return make(self.handle.data.astype(into))

    return cast


def _plan_load(name: str, slow: Plan) -> Plan:
    plans: dict[Any, Plan] = {}

    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        other = other.value if type(other) is tl.constexpr else other
        if type(other) is tl.core.tensor or type(mask) not in _MASKS or not options.keys() <= _HINTS:
            return slow(pointer, mask, other, **options)
        key = pointer.type.name, mask is None or mask.type.name, type(other), other
        if key not in plans:
            plans[key] = learn(slow(pointer, mask, other), pointer, other)
        return plans[key](pointer, mask, other)

    def learn(result: Any, pointer: Any, other: Any) -> Plan:
        shape, dtype = pointer.handle.data.shape, result.dtype.name
        if result.handle.data.shape != shape or dtype not in _PLAIN:
            return slow
        into, make, everywhere = result.handle.data.dtype, _mould(result), np.ones(shape, bool)
        outside = np.full(shape, other or 0, into)

        def plan(pointer: Any, mask: Any, other: Any) -> Any:
            inside = everywhere if mask is None else _spread_to(mask.handle.data, shape)
            return make(interpreter._interpreter.load(pointer.handle.data, inside, outside, into))

        return plan

    return load


def _plan_store(name: str, slow: Plan) -> Plan:
    plans: dict[Any, Plan] = {}

    def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if type(value) is not tl.core.tensor or type(mask) not in _MASKS or not options.keys() <= _HINTS:
            return slow(pointer, value, mask, **options)
        key = pointer.type.name, value.type.name, mask is None or mask.type.name
        if key not in plans:
            plans[key] = learn(pointer, value, mask)
        return plans[key](pointer, value, mask)

    def learn(pointer: Any, value: Any, mask: Any) -> Plan:
        shape, dtype = pointer.handle.data.shape, pointer.dtype.element_ty
        wider = any(x is not None and x.handle.data.ndim > len(shape) for x in (value, mask))
        if wider or not {dtype.name, value.dtype.name} <= _PLAIN:
            return slow
        into, everywhere = interpreter._get_np_dtype(dtype), np.ones(shape, bool)

        def plan(pointer: Any, value: Any, mask: Any) -> None:
            data = value.handle.data if value.handle.data.dtype == into else value.handle.data.astype(into)
            inside = everywhere if mask is None else _spread_to(mask.handle.data, shape)
            interpreter._interpreter.store(pointer.handle.data, _spread_to(data, shape), inside)

        return plan

    return store


def _plan_where(name: str, slow: Plan) -> Plan:
    plans: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
    tensor = tl.core.tensor

    def where(condition: Any, x: Any, y: Any) -> Any:
        if type(condition) is not tensor or type(x) is not tensor or condition.dtype.name != "int1":
            return slow(condition, x, y)
        y = y.value if type(y) is tl.constexpr else y
        if x.dtype.name not in _PLAIN or (y.dtype.name not in _PLAIN if type(y) is tensor else type(y) is not float):
            return slow(condition, x, y)
        key = condition.type.name, x.type.name, y.type.name if type(y) is tensor else y
        if key not in plans:
            result = slow(condition, x, y)
            plans[key] = result.handle.data.dtype, _mould(result)
        into, make = plans[key]
        first, second = x.handle.data, y.handle.data if type(y) is tensor else into.type(y)
        data = np.where(condition.handle.data, first, second)
        return make(data if data.dtype == into else data.astype(into))

    return where


def _plan_range(name: str, slow: Plan) -> Plan:
    plans: dict[Any, Any] = {}

    def arange(start: Any, end: Any) -> Any:
        start, end = (x.value if type(x) is tl.constexpr else x for x in (start, end))
        if (start, end) not in plans:
            result = slow(start, end)
            plans[start, end] = result.handle.data, _mould(result)
        data, make = plans[start, end]
        return make(data)

    return arange


def _spread_to(data: Any, shape: tuple[int, ...]) -> Any:
    return data if data.shape == shape else np.broadcast_to(data, shape)


_MASKS = (type(None), tl.core.tensor)
_HINTS = {"cache_modifier", "eviction_policy"}  # of which results do not depend
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or",
)  # fmt: skip
_OF_TENSORS = {
    **{f"__{name}__": _plan_operator for name in _OPERATORS}, "__getitem__": _plan_index, "to": _plan_cast,
}  # fmt: skip
_OF_THE_LANGUAGE = {
    "load": _plan_load, "store": _plan_store, "where": _plan_where, "arange": _plan_range,
    "minimum": _plan_operator, "maximum": _plan_operator,
}  # fmt: skip


def _make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """A view: nothing is written into what an operation has returned."""
    return interpreter.TensorHandle(_spread(arg.data, ret_ty.shape.values), arg.dtype.scalar)


def _spread(data: Any, shape: Any) -> Any:
    if data.size == 1:
        return np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    return np.broadcast_to(data, shape)


def _fold(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """Reduces by a function of one's own: Triton calls it for each number, this for each slice, in the same order."""
    assert self.axis is not None and not self.keep_dims
    slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in given]
    rows = [
        [self.to_tensor(part[i], x.dtype) for part, x in zip(slices, given, strict=True)] for i in range(len(slices[0]))
    ]
    folded = rows[0]
    for row in rows[1:]:
        folded = self.combine_fn.fn(*folded, *row)
    return list(folded)


def _unless_kept(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Most types are kept as they are: which, is asked once."""
    changes: dict[type, bool] = {}

    def unwrap_others(x: Any) -> Any:
        kind = type(x)
        if kind not in changes:
            changes[kind] = issubclass(kind, list | tuple | tl.core.tuple | tl.constexpr)
        return unwrap(x) if changes[kind] else x

    return unwrap_others


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
