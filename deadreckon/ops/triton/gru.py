"""The recurrence of a GRU as one kernel each way: see `ops/gru.py`. The hidden-to-hidden matrix stays in registers.

Places (B or 1, T) are positions of tokens in their rows; those below 0 are padding, where a row has its initial state.

A thread has a column of the matrix of each gate, or half of one, so that it adds up numbers of its own and computes one
unit. Warps meet for what halves sum up to, of all gates and rows of a program together, and for the new state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.cursors import slot_of, stride_of
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import ratio
from deadreckon.ops.triton.tiles import ceil_div, power_of_two

NARROW = 64  # units up to which a multiprocessor holds several programs, and each has one row
FEW = 128  # rows up to which that is as fast with more units: a GPU has about as many multiprocessors


@triton.jit
def _sigmoid(b_x):
    """Error 2⁻²²."""
    return ratio(1.0, 1.0 + tl.exp2(-1.4426950408889634 * b_x))


@triton.jit
def _tanh(b_x):
    return 2 * _sigmoid(2 * b_x) - 1


@triton.jit
def _three(p_x, step, mask):
    """What a pointer has for each gate, in float32."""
    b_r, b_z = tl.load(p_x, mask=mask, other=0.0), tl.load(p_x + step, mask=mask, other=0.0)
    return b_r.to(tl.float32), b_z.to(tl.float32), tl.load(p_x + 2 * step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _times(u, b_r, b_z, b_n):
    """The matrices' rows times numbers of these."""
    return u[0] * b_r[:, None], u[1] * b_z[:, None], u[2] * b_n[:, None]


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_six(a, b, c, d, e, f, g, h, i, j, k, m):
    return a + g, b + h, c + i, d + j, e + k, f + m


@triton.jit
def _sums(products):
    """Sums of columns."""
    if len(products) == 3:
        return tl.reduce(products, 0, _add_three)
    else:
        return tl.reduce(products, 0, _add_six)


