"""The recurrence of a GRU as one kernel each way: see `ops/gru.py`. The hidden-to-hidden matrix stays in registers.

Places (B or 1, T) are positions of tokens in their rows; those below 0 are padding, where a row has its initial state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.cursors import slot_of, stride_of
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import sigmoid
from deadreckon.ops.triton.tiles import power_of_two


@Kernel
@triton.jit
def _forward(
    p_x, p_b, p_u, p_c, p_first, p_place, p_state, p_out, s_place, T,
    H: tl.constexpr, BH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row. With KEPT, for one token, states are read from and written to a ring buffer by place."""
    i_b = tl.program_id(0).to(tl.int64)
    past, unit = tl.arange(0, BH), tl.arange(0, BH)
    m_unit = unit < H
    p_u += (unit[None, :] * H + past[:, None]) if KEPT else (past[:, None] * 3 * H + unit[None, :])
    S: tl.constexpr = H * H if KEPT else H
    m_u = m_unit[None, :] & (past < H)[:, None]
    b_ur = tl.load(p_u, mask=m_u, other=0.0).to(tl.float32)
    b_uz = tl.load(p_u + S, mask=m_u, other=0.0).to(tl.float32)
    b_un = tl.load(p_u + 2 * S, mask=m_u, other=0.0).to(tl.float32)
    b_r0 = tl.load(p_b + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_z0 = tl.load(p_b + H + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_n0 = tl.load(p_b + 2 * H + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_r0 += tl.load(p_c + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_z0 += tl.load(p_c + H + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_c = tl.load(p_c + 2 * H + unit, mask=m_unit, other=0.0).to(tl.float32)
    b_first = tl.zeros([BH], tl.float32)
    if p_first is not None:
        b_first = tl.load(p_first + unit, mask=m_unit, other=0.0).to(tl.float32)
    p_place += i_b * s_place
    p_x += i_b * T * 3 * H + unit
    p_out += i_b * T * H + unit
    place = tl.load(p_place)
    if KEPT:
        p_state += i_b * KEPT * H + unit
        b_h = tl.load(p_state + slot_of(tl.maximum(place - 1, -1), KEPT) * H, mask=m_unit, other=0.0)
    else:
        b_h = tl.load(p_state + i_b * H + unit, mask=m_unit, other=0.0)
    b_r = tl.load(p_x, mask=m_unit, other=0.0)
    b_z = tl.load(p_x + H, mask=m_unit, other=0.0)
    b_n = tl.load(p_x + 2 * H, mask=m_unit, other=0.0)
    for t in range(T):
        # Prefetches the next token's inputs.
        m_next = m_unit & (t + 1 < T)
        p_x += 3 * H
        b_next_r = tl.load(p_x, mask=m_next, other=0.0)
        b_next_z = tl.load(p_x + H, mask=m_next, other=0.0)
        b_next_n = tl.load(p_x + 2 * H, mask=m_next, other=0.0)
        next_place = tl.load(p_place + t + 1, mask=t + 1 < T, other=0)
        b_past = b_h[:, None]
        b_gate = sigmoid(b_r + b_r0 + tl.sum(b_ur * b_past, 0))
        b_keep = sigmoid(b_z + b_z0 + tl.sum(b_uz * b_past, 0))
        b_new = 2 * sigmoid(2 * (b_n + b_n0 + b_gate * (b_c + tl.sum(b_un * b_past, 0)))) - 1  # tanh
        b_h = (1 - b_keep) * b_new + b_keep * b_h
        b_h = tl.where(place < 0, b_first, b_h)
        tl.store(p_out + t * H, b_h, mask=m_unit)
        if KEPT:
            tl.debug_barrier()  # padding may leave it where it has been read
            tl.store(p_state + slot_of(place, KEPT) * H, b_h, mask=m_unit)
        b_r, b_z, b_n, place = b_next_r, b_next_z, b_next_n, next_place


def forward(
    x: Tensor, b: Tensor, u: Tensor, c: Tensor, first: Tensor | None, places: Tensor, state: Tensor, by_place: bool
) -> Tensor:
    """Hidden states (B, T, H), float32, from input projections x (B, T, 3 H).

    Args:
        b, c: (3 H,) biases of the input's and the past's map, whose matrix is u (3 H, H); each in any precision.
        first: (H,) the state at padding; zero by default.
        state: (B, H) float32, before the first token; or, by place, for one token, (B, kept, H), updated in place.
    """
    batch, length, rows = x.shape
    hidden = rows // 3
    out = x.new_empty(batch, length, hidden)
    b, c, state = b.contiguous(), c.contiguous(), state if by_place else state.contiguous()
    # With units side by side threads add up a few of their own and meet, where along rows they would shuffle.
    u = u.contiguous() if by_place else u.float().mT.contiguous()
    with torch.cuda.device_of(x):
        _forward[(batch,)](
            x.contiguous(), b, u, c, first, places, state, out, stride_of(places), length,
            H=hidden, BH=max(16, power_of_two(hidden)), KEPT=state.shape[1] if by_place else 0,
            num_warps=8 if hidden > 64 else 4,
        )  # fmt: skip
    return out


@Kernel
@triton.jit
def _backward(
    p_x, p_a, p_h, p_grad, p_u, p_by, p_carry, T, H: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """One row, from its last token to its first."""
    i_b = tl.program_id(0).to(tl.int64)
    row, unit = tl.arange(0, BH), tl.arange(0, BH)
    m_unit = unit < H
    m_u = (row < H)[:, None] & m_unit[None, :]
    p_u += row[:, None] * H + unit[None, :]
    b_ur = tl.load(p_u, mask=m_u, other=0.0)
    b_uz = tl.load(p_u + H * H, mask=m_u, other=0.0)
    b_un = tl.load(p_u + 2 * H * H, mask=m_u, other=0.0)
    last = i_b * T + T - 1
    p_x += last * 3 * H + unit
    p_a += last * 3 * H + unit
    p_h += last * H + unit
    p_grad += last * H + unit
    p_by += last * 4 * H + unit
    b_xr, b_ar = tl.load(p_x, mask=m_unit, other=0.0), tl.load(p_a, mask=m_unit, other=0.0)
    b_xz, b_az = tl.load(p_x + H, mask=m_unit, other=0.0), tl.load(p_a + H, mask=m_unit, other=0.0)
    b_xn, b_an = tl.load(p_x + 2 * H, mask=m_unit, other=0.0), tl.load(p_a + 2 * H, mask=m_unit, other=0.0)
    b_h, b_grad = tl.load(p_h, mask=m_unit, other=0.0), tl.load(p_grad, mask=m_unit, other=0.0)
    b_carry = tl.zeros([BH], tl.float32)
    for back in range(T):
        # Prefetches what the token before needs.
        m_next = m_unit & (back + 1 < T)
        p_x -= 3 * H
        p_a -= 3 * H
        p_h -= H
        p_grad -= H
        b_next_xr, b_next_ar = tl.load(p_x, mask=m_next, other=0.0), tl.load(p_a, mask=m_next, other=0.0)
        b_next_xz, b_next_az = tl.load(p_x + H, mask=m_next, other=0.0), tl.load(p_a + H, mask=m_next, other=0.0)
        b_next_xn = tl.load(p_x + 2 * H, mask=m_next, other=0.0)
        b_next_an = tl.load(p_a + 2 * H, mask=m_next, other=0.0)
        b_next_h, b_next_grad = tl.load(p_h, mask=m_next, other=0.0), tl.load(p_grad, mask=m_next, other=0.0)
        b_r, b_z = sigmoid(b_xr + b_ar), sigmoid(b_xz + b_az)
        b_n = 2 * sigmoid(2 * (b_xn + b_r * b_an)) - 1  # tanh
        b_arrived = b_carry + b_grad
        b_dn = b_arrived * (1 - b_z) * (1 - b_n * b_n)
        b_da = b_dn * b_r
        b_dr = b_da * b_an * (1 - b_r)
        b_dz = b_arrived * (b_h - b_n) * b_z * (1 - b_z)
        tl.store(p_by, b_da, mask=m_unit)
        tl.store(p_by + H, b_dr, mask=m_unit)
        tl.store(p_by + 2 * H, b_dz, mask=m_unit)
        tl.store(p_by + 3 * H, b_dn, mask=m_unit)
        p_by -= 4 * H
        b_all = b_ur * b_dr[:, None] + b_uz * b_dz[:, None] + b_un * b_da[:, None]
        b_carry = b_arrived * b_z + tl.sum(b_all, 0)
        b_xr, b_xz, b_xn, b_ar, b_az, b_an = b_next_xr, b_next_xz, b_next_xn, b_next_ar, b_next_az, b_next_an
        b_h, b_grad = b_next_h, b_next_grad
    tl.store(p_carry + i_b * H + unit, b_carry, mask=m_unit)


def backward(x: Tensor, a: Tensor, h: Tensor, grad: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """What `ops/gru.py` calls `_walk_back`, of float32 tensors: x = W x + b and a = U h + c, (B, T, 3 H)."""
    batch, length, hidden = h.shape
    slopes, carry = h.new_empty(batch, length, 4 * hidden), h.new_empty(batch, hidden)
    with torch.cuda.device_of(x):
        _backward[(batch,)](
            x.contiguous(), a.contiguous(), h.contiguous(), grad.contiguous(), u.contiguous(), slopes, carry, length,
            H=hidden, BH=max(16, power_of_two(hidden)), num_warps=8 if hidden > 64 else 4,
        )  # fmt: skip
    return slopes, carry
