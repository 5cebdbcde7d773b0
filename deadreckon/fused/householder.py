"""Attention along Householder routes, gated or not, as one operator and one for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deadreckon.fused.gated import gate_gradient
from deadreckon.fused.tree import Tree
from deadreckon.kernels.gates import gate_sums
from deadreckon.kernels.leaf import LEAF, Leaves

ROWS = 1 << 20  # rows of queries that are worked on at a time: what is kept between kernels stays small


def _some_heads(heads: int, rows: int) -> Iterator[tuple[int, int]]:
    """First and count of the key heads that are worked on together: as equal as can be."""
    parts = max(1, min(heads, heads * rows // ROWS))
    edges = [heads * part // parts for part in range(parts + 1)]
    for first, end in pairwise(edges):
        yield first, end - first


def ascend_fields(q: Tensor, fields: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention over whole leaves, two or more, and what goes on from there: for a sequence that comes in pieces.

    q (N, T, G, D), k and w (N, T, D), v (N, T, E), beta (N, T), gates (N, T, 1 | G) -> output (N, T, G, E) and
    log-sum-exp (N, T, G); q in the frame of the first token, k in that of the last, and the product (N, D, D) of all.
    """
    assert q.shape[1] % LEAF == 0
    assert q.shape[1] > LEAF
    k, v, w, beta = (fields[name].unsqueeze(2) for name in ("k", "v", "w", "beta"))
    log_gate = fields.get("gates")
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    tops = []
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, 1)
        for first, count in _some_heads(q.shape[0], q.shape[1] * q.shape[2]):
            leaves = Leaves(q, k, v, w, beta, sums, scale, first, count)
            top = Tree(leaves).ascend(out, lse[first : first + count], to_top=True)
            assert top is not None
            tops.append((top.queries, top.keys, top.products[:, 0]))
    queries, keys, products = (torch.cat(part) for part in zip(*tops, strict=True))
    return out, lse, queries, keys, products


@torch.library.custom_op("deadreckon::householder", mutates_args=())
def householder_forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention along Householder routes, gated or not: output (B, T, Hq, E) and log-sum-exp (B·H, T padded, G)."""
    batch, length, heads, _ = k.shape
    group, tokens = q.shape[2] // heads, -(-length // LEAF) * LEAF
    out = q.new_empty(batch, length, q.shape[2], v.shape[3])
    lse = q.new_empty(batch * heads, tokens, group, dtype=torch.float32)
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        for first, count in _some_heads(batch * heads, tokens * group):
            leaves = Leaves(q, k, v, w, beta, sums, scale, first, count)
            Tree(leaves).ascend(out, lse[first : first + count])
    return out, lse


@householder_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = k.shape
    tokens = -(-length // LEAF) * LEAF
    out = q.new_empty(batch, length, q.shape[2], v.shape[3])
    return out, q.new_empty(batch * heads, tokens, q.shape[2] // heads, dtype=torch.float32)


@torch.library.custom_op("deadreckon::householder_backward", mutates_args=())
def householder_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, out: Tensor,
    lse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta and, if there is one, log_gate."""
    batch, length, heads, _ = k.shape
    group, tokens = q.shape[2] // heads, -(-length // LEAF) * LEAF
    found = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, w, beta))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    sides = []
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, heads)
        for first, count in _some_heads(batch * heads, tokens * group):
            leaves = Leaves(q, k, v, w, beta, sums, scale, first, count)
            sides.append(Tree(leaves).descend(out, grad, lse[first : first + count], found))
    if log_gate is None:
        return list(found)
    by_query, by_key = (torch.cat(side) for side in zip(*sides, strict=True))
    return [*found, gate_gradient(by_query, by_key, log_gate, heads)]


@householder_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, out: Tensor,
    lse: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    given = [q, k, v, w, beta] if log_gate is None else [q, k, v, w, beta, log_gate]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = householder_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*found, None) if len(found) == 6 else (*found, None, None)


householder_forward.register_autograd(_gradients, setup_context=_save)


def attend_householder(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_gate: Tensor | None, scale: float
) -> Tensor:
    """See :func:`deadreckon.attend`; log_gate (B, T, H or Hq) -> (B, T, Hq, E)."""
    return householder_forward(q, k, v, w, beta, log_gate, scale)[0]
