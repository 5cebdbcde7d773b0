"""Histogram filters as Triton kernels: each cursor's histogram stays on chip for all tokens of a call.

One program handles one cursor of one sequence. A step is, with h̃ = (1 − reset) h + reset · total · δ₀,

    moved = stay · h̃ + up · h̃[i − 1] + down · h̃[i + 1], bounded at both ends       h' ∝ (moved + ε)^γ

where neighbours are gathered on chip. The backward pass needs the histograms: those that were the output, or that a
forward call has just recomputed. After a step the total is 1, whatever h was: only the first step of a call has to
compute it, and its gradient.

Superpositions are not computed inside the filter's kernel. A table of 512 × 340 16-bit numbers is larger than shared
memory, so every program would load it again at every token, and enough rows for tensor cores (64 of 512 positions) take
all registers of a multiprocessor. Chunk by chunk, the filter runs at full occupancy and the product at cuBLAS's speed;
the price is that a chunk's histograms go through global memory once, in the table's precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deadreckon.filters.operators import filter_operator, superposition_operator
from deadreckon.ops.triton.cursors import slot_of
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.pointwise import sigmoid
from deadreckon.ops.triton.tiles import INTERPRETED, power_of_two

WIDEST = 4096  # positions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _log2(x):
    """log2 of normal numbers in one instruction: error 2⁻²²; the exact one takes a dozen instructions."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _ratio(x, y):
    """x / y for normal y below 2¹²⁶."""
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def _gates(p_reset, p_move, i_at):
    """reset, up, down and stay."""
    p_move += i_at * 3
    reset, up = tl.load(p_reset + i_at).to(tl.float32), tl.load(p_move).to(tl.float32)
    return reset, up, tl.load(p_move + 1).to(tl.float32), tl.load(p_move + 2).to(tl.float32)


@triton.jit
def _moved(b_from, up, down, stay, position, P: tl.constexpr):
    """h̃ after a move: mass that would leave at an end stays there."""
    b_left = tl.gather(b_from, tl.maximum(position - 1, 0), 0)
    b_right = tl.gather(b_from, tl.minimum(position + 1, P - 1), 0)
    return stay * b_from + tl.where(position == 0, down, up) * b_left + tl.where(position == P - 1, up, down) * b_right


@triton.jit
def _sharpened(b_new, gamma, eps, m_p, P: tl.constexpr, BP: tl.constexpr):
    """(new + ε)^γ, normalised."""
    b_log = gamma * _log2(b_new + eps)
    if P != BP:
        b_log = tl.where(m_p, b_log, float("-inf"))
    b_power = tl.exp2(b_log - tl.max(b_log, 0))
    return b_power * (1.0 / tl.sum(b_power, 0))


