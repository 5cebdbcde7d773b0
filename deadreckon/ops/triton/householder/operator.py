"""Attention along Householder routes, gated or not, as one operator and one for its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.gated.flash import Documents, Reach, Sums, documents_of
from deadreckon.ops.triton.gated.gates import gate_gradient, gate_sums, growth_of, pruned, reach_of, room_for_reach
from deadreckon.ops.triton.householder.leaf import Leaves
from deadreckon.ops.triton.householder.tree import Closed, Kept, Tree
from deadreckon.ops.triton.operators import dense, gradients_for, results, save

ROWS = 1 << 21  # rows of queries that are worked on at a time: what is kept between kernels stays small


class Ascended(NamedTuple):
    """Softmax attention along Householder steps by kernels, and what goes on from there; N = B · H."""

    out: Tensor  # (B, T, Hq, E)
    lse: Tensor  # (N, T padded, G)
    queries: Tensor | None  # (N, T padded, G, D) in the frame of the first token, if they are to look further back
    keys: Tensor  # (N, closed, D): the first ones, in the frame of the last of them
    product: Tensor | None  # (N, D, D) of their steps, if there are any
    sums: Tensor | None  # (N, 1 | G, T padded) of log gates up to each token, float64


def _some_heads(lse: Tensor) -> Iterator[tuple[int, int]]:
    """First and count of the key heads of lse (B·H, T, G) that are worked on together: as equal as can be."""
    heads = lse.shape[0]
    parts = max(1, min(heads, lse.numel() // ROWS))
    edges = [heads * part // parts for part in range(parts + 1)]
    for first, end in pairwise(edges):
        yield first, end - first


def directions(w: Tensor) -> Tensor:
    """As kernels take them."""
    return dense(w.float() if w.dtype == torch.float64 else w)


def ascend(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float, closed: int = 0,
    to_top: bool = False,
) -> Ascended:  # fmt: skip
    """Attention along Householder routes, gated or not, and what a sequence that comes in pieces keeps of it."""
    w = directions(w)
    with torch.cuda.device_of(q):
        gates = _gates(q, k, w, beta, log_gate, scale)
        return _climb(q, k, v, w, beta, *gates, scale, closed, to_top)


def _gates(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float
) -> tuple[Sums | None, Reach | None]:
    """Their sums, and what they leave in reach of each other, if that is asked for."""
    if log_gate is None:
        return None, None
    sums = gate_sums(log_gate, k.shape[2])
    return sums, reach_of(q, k, log_gate, sums.edge, scale, growth_of(w, beta)) if pruned(k) else None


def _climb(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, sums: Sums | None, reach: Reach | None, scale: float,
    closed: int = 0, to_top: bool = False, kept: Kept | None = None, documents: Documents | None = None,
) -> Ascended:  # fmt: skip
    out, lse = results(q, k, v)
    keys = k.new_empty(lse.shape[0], closed, k.shape[3])
    products, queries, running = list[Tensor](), list[Tensor](), None
    for first, count in _some_heads(lse):
        some = slice(first, first + count)
        part = Closed(keys[some]) if closed else None
        tree = Tree(Leaves(q, k, v, w, beta, sums, documents, scale, first, count), reach, kept)
        top = tree.ascend(out, lse[some], part, to_top)
        products += [] if part is None else [part.product]
        queries += [] if top is None else [top]
    if sums is not None and (closed or to_top):
        running = (sums.edge.unsqueeze(-1) - sums.left.unflatten(2, (-1, LEAF))).flatten(2) * math.log(2)
    return Ascended(out, lse, _together(queries), keys, _together(products), running)


def _documents(cu_seqlens: Tensor | None, q: Tensor) -> Documents | None:
    return None if cu_seqlens is None else documents_of(cu_seqlens, q.shape[1])


def _together(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)


@torch.library.custom_op("deadreckon::householder", mutates_args=())
def householder_forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention along Householder routes, gated or not.

    Output (B, T, Hq, E), log-sum-exp (B·H, T padded, G), what gates leave in reach, and :class:`Kept`, which is empty
    unless asked for.
    """
    kept = Kept.room(q, k, v) if keep else None
    with torch.cuda.device_of(q):
        sums, reach = _gates(q, k, w, beta, log_gate, scale)
        out, lse, *_ = _climb(q, k, v, w, beta, sums, reach, scale, kept=kept, documents=_documents(cu_seqlens, q))
    return out, lse, *(reach or room_for_reach(k, None)), *(kept or Kept.nothing(q))


@householder_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    reach = room_for_reach(k, log_gate if pruned(k) else None)
    return *results(q, k, v), *reach, *(Kept.room(q, k, v) if keep else Kept.nothing(q))


@torch.library.custom_op("deadreckon::householder_backward", mutates_args=())
def householder_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    cu_seqlens: Tensor | None, out: Tensor, lse: Tensor, first: Tensor, last: Tensor, queries: Tensor,
    keys: Tensor, values: Tensor, products: Tensor,
    inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta and, if there is one, log_gate."""
    heads, grad = k.shape[2], dense(grad)
    kept, reach = Kept(queries, keys, values, products, inverse), Reach(first, last) if first.numel() else None
    found = tuple(gradients_for(q, k, v, w, beta))
    sides = []
    with torch.cuda.device_of(q):
        sums, documents = None if log_gate is None else gate_sums(log_gate, heads), _documents(cu_seqlens, q)
        for begin, count in _some_heads(lse):
            tree = Tree(Leaves(q, k, v, w, beta, sums, documents, scale, begin, count), reach, kept)
            sides.append(tree.descend(out, grad, lse[begin : begin + count], found))
    if log_gate is None:
        return list(found)
    by_query, by_key = (torch.cat(side) for side in zip(*sides, strict=True))
    return [*found, gate_gradient(by_query, by_key, log_gate, heads)]


@householder_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    cu_seqlens: Tensor | None, out: Tensor, lse: Tensor, first: Tensor, last: Tensor, queries: Tensor,
    keys: Tensor, values: Tensor, products: Tensor,
    inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(q, k, v, w, beta, *([] if log_gate is None else [log_gate]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    save(ctx, inputs[:-1], output)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = householder_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*found, *(None,) * (9 - len(found)))


householder_forward.register_autograd(_gradients, setup_context=_save)


def attend_householder(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None,
    cu_seqlens: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """See :func:`deadreckon.attend`; log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    inputs = q, k, v, directions(w), beta, log_gate, cu_seqlens
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return householder_forward(*inputs, scale, keep)[0]