@Kernel
@triton.jit(do_not_specialize=["s_u"])
def _forward(
    p_x, p_b, p_u, p_c, p_first, p_place, p_state, p_out, s_place, s_u, N, T,
    H: tl.constexpr, BH: tl.constexpr, KEPT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R rows. With KEPT, for one token of one row, states are read from and written to a ring buffer by place."""
    i_n = tl.program_id(0).to(tl.int64) * R
    past, unit = tl.arange(0, BH), tl.arange(0, BH)
    m_unit = unit < H
    m_u = (past < H)[:, None] & m_unit[None, :]
    u = _three(p_u + (unit[None, :] * H + past[:, None] if KEPT else past[:, None] * s_u + unit[None, :]),
               H * H if KEPT else H, m_u)  # fmt: skip
    b_r0, b_z0, b_n0 = _three(p_b + unit, H, m_unit)
    b_rc, b_zc, b_c = _three(p_c + unit, H, m_unit)
    b_r0 += b_rc
    b_z0 += b_zc
    b_first = tl.zeros([BH], tl.float32)
    if p_first is not None:
        b_first = tl.load(p_first + unit, mask=m_unit, other=0.0).to(tl.float32)
    h, x, place = (), (), ()
    for r in tl.static_range(R):
        i_row = i_n + r
        here = tl.load(p_place + i_row * s_place, mask=i_row < N, other=0)
        place += (here,)
        p_h = p_state + i_row * (KEPT if KEPT else 1) * H + unit
        if KEPT:
            p_h += slot_of(tl.maximum(here - 1, -1), KEPT) * H
        h += (tl.load(p_h, mask=m_unit & (i_row < N), other=0.0),)
        x += _three(p_x + i_row * T * 3 * H + unit, H, m_unit & (i_row < N))
    for t in range(T):
        # Prefetches the next token's inputs.
        next_x, next_place, products = (), (), ()
        for r in tl.static_range(R):
            i_row = i_n + r
            m_next = (i_row < N) & (t + 1 < T)
            next_x += _three(p_x + (i_row * T + t + 1) * 3 * H + unit, H, m_unit & m_next)
            next_place += (tl.load(p_place + i_row * s_place + t + 1, mask=m_next, other=0),)
            products += _times(u, h[r], h[r], h[r])
        total = _sums(products)
        after = ()
        for r in tl.static_range(R):
            i_row = i_n + r
            b_gate = _sigmoid(x[3 * r] + b_r0 + total[3 * r])
            b_keep = _sigmoid(x[3 * r + 1] + b_z0 + total[3 * r + 1])
            b_new = _tanh(x[3 * r + 2] + b_n0 + b_gate * (b_c + total[3 * r + 2]))
            b_h = tl.where(place[r] < 0, b_first, (1 - b_keep) * b_new + b_keep * h[r])
            after += (b_h,)
            tl.store(p_out + (i_row * T + t) * H + unit, b_h, mask=m_unit & (i_row < N))
            if KEPT:
                tl.debug_barrier()  # padding may leave it where it has been read
                tl.store(p_state + (i_row * KEPT + slot_of(place[r], KEPT)) * H + unit, b_h, mask=m_unit)
        h, x, place = after, next_x, next_place


def forward(
    x: Tensor, b: Tensor, u: Tensor, c: Tensor, first: Tensor | None, places: Tensor, state: Tensor, by_place: bool
) -> Tensor:
    """Hidden states (B, T, H), float32, from input projections x (B, T, 3 H).

    Args:
        b, c: (3 H,) biases of the input's and the past's map, whose matrix is u (3 H, H); each in any precision.
        first: (H,) the state at padding; zero by default.
        state: (B, H) float32, before the first token; or, by place, for one token, (B, kept, H), updated in place.
    """
    batch, length, _ = x.shape
    hidden = u.shape[1]
    out = x.new_empty(batch, length, hidden)
    b, c, state = b.contiguous(), c.contiguous(), state if by_place else state.contiguous()
    u = u.contiguous() if by_place else u.mT.contiguous()
    rows = 1 if by_place else _rows(batch, hidden)
    with torch.cuda.device_of(x):
        _forward[(ceil_div(batch, rows),)](
            x.contiguous(), b, u, c, first, places, state, out, stride_of(places), 3 * hidden, batch, length,
            H=hidden, KEPT=state.shape[1] if by_place else 0, R=rows, **_tile(hidden),
        )  # fmt: skip
    return out


def _rows(batch: int, hidden: int) -> int:
    """Rows of a program."""
    return 1 if hidden <= NARROW or batch <= FEW else 2


def _tile(hidden: int) -> dict[str, int]:
    return {"BH": max(16, power_of_two(hidden)), "num_warps": 8 if hidden > NARROW else 4}


@triton.jit
def _known(p_x, p_a, p_h, p_grad, i_at, mask, H: tl.constexpr):
    """What a token's gates and their gradients are made of."""
    b_xr, b_xz, b_xn = _three(p_x + i_at * 3 * H, H, mask)
    b_ar, b_az, b_an = _three(p_a + i_at * 3 * H, H, mask)
    b_h, b_grad = tl.load(p_h + i_at * H, mask=mask, other=0.0), tl.load(p_grad + i_at * H, mask=mask, other=0.0)
    return b_xr + b_ar, b_xz + b_az, b_xn, b_an, b_h, b_grad


@Kernel
@triton.jit(do_not_specialize=["s_u"])
def _backward(
    p_x, p_a, p_h, p_grad, p_u, p_by, p_carry, s_u, N, T, H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """R rows, from their last token to their first."""
    i_n = tl.program_id(0).to(tl.int64) * R
    row, unit = tl.arange(0, BH), tl.arange(0, BH)
    m_unit = unit < H
    u = _three(p_u + row[:, None] * s_u + unit[None, :], H * s_u, (row < H)[:, None] & m_unit[None, :])
    p_x, p_a, p_h, p_grad, p_by = p_x + unit, p_a + unit, p_h + unit, p_grad + unit, p_by + unit
    known, carry = (), ()
    for r in tl.static_range(R):
        known += (_known(p_x, p_a, p_h, p_grad, (i_n + r + 1) * T - 1, m_unit & (i_n + r < N), H),)
        carry += (tl.zeros([BH], tl.float32),)
    for back in range(T):
        # Prefetches what the token before needs.
        before, kept, products = (), (), ()
        for r in tl.static_range(R):
            i_at = (i_n + r + 1) * T - 1 - back
            m_row = m_unit & (i_n + r < N)
            before += (_known(p_x, p_a, p_h, p_grad, i_at - 1, m_row & (back + 1 < T), H),)
            b_r, b_z, b_xn, b_an, b_h, b_grad = known[r]
            b_r, b_z = _sigmoid(b_r), _sigmoid(b_z)
            b_n = _tanh(b_xn + b_r * b_an)
            b_arrived = carry[r] + b_grad
            b_dn = b_arrived * (1 - b_z) * (1 - b_n * b_n)
            b_da = b_dn * b_r
            b_dr = b_da * b_an * (1 - b_r)
            b_dz = b_arrived * (b_h - b_n) * b_z * (1 - b_z)
            p_row = p_by + i_at * 4 * H
            tl.store(p_row, b_da, mask=m_row)
            tl.store(p_row + H, b_dr, mask=m_row)
            tl.store(p_row + 2 * H, b_dz, mask=m_row)
            tl.store(p_row + 3 * H, b_dn, mask=m_row)
            kept += (b_arrived * b_z,)
            products += _times(u, b_dr, b_dz, b_da)
        total = _sums(products)
        carry = ()
        for r in tl.static_range(R):
            carry += (kept[r] + (total[3 * r] + total[3 * r + 1] + total[3 * r + 2]),)
        known = before
    for r in tl.static_range(R):
        tl.store(p_carry + (i_n + r) * H + unit, carry[r], mask=m_unit & (i_n + r < N))


def backward(x: Tensor, a: Tensor, h: Tensor, grad: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """What `ops/gru.py` calls `_walk_back`, of float32 tensors: x = W x + b and a = U h + c, (B, T, 3 H)."""
    batch, length, hidden = h.shape
    slopes, carry = h.new_empty(batch, length, 4 * hidden), h.new_empty(batch, hidden)
    rows = _rows(batch, hidden)
    with torch.cuda.device_of(x):
        _backward[(ceil_div(batch, rows),)](
            x.contiguous(), a.contiguous(), h.contiguous(), grad.contiguous(), u.contiguous(), slopes, carry, hidden,
            batch, length, H=hidden, R=rows, **_tile(hidden),
        )  # fmt: skip
    return slopes, carry