@triton.jit
def _filter_forward(
    p_reset, p_move, p_gamma, p_copy, p_state, p_out, p_final, eps, FIRST, STEPS, T, C, s_b, s_c, s_p,
    P: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    i_b, i_c = i_n // C, i_n % C
    position = tl.arange(0, BP)
    m_p = position < P
    gamma = tl.load(p_gamma + i_c).to(tl.float32)
    b_h = tl.load(p_state + i_b * s_b + i_c * s_c + position * s_p, mask=m_p, other=0.0).to(tl.float32)
    total = tl.sum(b_h, 0)
    for t in range(STEPS):
        i_at = (i_b * T + FIRST + t) * C + i_c
        reset, up, down, stay = _gates(p_reset, p_move, i_at)
        b_from = (1 - reset) * b_h + tl.where(position == 0, reset * total, 0.0)
        b_new = _moved(b_from, up, down, stay, position, P)
        if p_copy is not None:
            p_row = p_copy + i_at * (P + 1)
            b_copy = tl.load(p_row + position, mask=m_p, other=0.0).to(tl.float32)
            b_new = b_new * tl.load(p_row + P).to(tl.float32) + total * b_copy
        b_h = _sharpened(b_new, gamma, eps, m_p, P, BP)
        if p_out is not None:
            p_row = p_out + ((i_b * STEPS + t) * C + i_c) * P
            tl.store(p_row + position, b_h.to(p_out.dtype.element_ty), mask=m_p)
        total = tl.full([], 1.0, tl.float32)
    if p_final is not None:
        tl.store(p_final + i_n * P + position, b_h, mask=m_p)


@Kernel
@triton.jit
def _filter_step(
    p_action, p_sharpness, p_copy, p_kept, p_place, p_h, eps, s_place, s_row, C, WALKING,
    P: tl.constexpr, BP: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One decoding step, from the logits of its gates; histograms are read from and written to slots by position."""
    i_n = tl.program_id(0).to(tl.int64)
    i_b, i_c = i_n // C, i_n % C
    position = tl.arange(0, BP)
    m_p = position < P
    place = tl.load(p_place + i_b * s_place)
    p_action += i_b * s_row + i_c * 4
    reset = sigmoid(tl.load(p_action))
    to_up, to_down, to_stay = tl.load(p_action + 1), tl.load(p_action + 2), tl.load(p_action + 3)
    likeliest = tl.maximum(tl.maximum(to_up, to_down), to_stay)
    up, down, stay = tl.exp(to_up - likeliest), tl.exp(to_down - likeliest), tl.exp(to_stay - likeliest)
    every = up + down + stay
    # Padding keeps a cursor at its start.
    reset, stay = tl.where(place < 0, 1.0, reset), tl.where(place < 0, 1.0, stay / every)
    up, down = tl.where(place < 0, 0.0, up / every), tl.where(place < 0, 0.0, down / every)
    gamma = 1 + tl.exp(tl.load(p_sharpness + i_c).to(tl.float32))
    p_kept += (i_b * KEPT * C + i_c) * P + position
    b_h = tl.load(p_kept + slot_of(tl.maximum(place - 1, -1), KEPT) * C * P, mask=m_p, other=0.0)
    total = tl.sum(b_h, 0)
    b_from = (1 - reset) * b_h + tl.where(position == 0, reset * total, 0.0)
    b_new = _moved(b_from, up, down, stay, position, P)
    if p_copy is not None:
        jumps = i_c >= WALKING
        p_row = p_copy + (i_b * (C - WALKING) + i_c - WALKING) * (P + 1)
        b_copy = tl.load(p_row + position, mask=m_p & jumps, other=0.0)
        b_new = b_new * tl.load(p_row + P, mask=jumps, other=1.0) + total * b_copy
    b_h = _sharpened(b_new, gamma, eps, m_p, P, BP)
    tl.debug_barrier()  # padding may write to the slot that has just been read
    tl.store(p_kept + slot_of(place, KEPT) * C * P, b_h, mask=m_p)
    tl.store(p_h + i_n * P + position, b_h.to(p_h.dtype.element_ty), mask=m_p)


@triton.jit
def _filter_backward(
    p_reset, p_move, p_gamma, p_copy, p_state, p_out, p_grad, p_carry, p_grad_reset, p_grad_move, p_grad_gamma,
    p_grad_copy, eps, FIRST, STEPS, T, C, s_b, s_c, s_p, P: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0).to(tl.int64)
    i_b, i_c = i_n // C, i_n % C
    position = tl.arange(0, BP)
    left, right = tl.maximum(position - 1, 0), tl.minimum(position + 1, P - 1)
    m_p = position < P
    gamma = tl.load(p_gamma + i_c).to(tl.float32)
    p_out += position
    p_grad += position
    p_state += i_b * s_b + i_c * s_c + position * s_p
    p_carry += i_n * P + position
    b_carry = tl.load(p_carry, mask=m_p, other=0.0)
    b_after = tl.load(p_out + ((i_b * STEPS + STEPS - 1) * C + i_c) * P, mask=m_p, other=0.0).to(tl.float32)
    b_gamma = tl.zeros([BP], tl.float32)
    for back in range(STEPS):
        t = STEPS - 1 - back
        i_at, i_row = (i_b * T + FIRST + t) * C + i_c, (i_b * STEPS + t) * C + i_c
        reset, up, down, stay = _gates(p_reset, p_move, i_at)
        if t > 0:
            b_h = tl.load(p_out + (i_row - C) * P, mask=m_p, other=0.0).to(tl.float32)
            total = tl.full([], 1.0, tl.float32)
        else:
            b_h = tl.load(p_state, mask=m_p, other=0.0).to(tl.float32)
            total = tl.sum(b_h, 0)
        b_grad = b_carry + tl.load(p_grad + i_row * P, mask=m_p, other=0.0).to(tl.float32)
        b_grad = b_after * (b_grad - tl.sum(b_grad * b_after, 0))  # of γ log(new + ε)

        b_from = (1 - reset) * b_h + tl.where(position == 0, reset * total, 0.0)
        b_new = _moved(b_from, up, down, stay, position, P)
        jumped = tl.zeros([], tl.float32)
        if p_copy is not None:
            p_row = p_copy + i_at * (P + 1)
            none = tl.load(p_row + P).to(tl.float32)
            b_copy = tl.load(p_row + position, mask=m_p, other=0.0).to(tl.float32)
            b_all = b_new * none + total * b_copy + eps
            b_gamma += b_grad * _log2(b_all)
            b_grad = _ratio(gamma * b_grad, b_all)
            p_row = p_grad_copy + i_at * (P + 1)
            tl.store(p_row + position, (total * b_grad).to(p_grad_copy.dtype.element_ty), mask=m_p)
            tl.store(p_row + P, tl.sum(b_grad * b_new, 0).to(p_grad_copy.dtype.element_ty))
            jumped = tl.sum(b_grad * b_copy, 0)
            b_grad = none * b_grad
        else:
            b_gamma += b_grad * _log2(b_new + eps)
            b_grad = _ratio(gamma * b_grad, b_new + eps)
        b_left, b_right = tl.gather(b_grad, left, 0), tl.gather(b_grad, right, 0)
        b_to = stay * b_grad + up * b_right + down * b_left  # the gradient of h̃
        of_reset = tl.sum(b_to * (tl.where(position == 0, total, 0.0) - b_h), 0)
        p_of_move = p_grad_move + i_at * 3
        tl.store(p_grad_reset + i_at, of_reset.to(p_grad_reset.dtype.element_ty))
        tl.store(p_of_move, tl.sum(b_right * b_from, 0).to(p_grad_move.dtype.element_ty))
        tl.store(p_of_move + 1, tl.sum(b_left * b_from, 0).to(p_grad_move.dtype.element_ty))
        tl.store(p_of_move + 2, tl.sum(b_grad * b_from, 0).to(p_grad_move.dtype.element_ty))
        b_carry = (1 - reset) * b_to
        if t == 0:  # the gradient by way of total
            b_carry += jumped + tl.sum(tl.where(position == 0, reset * b_to, 0.0), 0)
        b_after = b_h
    tl.store(p_carry, b_carry, mask=m_p)
    p_grad_gamma += i_n
    tl.store(p_grad_gamma, tl.load(p_grad_gamma) + 0.6931471805599453 * tl.sum(b_gamma, 0))


def _tile(positions: int, shares: int = 1) -> tuple[int, int]:
    """Positions padded to a power of two, and warps: sixteen positions, or eight with two shares, for each thread.

    Up to 512 positions that is one warp, without synchronisation: neighbours, most of them in the same thread, and sums
    go by shuffles. More warps communicate through shared memory.
    """
    width = max(32, power_of_two(positions))
    return width, max(1, width * shares // 512)


def advance(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Filters tokens first, ..., first + steps − 1 from state (B, C, P), in any layout.

    reset (B, T, C), move (B, T, C, 3), gamma (C,) and copy (B, T, C, P + 1) are contiguous. Writes out
    (B, steps, C, P) and final (B, C, P), float32, unless they are None.
    """
    batch, length, cursors = reset.shape
    positions = state.shape[2]
    padded, warps = _tile(positions)
    _filter_forward[(batch * cursors,)](
        reset, move, gamma, copy, state, out, final, eps, first, steps, length, cursors, *state.stride(),
        P=positions, BP=padded, num_warps=warps,
    )  # fmt: skip


def retreat(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, state: Tensor, eps: float,
    first: int, steps: int, out: Tensor, grad: Tensor, carry: Tensor,
    grad_reset: Tensor, grad_move: Tensor, grad_gamma: Tensor, grad_copy: Tensor | None,
) -> None:  # fmt: skip
    """The backward pass over the same tokens: out as `advance` wrote it, grad its gradient, both contiguous.

    carry (B, C, P), float32, is the gradient of the histogram after these tokens, and is overwritten by that of state.
    Writes the tokens' grad_reset, grad_move and grad_copy, laid out as the inputs; adds to grad_gamma (B, C), float32.
    """
    batch, length, cursors = reset.shape
    positions = state.shape[2]
    # Unaligned rows are loaded number by number, which takes more registers than a thread has for sixteen positions.
    padded, warps = _tile(positions, 1 if positions % 4 == 0 else 2)
    _filter_backward[(batch * cursors,)](
        reset, move, gamma, copy, state, out, grad, carry, grad_reset, grad_move, grad_gamma, grad_copy,
        eps, first, steps, length, cursors, *state.stride(), P=positions, BP=padded, num_warps=warps,
    )  # fmt: skip


def step(
    actions: Tensor,
    sharpness: Tensor,
    copy: Tensor | None,
    kept: Tensor,
    places: Tensor,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """One decoding step: histograms (B, C, P), in a dtype, which are also written to the ring buffer `kept`.

    Args:
        actions: (B, 1, C, 4) float32 logits of reset, up, down and stay, the last two dimensions contiguous.
        sharpness: (C,), γ = 1 + exp of it.
        copy: (B, 1, jumping, P + 1) of the last cursors, contiguous.
        kept: (B, slots, C, P) float32, contiguous: the histogram after a token is at its position modulo slots.
        places: (B or 1, 1) int64, the token's position; below 0 it is padding.
    """
    batch, slots, cursors, positions = kept.shape
    padded, warps = _tile(positions)
    h = kept.new_empty(batch, cursors, positions, dtype=dtype)
    with torch.cuda.device_of(kept):
        _filter_step[(batch * cursors,)](
            actions, sharpness, copy, kept, places, h, eps, places.stride(0) if len(places) > 1 else 0,
            actions.stride(0), cursors, cursors if copy is None else cursors - copy.shape[2],
            P=positions, BP=padded, KEPT=slots, num_warps=warps,
        )  # fmt: skip
    return h


filter_fused = filter_operator("deadreckon::histogram_filter", advance, retreat)
superpose_fused = superposition_operator("deadreckon::superpose", advance, retreat)


def reason_against(reset: Tensor, positions: int) -> str | None:
    """What the kernels need and these inputs lack, or None."""
    if reset.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {reset.dtype}"
    if positions > WIDEST:
        return f"at most {WIDEST} positions, got {positions}"
    return None
