"""Histogram filters in plain PyTorch: shifts instead of scatters, and nothing saved per token but the output.

`advance` is the forward pass over a range of tokens, `retreat` its backward pass, as in the C library and the kernels:
`operators.py` and `superposition.py` take any such pair. The backward pass of a step needs the histograms before and
after it, which are the filter's output.

After a step the total is 1, and normalisation cancels the gradient of a constant total: only the first step of a call
computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""reset (B, T, C), move (B, T, C, 3), gamma (C,), copy (B, T, C, P + 1)."""


def work_type(reset: Tensor) -> torch.dtype:
    """The dtype that histograms are computed in."""
    return torch.float64 if reset.dtype == torch.float64 else torch.float32


BLOCK = 8  # tokens that `retreat` prepares at a time
NUMBERS = 1 << 16  # numbers of histograms per CPU thread at a time, so that they stay in its cache


class Moves(NamedTuple):
    """The gates as fractions of h: what moves up, moves down and stays, also at both ends, and what resets add."""

    up: Tensor  # (T, B, C, 1)
    down: Tensor
    stay: Tensor
    ends: Tensor  # (T, B, C, 2): down, which stays at 0; up, which stays at P − 1
    fresh: Tensor  # (T, B, C, 2): to 0 and 1

    @classmethod
    def of(cls, reset: Tensor, move: Tensor, total: Tensor) -> Moves:
        """From reset (T, B, C, 1), move (T, B, C, 3), and total (B, C, 1), the sum of h before the first token."""
        up, down, stay = move.split(1, dim=-1)
        fresh = torch.cat([reset * (down + stay), reset * up], dim=-1)
        fresh[0] *= total
        up, down, stay = ((1 - reset) * move).split(1, dim=-1)
        return cls(up, down, stay, torch.cat([down, up], dim=-1), fresh)

    def each(self) -> list[Moves]:
        """One for each token."""
        return [Moves(*parts) for parts in zip(*(x.unbind() for x in self), strict=True)]

    def apply(self, h: Shifted, new: Shifted, eps: Tensor) -> None:
        """Writes to `new` where the mass of h (..., P) moves, plus eps."""
        torch.addcmul(eps, h.all, self.stay, out=new.all)
        new.upper.addcmul_(h.lower, self.up)
        new.lower.addcmul_(h.upper, self.down)
        new.ends.addcmul_(h.ends, self.ends)
        new.first.add_(self.fresh)

    def apply_back(self, grad: Shifted, grad_h: Shifted) -> None:
        """The backward pass of `apply`: writes the gradient of h."""
        torch.mul(grad.all, self.stay, out=grad_h.all)
        grad_h.lower.addcmul_(grad.upper, self.up)
        grad_h.upper.addcmul_(grad.lower, self.down)
        grad_h.ends.addcmul_(grad.ends, self.ends)


class Shifted(NamedTuple):
    """A buffer (..., P) and views of it: creating them for every token would take as long as the arithmetic."""

    all: Tensor
    lower: Tensor  # 0, ..., P − 2
    upper: Tensor  # 1, ..., P − 1
    ends: Tensor
    first: Tensor  # 0 and 1

    @classmethod
    def of(cls, x: Tensor) -> Shifted:
        return cls(x, x[..., :-1], x[..., 1:], x[..., :: x.shape[-1] - 1], x[..., :2])


def _by_token(x: Tensor, tokens: slice, dtype: torch.dtype) -> Tensor:
    """(B, T, ...) -> (n, B, ...)."""
    return x[:, tokens].transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)


