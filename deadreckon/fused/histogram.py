"""Histogram filters and superpositions on Triton kernels: two operators, and one each for their backward pass.

Superpositions are not computed inside the filter's kernel. A table of 512 × 340 halves is larger than shared memory, so
that every token of every program would fetch it anew, and rows enough for tensor cores (64 of 512 positions) take all
registers of a multiprocessor. Chunk by chunk, the filter runs at full occupancy and the product at cuBLAS's speed; the
price is that a chunk's histograms go through memory once, in the table's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.blockwise.histogram import Inputs, filter_back
from deadreckon.blockwise.superposition import room, superpose_back, superpose_forth
from deadreckon.fused.operators import gradients_for
from deadreckon.kernels.histogram import WIDEST, advance, retreat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reason_against(reset: Tensor, positions: int) -> str | None:
    """Why there is no kernel for these inputs, if there is none."""
    if reset.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {reset.dtype}"
    if positions > WIDEST:
        return f"at most {WIDEST} positions, got {positions}"
    return None


def _packed(reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None) -> Inputs:
    """As kernels want them."""
    return reset.contiguous(), move.contiguous(), gamma.contiguous(), None if copy is None else copy.contiguous()


def _room(reset: Tensor, initial: Tensor) -> Tensor:
    return reset.new_empty(*reset.shape, initial.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The last of the inputs is eps. The last of several outputs is for the backward pass alone."""
    *tensors, ctx.eps = inputs
    last = output if isinstance(output, Tensor) else output[-1]
    ctx.save_for_backward(*tensors, last)
    if last is not output:
        ctx.mark_non_differentiable(last)


@torch.library.custom_op("deadreckon::histogram_filter", mutates_args=())
def filter_forward(
    reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, eps: float
) -> Tensor:
    """Histograms (B, T, C, P) in the dtype of reset."""
    out = _room(reset, initial)
    with torch.cuda.device_of(reset):
        advance(*_packed(reset, move, gamma, copy), initial, eps, 0, reset.shape[1], out, None)
    return out


@filter_forward.register_fake
def _(reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, eps: float) -> Tensor:
    return _room(reset, initial)


@torch.library.custom_op("deadreckon::histogram_filter_backward", mutates_args=())
def filter_backward(
    grad: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, out: Tensor,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of reset, move, gamma, initial and, if there is one, copy."""
    with torch.cuda.device_of(reset):
        return filter_back(retreat, _packed(reset, move, gamma, copy), initial, eps, out, grad.contiguous())


@filter_backward.register_fake
def _(
    grad: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, out: Tensor,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(reset, move, gamma, initial, *([] if copy is None else [copy]))


def _filter_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = filter_backward(grad, *ctx.saved_tensors, ctx.eps)
    return (*found, None) if len(found) == 5 else (*found, None, None)


filter_forward.register_autograd(_filter_gradients, setup_context=_save)


@torch.library.custom_op("deadreckon::superpose", mutates_args=())
def superpose_forward(
    reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, table: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Superpositions (B, T, C, d), the last histograms (B, C, P), and states (chunks, B, C, P)."""
    with torch.cuda.device_of(reset):
        return superpose_forth(advance, _packed(reset, move, gamma, copy), initial, table, eps)


@superpose_forward.register_fake
def _(
    reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, table: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return room(reset, initial, table)


@torch.library.custom_op("deadreckon::superpose_backward", mutates_args=())
def superpose_backward(
    grad: Tensor, grad_final: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None,
    table: Tensor, states: Tensor, eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of reset, move, gamma, initial and, if there is one, copy."""
    inputs = _packed(reset, move, gamma, copy)
    with torch.cuda.device_of(reset):
        return superpose_back(advance, retreat, inputs, initial, table, eps, states, grad, grad_final)


@superpose_backward.register_fake
def _(
    grad: Tensor, grad_final: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None,
    table: Tensor, states: Tensor, eps: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(reset, move, gamma, initial, *([] if copy is None else [copy]))


def _superpose_gradients(ctx: Any, grad: Tensor, grad_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = superpose_backward(grad, grad_final, *ctx.saved_tensors, ctx.eps)
    return (*found, None, None) if len(found) == 5 else (*found, None, None, None)


superpose_forward.register_autograd(_superpose_gradients, setup_context=_save)


def filter_fused(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, eps: float
) -> Tensor:
    """See :func:`deadreckon.histogram_filter`; there is no reason against."""
    return filter_forward(reset, move, gamma, initial, copy, eps)


def superpose_fused(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See :func:`deadreckon.superpose`; there is no reason against."""
    e, final, _ = superpose_forward(reset, move, gamma, initial, copy, table, eps)
    return e, final
