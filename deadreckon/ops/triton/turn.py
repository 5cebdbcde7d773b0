"""Rotation of one token in decode: its phases and all tensors that they rotate, in one kernel.

In PyTorch these are some thirty operations on a few thousand numbers, and a decode step waits for each of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.blockwise.rotation import Turned, for_each_query_head, unchanged
from deadreckon.ops.factors import Factors
from deadreckon.ops.layout import dense
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.rotation import cos_sin, distinct, turn_by
from deadreckon.ops.triton.tiles import power_of_two, strides

TURN = tl.constexpr(2 * math.pi)


@triton.jit
def _turn_heads(
    p_x, s_x, p_y, i_b, i_r, channel, m_channel, b_cos, b_sin, GROUP: tl.constexpr, TURNS: tl.constexpr,
    BG: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """y (B, heads, D), contiguous, is x rotated, for the heads that share angles."""
    s_b, _, s_h = s_x
    member = tl.arange(0, BG)
    head = i_r * GROUP + member
    mask = (member < GROUP)[:, None] & m_channel[None, :]
    x = p_x + i_b * s_b + head[:, None] * s_h + channel[None, :]
    y = p_y + (i_b * GROUP * TURNS + head[:, None]) * D + channel[None, :]
    b_first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(x + D // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(y, b_first * b_cos[None, :] - b_second * b_sin[None, :], mask=mask)
    tl.store(y + D // 2, b_first * b_sin[None, :] + b_second * b_cos[None, :], mask=mask)


@Kernel
@triton.jit
def _turn_token(
    p_angle, s_angle, p_before, s_before, p_phase, p_turns,
    p_q, s_q, p_q_turned, p_k, s_k, p_k_turned, p_v, s_v, p_v_turned, p_w, s_w, p_w_turned, ROWS,
    TURNS: tl.constexpr, GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, GROUP_W: tl.constexpr, VALUES: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_r, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    m_channel = channel < D // 2
    i_row = tl.minimum(i_b, ROWS - 1)  # of phases, which rows of the batch may share
    b_angle = tl.load(p_angle + i_row * s_angle[0] + i_r * s_angle[2] + channel, mask=m_channel, other=0.0)
    b_before = tl.load(p_before + i_row * s_before[0] + i_r * s_before[2] + channel, mask=m_channel, other=0.0)
    b_phase = b_before + b_angle.to(b_before.dtype)
    b_phase -= tl.floor(b_phase / TURN) * TURN
    b_turns = b_phase / TURN
    b_turns = (b_turns - tl.floor(b_turns + 0.5)).to(tl.float32)
    if i_b < ROWS:
        at = (i_b * TURNS + i_r) * (D // 2) + channel
        tl.store(p_phase + at, b_phase, mask=m_channel)
        tl.store(p_turns + at, b_turns, mask=m_channel)
    b_cos, b_sin = cos_sin(b_turns)
    _turn_heads(p_q, s_q, p_q_turned, i_b, i_r, channel, m_channel, b_cos, b_sin, GROUP_Q, TURNS, BQ, D)
    _turn_heads(p_k, s_k, p_k_turned, i_b, i_r, channel, m_channel, b_cos, b_sin, GROUP_K, TURNS, BK, D)
    if VALUES:
        _turn_heads(p_v, s_v, p_v_turned, i_b, i_r, channel, m_channel, b_cos, b_sin, GROUP_K, TURNS, BK, D)
    if GROUP_W:
        _turn_heads(p_w, s_w, p_w_turned, i_b, i_r, channel, m_channel, b_cos, b_sin, GROUP_W, TURNS, BK, D)


def turned_token(q: Tensor, k: Tensor, v: Tensor, factors: Factors, start: Tensor) -> Turned:
    """As :func:`deadreckon.ops.blockwise.rotation.turned`, for one token (B, 1, …) after phases (B or 1, 1, Hr, D/2).

    Phases are float64: they accumulate the steps of a whole stream.
    """
    rotation, steps = factors.parts()
    assert rotation is not None
    k, v, log_gate = for_each_query_head(q, k, v, factors.log_gate, rotation)
    angles, start = dense(distinct(rotation.angles)), dense(start)
    batch, _, heads, width = q.shape
    turns, rows = angles.shape[2], max(angles.shape[0], start.shape[0])
    angles, start = angles.expand(rows, -1, -1, -1), start.expand(rows, -1, turns, -1)
    w = None if steps is None else dense(steps.w)
    q, k, v = dense(q), dense(k), dense(v)
    new_q, new_k = q.new_empty(q.shape), k.new_empty(k.shape)
    new_v = v.new_empty(v.shape) if rotation.values else v
    new_w = None if w is None else w.new_empty(w.shape)
    phase = start.new_empty(rows, 1, turns, width // 2)
    in_turns = torch.empty_like(phase, dtype=torch.float32)
    none = [(0, 0, 0)]
    with torch.cuda.device_of(q):
        _turn_token[(turns, batch)](
            angles, *strides(angles), start, *strides(start), phase, in_turns,
            q, *strides(q), new_q, k, *strides(k), new_k, v, *strides(v), new_v,
            w, *(none if w is None else strides(w)), new_w, rows,
            TURNS=turns, GROUP_Q=heads // turns, GROUP_K=k.shape[2] // turns,
            GROUP_W=0 if w is None else w.shape[2] // turns, VALUES=rotation.values,
            BQ=power_of_two(heads // turns), BK=power_of_two(k.shape[2] // turns), D=width,
            BD=power_of_two(width // 2), num_warps=1 if heads // turns * width < 1024 else 4,
        )  # fmt: skip
    if steps is not None and new_w is not None:
        steps = replace(steps, w=new_w)
    back = partial(turn_by, phase=in_turns, sign=-1) if rotation.values else unchanged
    return Turned(new_q, new_k, new_v, Factors(steps, log_gate, factors.score), phase, back)
