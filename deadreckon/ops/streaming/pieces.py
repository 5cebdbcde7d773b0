"""Attention of a piece of new tokens over the past, in PyTorch: what all streaming paths share.

    past.segments           past.waiting   new tokens
    [ keys in their own  ]  [ as they came | queries, keys ]
      end's frame, P

One route tree over the waiting tokens and the new ones; then the new queries go back over the segments, youngest first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.dense import DenseBlocks
from deadreckon.ops.blockwise.forward import Top, forward_to_top
from deadreckon.ops.blockwise.precision import lengths, work
from deadreckon.ops.blockwise.problem import Problem, by_head, gates_by_head, leaf_tokens
from deadreckon.ops.blockwise.products import times_transposed
from deadreckon.ops.blockwise.runs import Gate
from deadreckon.ops.blockwise.scores import EvenPower
from deadreckon.ops.factors import Householder, Score
from deadreckon.ops.streaming.fold import unit_of
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Fields


def fields_by_head(k: Tensor, v: Tensor, steps: Householder | None, log_gate: Tensor | None) -> Fields:
    """What is cached of tokens (B, L, H, ...), as (N, L, ...): keys, values, gates, steps in the working dtype."""
    heads = k.shape[2]
    fields: Fields = {name: by_head(x, heads).squeeze(2) for name, x in (("k", k), ("v", v))}
    if log_gate is not None:
        fields["gates"] = gates_by_head(log_gate, heads)
    if steps is not None:
        fields["w"], fields["beta"] = (
            by_head(x.to(work(k.dtype)).contiguous(), heads).squeeze(2) for x in (steps.w, steps.beta)
        )
    return fields


def queries_by_head(q: Tensor, heads: int, score: Score) -> Tensor:
    """(B, L, Hq, D) -> (N, L, G, D), upcast where half precision gains nothing."""
    return by_head(q.to(work(q.dtype)) if q.device.type == "cpu" or score != "softmax" else q, heads)


def from_heads(x: Tensor, batch: int) -> Tensor:
    """(N, L, G, E) -> (B, L, Hq, E)."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def in_units(queries: Tensor, keys: Tensor, past: Past) -> Tensor:
    """Queries (N, L, G, D), scaled to keep powers in range with keys (N, L, D) as they are; updates `past.longest`."""
    past.longest = unit_of(keys.to(queries.dtype), past.longest)
    return queries / lengths(queries) / past.longest.unsqueeze(-1)


def problem_over(queries: Tensor, fields: Fields, score: Score, scale: float) -> Problem:
    """The route tree of these tokens, padded to whole leaves."""
    total = queries.shape[1]
    leaf = leaf_tokens(total, "w" in fields, fields.get("gates"), score, queries)

    def whole(name: str) -> Tensor | None:
        x = fields.get(name)
        return None if x is None else pad(x, (0, 0) * (x.dim() - 2) + (0, -total % leaf))

    q = pad(queries, (0, 0, 0, 0, 0, -total % leaf))
    k, v = whole("k"), whole("v")
    assert k is not None
    assert v is not None
    return Problem.prepare(q, k, v, whole("w"), whole("beta"), whole("gates"), score, scale, leaf)


def attend_piece(queries: Tensor, fields: Fields, score: Score, scale: float, past: Past) -> tuple[Tensor, Top, Fields]:
    """Attention of new tokens over themselves and the past, which is not changed.

    Returns:
        The output (N, L, G, E); the top of the tree and the fields, both of the waiting tokens and the new ones.
    """
    length = queries.shape[1]
    if past.waiting is not None:  # their keys are needed again, their outputs are not
        fields = {name: torch.cat([past.waiting[name], x], dim=1) for name, x in fields.items()}
        queries = pad(queries, (0, 0, 0, 0, past.waiting.length, 0))
    total = queries.shape[1]
    problem = problem_over(queries, fields, score, scale)
    top = forward_to_top(problem)
    new = slice(total - length, total)
    out, statistic, queries = (x[:, new] for x in (top.out, top.statistic, top.queries))
    look_back(problem.dense, queries, None if top.sums is None else top.sums[:, new], out, statistic, past)
    return problem.dense.score.finish(out, statistic), top, fields


def look_back(
    dense: DenseBlocks, queries: Tensor, sums: Tensor | None, out: Tensor, statistic: Tensor, past: Past
) -> None:
    """Attends to the segments, youngest first, and adds them to the output and statistic (N, L, G) of new tokens.

    Their queries (N, L, G, D) are in the frame of the piece's first token, the sums (N, L, 1 | G) of gates count from
    there.
    """
    if dense.stock == "cudnn":  # it would build a plan for every length of the past
        dense = replace(dense, stock="flash")
    queries, out, statistic = (x.unsqueeze(1) for x in (queries, out, statistic))
    shift = None if sums is None else sums.unsqueeze(1)
    for segment in reversed(past.segments):
        keys, values = (segment[name].unsqueeze(1) for name in ("k", "v"))
        if dense.stock is None:
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        gate, gates = None, segment.gates()
        if shift is not None and gates is not None:
            bias, total = (x.unsqueeze(1) for x in gates)
            gate, shift = Gate(shift, bias), shift + total
        dense.forward(queries, keys, values, gate, out, statistic)
        if segment.product is not None:
            crossed = times_transposed(queries.flatten(2, 3), segment.product.unsqueeze(1))
            queries = crossed.unflatten(2, queries.shape[2:4])
    if past.folded is not None:
        assert isinstance(dense.score, EvenPower)
        assert past.longest is not None
        unit_queries = queries.squeeze(1) * past.longest.unsqueeze(-1)
        shift = None if shift is None else shift.squeeze(1)
        added = past.folded.read(unit_queries, shift, past.longest, dense.score.p)
        out += added[..., :-1].unsqueeze(1)
        statistic += added[..., -1].unsqueeze(1)
