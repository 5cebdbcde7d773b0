"""Blocks of a few leaves, in which queries walk back leaf by leaf: attention within a block, forward and backward.

A query in the frame of its leaf's start attends to the keys of the leaf before, which are in the frame of that leaf's
end, then crosses that leaf's product, attends to the one before, and so on to the block's start. Blocks above that size
are the route tree's (`levels.py`), which needs queries at the block's start (where the walk ends) and keys at its end:
these cross the product of all leaves after their own.

Backward, queries walk once more and store their value and their gradient at each leaf; then each leaf gathers from the
queries that have passed: no atomics, and every sum has a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.gated.launch import Documents, Sums, edge_before, gates_since
from deadreckon.ops.triton.householder.frames import Back, Frames
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import (
    DTYPES,
    LOG2E,
    ceil_div,
    load_tile,
    matrix,
    mul,
    mul_single,
    padded,
    roomy,
    store_columns,
    store_matrix,
    store_rows,
    store_tile,
    through,
    warps_for,
)

WALK = 8  # leaves of a block
PASSED = WALK * (WALK - 1) // 2  # pairs of leaves in a block


@triton.jit
def _queries(GROUP, LEAVES, WALK: tl.constexpr):
    """This program's query of a group, leaf and key head; its rows and their tokens; the first leaf of its block."""
    pid = tl.program_id(0)
    i_g, i_leaf, i_n = pid % GROUP, pid // GROUP % LEAVES, (pid // GROUP // LEAVES).to(tl.int64)
    row = tl.arange(0, 64).to(tl.int64)
    return i_g, i_leaf, i_n, row, i_leaf * 64 + row, i_leaf // WALK * WALK


