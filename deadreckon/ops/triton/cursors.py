"""Kernels for PRISM's cursors, all but `jumps` for inference alone: PyTorch takes a launch for every token, every layer
or a pass over T × T.

    gru      h_t from h_{t−1}, all tokens in one launch: the hidden-to-hidden matrix stays in registers
    jumps    softmax over [keys so far, no jump], by place up to P − 2, all later ones together; nothing of size T × T
    jump     the same for one token, whose key is written to the cache first

Places (B or 1, T) are positions of tokens in their rows; those below 0 are padding, where a row has its initial state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import sigmoid
from deadreckon.ops.triton.tiles import DTYPES, LOG2E, ceil_div, mul_exact, padded, power_of_two

TILE = 64  # tokens of a program that jumps, and keys that it looks at together
KEYS = 512  # that a program of one token looks at together: cursors of a single row are few programs


@triton.jit
def slot_of(place, KEPT: tl.constexpr):
    """The slot of a place in a ring buffer of KEPT, for places below 0, too."""
    slot = place % KEPT
    return tl.where(slot < 0, slot + KEPT, slot)


@Kernel
@triton.jit
def _gru(
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


def gru(
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
        _gru[(batch,)](
            x.contiguous(), b, u, c, first, places, state, out, stride_of(places), length,
            H=hidden, BH=max(16, power_of_two(hidden)), KEPT=state.shape[1] if by_place else 0,
            num_warps=8 if hidden > 64 else 4,
        )  # fmt: skip
    return out


def stride_of(places: Tensor) -> int:
    """The stride of places from row to row; 0 if one row serves all."""
    assert places.shape[1] == 1 or places.stride(1) == 1
    return places.stride(0) if places.shape[0] > 1 else 0


@triton.jit
def _scores(b_q, p_k, s_key, first, width, m_width, last, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """Logits (tokens, STEP), in units of log 2, and the places of their keys."""
    key = first + tl.arange(0, STEP)
    mask = m_width[:, None] & (key <= last)[None, :]
    b_k = tl.load(p_k + key.to(tl.int64)[None, :] * s_key + width[:, None], mask=mask, other=0.0)
    return mul_exact(b_q, b_k, DTYPE), key


@Kernel
@triton.jit
def _jumps(
    p_q, p_k, p_none, p_place, p_out, scale, s_place, s_qb, s_qt, s_kb, s_kf, s_ks, T, TILES, F,
    P: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one cursor: once over all keys for the sum, once more over those that have a place."""
    i_t, i_b = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    i_f = tl.program_id(1).to(tl.int64)
    row, width = i_t * TILE + tl.arange(0, TILE), tl.arange(0, BW)
    m_row, m_width = row < T, width < W
    place = tl.load(p_place + i_b * s_place + row, mask=m_row, other=-1)
    last = tl.max(place, 0)
    p_q += i_b * s_qb + row.to(tl.int64)[:, None] * s_qt + i_f * W + width[None, :]
    b_q = tl.load(p_q, mask=m_row[:, None] & m_width[None, :], other=0.0) * scale
    at = (i_b * T + row) * F + i_f
    b_none = tl.load(p_none + at, mask=m_row, other=0.0) * 1.4426950408889634
    p_k += i_b * s_kb + i_f * s_kf
    b_greatest, b_sum, b_beyond = b_none, tl.full([TILE], 1.0, tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, last + 1, TILE):
        b_s, key = _scores(b_q, p_k, s_ks, first, width, m_width, last, TILE, DTYPE)
        b_s = tl.where(key[None, :] <= place[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_greatest, tl.max(b_s, 1))
        b_ratio, b_e = tl.exp2(b_greatest - b_new), tl.exp2(b_s - b_new[:, None])
        b_sum = b_sum * b_ratio + tl.sum(b_e, 1)
        b_beyond = b_beyond * b_ratio + tl.sum(tl.where((key >= P - 1)[None, :], b_e, 0.0), 1)
        b_greatest = b_new
    b_share = 1 / b_sum
    p_out += at * (P + 1)
    for first in range(0, P - 1, TILE):
        b_s, key = _scores(b_q, p_k, s_ks, first, width, m_width, last, TILE, DTYPE)
        b_e = tl.exp2(b_s - b_greatest[:, None]) * b_share[:, None]
        b_e = tl.where(key[None, :] <= place[:, None], b_e, 0.0)
        tl.store(p_out[:, None] + key[None, :], b_e, mask=m_row[:, None] & (key < P - 1)[None, :])
    tl.store(p_out + P - 1, b_beyond * b_share, mask=m_row)
    tl.store(p_out + P, tl.exp2(b_none - b_greatest) * b_share, mask=m_row)


@triton.jit
def _score(b_q, p_k, key, place, width, m_width, W: tl.constexpr):
    """Logits of keys before a place, in units of log 2."""
    m_key = key < place
    b_k = tl.load(p_k + key[:, None] * W + width[None, :], mask=m_key[:, None] & m_width[None, :], other=0.0)
    return tl.where(m_key, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), float("-inf"))


