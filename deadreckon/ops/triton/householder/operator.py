"""PaTH: softmax attention along products of Householder steps, as one operator and one for its backward pass.

A key reaches a query through every step in between, k_jᵀ H_{j+1} ⋯ H_i q_i. Cut the tokens anywhere, at m: what lies
between is the query's way back to m, times the key's way on to m. In *frames* that meet, attention is plain.

    tokens     |  0 … 63 | 64 … 127|   …     | 448…511 |                leaves of 64: all routes inside them at once
                 k → end   start ← q                                    frames of a leaf: keys at its end, queries at
                                                                        its start; P, the product of its 64 steps
    block      |     q walks back, leaf by leaf:  …P…P │                eight leaves: attend to the leaf before, cross
                                                                        its P, attend to the one before that
    levels     |  block (keys)     |  block (queries)  |                pairs of blocks: dense attention right × left,
               |     pair (keys)             |     pair (queries)   |   cross each other's product, and up a level

Forward, for a slice of key heads at a time: (1) leaves, (2) the walk inside blocks, which also takes queries to the
block's start and keys to its end, (3) levels of dense attention, (4) merge: all parts of a row by their log-sum-exp.

Backward, the other way around, with the log-sum-exp of *whole* rows, so that every part has its exact gradient as in
ring attention: levels from the top down, the walk once more and back, leaves. Frames of leaves are saved (unless
`recompute` is set); all else is recomputed, directions by their formula. Nothing inverts a step, nothing uses atomics.

Gates ride along as sums that each stage subtracts; packed documents as masks where they begin and end: what crosses a
boundary is computed with the rest, but never used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF, Run, levels
from deadreckon.ops.factors import Householder
from deadreckon.ops.layout import dense
from deadreckon.ops.saving import saving
from deadreckon.ops.tracing import without_autocast
from deadreckon.ops.triton.gated.delta import prepare
from deadreckon.ops.triton.gated.gates import (
    gate_gradient,
    gate_sums,
    growth_of,
    pruned,
    reach_in,
    reach_of,
    room_for_reach,
)
from deadreckon.ops.triton.gated.launch import Documents, Reach, Sums, documents_of
from deadreckon.ops.triton.householder.frames import Back, Frames, Place, Saved, buffer
from deadreckon.ops.triton.householder.leaf import Leaves
from deadreckon.ops.triton.householder.levels import Levels, Routes
from deadreckon.ops.triton.householder.merge import Part, merge
from deadreckon.ops.triton.householder.prefill import Ascended, Closed
from deadreckon.ops.triton.householder.walk import WALK, Walk
from deadreckon.ops.triton.operators import gradients_for, results, save
from deadreckon.ops.triton.tape import Taped

ROWS = 1 << 21  # rows of queries that are worked on at a time, of heads of 64: what is kept between kernels stays small


class Heads(NamedTuple):
    """A slice of n key heads: what every stage takes of them."""

    leaves: Leaves
    routes: Routes
    frames: Frames | None  # of leaves; None where one leaf is all there is
    inverse: Tensor | None  # (n, leaves, 64, 64), if it is saved
    runs: list[list[Run]]  # of each level, near to far

    def buffer(self, *shape: int) -> Tensor:
        """(n, T padded, ...): see :func:`buffer`."""
        return buffer(self.leaves.q, self.leaves.taken, self.leaves.leaves * LEAF, *shape)

    def frames_of_blocks(self) -> tuple[Tensor, Tensor]:
        """Empty tensors for queries (n, T padded, G, D) and keys (n, T padded, D)."""
        width = self.leaves.k.shape[3]
        return self.buffer(self.leaves.group, width), self.buffer(width)

    def with_leaves(self) -> Heads:
        """The same, after recomputing what the forward pass has not saved of leaves."""
        leaves = self.leaves
        inverse = leaves.q.new_empty(leaves.taken, leaves.leaves, LEAF, LEAF)
        out = self.buffer(leaves.group, leaves.v.shape[3])
        leaves.forward(self.frames, inverse, out, out.new_empty(out.shape[:3], dtype=torch.float32))
        return self._replace(inverse=inverse)

    def walk(self) -> Walk:
        """The walk of these heads, which have more than one leaf."""
        assert self.frames is not None
        return Walk(self.frames, self.routes.sums, self.routes.documents, self.routes.scale)


def _forward(
    heads: Heads, out: Tensor, lse: Tensor, closed: Closed | None = None, to_top: bool = False
) -> Tensor | None:
    """Writes out (B, T, Hq, E) and lse (n, T padded, G) of these heads; fills `closed` with the first tokens, if given.

    With to_top (and more than one leaf), returns queries (n, T padded, G, D) in the frame of the first token.
    """
    leaves, frames = heads.leaves, heads.frames
    near_out, near_lse = heads.buffer(leaves.group, out.shape[3]), torch.empty_like(lse)
    leaves.forward(frames, heads.inverse, near_out, near_lse)  # 1
    far: list[Part] = []
    queries = None
    if frames is not None:
        walk, above = heads.walk(), bool(heads.runs) or to_top
        queries, keys = heads.frames_of_blocks() if above else (None, None)
        walk.forward(near_out, near_lse, queries)  # 2
        if closed:
            closed.take_leaves(frames)
        if queries is not None and keys is not None:
            products = walk.suffixes(keys, keep=False)[1]
            blocks = Frames(queries, keys, frames.values, products)
            far = Levels(heads.runs, blocks, heads.routes).forward(closed, to_top)  # 3
    merge(near_out, near_lse, far, out, lse, leaves.first, leaves.documents)  # 4
    return queries if to_top else None


def _backward(
    heads: Heads, out: Tensor, grad: Tensor, lse: Tensor, gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Writes dq, dk, dv, dw, dbeta of these heads; returns what gates receive by query and by key, (n, T padded, G)."""
    leaves, frames, inverse = heads.leaves, heads.frames, heads.inverse
    assert inverse is not None
    by_head = heads.buffer(leaves.group, out.shape[3]), heads.buffer(leaves.group, out.shape[3])
    delta, row_shift = prepare(out, grad, lse, leaves.sums, leaves.k.shape[2], leaves.first, by_head)
    room = torch.empty_like if leaves.sums is None else torch.zeros_like  # kernels add to it
    back = Back(by_head[1], delta, lse, row_shift, room(lse), room(lse))
    values: list[tuple[Tensor, Place]] = []  # parts of dv, by where their keys are
    grad_q = grad_k = grad_products = None
    if frames is not None:
        walk = heads.walk()
        if heads.runs:
            queries, keys = heads.frames_of_blocks()
            suffixes, products = walk.suffixes(keys, keep=True)
            passing = walk.again(queries)
            blocks = Levels(heads.runs, Frames(queries, keys, frames.values, products), heads.routes)
            grad_q, grad_k, grad_blocks = blocks.backward(back, by_head[0], values)  # 3
            del blocks, queries, keys, by_head  # what follows takes the most memory
            grad_v, grad_products, grad_suffixes = walk.backward(back, passing, grad_q, grad_k, suffixes)  # 2
            assert suffixes is not None
            assert grad_suffixes is not None
            walk.suffixes_back(suffixes, grad_suffixes, grad_blocks, grad_products)
        else:
            grad_q, grad_k = heads.frames_of_blocks()
            grad_v, grad_products, _ = walk.backward(back, walk.again(None), grad_q, grad_k, None)
        values.append((grad_v, (0, 1, leaves.leaves * LEAF, 0)))
    leaves.backward(inverse, back, grad_q, grad_k, grad_products, values, gradients)  # 1
    return back.by_query, back.by_key