@triton.jit
def _slot(i_n, i_leaf, walked, LEAVES, WALK: tl.constexpr):
    """Where the queries that walk past `walked` leaves of a block are kept."""
    i_block = i_n * ((LEAVES + WALK - 1) // WALK) + i_leaf // WALK
    return i_block * (WALK * (WALK - 1) // 2) + walked * (walked - 1) // 2


@triton.jit
def _within(p_start, i_leaf, walked):
    """How many leaves back the document of a leaf's queries reaches, at most `walked`."""
    return tl.minimum(walked, i_leaf - tl.load(p_start + i_leaf * 64) // 64)


@Kernel
@triton.jit(do_not_specialize=["LEAVES", "GATES"])
def _walk_forward(
    p_q, p_k, p_v, p_products, p_left, p_rest, p_edge, p_start, p_out, p_lse, p_to, p_passing, scale2,
    s_q, s_k, s_v, s_out, s_lse, s_to, LEAVES, GROUP, GATES,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DTYPE: tl.constexpr, WALK: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, ONWARD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    i_g, i_leaf, i_n, row, token, first = _queries(GROUP, LEAVES, WALK)
    p_k += i_n * s_k
    p_v += i_n * s_v
    p_products += i_n * LEAVES * D * D
    b_q = load_tile(p_q + i_n * s_q + i_g * D, token, GROUP * D, D, BD)
    p_at = p_lse + i_n * s_lse + token * GROUP + i_g
    p_out += i_n * s_out + i_g * E
    walked = i_leaf - first
    if BACK:
        p_passing += _slot(i_n, i_leaf, walked, LEAVES, WALK) * (GROUP * 64 * D) + i_g * 64 * D
    else:
        b_max = tl.load(p_at) * 1.4426950408889634
        b_sum = tl.full([64], 1.0, tl.float32)
        b_acc = load_tile(p_out, token, GROUP * E, E, BE).to(tl.float32)
        if GATED:
            i_c = i_n * GATES + i_g % GATES
            p_left += i_c * LEAVES * 64
            p_edge += i_c * LEAVES
            edge = edge_before(p_edge, i_leaf * 64)
            b_row_gate = gates_since(p_left, p_rest + i_c * LEAVES * 64, p_edge, token, row >= 0, edge).to(tl.float32)
    if PACKED:
        b_start = tl.load(p_start + token)
        walked = _within(p_start, i_leaf, walked)
    for step in range(walked):
        j = i_leaf - 1 - step
        key = j * 64 + row
        if BACK:
            store_tile(p_passing + (j - first) * (GROUP * 64 * D), row, D, b_q, D, BD)
        else:
            b_s = mul(b_q, tl.trans(load_tile(p_k, key, D, D, BD)), DTYPE) * scale2
            if GATED:
                shift = (edge - tl.load(p_edge + j)).to(tl.float32)
                b_s += (tl.load(p_left + key) + shift)[None, :] + b_row_gate[:, None]
            if PACKED:
                b_s = tl.where(b_start[:, None] <= key[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_e = tl.exp2(b_s - b_new[:, None])
            decay = tl.exp2(b_max - b_new)
            b_sum = b_sum * decay + tl.sum(b_e, 1)
            b_v = load_tile(p_v, key, E, E, BE)
            b_acc = b_acc * decay[:, None] + mul(b_e, b_v, DTYPE)
            b_max = b_new
        b_q = through(b_q, matrix(p_products + j * (D * D), D, BD), True, DTYPE).to(DTYPE)
    if not BACK:
        store_tile(p_out, token, GROUP * E, b_acc / b_sum[:, None], E, BE)
        tl.store(p_at, (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    if ONWARD:
        store_tile(p_to + i_n * s_to + i_g * D, token, GROUP * D, b_q, D, BD)


@Kernel
@triton.jit(do_not_specialize=["LEAVES", "GATES"])
def _walk_back(
    p_k, p_v, p_products, p_left, p_edge, p_start, p_do, p_delta, p_row_shift, p_grad, p_passing, p_passing_grad,
    p_by_query, scale, scale2, s_k, s_v, s_out, s_lse, s_grad, LEAVES, GROUP, GATES,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DTYPE: tl.constexpr, WALK: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, ONWARD: tl.constexpr,
):  # fmt: skip
    i_g, i_leaf, i_n, row, token, first = _queries(GROUP, LEAVES, WALK)
    p_k += i_n * s_k
    p_v += i_n * s_v
    p_products += i_n * LEAVES * D * D
    slot = GROUP * 64 * D
    i_slot = _slot(i_n, i_leaf, i_leaf - first, LEAVES, WALK)
    p_passing += i_slot * slot + i_g * 64 * D
    p_passing_grad += i_slot * slot + i_g * 64 * D
    p_at = i_n * s_lse + token * GROUP + i_g
    b_do = load_tile(p_do + i_n * s_out + i_g * E, token, GROUP * E, E, BE)
    b_delta = tl.load(p_delta + p_at)
    b_row_shift = tl.load(p_row_shift + p_at)
    if GATED:
        i_c = i_n * GATES + i_g % GATES
        edge = edge_before(p_edge + i_c * LEAVES, i_leaf * 64)
    b_sums = tl.zeros([64], tl.float32)
    p_grad += i_n * s_grad + i_g * D
    b_grad = tl.zeros([64, BD], tl.float32)
    if ONWARD:
        b_grad += load_tile(p_grad, token, GROUP * D, D, BD).to(tl.float32)
    begin = first
    if PACKED:
        b_start = tl.load(p_start + token)
        begin = i_leaf - _within(p_start, i_leaf, i_leaf - first)
        b_grad = tl.where((b_start < first * 64)[:, None], b_grad, 0.0)  # queries of others never left the block
    for j in range(begin, i_leaf):
        key = j * 64 + row
        b_half = b_grad.to(DTYPE)
        store_tile(p_passing_grad + (j - first) * slot, row, D, b_half, D, BD)
        b_grad = through(b_half, matrix(p_products + j * (D * D), D, BD).to(DTYPE), False, DTYPE)
        b_q = load_tile(p_passing + (j - first) * slot, row, D, D, BD)
        b_k = load_tile(p_k, key, D, D, BD)
        b_s = mul(b_q, tl.trans(b_k), DTYPE) * scale2
        if GATED:
            shift = (edge - tl.load(p_edge + i_c * LEAVES + j)).to(tl.float32)
            b_s += (tl.load(p_left + i_c * LEAVES * 64 + key) + shift)[None, :]
        b_e = tl.exp2(b_s + b_row_shift[:, None])
        if PACKED:
            b_e = tl.where(b_start[:, None] <= key[None, :], b_e, 0.0)
        b_ds = b_e * (mul(b_do, tl.trans(load_tile(p_v, key, E, E, BE)), DTYPE) - b_delta[:, None])
        if GATED:
            b_sums += tl.sum(b_ds, 1)
        b_grad += mul(b_ds * scale, b_k, DTYPE)
    store_tile(p_grad, token, GROUP * D, b_grad, D, BD)
    if GATED:
        tl.store(p_by_query + p_at, tl.load(p_by_query + p_at) + b_sums)


@Kernel
@triton.jit(do_not_specialize=["LEAVES", "GATES"])
def _gather(
    p_k, p_v, p_suffix, p_left, p_edge, p_start, p_end, p_do, p_delta, p_row_shift, p_passing, p_passing_grad,
    p_grad_k, p_grad_v, p_grad_products, p_grad_suffix, p_by_key, scale, scale2,
    s_k, s_v, s_out, s_lse, s_grad, s_grad_v, LEAVES, GROUP, GATES,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, DTYPE: tl.constexpr, WALK: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, ONWARD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    j, i_n = pid % LEAVES, (pid // LEAVES).to(tl.int64)
    row = tl.arange(0, 64).to(tl.int64)
    key = j * 64 + row
    b_k = load_tile(p_k + i_n * s_k, key, D, D, BD)
    b_v = load_tile(p_v + i_n * s_v, key, E, E, BE)
    p_grad_k += i_n * s_grad
    p_grad_v += i_n * s_grad_v
    at = (i_n * LEAVES + j) * D * D
    b_dk = tl.zeros([64, BD], tl.float32)
    if ONWARD:  # keys went on to the block's end
        b_onward = load_tile(p_grad_k, key, D, D, BD)
        if PACKED:  # those of other documents are not seen from beyond
            b_onward = tl.where((tl.load(p_end + key) > (j // WALK + 1) * (WALK * 64))[:, None], b_onward, 0.0)
        b_dk += through(b_onward, matrix(p_suffix + at, D, BD), True, DTYPE)
        store_matrix(p_grad_suffix + at, mul(tl.trans(b_k), b_onward, DTYPE), D, BD)
    b_dv = tl.zeros([64, BE], tl.float32)
    b_dp = tl.zeros([BD, BD], tl.float32)
    first = j // WALK * WALK
    slot = GROUP * 64 * D
    end = tl.minimum(first + WALK, LEAVES)
    if PACKED:  # leaves from which some query has come as far as here
        end = tl.minimum(end, (tl.load(p_end + j * 64 + 63) + 63) // 64)
    for i in range(j + 1, end):
        i_slot = _slot(i_n, j, i - first, LEAVES, WALK) + (j - first)
        token = i * 64 + row
        for g in range(GROUP):
            b_q = load_tile(p_passing + i_slot * slot + g * 64 * D, row, D, D, BD)
            b_do = load_tile(p_do + i_n * s_out + g * E, token, GROUP * E, E, BE)
            p_at = i_n * s_lse + token * GROUP + g
            b_row_shift, b_delta = tl.load(p_row_shift + p_at), tl.load(p_delta + p_at)
            b_s = mul(b_k, tl.trans(b_q), DTYPE) * scale2
            if GATED:
                i_c = i_n * GATES + g % GATES
                p_gate = p_edge + i_c * LEAVES
                shift = (tl.load(p_gate + i - 1) - tl.load(p_gate + j)).to(tl.float32)
                b_s += (tl.load(p_left + i_c * LEAVES * 64 + key) + shift)[:, None]
            b_e = tl.exp2(b_s + b_row_shift[None, :])
            if PACKED:
                b_e = tl.where(tl.load(p_start + token)[None, :] <= key[:, None], b_e, 0.0)
            b_dv += mul(b_e, b_do, DTYPE)
            b_ds = b_e * (mul(b_v, tl.trans(b_do), DTYPE) - b_delta[None, :])
            if GATED:
                p_to = p_by_key + i_n * s_lse + key * GROUP + g
                tl.store(p_to, tl.load(p_to) + tl.sum(b_ds, 1))
            b_dk += mul(b_ds * scale, b_q, DTYPE)
            b_passing = load_tile(p_passing_grad + i_slot * slot + g * 64 * D, row, D, D, BD)
            b_dp += mul(tl.trans(b_passing), b_q, DTYPE)
    store_tile(p_grad_k, key, D, b_dk, D, BD)
    store_tile(p_grad_v, key, E, b_dv, E, BE)
    store_matrix(p_grad_products + at, b_dp, D, BD)


@triton.jit
def _product_times(p_product, p_rest, b_x, D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr):
    """P x, nearly in float32 precision, for a leaf's P as it is stored."""
    b_p = matrix(p_product, D, BD)
    if tl.float32 == DTYPE:
        return mul_single(b_p, b_x)
    b_half = b_x.to(DTYPE)
    b_small = tl.dot(matrix(p_rest, D, BD), b_half, tl.dot(b_p, (b_x - b_half.to(tl.float32)).to(DTYPE)))
    return tl.dot(b_p, b_half, b_small)


@Kernel
@triton.jit(do_not_specialize=["LEAVES"])
def _suffixes(
    p_products, p_rest, p_k, p_to, p_suffix, p_block, s_p, s_k, s_to, LEAVES,
    D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr, WALK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """For each leaf the product of those after it in its block, which its keys cross; and that of the whole block.

    A program computes 64 columns, which are independent of each other.
    """
    parts: tl.constexpr = BD // 64
    blocks = (LEAVES + WALK - 1) // WALK
    i_part, i_block, i_n = (
        tl.program_id(0) % parts, tl.program_id(0) // parts % blocks, (tl.program_id(0) // parts // blocks).to(tl.int64)
    )  # fmt: skip
    p_products += i_n * s_p
    p_rest += i_n * s_p
    p_suffix += i_n * LEAVES * D * D
    row = tl.arange(0, 64).to(tl.int64)
    column = i_part * 64 + tl.arange(0, 64)
    b_suffix = tl.where(tl.arange(0, BD)[:, None] == column[None, :], 1.0, 0.0)
    first = i_block * WALK
    count = tl.minimum(WALK, LEAVES - first)
    for step in range(count):
        leaf = first + count - 1 - step
        at = leaf * (D * D)
        if KEEP:
            store_columns(p_suffix + at, b_suffix, column, D, BD)
        key = leaf * 64 + row
        b_k = mul(load_tile(p_k + i_n * s_k, key, D, D, BD), b_suffix, DTYPE)
        store_rows(p_to + i_n * s_to, key, D, column, row >= 0, b_k, D)
        b_suffix = _product_times(p_products + at, p_rest + at, b_suffix, D, BD, DTYPE)
    store_columns(p_block + (i_n * blocks + i_block) * D * D, b_suffix, column, D, BD)


@Kernel
@triton.jit(do_not_specialize=["LEAVES"])
def _suffixes_back(
    p_products, p_suffix, p_grad_suffix, p_grad_block, p_grad, LEAVES,
    D: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr, WALK: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of leaves' products what their suffixes and blocks have received."""
    blocks = (LEAVES + WALK - 1) // WALK
    i_block, i_n = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    base = i_n * LEAVES * D * D
    b_carry = tl.zeros([BD, BD], tl.float32)
    if ABOVE:
        b_carry += matrix(p_grad_block + tl.program_id(0).to(tl.int64) * D * D, D, BD)
    first = i_block * WALK
    for leaf in range(first, tl.minimum(first + WALK, LEAVES)):
        at = base + leaf * (D * D)
        b_grad = mul(b_carry, tl.trans(matrix(p_suffix + at, D, BD)), DTYPE)
        store_matrix(p_grad + at, matrix(p_grad + at, D, BD).to(tl.float32) + b_grad, D, BD)
        b_carry = mul(tl.trans(matrix(p_products + at, D, BD)), b_carry, DTYPE)
        b_carry += matrix(p_grad_suffix + at, D, BD).to(tl.float32)


class Walk:
    """The walks of n key heads, from frames of leaves to frames of blocks."""

    def __init__(self, frames: Frames, sums: Sums | None, documents: Documents | None, scale: float) -> None:
        self.frames, self.scale = frames, scale
        q, k, v, products, _ = frames
        self.count, self.leaves, width, _ = products.shape
        self.group = q.shape[2]
        self.gates = (products, products, products) if sums is None else sums
        self.documents = Documents(products, products) if documents is None else documents
        self.sizes = (self.leaves, self.group, 1 if sums is None else sums.left.shape[1])
        self.narrow = {"D": width, "BD": padded(width), "DTYPE": DTYPES[q.dtype], "WALK": WALK, "num_warps": 4}
        self.flags = {**self.narrow, "E": v.shape[2], "BE": padded(v.shape[2]), "GATED": sums is not None}
        self.flags["PACKED"] = documents is not None
        self.steps = (q.stride(0), k.stride(0), v.stride(0))
        self.blocks = ceil_div(self.leaves, WALK)

    def forward(self, out: Tensor, lse: Tensor, to: Tensor | None) -> None:
        """Adds a block's keys to out (n, T, G, E) and lse (n, T, G) of leaves; puts queries at its start in `to`."""
        unused = self.frames.queries
        _walk_forward[(self.count * self.leaves * self.group,)](
            *self.frames[:4], *self.gates, self.documents.start, out, lse, unused if to is None else to, unused,
            self.scale * LOG2E, *self.steps,
            out.stride(0), lse.stride(0), 0 if to is None else to.stride(0), *self.sizes,
            **self.flags, ONWARD=to is not None, BACK=False, num_stages=2 if self.narrow["BD"] == 64 else 1,
        )  # fmt: skip

    def again(self, to: Tensor | None) -> Tensor:
        """Walks once more; returns the queries as they passed each leaf, (n, pairs of leaves, G, 64, D)."""
        q = self.frames.queries
        passing = q.new_empty(self.count, self.blocks * PASSED, self.group, LEAF, q.shape[3])
        _walk_forward[(self.count * self.leaves * self.group,)](
            *self.frames[:4], *self.gates, self.documents.start, q, self.frames.products, q if to is None else to,
            passing, self.scale * LOG2E,
            *self.steps, 0, 0, 0 if to is None else to.stride(0), *self.sizes,
            **self.flags, ONWARD=to is not None, BACK=True, num_stages=1,
        )  # fmt: skip
        return passing

    def backward(
        self, back: Back, passing: Tensor, grad_q: Tensor, grad_k: Tensor, suffixes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Takes grad_q and grad_k from block to leaf; returns gradients of values, products and, if any, suffixes."""
        _, k, v, products, _ = self.frames
        grad_v = v.new_empty(v.shape)
        passing_grad = torch.empty_like(passing)
        grad_products = torch.empty_like(products)
        grad_suffixes = None if suffixes is None else torch.empty_like(grad_products)
        steps = (*self.steps[1:], back.grad.stride(0), back.delta.stride(0))
        flags = {**self.flags, "ONWARD": suffixes is not None}
        _walk_back[(self.count * self.leaves * self.group,)](
            k, v, products, *self.gates[::2], self.documents.start, back.grad, back.delta, back.row_shift, grad_q,
            passing, passing_grad, back.by_query,
            self.scale, self.scale * LOG2E, *steps, grad_q.stride(0), *self.sizes, **flags,
            num_stages=2 if self.narrow["BD"] == 64 else 1,
        )  # fmt: skip
        stages = 3 if self.narrow["BD"] == 64 else 2 if roomy(k) else 1
        _gather[(self.count * self.leaves,)](
            k, v, k if suffixes is None else suffixes, *self.gates[::2], *self.documents, back.grad, back.delta,
            back.row_shift, passing, passing_grad, grad_k, grad_v, grad_products,
            k if grad_suffixes is None else grad_suffixes, back.by_key, self.scale, self.scale * LOG2E,
            *steps, grad_k.stride(0), grad_v.stride(0), *self.sizes,
            **flags | {"num_warps": warps_for(k.shape[2])}, num_stages=stages,
        )  # fmt: skip
        return grad_v, grad_products, grad_suffixes

    def suffixes(self, to: Tensor, keep: bool) -> tuple[Tensor | None, Tensor]:
        """Takes keys on to the end of their block, (n, T, D) `to`.

        Returns, if they are kept, for each leaf the product of those after it in its block (n, leaves, D, D); and those
        of blocks.
        """
        _, k, _, products, rest = self.frames
        suffixes = torch.empty_like(products) if keep else None
        blocks = products.new_empty(self.count, self.blocks, *products.shape[2:], dtype=torch.float32)
        options = {"num_stages": 2, "num_warps": warps_for(k.shape[2])} if roomy(k) else {"num_stages": 1}
        _suffixes[(self.count * self.blocks * (self.narrow["BD"] // 64),)](
            products, products if rest is None else rest, k, to, products if suffixes is None else suffixes, blocks,
            products.stride(0), k.stride(0), to.stride(0), self.leaves, KEEP=keep, **self.narrow | options,
        )  # fmt: skip
        return suffixes, blocks

    def suffixes_back(
        self, suffixes: Tensor, grad_suffixes: Tensor, grad_blocks: Tensor | None, grad_products: Tensor
    ) -> None:
        """Adds to grad_products what suffixes and blocks have received."""
        products = self.frames.products
        _suffixes_back[(self.count * self.blocks,)](
            products, suffixes, grad_suffixes, products if grad_blocks is None else grad_blocks, grad_products,
            self.leaves, **self.narrow, ABOVE=grad_blocks is not None, num_stages=1,
        )  # fmt: skip
