"""A GRU over all tokens as one operator, and one for its backward pass.

    r, z = σ(W x_t + b + U h_{t−1} + c),   n = tanh(W x_t + b + r ⊙ (U h_{t−1} + c)),   h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

r, z and n each use a third of the rows of W, U, b and c. In the backward pass gates are recomputed for all tokens at
once, and only the gradient of h goes from token to token. On a GPU each way is one kernel, up to `LARGEST` units.
(`torch.compile` would unroll PyTorch's GRU for one length.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from deadreckon.ops.pointwise import has_kernels
from deadreckon.ops.tracing import operator, room_like, without_autocast

LARGEST = 128  # hidden units of a network that is one kernel: its matrices stay in registers
# Preferred to cuDNN with so many units, and with more for as many rows as an H200 takes at once. Timed were rows of 84
# tokens, where it is faster, and of 700, where forward alone it is up to 11% slower.
SMALL, FEW = 64, 264


def has_gru(x: Tensor, hidden: int) -> bool:
    """Whether the recurrence over x is one kernel."""
    return has_kernels(x) and x.dtype == torch.float32 and hidden <= LARGEST


def is_preferred(x: Tensor, hidden: int) -> bool:
    """Whether that kernel is preferred to cuDNN."""
    return has_gru(x, hidden) and (hidden <= SMALL or len(x) <= FEW)


def gru_from(
    x: Tensor, b: Tensor, u: Tensor, c: Tensor, first: Tensor | None, places: Tensor, state: Tensor, by_place: bool
) -> Tensor:
    """Hidden states (B, T, H) from input projections x (B, T, 3 H), by the kernel, without gradients."""
    from deadreckon.ops.triton import gru

    return gru.forward(x, b, u, c, first, places, state, by_place)


def _forward(x: Tensor, before: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Hidden states (B, T, hidden) of x (B, T, inputs), from the one before the first token (B, hidden)."""
    with without_autocast(x):
        if has_gru(x, before.shape[1]):
            return gru_from(linear(x, w), b, u, c, None, x.new_zeros(1, x.shape[1], dtype=torch.int64), before, False)
        return torch.gru(x, before.unsqueeze(0), [w, u, b, c], True, 1, 0.0, False, False, True)[0].contiguous()


def _room(x: Tensor, before: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], before.shape[1])


def _backward(
    grad: Tensor, x: Tensor, before: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor, hidden: Tensor
) -> list[Tensor]:
    """Gradients of all inputs but hidden."""
    with without_autocast(x):
        units, past = before.shape[1], torch.cat([before.unsqueeze(1), hidden[:, :-1]], dim=1)
        from_input, from_past = linear(x, w, b), linear(past, u, c)
        if has_gru(x, units):
            from deadreckon.ops.triton import gru

            slopes, carry = gru.backward(from_input, from_past, past, grad, u)
        else:
            slopes, carry = _walk_back(from_input, from_past, past, grad, u)
        by_past, by_input = (rows.flatten(0, 1) for rows in (slopes[..., : 3 * units], slopes[..., units:]))
        of_u, of_c = (x.roll(-units, 0) for x in (by_past.mT @ past.flatten(0, 1), by_past.sum(0)))
        return [(by_input @ w).view_as(x), carry, by_input.mT @ x.flatten(0, 1), of_u, by_input.sum(0), of_c]


def _walk_back(from_input: Tensor, from_past: Tensor, past: Tensor, grad: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (B, T, 4 H) of U h + c in n, of what r and z are made of, and of W x + b in n; and of the first state.

    Args:
        from_input: W x + b, (B, T, 3 H).
        from_past: U h + c, of the same shape, h being past (B, T, H).
    """
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (y.transpose(0, 1).chunk(3, -1) for y in (from_input, from_past))
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    of_n = (1 - z) * (1 - n * n)
    slopes = torch.stack([of_n * r, of_n * n_h * r * (1 - r), (past.transpose(0, 1) - n) * z * (1 - z), of_n], dim=2)
    carry, u = torch.zeros_like(past[:, 0]), u.roll(past.shape[2], 0)
    for t in range(len(slopes) - 1, -1, -1):
        arrived = carry + grad[:, t]
        by = slopes[t].mul_(arrived.unsqueeze(1))
        carry = torch.addmm(arrived * z[t], by[:, :3].flatten(1), u)
    return slopes.flatten(2).transpose(0, 1).contiguous(), carry


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


gru_backward = operator("deadreckon::gru_backward", _backward, lambda grad, *inputs: room_like(*inputs[:6]))
gru = operator(
    "deadreckon::gru", _forward, _room,
    gradients=lambda ctx, grad: tuple(gru_backward(grad, *ctx.saved_tensors)),
    save=_save, instead="torch.nn.GRU",
)  # fmt: skip
