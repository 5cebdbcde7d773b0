"""Rotation kernels: sum step angles, rotate queries, keys and values, and rotate outputs back, each in one pass.

A phase is a running sum of step angles modulo one turn, good to 1e-6 rad after a million steps. So steps are summed in
fixed point: a float64 of turns between 2 and 4 holds 51 bits below the point, which move to the top of an int64. Whole
turns then overflow away, and integer sums are exact in any order: rounding a step costs 2⁻⁵² turns, a million equal
steps (RoPE) 1.4e-9 rad. (With 32 bits it would be 7e-4 rad.) Kernels exchange the sum as float32 *turns* in [−½, ½],
off by at most 2⁻²⁶ turns = 1e-7 rad, whose quarters are subtracted exactly before sine and cosine.

Forward: totals of tiles of tokens, their running sum, then one kernel finishes the sum within its tile and rotates its
tokens. Backward: y = R(φ) x gives dx = R(−φ) dy and dφ_m = x_m dx_{m+D/2} − x_{m+D/2} dx_m, summed over the heads that
share φ; step t rotates all later tokens, so its gradient is the sum of dφ from t on: tiles again, from the end. (The y
would do as well as the x, but they are rounded, and these sums are long.) In such a sum, routes that do not cross the
step cancel, but the rounding errors of dx do not: where gates make routes short, float32 gives angles' gradients to
1e-6 at 300 tokens and 2e-6 at 1000. Angles that need no gradient cost none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.layout import dense
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import ceil_div, power_of_two, strides

TURN = tl.constexpr(2 * math.pi)
QUARTER_TURN = tl.constexpr(math.pi / 2)
PER_RADIAN = tl.constexpr(1 / (2 * math.pi))
UNIT = tl.constexpr(2.0**-64)  # of a sum of steps, in turns

HEADS = 8  # heads of one tensor that a program turns, at most
TILE, WARPS = 2048, 8  # phases of a tile, and the warps it takes: eight sines and cosines a thread
CHUNK, COLUMNS = 128, 8  # tiles and channels that one step of the sum over tiles takes


@triton.jit
def _fixed(b_angle):
    """Radians, float32, as int64 multiples of 2⁻⁶⁴ turns."""
    b_turns = b_angle.to(tl.float64) * PER_RADIAN
    b_turns -= tl.floor(b_turns + 0.5)
    return (b_turns + 3.0).to(tl.int64, bitcast=True) << 13  # exponent and whole turns leave at the top


@triton.jit
def cos_sin(b_turns):
    """Taylor's series up to an eighth of a turn either side of the nearest quarter: 1e-7, and no branches."""
    b_quarter = tl.floor(b_turns * 4 + 0.5)
    b_x = (b_turns * 4 - b_quarter) * QUARTER_TURN  # the difference is exact
    b_z = b_x * b_x
    b_s = b_x + b_x * b_z * (-1.0 / 6 + b_z * (1.0 / 120 + b_z * (-1.0 / 5040 + b_z * (1.0 / 362880))))
    b_c = 1 + b_z * (-0.5 + b_z * (1.0 / 24 + b_z * (-1.0 / 720 + b_z * (1.0 / 40320 - b_z * (1.0 / 3628800)))))
    i_quarter = b_quarter.to(tl.int32)
    m_odd = (i_quarter & 1) != 0
    b_cos, b_sin = tl.where(m_odd, b_s, b_c), tl.where(m_odd, b_c, b_s)
    return tl.where(((i_quarter + 1) & 2) != 0, -b_cos, b_cos), tl.where((i_quarter & 2) != 0, -b_sin, b_sin)