def advance(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Filters tokens first, ..., first + steps − 1 from state (B, C, P).

    Writes out (B, steps, C, P) and final (B, C, P), unless they are None.
    """
    for rows in _parts(state):
        copies = None if copy is None else copy[rows]
        outs = None if out is None else out[rows]
        ends = None if final is None else final[rows]
        _advance(reset[rows], move[rows], gamma, copies, state[rows], eps, first, steps, outs, ends)


def _parts(state: Tensor) -> Iterator[slice]:
    """Slices of the batch to compute at a time."""
    batch, cursors, positions = state.shape
    count = batch if state.is_cuda else max(1, NUMBERS * torch.get_num_threads() // (cursors * positions))
    return (slice(first, first + count) for first in range(0, batch, count))


def _advance(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    dtype, tokens = work_type(reset), slice(first, first + steps)
    h, new = (Shifted.of(torch.empty(state.shape, dtype=dtype, device=state.device)) for _ in range(2))
    total, power = h.all.copy_(state).sum(-1, keepdim=True), gamma.to(dtype).unsqueeze(-1)
    moves = Moves.of(_by_token(reset, tokens, dtype).unsqueeze(-1), _by_token(move, tokens, dtype), total)
    floor = torch.full_like(h.all, eps if copy is None else 0.0)
    outs = None if out is None else out.unbind(1)
    for t, step in enumerate(moves.each()):
        step.apply(h, new, floor)
        if copy is not None:
            jump, none = copy[:, first + t].to(dtype).split([state.shape[-1], 1], dim=-1)
            new.all.mul_(none).add_(jump if t else jump * total).add_(eps)
        torch.softmax(new.all.log_().mul_(power), -1, out=h.all)
        if outs is not None:
            outs[t].copy_(h.all)
    if final is not None:
        final.copy_(h.all)


def retreat(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, grad: Tensor, carry: Tensor,
    grad_reset: Tensor, grad_move: Tensor, grad_gamma: Tensor, grad_copy: Tensor | None,
) -> None:  # fmt: skip
    """The backward pass over the same tokens: out as `advance` wrote it, grad its gradient.

    carry (B, C, P), contiguous, is the gradient of the histogram after these tokens, and is overwritten by that of
    state. Writes the tokens' grad_reset, grad_move and grad_copy; adds to grad_gamma (B, C).
    """
    for rows in _parts(state):
        copies, grad_copies = (None if x is None else x[rows] for x in (copy, grad_copy))
        _retreat(
            reset[rows], move[rows], gamma, copies, state[rows], eps, first, steps, out[rows], grad[rows], carry[rows],
            grad_reset[rows], grad_move[rows], grad_gamma[rows], grad_copies,
        )  # fmt: skip


def _retreat(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, grad: Tensor, carry: Tensor,
    grad_reset: Tensor, grad_move: Tensor, grad_gamma: Tensor, grad_copy: Tensor | None,
) -> None:  # fmt: skip
    floor = torch.full_like(carry, eps if copy is None else 0.0)
    room = [carry.new_empty(min(BLOCK, steps) + extra, *carry.shape) for extra in (1, 0, 0, 0)]
    for end in range(steps, 0, -BLOCK):
        begin = max(0, end - BLOCK)
        here, count = slice(first + begin, first + end), end - begin
        h, slope, logs, pulls = room[0][: count + 1], *(x[:count] for x in room[1:])  # (n, B, C, P)
        h[0] = out[:, begin - 1] if begin else state
        h[1:] = out[:, begin:end].transpose(0, 1)
        total = h[0].sum(-1, keepdim=True) if begin == 0 else h.new_ones(())
        gates = _by_token(reset, here, h.dtype).unsqueeze(-1), _by_token(move, here, h.dtype)
        moves = Moves.of(*gates, total)
        moves.apply(Shifted.of(h[:-1]), Shifted.of(slope), floor)
        jumps = None if copy is None else Jumps(_by_token(copy, here, h.dtype), slope, total, eps)
        torch.log(slope, out=logs)
        torch.div(gamma.to(h.dtype).unsqueeze(-1), slope, out=slope)
        _pull_back(h[1:], grad[:, begin:end], slope, moves, jumps, carry, pulls)
        grad_gamma += logs.mul_(pulls).sum((0, 3))
        pulls.mul_(slope)  # now those of new
        if jumps is not None and grad_copy is not None:
            of_copy, of_total = jumps.back(pulls)
            grad_copy[:, here] = of_copy.transpose(0, 1)
            carry += of_total[0] if begin == 0 else 0
            pulls.mul_(jumps.none)
        of_move, of_reset, of_total = _gate_gradients(*gates, h[:-1], pulls, total, logs)
        grad_move[:, here], grad_reset[:, here] = of_move.transpose(0, 1), of_reset.transpose(0, 1)
        carry += of_total[0] if begin == 0 else 0


def _pull_back(
    h: Tensor, grad: Tensor, slope: Tensor, moves: Moves, jumps: Jumps | None, carry: Tensor, pulls: Tensor
) -> None:
    """The sequential part: writes pulls (n, B, C, P), gradients of γ log(new + ε); slope is γ / (new + ε)."""
    pull, grad_h = Shifted.of(torch.empty_like(carry)), Shifted.of(carry)
    steps = zip(moves.each(), h.unbind(), grad.unbind(1), slope.unbind(), pulls.unbind(), strict=True)
    for t, (step, after, fresh, factor, drawn) in reversed(list(enumerate(steps))):
        torch.ops.aten._softmax_backward_data.out(carry.add_(fresh), after, -1, carry.dtype, grad_input=drawn)
        torch.mul(drawn, factor, out=pull.all)
        if jumps is not None:
            pull.all.mul_(jumps.none[t])
        step.apply_back(pull, grad_h)


class Jumps:
    """The copy branch, copy (n, B, C, P + 1): updates mass after moves (n, B, C, P), in place, by jumps, plus eps."""

    def __init__(self, copy: Tensor, moved: Tensor, total: Tensor, eps: float) -> None:
        self.jump, self.none = copy.split([moved.shape[-1], 1], dim=-1)
        self.moved, self.total = moved.clone(), total
        moved.mul_(self.none).add_(self.jump).add_(eps)
        moved[0] += (total - 1) * self.jump[0]

    def back(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of copy, and of totals (n, B, C, 1)."""
        of_none, of_total = ((grad * x).sum(-1, keepdim=True) for x in (self.moved, self.jump))
        of_copy = torch.cat([grad, of_none], dim=-1)
        of_copy[0, ..., :-1] *= self.total
        return of_copy, of_total


def _gate_gradients(
    reset: Tensor, move: Tensor, h: Tensor, grad: Tensor, total: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of move, reset and totals: h (n, B, C, P) are the histograms before, grad is that of moved mass."""
    stay = torch.mul(h, grad, out=scratch).sum(-1)
    up = torch.mul(h[..., :-1], grad[..., 1:], out=scratch[..., 1:]).sum(-1) + h[..., -1] * grad[..., -1]
    down = torch.mul(h[..., 1:], grad[..., :-1], out=scratch[..., 1:]).sum(-1) + h[..., 0] * grad[..., 0]
    moved = torch.stack([up, down, stay], dim=-1)
    origin, above = grad[..., :1], grad[..., 1:2]
    fresh = torch.cat([above, origin, origin], dim=-1)
    of_total = (reset * move * fresh).sum(-1, keepdim=True)
    fresh[0] *= total
    return (1 - reset) * moved + reset * fresh, (move * (fresh - moved)).sum(-1), of_total


def gradient_room(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Buffers for the gradients of reset, move, gamma (still per sequence, (B, C), and zero) and copy."""
    reset, move, _, copy = inputs
    of_reset, of_move = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (reset, move))
    of_copy = None if copy is None else torch.empty(copy.shape, dtype=copy.dtype, device=copy.device)
    return of_reset, of_move, reset.new_zeros(reset.shape[0], reset.shape[2], dtype=work_type(reset)), of_copy


def filter_backward(
    retreat: Callable[..., None], inputs: Inputs, initial: Tensor, eps: float, out: Tensor, grad: Tensor
) -> list[Tensor]:
    """Gradients of reset, move, gamma, initial and, if there is one, copy."""
    of_reset, of_move, by_cursor, of_copy = gradient_room(inputs)
    carry = initial.new_zeros(initial.shape, dtype=work_type(inputs[0]))
    retreat(*inputs, initial, eps, 0, out.shape[1], out, grad, carry, of_reset, of_move, by_cursor, of_copy)
    gradients = [of_reset, of_move, by_cursor.sum(0).to(inputs[2].dtype), carry.to(initial.dtype)]
    return gradients if of_copy is None else [*gradients, of_copy]
