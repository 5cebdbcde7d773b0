"""Even powers in decode: weights of keys, and the contribution of the state of all earlier keys.

Beyond squares numbers are float64, as states are: a weight may be a small difference of large monomials, of which each
program has some, and powers of small logits leave the range of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class State(NamedTuple):
    """The unit of keys, and the state of all tokens before the segments, (N, F, 1 | G, E + 1); TYPE is its dtype."""

    unit: Tensor  # (N,) float32: what keys are multiplied by
    address: Tensor  # (rows,) int64, as `placed`
    channels: Tensor  # (p, F) uint8: which ones a row is the product of
    factor: Tensor  # (N,) TYPE: what the state is multiplied by to be in that unit
    noise: Tensor  # (N, 1 | G) TYPE: sums of weights up to this are rounding errors
    later: Tensor  # (N, 1 | G) float32: gates of all segments


@triton.jit
def length_of(b_x, AXIS: tl.constexpr):
    """Norms along an axis, safe from over- and underflow; never zero."""
    b_largest = tl.maximum(tl.max(tl.abs(b_x), AXIS), 1e-30)
    b_x = b_x / (b_largest if AXIS == 0 else b_largest[:, None])
    return b_largest * tl.sqrt(tl.maximum(tl.sum(b_x * b_x, AXIS), 0.25))


@triton.jit
def powered(b_s, b_bias, m_key, POWER: tl.constexpr, TYPE: tl.constexpr):
    """Weights of visible keys, from logits and sums of log gates, (queries, keys)."""
    b_square = b_s.to(TYPE) * b_s.to(TYPE)
    b_power = b_square
    for _ in tl.static_range(POWER // 2 - 1):
        b_power *= b_square
    return tl.where(m_key[None, :], b_power * tl.exp2(b_bias * 1.4426950408889634), 0.0)


@triton.jit
def gate_at(p_gate, mask):
    """Log gates, clamped to −1e4, so that in a sum none takes the digits of others."""
    return tl.maximum(tl.load(p_gate, mask=mask, other=0.0).to(tl.float32), -1e4)


@triton.jit
def look_at_state(
    p_q, p_gate, last, partial, state, partial_at, p_part, i_n, i_h, i_row, tokens, N, F,
    G: tl.constexpr, GATES: tl.constexpr, POWER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, STATE_ROWS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Reads some rows of the state, for all queries of a group at once."""
    KINDS: tl.constexpr = GATES if GATES else 1
    channel, value, query = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BQ)
    m_query, kind = query < G, query % KINDS
    start, stop = tl.load(p_part + 1), tl.load(p_part + 2)
    p_state = state.factor + tl.load(state.address + i_row) + i_h * F * KINDS * (E + 1)
    b_fade = tl.load(state.factor + i_n) + tl.zeros([BQ], TYPE)
    if GATES:
        b_shift = gate_at(p_gate + i_n * GATES + kind, m_query)
        b_shift += tl.load(last.totals + ((tokens % 2) * N + i_n) * GATES + kind, mask=m_query, other=0.0)
        b_shift += tl.load(state.later + i_n * GATES + kind, mask=m_query, other=0.0)
        b_fade *= tl.exp2(b_shift * 1.4426950408889634)
    m_q = m_query[:, None] & (channel < D)[None, :]
    b_q = tl.load(p_q + query[:, None] * D + channel[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_one = 1 / length_of(b_q, 1)
    b_out = tl.zeros([BQ, BE], TYPE)
    b_weight = tl.zeros([BQ], TYPE)
    for first in range(start, stop, STATE_ROWS):
        row = first + tl.arange(0, STATE_ROWS)
        m_row = row < stop
        m_x = m_row[:, None] & m_query[None, :]
        b_x = tl.full([STATE_ROWS, BQ], 1.0, TYPE)
        for factor in tl.static_range(POWER):
            b_channel = tl.load(state.channels + factor * F + row, mask=m_row, other=0).to(tl.int32)
            p_x = p_q + b_channel[:, None] + query[None, :] * D
            b_x *= tl.load(p_x, mask=m_x, other=0.0).to(TYPE) * b_one[None, :]
        p_row = p_state + (row.to(tl.int64)[:, None] * KINDS + kind[None, :]) * (E + 1)
        m_state = m_x[:, :, None] & (value < E)[None, None, :]
        b_state = tl.load(p_row[:, :, None] + value[None, None, :], mask=m_state, other=0.0)
        b_out += tl.sum(b_x[:, :, None] * b_state, 0)
        b_weight += tl.sum(b_x * tl.load(p_row + E, mask=m_x, other=0.0), 0)
    p_out = partial.out + (partial_at + query)[:, None] * E + value[None, :]
    tl.store(p_out, b_out * b_fade[:, None], mask=m_query[:, None] & (value < E)[None, :])
    tl.store(partial.weight + partial_at + query, b_weight * b_fade, mask=m_query)
    b_noise = tl.load(state.noise + i_n * KINDS + kind, mask=m_query, other=0.0)
    tl.store(partial.greatest + partial_at + query, b_noise * b_fade, mask=m_query)
