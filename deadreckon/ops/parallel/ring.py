"""Ring attention: every rank's queries over the keys of all preceding pieces, in one ring pass and one backward.

Each rank first attends inside its own pieces (`Inside`), while the first remote keys are in flight. Then keys and
values travel around the ring, rank by rank, each piece in the frame of its own end (`blocks.py`): what a query sees of
a preceding piece is a dense block without a mask, added to its row as blocks of the route tree are. A rank never holds
more than its own shard and two others.

In the backward pass, given the statistic of whole rows (for softmax, the log-sum-exp), every block has its exact
gradient. Keys and values travel around once more, in the other direction, far pieces before near ones as stick-breaking
needs it; their gradients follow one step behind, every rank adding its own, until they are back at their owner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deadreckon.ops.blockwise.dense import DenseBlocks, Rows
from deadreckon.ops.blockwise.precision import exact, work
from deadreckon.ops.blockwise.tree import gradients_of_rows, unfinished_rows
from deadreckon.ops.factors import Score
from deadreckon.ops.parallel.blocks import Between, Pair, pairs
from deadreckon.ops.parallel.context import ContextParallel
from deadreckon.ops.tracing import first_derivatives_only, without_autocast

Optional = Tensor | None


class Inside(Protocol):
    """Attention inside pieces, M of them: q (M, C, G, D), k and w (M, C, D), v (M, C, E), gates (M, C, 1 | G)."""

    knows_documents: bool  # or gates must keep them apart

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional, score: Score, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output (M, C, G, E) and statistic (M, C, G), not finished, and tensors to save for the backward pass."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional,
        saved: list[Tensor], out: Tensor, statistic: Tensor, grad_farther: Tensor, score: Score, scale: float,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of those inputs that are not None, from the output and statistic of whole rows."""


class InsideTree:
    """`Inside` by the route tree, in PyTorch: any score, any device."""

    knows_documents = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional, score: Score, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return *unfinished_rows(q, k, v, w, beta, gates, score, scale), []

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional,
        saved: list[Tensor], out: Tensor, statistic: Tensor, grad_farther: Tensor, score: Score, scale: float,
    ) -> list[Tensor]:  # fmt: skip
        return gradients_of_rows(grad, q, k, v, w, beta, gates, out, statistic, grad_farther, score, scale)


@dataclass(frozen=True)
class Plan:
    """The settings that all steps of a ring share."""

    cp: ContextParallel
    inside: Inside
    score: Score
    scale: float
    documents: list[int] | None

    def dense(self, q: Tensor) -> DenseBlocks:
        dense = DenseBlocks.choose(q, self.score, self.scale, q.shape[1] * self.cp.count)
        if dense.stock == "cudnn" and self.documents is not None:  # it would build a plan for each rectangle
            dense = replace(dense, stock="flash")
        return dense


