"""Recomputation of tensors that are cheap to compute: autograd saves their inputs in place of the result.

    y = f(a, b)      saves a and b for f's backward pass
    z = g(y)         saves y for g's; inside `saving(Formula(y, f, (a, b)))` it is a and b once more, at no cost

This is activation checkpointing of a single tensor. It is for eager mode: compilers choose for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from deadreckon.ops.tracing import traced


class Formula(NamedTuple):
    """result = function(*inputs), bit-identical at every call. The function keeps alive what it closes over."""

    result: Tensor
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def then(self, result: Tensor, function: Callable[..., Tensor], *others: Tensor) -> Formula:
        """The formula of a tensor computed from this one, result = function(this, *others)."""
        first, count = self.function, len(self.inputs)

        def both(*inputs: Tensor) -> Tensor:
            return function(first(*inputs[:count]), *inputs[count:])

        return Formula(result, both, (*self.inputs, *others))


class _Saved(NamedTuple):
    """What is saved in place of a formula's result."""

    function: Callable[..., Tensor]
    inputs: list[Any]
    shape: torch.Size


def saving(formula: Formula | None) -> AbstractContextManager[Any]:
    """A region where operations that save the formula's result for their backward pass save its inputs instead.

    All other tensors are saved as usual. PyTorch calls the innermost hooks alone: those that are already active
    (activation checkpointing, offloading) are called from here, with all that is saved.
    """
    if (
        formula is None
        or not torch.is_grad_enabled()
        or traced(formula.result)
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None  # inside torch.func
    ):
        return nullcontext()
    return _saving(formula)


@contextmanager
def _saving(formula: Formula) -> Iterator[None]:
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_hold, _held)
    version = formula.result._version
    open_formulas = [formula]  # autograd keeps `pack` beside what it saves, and would keep the result with it

    def pack(x: Tensor) -> Any:
        for result, function, inputs in open_formulas:
            if x._version == version and _is_same(x, result):
                return _Saved(function, [outer_pack(y.detach()) for y in inputs], x.shape)
        return outer_pack(x)

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Saved):
            return outer_unpack(kept)
        with torch.no_grad():
            return kept.function(*(outer_unpack(y) for y in kept.inputs)).view(kept.shape)

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            open_formulas.clear()


def _hold(x: Tensor) -> tuple[Tensor, int]:
    """Saves a tensor as autograd does. Detached: an operation that saved its own output would keep itself alive."""
    return x.detach(), x._version


def _held(kept: tuple[Tensor, int]) -> Tensor:
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            f"a tensor {tuple(x.shape)} that is needed for gradients was changed in place after the forward pass"
        )
    return x


def _is_same(x: Tensor, result: Tensor) -> bool:
    """Whether x is the result's own memory, all of it and in its order, in whatever shape."""
    return (
        x.numel() == result.numel()
        and x.dtype == result.dtype
        and x.is_contiguous()
        and result.is_contiguous()
        and x.data_ptr() == result.data_ptr()
    )
