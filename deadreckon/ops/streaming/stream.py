"""Attention while a sequence comes in pieces, any pieces: what lies behind is kept as segments.

A segment holds keys in the frame of its own end, and the product of its steps. Queries of a new piece are carried back
to the piece's start, look at the nearest segment, cross it (one D × D product), look at the next. Two neighbours become
one when the older is no longer than the younger, as the digits of a binary counter carry: so a key is rewritten
O(log T) times, in the working precision, and a query crosses O(log T) products. Between carries segments do not change,
and continuations of one prefix share them.

The last tokens, one leaf of them and less than another, wait as they came: their leaves are computed again with each
piece, and it is possible to go back by a leaf. Without Householder steps nothing ever changes its frame, and there is
one segment that grows. With powers it does not grow for ever: once the state (`power.py`) takes less room than keys and
values do, all but the last leaf are folded into it, and from then on a leaf at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.attend import attend_blockwise
from deadreckon.ops.blockwise.climb import Climb, by_head, gates_by_head, leaf_tokens
from deadreckon.ops.blockwise.power import chunk_tokens
from deadreckon.ops.blockwise.precision import lengths, usual_scale, work
from deadreckon.ops.blockwise.rotation import Turned, turned
from deadreckon.ops.blockwise.runs import LEAF, Gate
from deadreckon.ops.blockwise.scores import EvenPower
from deadreckon.ops.factors import Factors, Householder, Power, Rotation, Score
from deadreckon.ops.streaming.fold import unit_of
from deadreckon.ops.streaming.past import Fields, Past, Segment, joined

if TYPE_CHECKING:
    from deadreckon.ops.triton.householder.operator import Ascended


class Kernels(NamedTuple):
    """What serves in place of PyTorch's operations."""

    attend: Callable[[Tensor, Tensor, Tensor, Factors, float, None], Tensor]
    turned: Callable[[Tensor, Tensor, Tensor, Tensor | None, Rotation], Turned]
    ascend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float, int, bool], Ascended]
    """Of q, k, v, w, beta, log_gate, scale, how many tokens to close, and whether queries go further back."""


