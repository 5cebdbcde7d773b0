"""The route tree: attention along accumulated routes as a few dense attention calls.

Take a block of tokens with midpoint m. Carry the queries of its right half back to m and the keys of its left half on
to m: between the two halves nothing is left to accumulate, and right × left is dense attention without a mask. So the
causal triangle is leaves on the diagonal (`leaf.py`) and, above them, one batch of dense blocks a level, twice as large
from level to level. Gates ride along: with c the running sum of log gates, a route's gate is (c_i − c_m) + (c_m − c_j),
a shift of the query's row and a bias of the key, both local to the block.

Going up a level costs a D × D product for half of the tokens (`frames.py`). The backward pass computes leaves and
frames again rather than keep them, then descends from the widest blocks to the leaves.

Reading order: `problem.py` describes one such attention; `forward.py` and `backward.py` are the two passes;
`dense.py` computes dense blocks, `leaf.py` and `causal.py` leaves. This file registers the passes as torch operators.

Layout: N = B·H, and the G queries that share a key head are G more rows of the same token, so grouped heads need no
copies of keys: q (N, T, G, D), k (N, T, D), v (N, T, E), gates (N, T, 1 or G).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.backward import backward
from deadreckon.ops.blockwise.dense import tiled_score
from deadreckon.ops.blockwise.forward import forward
from deadreckon.ops.blockwise.precision import exact, in_range, work
from deadreckon.ops.blockwise.problem import Problem, by_head, gates_by_head, leaf_tokens
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


class LeafPadding:
    """Pads the operators' inputs to whole leaves, and cuts the padding off their results.

    The size of a leaf may depend on the gates, so it is decided inside the operators, which are opaque to a tracer.
    """

    def __init__(self, like: Tensor, householder: bool, gates: Tensor | None, score: Score) -> None:
        self.length = like.shape[1]
        self.leaf = leaf_tokens(self.length, householder, gates, score, like)
        self.padding = -self.length % self.leaf

    def pad(self, *inputs: Tensor | None, value: float = 0.0) -> Iterator[Any]:
        """Each of (N, T, ...), padded."""
        for x in inputs:
            if x is None or not self.padding:
                yield x
            else:
                yield pad(x, (0, 0) * (x.dim() - 2) + (0, self.padding), value=value)

    def cut(self, *results: Tensor | None) -> Iterator[Tensor]:
        """Each of (N, T padded, ...) that is not None, without the padding."""
        for x in results:
            if x is not None:
                yield x[:, : self.length].contiguous()


def _score(name: str, p: int) -> Score:
    return Power(p) if name == "power" else name  # type: ignore[return-value]


def tree_forward_pass(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None, score: str, p: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (N, T, G, E), the same in float64 if the score needs it (else empty), and the rows' statistic."""
    out, statistic = unfinished_rows(q, k, v, w, beta, gates, _score(score, p), scale)
    tiled = tiled_score(_score(score, p))
    out = tiled.finish(out, statistic)
    if not tiled.needs_double:
        return out.to(q.dtype), out.new_empty(0), statistic
    return out.to(q.dtype, copy=True), out, statistic


def unfinished_rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None, score: Score,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (N, T, G, E) and statistic (N, T, G) of rows to which farther keys may be added: see `scores.py`."""
    padding = LeafPadding(q, w is not None, gates, score)
    q, k, v, w, beta, gates = padding.pad(q, k, v, w, beta, gates)
    out, statistic = padding.cut(*forward(Problem.prepare(q, k, v, w, beta, gates, score, scale, padding.leaf)))
    return out, statistic


def _room(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None, score: str, p: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    working, precise = work(q.dtype), exact(q.device)
    out = q.new_empty(*q.shape[:3], v.shape[2])
    double = torch.empty_like(out, dtype=precise) if score == "power" else out.new_empty(0, dtype=working)
    return out, double, q.new_empty(q.shape[:3], dtype=working if score == "softmax" else precise)


def tree_backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
    out: Tensor, double_out: Tensor, statistic: Tensor, score: str, p: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of those of q, k, v, w, beta and gates that are not None."""
    with without_autocast(q):
        out = double_out if tiled_score(_score(score, p)).needs_double else out
        return gradients_of_rows(grad, q, k, v, w, beta, gates, out, statistic, None, _score(score, p), scale)


def gradients_of_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
    out: Tensor, statistic: Tensor, grad_farther: Tensor | None, score: Score, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of those of q, k, v, w, beta and gates that are not None; see :func:`backward`."""
    padding = LeafPadding(q, w is not None, gates, score)
    q, k, v, w, beta, gates = padding.pad(q, k, v, w, beta, gates)
    problem = Problem.prepare(q, k, v, w, beta, gates, score, scale, padding.leaf)
    grad, out, grad_farther = padding.pad(grad.contiguous(), out, grad_farther)
    (statistic,) = padding.pad(statistic, value=problem.dense.score.padding_statistic)
    return list(padding.cut(*backward(problem, grad, out, statistic, grad_farther)))


def _gradient_room(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
    out: Tensor, double_out: Tensor, statistic: Tensor, score: str, p: int, scale: float,
) -> list[Tensor]:  # fmt: skip
    return room_like(q, k, v, w, beta, gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, score, p, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = score, p, scale
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no second unpack
    gradients = iter(tree_backward(grad, *saved, *ctx.settings))
    return *(None if x is None else next(gradients) for x in saved[:6]), None, None, None


tree_backward = operator("deadreckon::tree_backward", tree_backward_pass, _gradient_room)
tree_forward = operator("deadreckon::tree", tree_forward_pass, _room, gradients=_gradients, save=_save)