def slices(heads: int, rows: int, width: int) -> Iterator[slice]:
    """Slices of key heads that are processed together, as equal as possible; `rows` are the query rows of all heads.

    Fewer of wide heads: products of steps grow with the square of the width.
    """
    parts = max(1, min(heads, rows * max(LEAF, width) ** 2 // (ROWS * LEAF**2)))
    return (slice(first, end) for first, end in pairwise(heads * part // parts for part in range(parts + 1)))


def _head_slices(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, routes: Routes, lse: Tensor, saved: Saved | None
) -> Iterator[tuple[slice, Heads]]:
    """Slices of the key heads of lse (B·H, T padded, G), and what the stages take of each."""
    sums, reach, documents, scale = routes
    for part in slices(lse.shape[0], lse.numel(), q.shape[3]):
        taken = part.stop - part.start
        leaves = Leaves(q, k, v, w, beta, sums, documents, scale, part.start, taken)
        frames = inverse = None
        if leaves.leaves > 1:
            frames = Frames.room(q, k, v, taken) if saved is None else saved.frames(part)
        if saved is not None:
            inverse = saved.inverses(part)
        part_routes = Routes(
            None if sums is None else Sums(*(x[part] for x in sums)),
            None if reach is None else Reach(reach.both[:, part]), documents, scale,
        )  # fmt: skip
        yield part, Heads(leaves, part_routes, frames, inverse, list(levels(leaves.leaves * LEAF, WALK * LEAF)))


def _routes(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, documents: Documents | None, scale: float,
    prune: bool, reach: Reach | None = None,
) -> Routes:  # fmt: skip
    """Sums of gates, what they leave in reach (unless it is known), documents."""
    if log_gate is None:
        return Routes(None, None, documents, scale)
    sums, most = gate_sums(log_gate, k.shape[2])
    if reach is None and prune:
        reach = reach_of(q, k, sums.edge, most, scale, growth_of(w, beta))
    return Routes(sums, reach, documents, scale)


@Taped
def _forward_pass(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, documents: Documents | None,
    prune: bool, scale: float, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What :func:`householder_forward` returns."""
    out, lse = results(q, k, v)
    saved = Saved.room(q, k, v) if keep else None
    routes = _routes(q, k, w, beta, log_gate, documents, scale, prune)
    for part, heads in _head_slices(q, k, v, w, beta, routes, lse, saved):
        _forward(heads, out, lse[part])
    reach = room_for_reach(k, None, prune) if routes.reach is None else routes.reach.both.view(-1)
    return out, lse, reach, *(saved or Saved.nothing(q))


@torch.library.custom_op("deadreckon::householder", mutates_args=())
def householder_forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None,
    prune: bool, scale: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention along Householder routes, gated or not, packed or not; `prune`: skips keys out of the gates' reach.

    Returns output (B, T, Hq, E), log-sum-exp (B·H, T padded, G), the reach, flattened, and :class:`Saved`, which is
    empty unless `keep`.
    """
    with torch.cuda.device_of(q):
        return _forward_pass(q, k, v, w, beta, log_gate, documents_of(cu_seqlens, q.shape[1]), prune, scale, keep)


@householder_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None,
    prune: bool, scale: float, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    saved = Saved.room(q, k, v) if keep else Saved.nothing(q)
    return *results(q, k, v), room_for_reach(k, log_gate, prune), *saved


@Taped
def _backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    documents: Documents | None, out: Tensor, lse: Tensor, reach: Tensor, saved: Saved | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """What :func:`householder_backward` returns."""
    grad = dense(grad)
    gradients = tuple(gradients_for(q, k, v, w, beta))
    sides = []
    routes = _routes(q, k, w, beta, log_gate, documents, scale, False, reach_in(reach, k, log_gate))
    for part, heads in _head_slices(q, k, v, w, beta, routes, lse, saved):
        heads = heads if saved else heads.with_leaves()
        sides.append(_backward(heads, out, grad, lse[part], gradients))
    if log_gate is None:
        return list(gradients)
    by_query, by_key = (side[0] if len(side) == 1 else torch.cat(side) for side in zip(*sides, strict=True))
    return [*gradients, gate_gradient(by_query, by_key, log_gate, k.shape[2])]


def _arguments_of_backward_pass(arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    """Arguments of the backward pass, to compile its kernels ahead; None if nothing is kept for one."""
    *inputs, documents, _, scale, keep = arguments
    out, lse, reach, *saved = results
    if not keep:
        return None
    return torch.empty_like(out), *inputs, documents, out, lse, reach, Saved(*saved), scale


_forward_pass.followed_by(_backward_pass, _arguments_of_backward_pass)


@torch.library.custom_op("deadreckon::householder_backward", mutates_args=())
def householder_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    cu_seqlens: Tensor | None, out: Tensor, lse: Tensor, reach: Tensor, queries: Tensor,
    keys: Tensor, values: Tensor, products: Tensor, inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta and, if there is one, log_gate."""
    saved = Saved(queries, keys, values, products, inverse) if inverse.numel() else None
    with torch.cuda.device_of(q):
        documents = documents_of(cu_seqlens, q.shape[1])
        return _backward_pass(grad, q, k, v, w, beta, log_gate, documents, out, lse, reach, saved, scale)


@householder_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    cu_seqlens: Tensor | None, out: Tensor, lse: Tensor, reach: Tensor, queries: Tensor,
    keys: Tensor, values: Tensor, products: Tensor, inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(q, k, v, w, beta, *([] if log_gate is None else [log_gate]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, scale, _ = inputs
    save(ctx, (*tensors, scale), output)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = householder_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*gradients, *(None,) * (10 - len(gradients)))


householder_forward.register_autograd(_gradients, setup_context=_save)


def directions(w: Tensor) -> Tensor:
    """Directions as kernels take them: stride 1 along channels, no float64."""
    return dense(w.float() if w.dtype == torch.float64 else w)


def attend_householder(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder, log_gate: Tensor | None, cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """See :func:`deadreckon.attend`; log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    inputs = q, k, v, directions(steps.w), steps.beta, log_gate, cu_seqlens
    learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    keep = learning and not steps.recompute
    with saving(steps.formula):
        return householder_forward(*inputs, pruned(k, log_gate), scale, keep)[0]


def ascend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float, closed: int = 0,
    to_top: bool = False,
) -> Ascended:  # fmt: skip
    """The forward pass for streaming, which also returns `closed` tokens as a segment and, if to_top, queries there."""
    with torch.cuda.device_of(q), without_autocast(q):  # products are of single precision, also when read off a tape
        return _ascend(q, k, v, directions(w), beta, log_gate, scale, closed, to_top)


@Taped
def _ascend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float, closed: int,
    to_top: bool,
) -> Ascended:  # fmt: skip
    out, lse = results(q, k, v)
    keys = k.new_empty(lse.shape[0], closed, k.shape[3])
    products, queries, running = list[Tensor](), list[Tensor](), None
    routes = _routes(q, k, w, beta, log_gate, None, scale, pruned(k, log_gate))
    for part, heads in _head_slices(q, k, v, w, beta, routes, lse, None):
        first_tokens = Closed(keys[part]) if closed else None
        top = _forward(heads, out, lse[part], first_tokens, to_top)
        products += [] if first_tokens is None else [first_tokens.product]
        queries += [] if top is None else [top]
    if routes.sums is not None and (closed or to_top):
        left, rest, edge = (x.double() for x in routes.sums)
        running = (edge.unsqueeze(-1) - (left + rest).unflatten(2, (-1, LEAF))).flatten(2) * math.log(2)
    return Ascended(out, lse, _together(queries), keys, _together(products), running)


def _together(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