@triton.jit
def _place(T, TURNS, PARTS, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """This program's tile, head of angles, part of the heads, row of the batch; its tokens, channels and their mask."""
    i_0 = tl.program_id(0)
    i_tile = (i_0 // (TURNS * PARTS)).to(tl.int64)
    i_r = (i_0 // PARTS % TURNS).to(tl.int64)
    token = i_tile * BT + tl.arange(0, BT)
    channel = tl.arange(0, BD)
    mask = (token < T)[:, None]
    if BD != D // 2:
        mask = mask & (channel < D // 2)[None, :]
    return i_tile, i_r, i_0 % PARTS, tl.program_id(1).to(tl.int64), token, channel, mask


@triton.jit
def _turn_heads(
    p_x, s_x, p_y, p_z, group, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cross, T, TURNS, PARTS,
    D: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """y, contiguous, is x rotated, for one part of the heads that share angles; adds Σ z × y to b_cross."""
    s_b, s_t, s_h = s_x
    share = (group + PARTS - 1) // PARTS
    first = i_r * group + i_part * share
    last = tl.minimum(first + share, (i_r + 1) * group)
    x = i_b * s_b + token[:, None] * s_t + channel[None, :]
    y = (i_b * T + token[:, None]) * (group * TURNS * D) + channel[None, :]
    for i_h in range(first, last):
        b_x1 = tl.load(p_x + x + i_h * s_h, mask=mask, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_x + x + (i_h * s_h + D // 2), mask=mask, other=0.0).to(tl.float32)
        b_y1, b_y2 = b_x1 * b_cos - b_x2 * b_sin, b_x1 * b_sin + b_x2 * b_cos
        if CROSS:
            b_z1 = tl.load(p_z + y + i_h * D, mask=mask, other=0.0).to(tl.float32)
            b_z2 = tl.load(p_z + y + (i_h * D + D // 2), mask=mask, other=0.0).to(tl.float32)
            b_cross += b_z1 * b_y2 - b_z2 * b_y1
        tl.store(p_y + y + i_h * D, b_y1, mask=mask)
        tl.store(p_y + y + (i_h * D + D // 2), b_y2, mask=mask)
    return b_cross


@Kernel
@triton.jit
def _step_totals(p_angle, s_angle, p_total, T, TURNS, TILES, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    i_tile, i_r, _, i_b, token, channel, mask = _place(T, TURNS, 1, D, BT, BD)
    s_b, s_t, s_h = s_angle
    p_angle += i_b * s_b + i_r * s_h
    b_angle = tl.load(p_angle + token[:, None] * s_t + channel[None, :], mask=mask, other=0.0)
    b_total = tl.sum(_fixed(b_angle), 0)
    p_total += ((i_b * TILES + i_tile) * TURNS + i_r) * (D // 2)
    tl.store(p_total + channel, b_total, mask=channel < D // 2)


@Kernel
@triton.jit
def _before(p_total, TILES, WIDTH, REVERSE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Replaces each tile's total by the sum of those before it, or after it: (B, TILES, WIDTH), int64 or float64."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_column = (column < WIDTH)[None, :]
    p_total += tl.program_id(1).to(tl.int64) * TILES * WIDTH
    b_carry = tl.zeros([COLUMNS], p_total.dtype.element_ty)
    for i in range(0, TILES, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        mask = (tile < TILES)[:, None] & m_column
        if REVERSE:
            tile = TILES - 1 - tile
        p = p_total + tile.to(tl.int64)[:, None] * WIDTH + column[None, :]
        b_total = tl.load(p, mask=mask, other=0)
        tl.store(p, tl.cumsum(b_total, 0) - b_total + b_carry[None, :], mask=mask)
        b_carry += tl.sum(b_total, 0)


@Kernel
@triton.jit
def _turn_by_steps(
    p_angle, s_angle, p_before, p_phase, p_q, s_q, p_q_turned, p_k, s_k, p_k_turned, p_v, s_v, p_v_turned,
    T, ROWS, TURNS, TILES, PARTS, GROUP_Q, GROUP_K,
    D: tl.constexpr, VALUES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_tile, i_r, i_part, i_b, token, channel, mask = _place(T, TURNS, PARTS, D, BT, BD)
    i_row = tl.minimum(i_b, ROWS - 1)  # of angles, which rows of the batch may share
    s_b, s_t, s_h = s_angle
    p_angle += i_row * s_b + i_r * s_h
    b_angle = tl.load(p_angle + token[:, None] * s_t + channel[None, :], mask=mask, other=0.0)
    p_before += ((i_row * TILES + i_tile) * TURNS + i_r) * (D // 2)
    b_before = tl.load(p_before + channel, mask=channel < D // 2, other=0)
    b_sum = tl.cumsum(_fixed(b_angle), 0) + b_before[None, :]
    b_phase = b_sum.to(tl.float32) * UNIT + b_angle * 0  # propagates NaN and infinity
    if (i_part == 0) & (i_b < ROWS):
        phase = ((i_b * T + token[:, None]) * TURNS + i_r) * (D // 2) + channel[None, :]
        tl.store(p_phase + phase, b_phase, mask=mask)
    b_cos, b_sin = cos_sin(b_phase)
    _turn_heads(
        p_q, s_q, p_q_turned, p_q, GROUP_Q, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cos,
        T, TURNS, PARTS, D, False,
    )  # fmt: skip
    _turn_heads(
        p_k, s_k, p_k_turned, p_k, GROUP_K, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cos,
        T, TURNS, PARTS, D, False,
    )  # fmt: skip
    if VALUES:
        _turn_heads(
            p_v, s_v, p_v_turned, p_v, GROUP_K, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin,
            b_cos, T, TURNS, PARTS, D, False,
        )  # fmt: skip


@Kernel
@triton.jit
def _turn_by_phase(
    p_phase, p_grad_phase, p_gradient, p_total,
    p_x0, s_0, p_y0, p_z0, p_x1, s_1, p_y1, p_z1, p_x2, s_2, p_y2, p_z2,
    T, BATCH, ROWS, TURNS, TILES, PARTS, GROUP_0, GROUP_1, GROUP_2,
    D: tl.constexpr, COUNT: tl.constexpr, SIGN: tl.constexpr,
    CROSS: tl.constexpr, PHASE_USED: tl.constexpr, TOTALS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y is x rotated by SIGN · phase. If y is a gradient and z its tensor: the gradient of the phase, per turn."""
    i_tile, i_r, i_part, i_b, token, channel, mask = _place(T, TURNS, PARTS, D, BT, BD)
    i_row = tl.minimum(i_b, ROWS - 1)
    phase = ((i_row * T + token[:, None]) * TURNS + i_r) * (D // 2) + channel[None, :]
    b_cos, b_sin = cos_sin(SIGN * tl.load(p_phase + phase, mask=mask, other=0.0))
    b_cross = tl.zeros([BT, BD], tl.float32)
    if COUNT > 0:
        b_cross = _turn_heads(
            p_x0, s_0, p_y0, p_z0, GROUP_0, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cross,
            T, TURNS, PARTS, D, CROSS,
        )  # fmt: skip
    if COUNT > 1:
        b_cross = _turn_heads(
            p_x1, s_1, p_y1, p_z1, GROUP_1, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cross,
            T, TURNS, PARTS, D, CROSS,
        )  # fmt: skip
    if COUNT > 2:
        b_cross = _turn_heads(
            p_x2, s_2, p_y2, p_z2, GROUP_2, i_r, i_part, i_b, token, channel, mask, b_cos, b_sin, b_cross,
            T, TURNS, PARTS, D, CROSS,
        )  # fmt: skip
    if CROSS:
        b_gradient = b_cross * (-SIGN * TURN)
        if PHASE_USED:
            m_grad = mask & (i_part == 0) & (i_b < ROWS)
            b_gradient += tl.load(p_grad_phase + phase, mask=m_grad, other=0.0)
        i_place = i_part * BATCH + i_b
        place = ((i_place * T + token[:, None]) * TURNS + i_r) * (D // 2) + channel[None, :]
        tl.store(p_gradient + place, b_gradient, mask=mask)
        if TOTALS:
            p_total += ((i_place * TILES + i_tile) * TURNS + i_r) * (D // 2)
            tl.store(p_total + channel, tl.sum(b_gradient, 0).to(tl.float64), mask=channel < D // 2)


@Kernel
@triton.jit
def _step_gradient(p_gradient, p_after, p_angle, T, TURNS, TILES, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    i_tile, i_r, _, i_b, _, channel, _ = _place(T, TURNS, 1, D, BT, BD)
    token = i_tile * BT + (BT - 1 - tl.arange(0, BT))  # the last first
    mask = (token < T)[:, None] & (channel < D // 2)[None, :]
    place = ((i_b * T + token[:, None]) * TURNS + i_r) * (D // 2) + channel[None, :]
    b_gradient = tl.load(p_gradient + place, mask=mask, other=0.0)
    p_after += ((i_b * TILES + i_tile) * TURNS + i_r) * (D // 2)
    b_after = tl.load(p_after + channel, mask=channel < D // 2, other=0.0).to(tl.float32)
    tl.store(p_angle + place, (tl.cumsum(b_gradient, 0) + b_after[None, :]) * PER_RADIAN, mask=mask)


class _Grid(NamedTuple):
    """The tiles and programs of a launch."""

    BT: int  # tokens of a tile
    BD: int  # pairs, filled up to a power of two
    along: int  # tiles along T
    parts: int  # programs that share the heads of one angle


def _grid(phase: Tensor, tensors: Sequence[Tensor]) -> _Grid:
    _, T, turns, pairs = phase.shape
    BD = power_of_two(pairs)
    BT = TILE // BD
    group = max((x.shape[2] // turns for x in tensors), default=1)
    return _Grid(BT, BD, ceil_div(T, BT), ceil_div(group, HEADS))


def _sum_before(totals: Tensor, reverse: bool) -> None:
    rows, tiles, turns, pairs = totals.shape
    grid = (ceil_div(turns * pairs, COLUMNS), rows)
    _before[grid](totals, tiles, turns * pairs, REVERSE=reverse, CHUNK=CHUNK, COLUMNS=COLUMNS)


@torch.library.custom_op("deadreckon::turn", mutates_args=())
def _turn(q: Tensor, k: Tensor, v: Tensor | None, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v rotated (an empty tensor if v is None), and the phase."""
    q, k, angles = dense(q), dense(k), dense(angles)
    values = k if v is None else dense(v)
    (B, T, _, D), (rows, _, turns, pairs) = q.shape, angles.shape
    q_turned, k_turned, v_turned, phase = _turn_fake(q, k, v, angles)
    grid = _grid(angles, (q, k))
    before = torch.empty(rows, grid.along, turns, pairs, dtype=torch.int64, device=q.device)
    with torch.cuda.device_of(q):
        _step_totals[(grid.along * turns, rows)](
            angles, *strides(angles), before, T, turns, grid.along, D=D, BT=grid.BT, BD=grid.BD, num_warps=WARPS
        )
        _sum_before(before, reverse=False)
        _turn_by_steps[(grid.along * turns * grid.parts, B)](
            angles, *strides(angles), before, phase,
            q, *strides(q), q_turned, k, *strides(k), k_turned, values, *strides(values), v_turned,
            T, rows, turns, grid.along, grid.parts, q.shape[2] // turns, k.shape[2] // turns,
            D=D, VALUES=v is not None, BT=grid.BT, BD=grid.BD, num_warps=WARPS,
        )  # fmt: skip
    return q_turned, k_turned, v_turned, phase


@_turn.register_fake
def _turn_fake(q: Tensor, k: Tensor, v: Tensor | None, angles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    v_turned = k.new_empty(0) if v is None else v.new_empty(v.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v_turned, angles.new_empty(angles.shape)


def _by_phase(
    tensors: Sequence[Tensor],
    phase: Tensor,
    sign: int,
    inputs: Sequence[Tensor],
    grad_phase: Tensor | None,
    totals: bool,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Tensors rotated by sign · phase; if these are gradients of `inputs`, also the phase's gradient and its totals.

    `grad_phase`, from other uses of the phase, is added to its gradient.
    """
    tensors, phase = [dense(x) for x in tensors], phase.contiguous()
    outputs = [x.new_empty(x.shape) for x in tensors]
    rows, T, turns, pairs = phase.shape
    B = tensors[0].shape[0] if tensors else rows
    grid = _grid(phase, tensors)
    cross = len(inputs) > 0 or grad_phase is not None
    gradient = phase.new_empty(grid.parts, B, T, turns, pairs) if cross else None
    total = phase.new_empty(grid.parts, B, grid.along, turns, pairs, dtype=torch.float64) if totals else None
    arguments: list[Any] = []
    for i in range(3):
        if i < len(tensors):
            partner = inputs[i].contiguous() if inputs else phase
            arguments += [tensors[i], *strides(tensors[i]), outputs[i], partner]
        else:
            arguments += [phase, (0, 0, 0), phase, phase]
    groups = [x.shape[2] // turns for x in tensors]
    with torch.cuda.device_of(phase):
        _turn_by_phase[(grid.along * turns * grid.parts, B)](
            phase, phase if grad_phase is None else grad_phase.contiguous(), gradient, total, *arguments,
            T, B, rows, turns, grid.along, grid.parts, *groups, *[1] * (3 - len(groups)),
            D=2 * pairs, COUNT=len(tensors), SIGN=sign, CROSS=cross, PHASE_USED=grad_phase is not None, TOTALS=totals,
            BT=grid.BT, BD=grid.BD, num_warps=WARPS,
        )  # fmt: skip
    return outputs, _over_sharers(gradient, rows), _over_sharers(total, rows)


def _over_sharers(gradient: Tensor | None, rows: int) -> Tensor | None:
    """From (parts, B, …) to (rows, …): the sum over parts of the heads and, if one row serves all, over the batch."""
    if gradient is None:
        return None
    if rows < gradient.shape[1]:
        return gradient.sum((0, 1)).unsqueeze(0)
    return gradient.sum(0) if gradient.shape[0] > 1 else gradient.squeeze(0)


@torch.library.custom_op("deadreckon::turn_backward", mutates_args=())
def _turn_backward(
    gradients: Sequence[Tensor], inputs: Sequence[Tensor], grad_phase: Tensor | None, phase: Tensor, steps: bool
) -> list[Tensor]:
    """Gradients of the rotated tensors, in order, and last, if `steps`, of the step angles."""
    outputs, gradient, after = _by_phase(gradients, phase, -1, inputs if steps else [], grad_phase, steps)
    if not steps:
        return outputs
    assert gradient is not None
    assert after is not None
    rows, T, turns, pairs = phase.shape
    grid = _grid(phase, gradients)
    angles = torch.empty_like(gradient)
    with torch.cuda.device_of(phase):
        _sum_before(after, reverse=True)
        _step_gradient[(grid.along * turns, rows)](
            gradient, after, angles, T, turns, grid.along, D=2 * pairs, BT=grid.BT, BD=grid.BD, num_warps=WARPS
        )
    return [*outputs, angles]


@_turn_backward.register_fake
def _(
    gradients: Sequence[Tensor], inputs: Sequence[Tensor], grad_phase: Tensor | None, phase: Tensor, steps: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*gradients, *([phase] if steps else []))]


def _turn_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    turned = inputs[:2] if inputs[2] is None else inputs[:3]
    ctx.count = len(turned)
    ctx.set_materialize_grads(False)  # a phase that nothing used has no gradient, rather than one of zeros
    ctx.save_for_backward(output[3], *(turned if ctx.needs_input_grad[3] else ()))
    if not ctx.needs_input_grad[3]:  # or what else is turned by the phase would be saved for its gradient
        ctx.mark_non_differentiable(output[3])


def _turn_grad(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    phase, *inputs = ctx.saved_tensors
    steps = ctx.needs_input_grad[3]
    used = [i for i, x in enumerate(gradients[: ctx.count]) if x is not None]
    grad_phase = gradients[3] if steps else None
    result: list[Tensor | None] = [None] * 4
    if used or grad_phase is not None:
        turned_back = torch.ops.deadreckon.turn_backward(
            [gradients[i] for i in used], [inputs[i] for i in used] if steps else [], grad_phase, phase, steps
        )
        for i, x in zip([*used, 3] if steps else used, turned_back, strict=True):
            result[i] = x
    return tuple(result)


_turn.register_autograd(_turn_grad, setup_context=_turn_setup)


@torch.library.custom_op("deadreckon::turn_by", mutates_args=())
def _turn_by(x: Tensor, phase: Tensor, sign: int) -> Tensor:
    return _by_phase([x], phase, sign, [], None, False)[0][0]


@_turn_by.register_fake
def _(x: Tensor, phase: Tensor, sign: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("deadreckon::turn_by_backward", mutates_args=())
def _turn_by_backward(gradient: Tensor, x: Tensor | None, phase: Tensor, sign: int) -> list[Tensor]:
    """The gradient of x and, if there is an x, that of the phase."""
    outputs, phase_gradient, _ = _by_phase([gradient], phase, -sign, [] if x is None else [x], None, False)
    return outputs if phase_gradient is None else [*outputs, phase_gradient]


@_turn_by_backward.register_fake
def _(gradient: Tensor, x: Tensor | None, phase: Tensor, sign: int) -> list[Tensor]:
    return [y.new_empty(y.shape) for y in ((gradient,) if x is None else (gradient, phase))]


def _turn_by_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sign = inputs[2]
    ctx.save_for_backward(inputs[1], *(inputs[:1] if ctx.needs_input_grad[1] else ()))


def _turn_by_grad(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    phase, *inputs = ctx.saved_tensors
    result = torch.ops.deadreckon.turn_by_backward(gradient, inputs[0] if inputs else None, phase, ctx.sign)
    return (*result, None, None)[:3]


_turn_by.register_autograd(_turn_by_grad, setup_context=_turn_by_setup)


def distinct(angles: Tensor) -> Tensor:
    """Angles without the copies that `expand` made over batch and heads, unless each of them has its gradient."""
    if not angles.requires_grad:
        for dim in (0, 2):
            if angles.shape[dim] > 1 and angles.stride(dim) == 0:
                angles = angles.narrow(dim, 0, 1)
    return angles


def turn_by_steps(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and, if values, v rotated by the running sums of step angles, and these sums, which `turn_by` takes.

    q (B, T, Hq, D), k and v (B, T, H, D), angles (B or 1, T, Hr, D/2) in radians, Hr a divisor of both Hq and H; the
    phase (B or 1, T, Hr or 1, D/2) is in turns. Heads share angles in consecutive groups.
    """
    angles = distinct(angles).float()
    assert angles.shape[1] == q.shape[1] == k.shape[1]
    assert 2 * angles.shape[3] == q.shape[3] == k.shape[3]
    assert q.shape[2] % angles.shape[2] == k.shape[2] % angles.shape[2] == 0
    assert not values or v.shape == k.shape
    q, k, v_turned, phase = torch.ops.deadreckon.turn(q, k, v if values else None, angles)
    return q, k, v_turned if values else v, phase


def turn_by(x: Tensor, phase: Tensor, sign: int) -> Tensor:
    """x (B, T, heads, D) rotated by the phase that `turn_by_steps` returned (sign 1), or by its opposite (−1)."""
    assert x.shape[2] % phase.shape[2] == 0
    assert x.shape[3] == 2 * phase.shape[3]
    return torch.ops.deadreckon.turn_by(x, phase, sign)
