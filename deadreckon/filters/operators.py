"""Filters and superpositions as custom torch operators, from any pair of `advance` and `retreat`.

Each is one operator, and one for its backward pass, both opaque to `torch.compile` and activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deadreckon.filters.chunked import Inputs, filter_backward
from deadreckon.filters.superposition import room, superpose_backward, superpose_forward
from deadreckon.ops.tracing import operator, room_like


def _packed(reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None) -> Inputs:
    """The inputs, contiguous, as kernels need them."""
    return reset.contiguous(), move.contiguous(), gamma.contiguous(), None if copy is None else copy.contiguous()


def _room(reset: Tensor, initial: Tensor) -> Tensor:
    return reset.new_empty(*reset.shape, initial.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves inputs, of which the last is eps, and the last output, which is for the backward pass alone if several."""
    *tensors, ctx.eps = inputs
    last = output if isinstance(output, Tensor) else output[-1]
    ctx.save_for_backward(*tensors, last)
    if last is not output:
        ctx.mark_non_differentiable(last)


def filter_operator(name: str, advance: Callable[..., None], retreat: Callable[..., None]) -> Callable[..., Tensor]:
    """Histograms (B, T, C, P) in the dtype of reset, from reset, move, gamma, copy, initial and eps."""

    def forward(reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, eps: float) -> Tensor:
        out = _room(reset, initial)
        with torch.cuda.device_of(reset):
            advance(*_packed(reset, move, gamma, copy), initial, eps, 0, reset.shape[1], out, None)
        return out

    def backward(
        grad: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, out: Tensor,
        eps: float,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of reset, move, gamma, initial and, if there is one, copy."""
        with torch.cuda.device_of(reset):
            return filter_backward(retreat, _packed(reset, move, gamma, copy), initial, eps, out, grad.contiguous())

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from_backward = run_backward(grad, *ctx.saved_tensors, ctx.eps)
        return (*from_backward, None) if len(from_backward) == 5 else (*from_backward, None, None)

    run_backward = operator(f"{name}_backward", backward, lambda grad, *inputs: room_like(*inputs[:5]))
    run = operator(
        name, forward, lambda reset, move, gamma, initial, *_: _room(reset, initial), gradients=gradients, save=_save
    )

    def call(reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, eps: float) -> Tensor:
        out: Tensor = run(reset, move, gamma, initial, copy, eps)
        return out

    return call


def superposition_operator(
    name: str, advance: Callable[..., None], retreat: Callable[..., None]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Superpositions (B, T, C, d) and the last histograms (B, C, P), from the same inputs and a table, before eps."""

    def forward(
        reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor, copy: Tensor | None, table: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns states (chunks + 1, B, C, P), for the backward pass."""
        with torch.cuda.device_of(reset):
            return superpose_forward(advance, _packed(reset, move, gamma, copy), initial, table, eps)

    def backward(
        grad: Tensor, grad_final: Tensor, reset: Tensor, move: Tensor, gamma: Tensor, initial: Tensor,
        copy: Tensor | None, table: Tensor, states: Tensor, eps: float,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of reset, move, gamma, initial and, if there is one, copy."""
        inputs = _packed(reset, move, gamma, copy)
        with torch.cuda.device_of(reset):
            return superpose_backward(advance, retreat, inputs, initial, table, eps, states, grad, grad_final)

    def gradients(ctx: Any, grad: Tensor, grad_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        from_backward = run_backward(grad, grad_final, *ctx.saved_tensors, ctx.eps)
        return (*from_backward, None, None) if len(from_backward) == 5 else (*from_backward, None, None, None)

    run_backward = operator(f"{name}_backward", backward, lambda grad, final, *inputs: room_like(*inputs[:5]))
    run = operator(
        name, forward, lambda reset, move, gamma, initial, copy, table, eps: room(reset, initial, table),
        gradients=gradients, save=_save,
    )  # fmt: skip

    def call(
        reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, table: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        e, final, _ = run(reset, move, gamma, initial, copy, table, eps)
        return e, final

    return call