@Kernel
@triton.jit
def _jump(
    p_q, p_k, p_new, p_none, p_place, p_out, scale, s_place, s_kb, s_kf, F,
    P: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One token of one cursor. Each lane has a sum of its own: threads synchronise only at the end."""
    i_b, i_f = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    width, lane = tl.arange(0, BW), tl.arange(0, STEP)
    m_width = width < W
    at = i_b * F + i_f
    place = tl.load(p_place + i_b * s_place)
    b_q = tl.load(p_q + at * W + width, mask=m_width, other=0.0) * scale
    b_own = tl.load(p_new + at * W + width, mask=m_width, other=0.0)
    none = tl.load(p_none + at) * 1.4426950408889634
    p_k += i_b * s_kb + i_f * s_kf
    tl.store(p_k + place * W + width, b_own, mask=m_width & (place >= 0))
    own = tl.where(place >= 0, tl.sum(b_q * b_own.to(tl.float32), 0), float("-inf"))
    b_greatest = tl.full([STEP], -1e30, tl.float32)
    b_total, b_beyond = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
    for first in range(0, place, STEP):
        key = first + lane
        b_s = _score(b_q, p_k, key, place, width, m_width, W)
        b_new = tl.maximum(b_greatest, b_s)
        b_ratio, b_e = tl.exp2(b_greatest - b_new), tl.exp2(b_s - b_new)
        b_total = b_total * b_ratio + b_e
        b_beyond = b_beyond * b_ratio + tl.where(key >= P - 1, b_e, 0.0)
        b_greatest = b_new
    greatest = tl.maximum(tl.max(b_greatest, 0), tl.maximum(none, own))
    b_ratio = tl.exp2(b_greatest - greatest)
    at_place = tl.exp2(own - greatest)
    total = tl.sum(b_total * b_ratio, 0) + tl.exp2(none - greatest) + at_place
    beyond = tl.sum(b_beyond * b_ratio, 0) + tl.where(place >= P - 1, at_place, 0.0)
    p_out += at * (P + 1)
    for first in range(0, P - 1, STEP):
        key = first + lane
        b_s = tl.where(key == place, own, _score(b_q, p_k, key, place, width, m_width, W))
        tl.store(p_out + key, tl.exp2(b_s - greatest) / total, mask=key < P - 1)
    tl.store(p_out + P - 1, beyond / total)
    tl.store(p_out + P, tl.exp2(none - greatest) / total)


def jumps(q: Tensor, keys: Tensor, none: Tensor, places: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Probabilities of where cursors jump to: (B, T, F, P + 1), the last of no jump.

    Args:
        q: (B, T, F, W) float32, of any layout in B and T.
        keys: (B, F, S, W) in any precision, by place; S beyond all places.
        none: (B, T, F) logits of no jump.
        dtype: of the inputs of all this: for 16 bits, products are precise enough as three 16-bit products.
    """
    batch, length, cursors, width = q.shape
    out = none.new_empty(batch, length, cursors, positions + 1)
    with torch.cuda.device_of(q):
        tiles = ceil_div(length, TILE)
        _jumps[(tiles * batch, cursors)](
            q, keys, none.contiguous(), places, out, width**-0.5 * LOG2E, stride_of(places), *q.stride()[:2],
            *keys.stride()[:3], length, tiles, cursors,
            P=positions, W=width, BW=padded(width), TILE=TILE, DTYPE=DTYPES[dtype], num_warps=4,
        )  # fmt: skip
    return out


def jump(q: Tensor, keys: Tensor, new: Tensor, none: Tensor, places: Tensor, positions: int) -> Tensor:
    """The same for one token, q and new (B, 1, F, W), whose key is written to keys (B, F, S, W), contiguous, by place.

    The key is rounded to their dtype.
    """
    batch, _, cursors, width = q.shape
    out = none.new_empty(batch, 1, cursors, positions + 1)
    with torch.cuda.device_of(q):
        _jump[(batch, cursors)](
            q.contiguous(), keys, new.to(keys.dtype).contiguous(), none.contiguous(), places, out,
            width**-0.5 * LOG2E, stride_of(places), *keys.stride()[:2], cursors,
            P=positions, W=width, BW=power_of_two(width), STEP=KEYS, num_warps=8,
        )  # fmt: skip
    return out
