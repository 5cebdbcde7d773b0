"""Where PRISM's cursors may jump: softmax over [keys so far, no jump], by place up to P − 2, all later ones together.

    jumps    of all tokens; nothing of size T × T but the result
    jump     of one token, whose key is written to the cache first; for inference alone

Places (B or 1, T) are positions of tokens in their rows; those below 0 are padding, from where there are no jumps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import DTYPES, LOG2E, ceil_div, mul_exact, padded, power_of_two

TILE = 64  # tokens of a program that jumps, and keys that it looks at together
KEYS = 512  # that a program of one token looks at together: cursors of a single row are few programs


@triton.jit
def slot_of(place, KEPT: tl.constexpr):
    """The slot of a place in a ring buffer of KEPT, for places below 0, too."""
    slot = place % KEPT
    return tl.where(slot < 0, slot + KEPT, slot)


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
