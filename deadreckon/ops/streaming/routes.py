"""Streaming with Householder steps: tokens wait, then whole leaves of them are closed into segments.

A segment holds keys in the frame of its own end, and the product of its steps. Queries of a new piece are carried back
to the piece's start, attend to the nearest segment, cross it (one D × D product), attend to the next. Two neighbours
are merged when the older length has no more binary digits than the younger, like a carry of a binary counter: so a key
is rewritten O(log T) times, in the working precision, and a query crosses O(log T) products. Between merges segments do
not change, and continuations of one prefix share them.

The last tokens, one leaf of them and less than another (fewer at first), wait as they came: their leaves are recomputed
with each piece, and `crop` can undo a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.dense import DenseBlocks
from deadreckon.ops.blockwise.forward import Top
from deadreckon.ops.blockwise.precision import work
from deadreckon.ops.blockwise.problem import by_head
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.factors import Householder, Power, Score
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.pieces import (
    attend_piece,
    fields_by_head,
    from_heads,
    in_units,
    look_back,
    queries_by_head,
)
from deadreckon.ops.streaming.segments import Fields, Segment, add_closed, counted_to_end

if TYPE_CHECKING:
    from deadreckon.ops.triton.householder.prefill import Ascended

Ascend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int, bool], "Ascended"]
"""Takes q, k, v, w, beta, log_gate, scale, how many tokens to close, and whether queries go further back."""


def attend_routes(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder, log_gate: Tensor | None, score: Score, scale: float, past: Past
) -> Tensor:
    """A piece in PyTorch, with any score: first the tokens that will be closed, then those that will wait."""
    (batch, length, heads, _), dtype = k.shape, q.dtype
    fields, queries = fields_by_head(k, v, steps, log_gate), queries_by_head(q, heads, score)
    if isinstance(score, Power):
        queries, scale = in_units(queries, fields["k"], past), 1.0
    waiting = 0 if past.waiting is None else past.waiting.length
    closed = tokens_to_close(waiting + length)
    if 0 < closed <= waiting:  # these need no new tokens
        close_waiting(past, closed)
    cut = max(0, closed - waiting)
    outputs = []
    for tokens in (slice(0, cut), slice(cut, length)):
        if tokens.start < tokens.stop:
            piece = {name: x[:, tokens] for name, x in fields.items()}
            output, top, kept = attend_piece(queries[:, tokens], piece, score, scale, past)
            outputs.append(from_heads(output, batch).to(dtype))
            past.waiting = past.decoder = None
            if tokens.stop == cut:
                close(past, top, kept)
            else:
                past.waiting = Segment({name: x.clone() for name, x in kept.items()})  # no views of the whole piece
    return torch.cat(outputs, dim=1)


def attend_routes_fused(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder, log_gate: Tensor | None, scale: float, past: Past,
    ascend: Ascend,
) -> Tensor:  # fmt: skip
    """A piece by kernels, with softmax: waiting and new tokens are one tree, as in `attend`."""
    (batch, length, heads, _), dtype = k.shape, q.dtype
    w, beta, waiting = steps.w, steps.beta, past.waiting
    if waiting is not None:  # their keys are needed again, their outputs are not

        def after(name: str, x: Tensor) -> Tensor:
            before = waiting[name].unflatten(0, (batch, heads)).transpose(1, 2)  # (N, S, ...) -> (B, S, H, ...)
            return torch.cat([before.reshape(batch, -1, *x.shape[2:]), x], dim=1)

        k, v, w, beta = after("k", k), after("v", v), after("w", w), after("beta", beta)
        log_gate = None if log_gate is None else after("gates", log_gate)
        q = pad(q, (0, 0, 0, 0, waiting.length, 0))
    total = q.shape[1]
    new, closed = slice(total - length, total), tokens_to_close(total)
    tree = ascend(q, k, v, w, beta, log_gate, scale, closed, bool(past.segments))
    output = tree.out[:, new]
    if tree.queries is not None:
        dense = DenseBlocks.choose(q, "softmax", scale, total)
        out, lse = by_head(output, heads).float(), tree.lse[:, new]
        sums = None if tree.sums is None else tree.sums[..., new].mT
        look_back(dense, tree.queries[:, new].float(), sums, out, lse, past)
        output = from_heads(out, batch).to(dtype)
    gates = None if log_gate is None else log_gate[:, closed:]
    rest = fields_by_head(k[:, closed:], v[:, closed:], Householder(w[:, closed:], beta[:, closed:]), gates)
    past.waiting = Segment({name: x.clone(memory_format=torch.contiguous_format) for name, x in rest.items()})
    past.decoder = None
    if tree.product is not None:
        values = by_head(v[:, :closed], heads).squeeze(2)
        _add_segment(past, tree.keys, values, tree.product, None if tree.sums is None else tree.sums[..., :closed])
    return output


def tokens_to_close(tokens: int) -> int:
    """How many of these tokens become a segment, in whole leaves: once there are two leaves, one always waits."""
    return max(0, tokens // LEAF - 1) * LEAF


def close_waiting(past: Past, tokens: int) -> None:
    """Closes the oldest waiting tokens into a segment."""
    assert past.waiting is not None
    fields = past.waiting.kept().fields()
    oldest = {name: x[:, :tokens] for name, x in fields.items()}
    rest = {name: x[:, tokens:] for name, x in fields.items()}
    keys, product = in_newest_frame(oldest)
    sums = oldest["gates"].cumsum(1).mT if "gates" in oldest else None
    _add_segment(past, keys.to(oldest["k"].dtype), oldest["v"], product, sums)
    past.waiting = Segment(rest) if rest["k"].shape[1] else None


def in_newest_frame(fields: Fields) -> tuple[Tensor, Tensor]:
    """Keys (N, S, D) carried along all steps after their own, and the product (N, D, D) of all steps.

    Row by row, x H_1 ⋯ H_S = x − Σ_s y_s β_s w_s, where y_s = x · w_s − Σ_{r<s} y_r β_r (w_r · w_s): a triangular
    system for all rows of a leaf. A key begins after its own step: its y is 0 up to there. Then leaves are merged, all
    pairs of neighbours at once, the older keys crossing the younger product: there are 2ⁿ leaves, the first perhaps
    padding.
    """
    (heads, tokens, width), dtype = fields["k"].shape, work(fields["k"].dtype)
    identity = torch.eye(width, dtype=dtype, device=fields["k"].device).expand(heads, -1, -1)
    if not tokens:
        return fields["k"].to(dtype), identity.clone(memory_format=torch.contiguous_format)
    size, leaves = min(tokens, LEAF), 1
    while leaves * size < tokens:
        leaves *= 2
    padding = leaves * size - tokens
    inputs = (pad(fields[name].to(dtype), (0, 0, padding, 0)) for name in ("k", "w"))
    k, w = (x.reshape(heads * leaves, size, width) for x in inputs)
    beta = pad(fields["beta"].to(dtype), (padding, 0)).reshape(heads * leaves, size)
    rows = torch.cat([k, identity[:1].expand(len(k), -1, -1)], dim=1)
    along = rows @ w.mT
    along[:, :size].triu_(1)
    system = beta.unsqueeze(2) * (w @ w.mT)  # only the part above the diagonal is read
    along = torch.linalg.solve_triangular(system, along, upper=True, left=False, unitriangular=True)
    rows = torch.baddbmm(rows, along * beta.unsqueeze(1), w, alpha=-1)
    keys, products = rows[:, :size], rows[:, size:]
    while len(keys) > heads:
        keys = torch.cat([keys[::2] @ products[1::2], keys[1::2]], dim=1)
        products = products[::2] @ products[1::2]
    return keys[:, padding:], products


def close(past: Past, top: Top, fields: Fields) -> None:
    """Adds the tokens of a tree as a segment."""
    assert top.product is not None
    total = fields["k"].shape[1]
    keys = top.keys[:, :total].to(fields["k"].dtype)
    sums = None if top.sums is None else top.sums[:, :total].mT
    _add_segment(past, keys, fields["v"], top.product, sums)


def _add_segment(past: Past, keys: Tensor, values: Tensor, product: Tensor, sums: Tensor | None) -> None:
    """Keys (N, S, D) are in their last frame; product of all steps; sums of log gates (N, 1 | G, S)."""
    bias, total = (None, None) if sums is None else counted_to_end(sums, work(keys.dtype))
    add_closed(past.segments, Segment({"k": keys.contiguous(), "v": values.contiguous()}, product, bias, total))
