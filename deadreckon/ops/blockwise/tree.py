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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.climb import Climb, by_head, gates_by_head, leaf_tokens
from deadreckon.ops.blockwise.precision import exact, in_range, work
from deadreckon.ops.factors import Householder, Power, Score
from deadreckon.ops.tracing import operator, room_like, without_autocast


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
    w = beta = gates = None
    if householder is not None:
        w, beta = (by_head(x.to(work(q.dtype)), heads).squeeze(2) for x in (householder.w, householder.beta))
    if log_gate is not None:
        gates = gates_by_head(log_gate, heads)
    q, k, v = (by_head(x, heads) for x in (q, k, v))
    k, v = k.squeeze(2), v.squeeze(2)
    if isinstance(score, Power):
        (q, k), scale = in_range(q, k), 1.0
    name, p = ("power", score.p) if isinstance(score, Power) else (score, 0)
    output = tree_forward(q, k, v, w, beta, gates, name, p, scale)[0]
    output = output.unflatten(0, (batch, heads)).transpose(1, 2)  # (B, T, H, G, E)
    return output.reshape(batch, length, query_heads, -1).to(dtype)


class Leaves:
    """Inputs of the operators, padded to whole leaves, and what is left of results without the padding.

    How large a leaf is may depend on the gates, so that it is not known outside.
    """

    def __init__(self, like: Tensor, householder: bool, gates: Tensor | None, score: Score) -> None:
        self.length = like.shape[1]
        self.size = leaf_tokens(self.length, householder, gates, score, like)
        self.padding = -self.length % self.size

    def whole(self, *inputs: Tensor | None, value: float = 0.0) -> Iterator[Any]:
        """Each of (N, T, ...), padded."""
        for x in inputs:
            if x is None or not self.padding:
                yield x
            else:
                yield pad(x, (0, 0) * (x.dim() - 2) + (0, self.padding), value=value)

    def cut(self, *results: Tensor | None) -> Iterator[Tensor]:
        """Those of (N, T padded, ...) that there are, without the padding."""
        for x in results:
            if x is not None:
                yield x[:, : self.length].contiguous()


def _score(name: str, p: int) -> Score:
    return Power(p) if name == "power" else name  # type: ignore[return-value]


def climb_up(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None, score: str, p: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (N, T, G, E), the same more precisely, if the score needs it (else empty), and the rows' statistic."""
    leaves = Leaves(q, w is not None, gates, _score(score, p))
    q, k, v, w, beta, gates = leaves.whole(q, k, v, w, beta, gates)
    climb = Climb(q, k, v, w, beta, gates, _score(score, p), scale, leaves.size)
    out, row = climb.ascend()
    out, row = leaves.cut(climb.score.finish(out, row), row)
    if not climb.score.careful:
        return out.to(q.dtype), out.new_empty(0), row
    return out.to(q.dtype, copy=True), out, row


def _room(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None, score: str, p: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    working, precise = work(q.dtype), exact(q.device)
    out = q.new_empty(*q.shape[:3], v.shape[2])
    careful = torch.empty_like(out, dtype=precise) if score == "power" else out.new_empty(0, dtype=working)
    return out, careful, q.new_empty(q.shape[:3], dtype=working if score == "softmax" else precise)


def climb_down(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
    out: Tensor, careful: Tensor, row: Tensor, score: str, p: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta and gates, of those that there are."""
    with without_autocast(q):
        leaves = Leaves(q, w is not None, gates, _score(score, p))
        q, k, v, w, beta, gates = leaves.whole(q, k, v, w, beta, gates)
        climb = Climb(q, k, v, w, beta, gates, _score(score, p), scale, leaves.size)
        grad, out = leaves.whole(grad.contiguous(), careful if climb.score.careful else out)
        (row,) = leaves.whole(row, value=climb.score.unseen)
        return list(leaves.cut(*climb.descend(grad, out, row.clone())))


def _gradient_room(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
    out: Tensor, careful: Tensor, row: Tensor, score: str, p: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    return room_like(q, k, v, w, beta, gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, score, p, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = score, p, scale
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def first_derivatives_only() -> None:
    """For backward passes: nobody has written down their derivatives."""
    if torch.is_grad_enabled():
        raise RuntimeError("attend: second derivatives need impl='reference'; this one computes first derivatives")


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    first_derivatives_only()
    found = iter(tree_backward(grad, *ctx.saved_tensors, *ctx.settings))
    return *(None if x is None else next(found) for x in ctx.saved_tensors[:6]), None, None, None


tree_backward = operator("deadreckon::tree_backward", climb_down, _gradient_room)
tree_forward = operator("deadreckon::tree", climb_up, _room, gradients=_gradients, save=_save)
