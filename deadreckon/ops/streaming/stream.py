"""Streaming attention over pieces of any length: prefill, chunks, single tokens. The KV cache is `Past`.

    transport     score     piece                          how
    Rotation      any       any                            rotated by its phase, then as without it
    Householder   softmax   one token, later               `decode_token`: two kernels, or a few products
                  softmax   long, or first, with kernels   `attend_routes_fused`: the tree of `attend`, and the segments
                  any       any other                      `attend_routes`: the same in PyTorch
    none          Power     one token, with kernels        `decode_token`: two kernels
                  Power     later, or no kernels           `attend_powers`: chunks; keys fold to a state
                  any       first                          `attend_first`: `attend`; keys and values are cached
                  others    one token, with kernels        `decode_token`: two kernels
                  others    later                          `attend_cached`: over the KV cache, which grows

Without Householder steps nothing ever changes its frame, and there is one segment that grows (or one for each
continuation that shares a prefix, or some that the decode kernels have closed). With powers it stops growing: once the
state takes less memory than keys and values, all but the last leaf are folded into it, and from then on a leaf at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.attend import attend_blockwise
from deadreckon.ops.blockwise.forward import Top
from deadreckon.ops.blockwise.power import chunk_tokens
from deadreckon.ops.blockwise.precision import usual_scale, work
from deadreckon.ops.blockwise.rotation import Turned, turned
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.blockwise.symmetric import dimension
from deadreckon.ops.factors import Factors, Power, Score
from deadreckon.ops.layout import dense
from deadreckon.ops.streaming.decode import TokenDecoder, close_tail, decode_token
from deadreckon.ops.streaming.fold import unit_of
from deadreckon.ops.streaming.past import Decoder, Past, lasting
from deadreckon.ops.streaming.pieces import attend_piece, fields_by_head, from_heads, in_units, queries_by_head
from deadreckon.ops.streaming.routes import Ascend, attend_routes, attend_routes_fused
from deadreckon.ops.streaming.segments import Fields, Segment
from deadreckon.ops.streaming.signature import Signature

LARGEST = 1 << 24  # rows of a state that kernels read: they have a table of the channels of each


class Kernels(NamedTuple):
    """The operations that an implementation provides."""

    attend: Callable[[Tensor, Tensor, Tensor, Factors, float, None], Tensor]
    turned: Callable[[Tensor, Tensor, Tensor, Factors, Tensor | None], Turned]
    ascend: Ascend | None
    decoder: type[Decoder]


PYTORCH = Kernels(attend_blockwise, turned, None, TokenDecoder)


@lasting()
def attend_stream(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, past: Past, kernels: Kernels = PYTORCH
) -> Tensor:
    """Attention of the next piece (B, L, ...) over the past and itself; appends it to the past. No gradients.

    The past is updated as a whole, once the output is there, or not at all.
    """
    signature = Signature.of(q, k, v, factors, scale)
    if past.signature is not None:
        past.signature.check(signature)
    draft = past.draft()
    output = _advance(q, k, v, factors, scale, draft, kernels)
    draft.signature, draft.length = signature, past.length + q.shape[1]
    past.become(draft)
    return output


def _advance(q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, past: Past, kernels: Kernels) -> Tensor:
    """Dispatches as in the table above."""
    _, log_gate, score = factors
    rotation, steps = factors.parts()
    q, scale = usual_scale(q, scale, score)
    if rotation is not None:
        return attend_turned(q, k, v, factors, scale, past, kernels)
    q, k, v = (dense(x) for x in (q, k, v))  # as kernels take them
    if steps is not None:
        length, waiting = q.shape[1], 0 if past.waiting is None else past.waiting.length
        if score == "softmax" and length == 1 and past.length:
            return decode_token(q, k, v, steps, log_gate, scale, past, kernels.decoder)
        if score == "softmax" and kernels.ascend and (not past.segments or waiting + length > LEAF):
            return attend_routes_fused(q, k, v, steps, log_gate, scale, past, kernels.ascend)
        return attend_routes(q, k, v, steps, log_gate, score, scale, past)
    if isinstance(score, Power):
        by_kernels = kernels.decoder.plain and dimension(q.shape[3], score.p) <= LARGEST
        if past.length and q.shape[1] == 1 and score.form != "attention" and by_kernels:
            return decode_token(q, k, v, None, log_gate, scale, past, kernels.decoder)
        if past.length or not kernels.decoder.plain:
            return attend_powers(q, k, v, log_gate, score, past)
    if not past.length:
        return attend_first(q, k, v, log_gate, score, scale, past, kernels)
    if not isinstance(score, Power) and q.shape[1] == 1 and kernels.decoder.plain:
        return decode_token(q, k, v, None, log_gate, scale, past, kernels.decoder)
    return attend_cached(q, k, v, log_gate, score, scale, past)


def attend_turned(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, past: Past, kernels: Kernels
) -> Tensor:
    """Rotates the piece by phases that continue those of the past. The KV cache holds rotated keys."""
    turn = kernels.turned(q, k, v, factors, None if past.phases is None else past.phases[:, -1:])
    past.turn(turn.last_phases(LEAF + 1), q.shape[1])
    output = _advance(turn.q, turn.k, turn.v, turn.factors, scale, past, kernels)
    return turn.back(output)


def attend_first(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, score: Score, scale: float, past: Past, kernels: Kernels
) -> Tensor:
    """The first piece: attention as in training; its keys, values and gates become the KV cache."""
    output = kernels.attend(q, k, v, Factors(None, log_gate, score), scale, None)
    fields = fields_by_head(k, v, None, log_gate)
    if log_gate is not None:
        fields["sums"] = fields.pop("gates").mT.contiguous().cumsum(2).mT.contiguous()  # fast on a GPU, too
    past.segments.append(Segment(fields))
    if isinstance(score, Power):
        past.longest = unit_of(fields["k"].to(work(q.dtype)), None)
        if score.form != "attention":
            past.fold(score.p)
    return output


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, score: Score, scale: float, past: Past
) -> Tensor:
    """A later piece over the KV cache, without transport."""
    batch, _, heads, _ = k.shape
    queries, fields = queries_by_head(q, heads, score), fields_by_head(k, v, None, log_gate)
    output, top, fields = attend_piece(queries, fields, score, scale, past)
    past.waiting = past.decoder = None  # they are among the fields now
    extend_cache(past, top, fields)
    return from_heads(output, batch).to(q.dtype)


def attend_powers(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, score: Power, past: Past) -> Tensor:
    """Even powers, a chunk at a time if keys are folded. Rows are divided by their sums, so that no scale matters."""
    batch, length, heads, width = k.shape
    folds = score.form != "attention"
    if past.waiting is not None:  # a decoder's tail
        close_tail(past)
        past.decoder = None
    fields = fields_by_head(k, v, None, log_gate)
    queries = in_units(queries_by_head(q, heads, score), fields["k"], past)
    outputs, size = [], chunk_tokens(width, score.p) if folds else length
    for start in range(0, length, size):
        chunk = slice(start, start + size)
        piece = {name: x[:, chunk] for name, x in fields.items()}
        output, top, piece = attend_piece(queries[:, chunk], piece, score, 1.0, past)
        outputs.append(from_heads(output, batch).to(q.dtype))
        extend_cache(past, top, piece)
        if folds:
            past.fold(score.p)
    return torch.cat(outputs, dim=1)


def extend_cache(past: Past, top: Top, fields: Fields) -> None:
    """Appends tokens to the KV cache, in a new segment if the last is closed or shared with another continuation."""
    kept = {"k": fields["k"], "v": fields["v"]}
    last = past.segments[-1] if past.segments else None
    if last is not None and (last.shared or last.bias is not None):
        last = None
    if top.sums is not None:
        sums = top.sums[:, : kept["k"].shape[1]]
        kept["sums"] = sums if last is None else sums + last["sums"][:, -1:]
    if last is None:
        past.segments.append(Segment(kept))
    else:
        past.segments[-1] = last.extended(kept)