class Ring(torch.autograd.Function):
    """Inputs are pieces by head, M = pieces · N rows: those of `Inside`, and the same in the frames of piece ends.

    queries (M, C, G, D) at the start of their piece, keys (M, C, D) at its end, products (M, D, D), sums (M, C, 1 | G)
    of log gates from the piece's start. Returns the output (M, C, G, E), in the dtype of q.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional,
        queries: Tensor, keys: Tensor, products: Optional, sums: Optional,
    ) -> Tensor:  # fmt: skip
        dense, between = plan.dense(q), Between.gather(plan.cp, products, sums)
        out = statistic = q.new_empty(0)
        saved = list[Tensor]()
        for rank, shard in plan.cp.passed_on(_shard(q, v, keys, sums), direction=1):
            if rank == plan.cp.rank:
                out, statistic, saved = plan.inside.forward(q, k, v, w, beta, gates, plan.score, plan.scale)
            for pair in pairs(plan.cp, rank, q.shape[1], plan.documents):
                here = _rows_of(plan, pair, out)
                past_k, past_v, bias = _keys_of(plan, pair, shard, work(q.dtype))
                dense.forward(
                    between.queries(pair, here(queries).to(past_k.dtype)).unsqueeze(1), past_k, past_v,
                    between.gate(pair, None if sums is None else here(sums), bias),
                    here(out).unsqueeze(1), here(statistic).unsqueeze(1),
                )  # fmt: skip
        out = dense.score.finish(out, statistic)
        ctx.plan = plan
        tensors = (q, k, v, w, beta, gates, queries, keys, products, sums)
        ctx.save_for_backward(*tensors, out, statistic, *saved)
        return out.to(q.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional, ...]:
        first_derivatives_only()
        with without_autocast(grads[0]):
            return _backward(ctx.plan, grads[0], *ctx.saved_tensors)


def _backward(plan: Plan, grad: Tensor, *tensors: Tensor) -> tuple[Optional, ...]:
    """Gradients of the inputs of `Ring`, from that of its output and the saved tensors."""
    q, k, v, w, beta, gates, queries, keys, products, sums, out, statistic, *saved = tensors
    cp, dense, between = plan.cp, plan.dense(q), Between.gather(plan.cp, products, sums)
    precise = exact(q.device) if dense.score.needs_double else work(q.dtype)
    rows = Rows.of(dense.score, grad.contiguous(), out, statistic, precise)
    grad_queries = torch.zeros_like(queries, dtype=work(q.dtype))
    grad_sums = None if sums is None else torch.zeros_like(sums)
    home: list[Tensor] = []  # gradients of this rank's own keys, values and biases
    coming = None
    for rank, shard in cp.passed_on(_shard(q, v, keys, sums), direction=-1):
        grad_shard = [torch.zeros_like(x, dtype=work(x.dtype)) for x in shard]
        for pair in pairs(cp, rank, q.shape[1], plan.documents):
            _pair_backward(plan, dense, between, pair, shard, rows, queries, sums, grad_shard, grad_queries, grad_sums)
        if rank == cp.rank:
            home = grad_shard
            continue
        if coming is not None:
            for mine, received in zip(grad_shard, coming.wait(), strict=True):
                mine += received
        coming = cp.exchange(grad_shard, direction=-1)
    if coming is not None:
        for mine, received in zip(home, coming.wait(), strict=True):
            mine += received
    grad_keys, grad_values, *grad_bias = home
    if grad_sums is not None:  # a key's bias is the piece's total less its own sum
        grad_total = between.total_gradients(cp)
        assert grad_total is not None
        grad_sums -= grad_bias[0]
        grad_sums[:, -1] += grad_total + grad_bias[0].sum(1, dtype=grad_sums.dtype)
    inputs = (q, k, v, w, beta, gates)
    inside = iter(
        plan.inside.backward(rows.grad, *inputs, saved, out, rows.statistic, rows.grad_farther, plan.score, plan.scale)
    )
    grad_q, grad_k, grad_v, grad_w, grad_beta, grad_gates = (None if x is None else next(inside) for x in inputs)
    assert grad_v is not None
    return (
        None, grad_q, grad_k, grad_v + grad_values.to(grad_v.dtype), grad_w, grad_beta, grad_gates,
        grad_queries.to(queries.dtype), grad_keys.to(keys.dtype), between.product_gradients(cp), grad_sums,
    )  # fmt: skip


def _shard(q: Tensor, v: Tensor, keys: Tensor, sums: Optional) -> list[Tensor]:
    """What travels: keys and values in the dtype of q, and sums of log gates from each key to its piece's end."""
    bias = [] if sums is None else [(sums[:, -1:] - sums).to(work(q.dtype))]
    return [keys.to(q.dtype), v, *bias]


def _rows_of(plan: Plan, pair: Pair, like: Tensor) -> Any:
    """Takes from (M, C, ...) the queries of a pair, (N, R, ...), as a view."""
    count = like.shape[0] // plan.cp.pieces
    first = pair.rows * count
    return lambda x: x[first : first + count, : pair.queries_to]


def _keys_of(plan: Plan, pair: Pair, shard: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Optional]:
    """Keys (N, 1, S, D) and values (N, 1, S, E) of a pair in the working precision, and bias (N, S, 1 | G)."""
    count = shard[0].shape[0] // plan.cp.pieces
    first = pair.keys * count
    k, v, *bias = (x[first : first + count, pair.keys_from :] for x in shard)
    return k.to(dtype).unsqueeze(1), v.to(dtype).unsqueeze(1), bias[0] if bias else None


def _pair_backward(
    plan: Plan, dense: DenseBlocks, between: Between, pair: Pair, shard: list[Tensor], rows: Rows, queries: Tensor,
    sums: Optional, grad_shard: list[Tensor], grad_queries: Tensor, grad_sums: Optional,
) -> None:  # fmt: skip
    """Adds the gradients of one block to those of the keys' shard, of queries and of sums."""
    here = _rows_of(plan, pair, queries)
    past_k, past_v, bias = _keys_of(plan, pair, shard, grad_queries.dtype)
    grad_k, grad_v, grad_bias = _keys_of(plan, pair, grad_shard, grad_shard[0].dtype)  # views: written to
    q = here(queries).to(past_k.dtype)
    crossed = between.queries(pair, q).unsqueeze(1)
    grad_crossed = torch.zeros_like(crossed)
    gates = dense.backward(
        crossed, past_k, past_v, between.gate(pair, None if sums is None else here(sums), bias),
        rows.view(lambda x: here(x).unsqueeze(1)), grad_crossed, grad_k, grad_v,
    )  # fmt: skip
    here(grad_queries).add_(between.queries_back(pair, q, grad_crossed.squeeze(1)))
    if gates is not None and grad_sums is not None and grad_bias is not None:
        by_query, by_key = (x.squeeze(1).to(grad_sums.dtype) for x in gates)
        if grad_sums.shape[2] == 1:
            by_query = by_query.sum(-1, keepdim=True)
        here(grad_sums).add_(by_query)
        grad_bias.add_(by_key)
        between.gate_back(pair, by_query)