@torch.no_grad()
def attend_stream(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, past: Past, kernels: Kernels | None = None
) -> Tensor:
    """Attention of the next piece (B, L, ...) over itself and the past, which then ends with it. No gradients."""
    transport, log_gate, score = factors
    batch, length, query_heads, _ = q.shape
    q, scale = usual_scale(q, scale, score)
    if isinstance(transport, Rotation):
        if past.phases is None:
            turn = (kernels.turned if kernels else turned)(q, k, v, log_gate, transport)
            phases = turn.phase
        else:
            turn = turned(q, k, v, log_gate, transport, past.phases[:, -1:])
            before = past.phases.expand(turn.phase.shape[0], -1, *turn.phase.shape[2:])
            phases = torch.cat([before, turn.phase[:, -LEAF - 1 :]], dim=1)
        past.phases = phases[:, -LEAF - 1 :]
        return turn.back(
            attend_stream(turn.q, turn.k, turn.v, Factors(None, turn.log_gate, score), scale, past, kernels)
        )
    heads, given = k.shape[2], q.dtype
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # as kernels take them
    if isinstance(transport, Householder) and score == "softmax" and kernels:
        waiting = 0 if past.waiting is None else past.waiting.length
        if not past.segments or waiting + length > LEAF:
            return _attend_tree(q, k, v, transport, log_gate, scale, past, kernels)
    if transport is None and not past.segments and past.folded is None and not isinstance(score, Power):
        output = (kernels.attend if kernels else attend_blockwise)(q, k, v, factors, scale, None)
        fields = _fields(k, v, None, log_gate, given)
        if log_gate is not None:
            fields["sums"] = fields.pop("gates").mT.contiguous().cumsum(2).mT.contiguous()  # fast on a GPU, too
        past.segments.append(Segment(fields))
        return output
    if q.device.type == "cpu" or score != "softmax":  # where half precision gains nothing
        q = q.to(work(given))
    fields = _fields(k, v, transport, log_gate, given)
    queries = by_head(q, heads)
    size, folds = length, None  # to which power keys are folded, if they are
    if isinstance(score, Power):
        past.longest = unit_of(fields["k"].to(q.dtype), past.longest)
        queries = queries / lengths(queries) / past.longest.unsqueeze(-1)  # keys stay as they came
        scale = 1.0
        if transport is None and score.form != "attention":
            size, folds = chunk_tokens(k.shape[3], score.p), score.p
    output = q.new_empty(batch, length, heads, query_heads // heads, v.shape[3], dtype=given)
    for piece, close in _pieces(length, size, past, transport is not None):
        some = {name: x[:, piece] for name, x in fields.items()}
        found = _attend_piece(queries[:, piece], some, score, scale, past, close)
        output[:, piece] = found.unflatten(0, (batch, heads)).transpose(1, 2)
        if folds is not None:
            past.fold(folds)
    return output.flatten(2, 3)


def _fields(k: Tensor, v: Tensor, transport: Householder | None, log_gate: Tensor | None, given: torch.dtype) -> Fields:
    """By head; keys and values in the dtype given."""
    heads = k.shape[2]
    fields: Fields = {name: by_head(x, heads).squeeze(2) for name, x in (("k", k), ("v", v))}
    if log_gate is not None:
        fields["gates"] = gates_by_head(log_gate, heads)
    if transport is not None:
        fields["w"], fields["beta"] = (
            by_head(x.to(work(given)).contiguous(), heads).squeeze(2) for x in (transport.w, transport.beta)
        )
    return fields


def _attend_tree(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder, log_gate: Tensor | None, scale: float, past: Past,
    kernels: Kernels,
) -> Tensor:  # fmt: skip
    """A piece along Householder steps by kernels: tokens that wait and new ones are one tree, as in `attend`."""
    (batch, length, heads, _), given = k.shape, q.dtype
    w, beta, waiting = steps.w, steps.beta, past.waiting
    if waiting is not None:  # their keys are needed again, their outputs are not

        def after(name: str, x: Tensor) -> Tensor:
            before = waiting[name].unflatten(0, (batch, heads)).transpose(1, 2)  # (N, S, ...) -> (B, S, H, ...)
            return torch.cat([before.reshape(batch, -1, *x.shape[2:]), x], dim=1)

        k, v, w, beta = after("k", k), after("v", v), after("w", w), after("beta", beta)
        log_gate = None if log_gate is None else after("gates", log_gate)
        q = pad(q, (0, 0, 0, 0, waiting.length, 0))
    total = q.shape[1]
    new, closed = slice(total - length, total), _closed(total)
    found = kernels.ascend(q, k, v, w, beta, log_gate, scale, closed, bool(past.segments))
    output = found.out[:, new]
    if found.queries is not None:
        first = _fields(k[:, :LEAF], v[:, :LEAF], None, None, given)
        climb = _climb(by_head(q[:, :LEAF], heads), first, "softmax", scale)
        out, row = by_head(output, heads).float(), found.lse[:, new]
        sums = None if found.sums is None else found.sums[..., new].mT
        _look_back(climb, found.queries[:, new].float(), sums, out, row, past)
        output = out.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2, 3).to(given)
    gates = None if log_gate is None else log_gate[:, closed:]
    rest = _fields(k[:, closed:], v[:, closed:], Householder(w[:, closed:], beta[:, closed:]), gates, given)
    past.waiting = Segment({name: x.clone(memory_format=torch.contiguous_format) for name, x in rest.items()})
    past.decoder = None
    if found.product is not None:
        values = by_head(v[:, :closed], heads).squeeze(2)
        _close(past, found.keys, values, found.product, None if found.sums is None else found.sums[..., :closed])
    return output


