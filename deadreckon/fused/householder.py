"""Attention along Householder routes, gated or not, as one operator and one for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deadreckon.blockwise.climb import by_head
from deadreckon.fused.operators import dense, gate_gradient, gradients_for, results, save
from deadreckon.fused.tree import Kept, Tree
from deadreckon.kernels.gates import gate_sums
from deadreckon.kernels.leaf import LEAF, Leaves

ROWS = 1 << 20  # rows of queries that are worked on at a time: what is kept between kernels stays small


def _some_heads(lse: Tensor) -> Iterator[tuple[int, int]]:
    """First and count of the key heads of lse (B·H, T, G) that are worked on together: as equal as can be."""
    heads = lse.shape[0]
    parts = max(1, min(heads, lse.numel() // ROWS))
    edges = [heads * part // parts for part in range(parts + 1)]
    for first, end in pairwise(edges):
        yield first, end - first


def ascend_fields(
    q: Tensor, fields: dict[str, Tensor], scale: float, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention over whole leaves, two or more, and what goes on from there: for a sequence that comes in pieces.

    q (N, T, G, D), k and w (N, T, D), v (N, T, E), beta (N, T), gates (N, T, 1 | G) -> output (N, T, G, E) and
    log-sum-exp (N, T, G); q in the frame of the first token, k in that of the last, and the product (N, D, D) of all.
    N is `batch` times key heads; the output lies in memory as (batch, T, heads · G, E).
    """
    assert q.shape[1] % LEAF == 0
    assert q.shape[1] > LEAF
    heads = q.shape[0] // batch

    def whole(x: Tensor) -> Tensor:  # (N, T, ...) -> (B, T, H, ...)
        return x.unflatten(0, (batch, heads)).transpose(1, 2)

    log_gate = whole(fields["gates"]).flatten(2, 3) if "gates" in fields else None
    k, v, w, beta = (whole(fields[name]) for name in ("k", "v", "w", "beta"))
    out = q.new_empty(batch, q.shape[1], heads * q.shape[2], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    tops = []
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        for first, count in _some_heads(lse):
            leaves = Leaves(whole(q).flatten(2, 3), k, v, w, beta, sums, scale, first, count)
            top = Tree(leaves).ascend(out, lse[first : first + count], to_top=True)
            assert top is not None
            tops.append((top.queries, top.keys, top.products[:, 0]))
    queries, keys, products = tops[0] if len(tops) == 1 else (torch.cat(part) for part in zip(*tops, strict=True))
    return by_head(out, heads), lse, queries, keys, products


@torch.library.custom_op("deadreckon::householder", mutates_args=())
def householder_forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention along Householder routes, gated or not.

    Output (B, T, Hq, E), log-sum-exp (B·H, T padded, G), and :class:`Kept`, which is empty unless asked for.
    """
    heads = k.shape[2]
    out, lse = results(q, k, v)
    kept = Kept.room(q, k, v) if keep else None
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        for first, count in _some_heads(lse):
            leaves = Leaves(q, k, v, w, beta, sums, scale, first, count)
            Tree(leaves, kept).ascend(out, lse[first : first + count])
    return out, lse, *(kept or Kept.nothing(q))


@householder_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float, keep: bool
) -> tuple[Tensor, ...]:
    return *results(q, k, v), *(Kept.room(q, k, v) if keep else Kept.nothing(q))


@torch.library.custom_op("deadreckon::householder_backward", mutates_args=())
def householder_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, out: Tensor,
    lse: Tensor, queries: Tensor, keys: Tensor, values: Tensor, products: Tensor, inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta and, if there is one, log_gate."""
    heads, grad = k.shape[2], dense(grad)
    kept = Kept(queries, keys, values, products, inverse)
    found = tuple(gradients_for(q, k, v, w, beta))
    sides = []
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        for first, count in _some_heads(lse):
            leaves = Leaves(q, k, v, w, beta, sums, scale, first, count)
            sides.append(Tree(leaves, kept).descend(out, grad, lse[first : first + count], found))
    if log_gate is None:
        return list(found)
    by_query, by_key = (torch.cat(side) for side in zip(*sides, strict=True))
    return [*found, gate_gradient(by_query, by_key, log_gate, heads)]


@householder_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, out: Tensor,
    lse: Tensor, queries: Tensor, keys: Tensor, values: Tensor, products: Tensor, inverse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    return gradients_for(q, k, v, w, beta, *([] if log_gate is None else [log_gate]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    save(ctx, inputs[:-1], output)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = householder_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*found, None, None) if len(found) == 6 else (*found, None, None, None)


householder_forward.register_autograd(_gradients, setup_context=_save)


def attend_householder(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float
) -> Tensor:
    """See :func:`deadreckon.attend`; log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    inputs = q, k, v, w, beta, log_gate
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return householder_forward(*inputs, scale, keep)[0]
