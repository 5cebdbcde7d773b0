"""Superpositions e_t = Σ_k h_t[k] · table[k] of a filter's histograms, chunk by chunk, to save memory.

The filter computes the histograms of a chunk of tokens into a buffer, a matrix product turns them into superpositions,
and the next chunk reuses the buffer. The state at the start of each chunk is saved: the backward pass recomputes the
chunk's histograms from it, gets their gradients by another matrix product, and runs the filter's backward pass.
`advance` and `retreat` are those of `chunked.py`, the C library or the Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deadreckon.filters.chunked import Inputs, gradient_room, work_type


def chunk(length: int) -> int:
    """Tokens per chunk: about √(T/2), so that saved states and a chunk's buffer take about the same memory.

    8 up to 128 tokens, doubled beyond each of 128, 512 and 2048. No branch: under tracing the length may be a SymInt.
    """
    return 8 * math.prod(1 + torch.sym_min((length - 1) // edge, 1) for edge in (128, 512, 2048))


def room(reset: Tensor, initial: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty superpositions (B, T, C, d), last histograms (B, C, P) and states (chunks + 1, B, C, P)."""
    size, dtype = chunk(reset.shape[1]), work_type(reset)
    states = initial.new_empty((reset.shape[1] - 1) // size + 2, *initial.shape, dtype=dtype)
    return table.new_empty(*reset.shape, table.shape[1]), initial.new_empty(initial.shape, dtype=dtype), states


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    """The first token of each chunk, and its number of tokens."""
    for first in range(0, length, chunk(length)):
        yield first, min(chunk(length), length - first)


class Buffer:
    """Room for the histograms of a chunk, (B, steps, C, P), contiguous."""

    def __init__(self, reset: Tensor, positions: int, dtype: torch.dtype) -> None:
        batch, length, cursors = reset.shape
        self.shape = batch, cursors, positions
        self.memory = reset.new_empty(batch * min(chunk(length), length) * cursors * positions, dtype=dtype)

    def of(self, steps: int) -> Tensor:
        """The buffer's first part, for so many tokens."""
        batch, cursors, positions = self.shape
        return self.memory[: batch * steps * cursors * positions].view(batch, steps, cursors, positions)


def superpose_forward(
    advance: Callable[..., None], inputs: Inputs, initial: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs that `room` allocates, computed; matrix products are in the table's dtype."""
    reset = inputs[0]
    batch, length, cursors = reset.shape
    e, final, states = room(reset, initial, table)
    states[0] = initial
    rows, tables = e.view(batch, length * cursors, -1), table.expand(batch, -1, -1)
    buffer = Buffer(reset, table.shape[0], table.dtype)
    for number, (first, steps) in enumerate(_chunks(length)):
        h = buffer.of(steps)
        advance(*inputs, states[number], eps, first, steps, h, states[number + 1])
        torch.bmm(h.flatten(1, 2), tables, out=rows[:, first * cursors : (first + steps) * cursors])
    return e, final.copy_(states[-1]), states


def superpose_backward(
    advance: Callable[..., None], retreat: Callable[..., None], inputs: Inputs, initial: Tensor, table: Tensor,
    eps: float, states: Tensor, grad: Tensor, grad_final: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of reset, move, gamma, initial and, if there is one, copy."""
    reset = inputs[0]
    batch, length, cursors = reset.shape
    of_reset, of_move, by_cursor, of_copy = gradient_room(inputs)
    carry = grad_final.to(states.dtype, memory_format=torch.contiguous_format, copy=True)
    rows, tables = grad.reshape(batch, length * cursors, -1), table.mT.expand(batch, -1, -1)
    histograms = Buffer(reset, table.shape[0], states.dtype)
    gradients = Buffer(reset, table.shape[0], table.dtype)
    for number, (first, steps) in reversed(list(enumerate(_chunks(length)))):
        h, grad_h = histograms.of(steps), gradients.of(steps)
        advance(*inputs, states[number], eps, first, steps, h, None)
        torch.bmm(rows[:, first * cursors : (first + steps) * cursors], tables, out=grad_h.flatten(1, 2))
        retreat(
            *inputs, states[number], eps, first, steps, h, grad_h, carry, of_reset, of_move, by_cursor, of_copy
        )  # fmt: skip
    gradients_of_inputs = [of_reset, of_move, by_cursor.sum(0).to(inputs[2].dtype), carry.to(initial.dtype)]
    return gradients_of_inputs if of_copy is None else [*gradients_of_inputs, of_copy]