def _closed(tokens: int) -> int:
    """How many of so many become a segment, whole leaves of them: once there are two leaves, one always waits."""
    return max(0, tokens // LEAF - 1) * LEAF


def _pieces(length: int, size: int, past: Past, householder: bool) -> list[tuple[slice, bool]]:
    """The new tokens that, with those that wait, are closed to a segment; and the rest, which wait in turn.

    Leaves that are full without new tokens are closed here. Without Householder steps nothing waits, and new tokens
    come `size` at a time.
    """
    if not householder:
        return [(slice(start, min(start + size, length)), True) for start in range(0, length, size)]
    waiting = 0 if past.waiting is None else past.waiting.length
    closed = _closed(waiting + length)
    if closed > waiting:
        return [(slice(0, closed - waiting), True), (slice(closed - waiting, length), False)]
    if closed:
        close_waiting(past, closed)
    return [(slice(0, length), False)]


def close_waiting(past: Past, tokens: int) -> None:
    """Makes a segment of the oldest that wait, whole leaves of them."""
    assert past.waiting is not None
    fields = {name: x[:, :tokens] for name, x in past.waiting.fields().items()}
    rest = {name: x[:, tokens:] for name, x in past.waiting.fields().items()}
    climb = climb_alone(fields)
    past.waiting = None
    _move_on(climb, fields, tokens, past, True)
    past.waiting = Segment(rest) if rest["k"].shape[1] else None


def climb_alone(fields: Fields) -> Climb:
    """Takes tokens up to the top without queries of their own: their keys to the last frame, and all their steps."""
    keys, group = fields["k"], fields["gates"].shape[2] if "gates" in fields else 1
    climb = _climb(keys.new_zeros(*keys.shape[:2], group, keys.shape[2]), fields, "softmax", 1.0)
    climb.ascend(to_top=True)
    return climb


def _climb(queries: Tensor, fields: Fields, score: Score, scale: float) -> Climb:
    """Over these tokens, padded to whole leaves."""
    total = queries.shape[1]
    leaf = leaf_tokens(total, "w" in fields, fields.get("gates"), score, queries)

    def whole(name: str) -> Tensor | None:
        x = fields.get(name)
        return None if x is None else pad(x, (0, 0) * (x.dim() - 2) + (0, -total % leaf))

    q = pad(queries, (0, 0, 0, 0, 0, -total % leaf))
    k, v = whole("k"), whole("v")
    assert k is not None
    assert v is not None
    return Climb(q, k, v, whole("w"), whole("beta"), whole("gates"), score, scale, leaf)


def _attend_piece(queries: Tensor, fields: Fields, score: Score, scale: float, past: Past, close: bool) -> Tensor:
    """The output (N, L, G, E) of one piece; the past is moved on."""
    length = queries.shape[1]
    if past.waiting is not None:  # their keys are needed again, their outputs are not
        fields = {name: torch.cat([past.waiting[name], x], dim=1) for name, x in fields.items()}
        queries = pad(queries, (0, 0, 0, 0, fields["k"].shape[1] - length, 0))
        past.waiting = past.decoder = None
    total = queries.shape[1]
    climb = _climb(queries, fields, score, scale)
    new = slice(total - length, total)
    out, row = (x[:, new] for x in climb.ascend(to_top=True))
    _look_back(climb, climb.queries[:, new], None if climb.sums is None else climb.sums[:, new], out, row, past)
    _move_on(climb, fields, total, past, close)
    return climb.score.finish(out, row)


def _look_back(climb: Climb, queries: Tensor, sums: Tensor | None, out: Tensor, row: Tensor, past: Past) -> None:
    """Adds the segments, from the youngest to the oldest, to the rows (N, L, G) of new tokens.

    Their queries (N, L, G, D) are in the frame of the piece's first token, the sums (N, L, 1 | G) of gates count from
    there.
    """
    if climb.stock == "cudnn":  # which would plan anew for every length of the past
        climb.stock = "flash"
    queries, out, row = (x.unsqueeze(1) for x in (queries, out, row))
    shift = None if sums is None else sums.unsqueeze(1)
    for segment in reversed(past.segments):
        keys, values = (segment[name].unsqueeze(1) for name in ("k", "v"))
        if climb.stock is None:
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        gate, gates = None, segment.gates()
        if shift is not None and gates is not None:
            bias, total = (x.unsqueeze(1) for x in gates)
            gate, shift = Gate(shift, bias), shift + total
        climb.add_block(queries, keys, values, gate, out, row)
        if segment.product is not None:
            crossed = queries.flatten(2, 3) @ segment.product.mT.unsqueeze(1)
            queries = crossed.unflatten(2, queries.shape[2:4])
    if past.folded is not None:
        assert isinstance(climb.score, EvenPower)
        assert past.longest is not None
        unit_queries = queries.squeeze(1) * past.longest.unsqueeze(-1)
        found = past.folded.read(unit_queries, None if shift is None else shift.squeeze(1), past.longest, climb.score.p)
        out += found[..., :-1].unsqueeze(1)
        row += found[..., -1].unsqueeze(1)


def _move_on(climb: Climb, fields: Fields, total: int, past: Past, close: bool) -> None:
    """Keeps what the next piece will need of this one: as a segment, or as it came."""
    if not close:
        past.waiting = Segment(fields)
        return
    sums = None if climb.sums is None else climb.sums[:, :total]
    if climb.products is not None:
        keys = climb.keys[:, :total].to(fields["k"].dtype)
        _close(past, keys, fields["v"], climb.products[:, 0], None if sums is None else sums.mT)
        return
    kept = {"k": fields["k"], "v": fields["v"]}
    last = past.segments[-1] if past.segments and not past.segments[-1].shared else None
    if sums is not None:
        kept["sums"] = sums if last is None else sums + last["sums"][:, -1:]
    if last is None:
        past.segments.append(Segment(kept))
    else:
        last.append(kept)


def _close(past: Past, keys: Tensor, values: Tensor, product: Tensor, sums: Tensor | None) -> None:
    """Adds a segment: keys (N, S, D) in its last frame, values, all its steps, sums of log gates (N, 1 | G, S)."""
    bias = total = None
    if sums is not None:
        total = sums[..., -1:].contiguous()
        bias = (total - sums).to(work(keys.dtype)).contiguous()  # near the end, where it matters, exact
    past.segments.append(Segment({"k": keys.contiguous(), "v": values.contiguous()}, product, bias, total))
    while len(past.segments) > 1 and past.segments[-2].length <= past.segments[-1].length:
        younger, older = past.segments.pop(), past.segments.pop()
        past.segments.append(joined(older, younger))
