"""The route tree: attention along accumulated routes as a few dense attention calls.

Take a block of tokens with midpoint m. Carry the queries of its right half back to m and the keys of its left half on
to m: between the two halves nothing is left to accumulate, and right × left is dense attention without a mask. So the
causal triangle is leaves on the diagonal (`leaf.py`) and, above them, one batch of dense blocks a level, twice as large
from level to level. Gates ride along: with c the running sum of log gates, a route's gate is (c_i − c_m) + (c_m − c_j),
a shift of the query's row and a bias of the key, both local to the block.

Going up a level costs a D × D product for half of the tokens. With P the product of all steps of a block,

    queries of the right half ← P_left · q̃,   keys of the left half ← P_rightᵀ · k̃,   P ← P_left P_right

Nothing is inverted (a step with β = 1 is singular). The backward pass computes leaves and frames again rather than keep
them, then descends from the widest blocks to the leaves.

Layout: N = B·H, and the G queries that share a key head are G more rows of the same token, so grouped heads need no
copies of keys: q (N, T, G, D), k (N, T, D), v (N, T, E), gates (N, T, 1 or G).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.climb import Climb, by_head, gates_by_head, leaf_tokens
from deadreckon.ops.blockwise.precision import in_range, work
from deadreckon.ops.factors import Householder, Power, Score


def attend_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    householder: Householder | None,
    log_gate: Tensor | None,
    score: Score,
    scale: float,
) -> Tensor:
    """Attention of (B, T, Hq, D), (B, T, H, D), (B, T, H, E) along the routes of householder and log_gate."""
    batch, length, query_heads, _ = q.shape
    heads = k.shape[2]
    dtype = q.dtype
    if q.device.type == "cpu" or score != "softmax":  # where half precision gains nothing
        q, k, v = (x.to(work(dtype)) for x in (q, k, v))
    leaf = leaf_tokens(length, householder is not None, None if log_gate is None else log_gate.detach(), score, q)
    padding = -length % leaf

    def whole(x: Tensor) -> Tensor:  # T padded to whole leaves
        return pad(x, (0, 0) * (x.dim() - 2) + (0, padding)) if padding else x

    w = beta = gates = None
    if householder is not None:
        steps = (householder.w, householder.beta)
        w, beta = (whole(by_head(x.to(work(q.dtype)), heads)).squeeze(2) for x in steps)
    if log_gate is not None:
        gates = whole(gates_by_head(log_gate, heads))
    q, k, v = (whole(by_head(x, heads)) for x in (q, k, v))
    k, v = k.squeeze(2), v.squeeze(2)
    if isinstance(score, Power):
        (q, k), scale = in_range(q, k), 1.0
    output = _Tree.apply(q, k, v, w, beta, gates, score, scale, leaf)
    output = output[:, :length].unflatten(0, (batch, heads)).transpose(1, 2)  # (B, T, H, G, E)
    return output.reshape(batch, length, query_heads, -1).to(dtype)


class _Tree(torch.autograd.Function):
    """The tree with its gradients, written out so that a level is never kept longer than it is needed."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
        score: Score, scale: float, leaf: int,
    ) -> Tensor:  # fmt: skip
        climb = Climb(q, k, v, w, beta, gates, score, scale, leaf)
        out, row = climb.ascend()
        out = climb.score.finish(out, row)
        given = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, w, beta, gates, out if climb.score.careful else given, row)
        ctx.settings = (score, scale, leaf)
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("attend: second derivatives need impl='reference'; this one computes first derivatives")
        q, k, v, w, beta, gates, out, row = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            climb = Climb(q, k, v, w, beta, gates, *ctx.settings)
            return (*climb.descend(grad.contiguous(), out, row.clone()), None, None, None)
