"""Decode kernels: attention of one new token, split over the KV cache, in two launches whatever the cache holds.

The last tokens, the tail, are in storage with room for more. Earlier tokens are in closed segments that do not change.
With Householder steps the tail's keys are kept in the frame of the newest token, in float32: a new token updates each
of them, and the product of the tail's steps; the query reads a segment through the tail's product and one more, that of
all steps between the segment and the tail. Gates are summed in the same way. So no part depends on another: `_look` has
a program for every 64 tokens of the tail and for each share of the segments, and `_combine` reduces their partial
results. Whatever grows, the addresses of segments included, is read from memory: every launch is the same, so that a
CUDA graph can replay it.

Even powers work in the same way, with further programs for the state of all tokens before the segments, each for some
of its rows. With stick-breaking each program breaks a stick that begins at the nearest of its keys and also returns
what is left of it, and `_combine` goes through the parts from the nearest on.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.streaming.powers import State, gate_at, length_of, look_at_state, powered
from deadreckon.ops.streaming.sticks import broken, nearer
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import DTYPES, matrix, mul, mul_exact, padded, power_of_two, store_matrix

CHUNK = 64  # tokens of the tail per program
STATE_PARTS = 66  # programs that read a state: of heads of 64 each one has 32 rows, one step of its loop
STATE_TILE = 32 * 4 * 64  # numbers that it reads in a step, at most: 64 of a thread
COMBINED = 16  # channels that a program adds up
FIELDS = 7  # of a segment: where keys, values, biases, later steps' product and later gates' sums are; length and room


class Last(NamedTuple):
    """The tail: the last tokens as they came, and in the frame of the newest; N heads, room for more tokens.

    `products` and `totals` are double-buffered, for even and for odd numbers of tokens: all programs read one while
    some write the other.
    """

    k: Tensor  # (N, room, D), as all that follow up to `gates`
    v: Tensor  # (N, room, E)
    w: Tensor | None  # float32, as `beta`, `keys` and `products` with Householder steps alone
    beta: Tensor | None  # (N, room)
    gates: Tensor | None  # (N, room, 1 | G) float64
    keys: Tensor | None  # (N, room, D), in the frame of the newest token
    bias: Tensor | None  # (N, room, 1 | G) float32, sums of gates up to the newest token
    products: Tensor | None  # (2, N, D, D)
    totals: Tensor | None  # (2, N, 1 | G) float32
    tokens: Tensor  # (rows,) int32: how many there are


class Partial(NamedTuple):
    """Partial results of every program: unnormalised outputs, sums of weights and greatest logits.

    With stick-breaking `weight` is 1, or 0 where there were no keys, and `greatest` the logarithm of what is left.
    """

    out: Tensor  # (N, programs, G, E) TYPE: float32, float64 for powers beyond squares
    weight: Tensor  # (N, programs, G) TYPE
    greatest: Tensor  # (N, programs, G) float32, in units of log 2


@triton.jit
def _weighted(b_e, b_v, DTYPE: tl.constexpr):
    """Weighted sums of values. Weights are divided by the largest: all of them may underflow in half precision."""
    b_most = tl.maximum(tl.max(b_e, 1), 1e-30 if b_e.dtype == tl.float32 else 1e-200)[:, None]
    return mul_exact((b_e / b_most).to(tl.float32), b_v, DTYPE) * b_most


@triton.jit
def _queries(p_q, G: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr):
    """All queries of a group, as they are: (BG, BD)."""
    query, channel = tl.arange(0, BG), tl.arange(0, BD)
    mask = (query < G)[:, None] & (channel < D)[None, :]
    return tl.load(p_q + query[:, None] * D + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _look_at_tail(
    p_q, p_k, p_v, p_gate, b_w, beta, last, partial, p_product, partial_at, i_n, i_part, tokens, scale, unit, N, ROOM,
    G: tl.constexpr, GATES: tl.constexpr, ROUTES: tl.constexpr, POWER: tl.constexpr, STICKS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
    DTYPE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Updates one chunk of the tail, perhaps with the new token in it, and attends to it."""
    channel, value, query = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    m_channel, m_value, m_query = channel < D, value < E, query < G
    row = i_part * CHUNK + tl.arange(0, CHUNK)
    at = i_n * ROOM + row
    is_new, m_row = row == tokens, row <= tokens
    m_keys, m_values = m_row[:, None] & m_channel[None, :], m_row[:, None] & m_value[None, :]
    p_keys = last.keys if ROUTES else last.k
    b_keys = tl.load(p_keys + at[:, None] * D + channel[None, :], mask=m_keys & (row < tokens)[:, None], other=0.0)
    if ROUTES:
        b_keys -= beta * tl.sum(b_keys * b_w[None, :], 1)[:, None] * b_w[None, :]
    b_k = tl.load(p_k + i_n * D + channel, mask=m_channel, other=0.0)
    b_v = tl.load(p_v + i_n * E + value, mask=m_value, other=0.0)
    b_keys = tl.where(is_new[:, None], b_k.to(b_keys.dtype)[None, :], b_keys)
    b_values = tl.load(last.v + at[:, None] * E + value[None, :], mask=m_values & (row < tokens)[:, None], other=0.0)
    b_values = tl.where(is_new[:, None], b_v[None, :], b_values)
    if ROUTES:
        tl.store(last.keys + at[:, None] * D + channel[None, :], b_keys, mask=m_keys)
    if (i_part == tokens // CHUNK) & (tokens < ROOM):
        new = i_n * ROOM + tokens
        tl.store(last.k + new * D + channel, b_k, mask=m_channel)
        tl.store(last.v + new * E + value, b_v, mask=m_value)
        if ROUTES:
            tl.store(last.w + new * D + channel, b_w, mask=m_channel)
            tl.store(last.beta + new, beta)
    if ROUTES and i_part == 0:
        b_p = matrix(p_product, D, BD)
        b_p -= beta * tl.sum(b_p * b_w[None, :], 1)[:, None] * b_w[None, :]
        store_matrix(last.products + (((tokens + 1) % 2) * N + i_n) * D * D, b_p, D, BD)
    b_q = _queries(p_q, G, D, BG, BD)
    b_s = mul_exact(b_q, tl.trans(b_keys), DTYPE)
    b_bias = tl.zeros([BG, CHUNK], tl.float32)
    if GATES:
        kind, m_kind = query % GATES, query < GATES
        b_gate = gate_at(p_gate + i_n * GATES + kind, m_query)
        of_kind = at[None, :] * GATES + kind[:, None]
        m_bias = m_query[:, None] & (row < tokens)[None, :]
        b_bias = tl.load(last.bias + of_kind, mask=m_bias, other=0.0) + b_gate[:, None]
        b_bias = tl.where(is_new[None, :], 0.0, b_bias)
        tl.debug_barrier()  # several threads load a number, one of them writes it
        tl.store(last.bias + of_kind, b_bias, mask=m_kind[:, None] & m_row[None, :])
        b_gates = tl.where(is_new[None, :], b_gate[:, None], 0.0)
        tl.store(last.gates + of_kind, b_gates, mask=m_kind[:, None] & is_new[None, :])
        if i_part == 0:
            p_total = last.totals + i_n * GATES + kind
            b_total = tl.load(p_total + (tokens % 2) * N * GATES, mask=m_kind, other=0.0) + b_gate
            tl.store(p_total + ((tokens + 1) % 2) * N * GATES, b_total, mask=m_kind)
    if POWER:
        b_s *= (unit / length_of(b_q.to(tl.float32), 1))[:, None]
        b_weight = powered(b_s, b_bias, m_row, POWER, TYPE)
        b_greatest = tl.zeros([BG], tl.float32)
    elif STICKS:  # a token takes nothing from its own
        b_weight, b_greatest = broken(b_s * scale, b_bias, tl.zeros([BG], tl.float32), row < tokens)
    else:
        b_s = tl.where(m_row[None, :], (b_s * scale + b_bias) * 1.4426950408889634, float("-inf"))
        b_greatest = tl.maximum(tl.max(b_s, 1), -1e30)  # of no tokens at all, perhaps
        b_weight = tl.exp2(b_s - b_greatest[:, None])
    p_out = partial.out + (partial_at + query)[:, None] * E + value[None, :]
    tl.store(p_out, _weighted(b_weight, b_values, DTYPE), mask=m_query[:, None] & m_value[None, :])
    tl.store(partial.weight + partial_at + query, 1.0 if STICKS else tl.sum(b_weight, 1), mask=m_query)
    tl.store(partial.greatest + partial_at + query, b_greatest, mask=m_query)


@triton.jit
def _look_at_segment(
    p_q, p_gate, b_w, beta, last, partial, p_product, partial_at, p_segments, p_part, i_n, i_h, tokens, scale, unit, N,
    G: tl.constexpr, GATES: tl.constexpr, ROUTES: tl.constexpr, POWER: tl.constexpr, STICKS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Carries the queries back to a segment, and attends to a part of it."""
    channel, value = tl.arange(0, BD), tl.arange(0, BE)
    m_channel, m_value = channel < D, value < E
    segment, start, stop = tl.load(p_part), tl.load(p_part + 1), tl.load(p_part + 2)
    address = p_segments + segment * FIELDS
    length, room = tl.load(address + 5), tl.load(address + 6)
    p_keys = last.k + tl.multiple_of(tl.load(address), 8) + i_h * room * D
    p_values = last.k + tl.multiple_of(tl.load(address + 1), 8) + i_h * room * E
    p_bias = partial.greatest + tl.load(address + 2) + i_h * length * GATES
    p_total = partial.greatest + tl.load(address + 4) + i_h * GATES
    query = tl.arange(0, BG)
    b_queries = _queries(p_q, G, D, BG, BD)
    b_scale = tl.full([BG], 0.0, tl.float32) + scale
    if POWER:
        b_scale = unit / length_of(b_queries.to(tl.float32), 1)
    if ROUTES:
        p_later = partial.greatest + tl.multiple_of(tl.load(address + 3), 4) + i_h * D * D
        b_queries = b_queries.to(tl.float32)
        b_queries -= beta * tl.sum(b_queries * b_w[None, :], 1)[:, None] * b_w[None, :]
        b_queries = mul_exact(b_queries, tl.trans(matrix(p_product, D, BD)), DTYPE)
        b_queries = mul_exact(b_queries, tl.trans(matrix(p_later, D, BD)), DTYPE)
    b_shift = tl.zeros([BG], tl.float32)
    gate_of = query % GATES if GATES else query
    if GATES:
        m_gate = query < G
        b_shift += gate_at(p_gate + i_n * GATES + gate_of, m_gate)
        b_shift += tl.load(last.totals + ((tokens % 2) * N + i_n) * GATES + gate_of, mask=m_gate, other=0.0)
        b_shift += tl.load(p_total + gate_of, mask=m_gate, other=0.0)
    b_queries = b_queries.to(DTYPE)
    b_greatest = tl.full([BG], 0.0 if POWER or STICKS else -1e30, tl.float32)
    b_weight = tl.full([BG], 1.0 if STICKS else 0.0, TYPE)
    b_out = tl.zeros([BG, BE], TYPE)
    for first in range(start, stop, BLOCK):
        row = first + tl.arange(0, BLOCK)
        if STICKS:  # from the last on; before the first of them there may be others' tokens
            row = stop - BLOCK - (first - start) + tl.arange(0, BLOCK)
        m_row = (row >= start) & (row < stop)
        at = row.to(tl.int64)
        b_k = tl.load(p_keys + at[None, :] * D + channel[:, None], mask=m_row[None, :] & m_channel[:, None], other=0.0)
        b_s = mul(b_queries, b_k, DTYPE) * b_scale[:, None]  # a scaled query would be rounded once more
        b_bias = b_shift[:, None]
        if GATES:
            m_bias = m_row[None, :] & (query < G)[:, None]
            b_bias += tl.load(p_bias + gate_of[:, None] * length + at[None, :], mask=m_bias, other=0.0)
        b_new = b_greatest
        if POWER:
            b_e = powered(b_s, b_bias, m_row, POWER, TYPE)
        elif STICKS:
            b_e, b_new = broken(b_s, b_bias, b_greatest, m_row)
        else:
            b_s = tl.where(m_row[None, :], (b_s + b_bias) * 1.4426950408889634, float("-inf"))
            b_new = tl.maximum(b_greatest, tl.max(b_s, 1))
            b_e = tl.exp2(b_s - b_new[:, None])
        b_v = tl.load(p_values + at[:, None] * E + value[None, :], mask=m_row[:, None] & m_value[None, :], other=0.0)
        if POWER or STICKS:
            b_out += _weighted(b_e, b_v, DTYPE)
        else:
            b_ratio = tl.exp2(b_greatest - b_new)
            b_out = b_out * b_ratio[:, None] + mul(b_e, b_v, DTYPE)
            b_weight *= b_ratio
        if not STICKS:
            b_weight += tl.sum(b_e, 1)
        b_greatest = b_new
    m_query = query < G
    p_out = partial.out + (partial_at + query)[:, None] * E + value[None, :]
    tl.store(p_out, b_out, mask=m_query[:, None] & m_value[None, :])
    tl.store(partial.weight + partial_at + query, b_weight, mask=m_query)
    tl.store(partial.greatest + partial_at + query, b_greatest, mask=m_query)


@triton.jit
def _look_at_nothing(partial, partial_at, G: tl.constexpr, BG: tl.constexpr):
    query = tl.arange(0, BG)
    tl.store(partial.weight + partial_at + query, tl.zeros([BG], tl.float32), mask=query < G)
    tl.store(partial.greatest + partial_at + query, tl.full([BG], -1e30, tl.float32), mask=query < G)


@Kernel
@triton.jit
def _look(
    p_q, p_k, p_v, p_w, p_beta, p_gate, last, partial, state, p_segments, p_parts, scale, N, HEADS, ROOM, F, SPLIT,
    PARTS, G: tl.constexpr, GATES: tl.constexpr, ROUTES: tl.constexpr, POWER: tl.constexpr, STICKS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BG: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, STATE_ROWS: tl.constexpr, DTYPE: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    i_n, i_part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    i_row, i_h = i_n // HEADS, i_n % HEADS  # rows have segments of their own, each of so many heads
    channel = tl.arange(0, BD)
    tokens = tl.load(last.tokens + i_row)
    p_product, b_w, beta = last.products, 0.0, 0.0
    if ROUTES:
        p_product = last.products + ((tokens % 2) * N + i_n) * D * D
        b_w = tl.load(p_w + i_n * D + channel, mask=channel < D, other=0.0).to(tl.float32)
        beta = tl.load(p_beta + i_n).to(tl.float32)
    unit = 1.0
    if POWER:
        unit = tl.load(state.unit + i_n)
    p_q += i_n * G * D
    partial_at = (i_n * PARTS + i_part) * G
    if i_part * CHUNK < ROOM:
        if i_part * CHUNK <= tokens:
            _look_at_tail(
                p_q, p_k, p_v, p_gate, b_w, beta, last, partial, p_product, partial_at, i_n, i_part, tokens, scale,
                unit, N, ROOM, G, GATES, ROUTES, POWER, STICKS, D, E, BG, BD, BE, CHUNK, DTYPE, TYPE,
            )  # fmt: skip
        else:  # there is more room than tokens
            _look_at_nothing(partial, partial_at, G, BG)
    else:
        p_part = p_parts + (i_row * (PARTS - ROOM // CHUNK) + i_part - ROOM // CHUNK) * 3
        p_segments += i_row * (SPLIT - ROOM // CHUNK) * FIELDS
        if tl.load(p_part + 1) < tl.load(p_part + 2):
            if POWER and i_part >= SPLIT:
                look_at_state(
                    p_q, p_gate, last, partial, state, partial_at, p_part, i_n, i_h, i_row, tokens, N, F,
                    G, GATES, POWER, D, E, BQ, BD, BE, STATE_ROWS, TYPE,
                )  # fmt: skip
            else:
                _look_at_segment(
                    p_q, p_gate, b_w, beta, last, partial, p_product, partial_at, p_segments, p_part, i_n, i_h,
                    tokens, scale, unit, N, G, GATES, ROUTES, POWER, STICKS, D, E, BG, BD, BE, FIELDS, BLOCK, DTYPE,
                    TYPE,
                )  # fmt: skip
        else:  # there are more programs than parts
            _look_at_nothing(partial, partial_at, G, BG)


@Kernel
@triton.jit
def _combine(
    p_out, partial, p_tokens, HEADS, PARTS, SPLIT, TAIL,
    G: tl.constexpr, POWER: tl.constexpr, STICKS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Reduces all programs' partial results, for some channels. The first TAIL are of the tail, the nearest last."""
    i_n, g, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    value = i_part * BE + tl.arange(0, BE)
    greatest = tl.full([], 0.0 if STICKS else -1e30, tl.float32)
    weight = tl.zeros([], TYPE)
    b_out = tl.zeros([BE], TYPE)
    if POWER:  # what is read from the state counts if it is more than rounding errors
        noise, read = tl.zeros([], tl.float32), tl.zeros([], TYPE)
        for first in range(SPLIT, PARTS, BLOCK):
            part = first + tl.arange(0, BLOCK)
            at = (i_n * PARTS + part) * G + g
            read += tl.sum(tl.load(partial.weight + at, mask=part < PARTS, other=0.0), 0)
            noise = tl.maximum(noise, tl.max(tl.load(partial.greatest + at, mask=part < PARTS, other=0.0), 0))
        PARTS_READ = tl.where(read > noise, PARTS, SPLIT)
    else:
        PARTS_READ = PARTS
    for first in range(0, PARTS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        m_part = part < PARTS_READ
        if STICKS:
            part = tl.where(part < TAIL, TAIL - 1 - part, part)
        at = (i_n * PARTS + part) * G + g
        b_greatest = tl.load(partial.greatest + at, mask=m_part, other=float("-inf"))
        b_weight = tl.load(partial.weight + at, mask=m_part, other=0.0)
        m_out = m_part[:, None] & (value < E)[None, :]
        b_part = tl.load(partial.out + at[:, None] * E + value[None, :], mask=m_out, other=0.0)
        b_part = tl.where((b_weight != 0)[:, None], b_part, 0.0)  # without weight it may be uninitialised
        if STICKS:
            b_left = tl.where(b_weight != 0, b_greatest, 0.0)
            new, ratio = greatest + tl.sum(b_left, 0), 1.0
            b_ratio = tl.exp2(greatest + nearer(b_left, 0, False))
        else:
            new = tl.maximum(greatest, tl.max(b_greatest, 0))
            b_ratio = tl.exp2(b_greatest - new)
            ratio = tl.exp2(greatest - new)
            if POWER:
                new, b_ratio, ratio = greatest, m_part.to(tl.float32), 1.0
        b_out = b_out * ratio + tl.sum(b_part * b_ratio[:, None], 0)
        weight = weight * ratio + tl.sum(b_weight * b_ratio, 0)
        greatest = new
    if POWER:
        weight = tl.where(weight == 0, 1.0, weight)  # a row without weights attends to nothing
    if STICKS:
        weight = 1.0
    tl.store(p_out + (i_n * G + g) * E + value, (b_out / weight).to(p_out.dtype.element_ty), mask=value < E)
    if (i_n % HEADS == 0) & (g == 0) & (i_part == 0):
        p_tokens += i_n // HEADS
        tl.store(p_tokens, tl.load(p_tokens) + 1)


def placed(x: Tensor | None, base: Tensor, alignment: int = 16) -> int:
    """The address of a tensor, as an offset in elements from `base`, a multiple of `alignment` bytes.

    For kernels that read any number of tensors. (With a bare address they would not know the alignment.)
    """
    if x is None:
        return 0
    assert x.is_contiguous()
    assert x.dtype == base.dtype
    distance = x.data_ptr() - base.data_ptr()
    assert distance % alignment == 0
    return distance // x.element_size()


def is_narrow(k: Tensor, v: Tensor) -> bool:
    """Whether a key and a value, (..., D) and (..., E), take 512 bytes each at most."""
    return max(k.shape[-1], v.shape[-1]) * k.element_size() <= 512


def chunk_for(k: Tensor, v: Tensor) -> int:
    """Tokens of the tail per program: fewer with wide heads, or one program alone would take all shared memory."""
    return CHUNK if is_narrow(k, v) else CHUNK // 2


def look(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gate: Tensor | None,
    last: Last, partial: Partial, state: State | None, segments: Tensor, parts: Tensor, scale: float,
    sticks: bool = False,
) -> Tensor:  # fmt: skip
    """The output (N, G, E) of the next token, which is added to the tail.

    q (N, G, D), k and w (N, D), v (N, E), beta (N,), gate (N, 1 | G); w and beta are None without Householder steps.
    Per row: segments (rows, segments, FIELDS) int64, addresses by `placed`; parts (rows, parts, 3) int32: a segment,
    start and end in it, or an empty range, the nearest first; with powers the last STATE_PARTS are ranges of rows of
    the state. All contiguous.
    """
    heads, group, width = q.shape
    value_width, room, gates = v.shape[1], last.k.shape[1], 0 if gate is None else gate.shape[1]
    out = q.new_empty(heads, group, value_width)
    programs = partial.weight.shape[1]
    chunk = chunk_for(q, v)
    block = 64 if is_narrow(q, v) else 32  # tokens of segments at a time: one program alone had all shared memory
    of_row = heads // len(last.tokens)
    power, rows = (0, 0) if state is None else state.channels.shape
    split = programs - (STATE_PARTS if power else 0)
    queries, values = power_of_two(group), padded(value_width)
    kind, tile = (tl.float64, STATE_TILE // 4) if power > 2 else (tl.float32, STATE_TILE)
    _look[(heads * programs,)](  # in one dimension, of which there may be more than 65 535
        q, k, v, w, beta, gate, last, partial, state, segments, parts, scale, heads, of_row, room, rows, split,
        programs, G=group, GATES=gates, ROUTES=w is not None, POWER=power, STICKS=sticks, D=width,
        E=value_width, BG=max(16, queries), BQ=queries, BD=padded(width), BE=values, CHUNK=chunk, FIELDS=FIELDS,
        BLOCK=block, STATE_ROWS=max(1, min(32, tile // (queries * values))), DTYPE=DTYPES[q.dtype], TYPE=kind,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine[(heads, group, values // COMBINED)](
        out, partial, last.tokens, of_row, programs, split, room // chunk,
        G=group, POWER=power, STICKS=sticks, E=value_width, BE=COMBINED, BLOCK=min(256, power_of_two(programs)),
        TYPE=kind, num_warps=4,
    )  # fmt: skip
    return out
