"""Context-parallel attention, over a sequence sharded among ranks: any transport, gate and score, packed rows too.

Rotations are applied up front, by phases that continue from piece to piece (one sum per piece is gathered). Householder
steps become frames at the ends of pieces and one product per piece (`blockwise/ends.py`). What is left is a ring pass
(`ring.py`).

Even powers take the same ring, as attention, or pass states on where these are fewer bytes (`states.py`): a state has
C(D + p − 1, p) rows, 2080 for D = 64 and p = 2, but 766 480 for p = 4. Stick-breaking goes from the nearest key to the
farthest, but a ring in the layout "zigzag" delivers pieces in another order: so shards are moved to the layout
"contiguous" and back, and the last rank has up to twice the mean work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deadreckon.ops.blockwise.documents import CLOSED, boundaries
from deadreckon.ops.blockwise.ends import Ends
from deadreckon.ops.blockwise.precision import exact, lengths, power_of_two, usual_scale, work
from deadreckon.ops.blockwise.problem import by_head, gates_by_head
from deadreckon.ops.blockwise.rotation import turned
from deadreckon.ops.factors import Factors, Power
from deadreckon.ops.layout import sent
from deadreckon.ops.parallel.context import ContextParallel
from deadreckon.ops.parallel.finite import Containment
from deadreckon.ops.parallel.ring import Inside, InsideTree, Plan, Ring
from deadreckon.ops.parallel.states import Handover, States, sends_states


@torch.compiler.disable
def attend_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Factors,
    scale: float,
    documents: list[int] | Tensor | None,
    cp: ContextParallel,
    kernels: bool,
) -> Tensor:
    """See :func:`deadreckon.attend`; the arguments are validated shards (B, T / R, ...) of this rank.

    Boundaries that are still a tensor, which a tracer could not read, are validated here. With `kernels`, which the
    caller has found to support these inputs, softmax attention inside pieces runs on Triton.
    """
    cp.piece_length(q.shape[1])
    if isinstance(documents, Tensor):
        documents = boundaries(documents, q.shape[1] * cp.size)
    if factors.score == "stick-breaking" and cp.layout == "zigzag":
        near = cp.contiguous()
        q, k, v, factors = mapped(lambda x: cp.moved(x, near), q, k, v, factors)
        return near.moved(attend_parallel(q, k, v, factors, scale, documents, near, kernels), cp)
    finite = Containment(q.shape[2])
    k, v, factors = finite.cleared(k), finite.cleared(v), finite.cleared_factors(factors)
    q, scale = usual_scale(q, scale, factors.score)
    rows = mapped(cp.as_rows, q, k, v, factors)
    inside: Inside = InsideTree()
    if kernels and factors.score == "softmax":
        from deadreckon.ops.parallel.fused import InsideKernels

        inside = InsideKernels(cp, documents)
    return finite.restored(cp.from_rows(_over_pieces(*rows, scale, documents, cp, inside)), documents, cp)


def mapped(
    change: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, factors: Factors
) -> tuple[Tensor, Tensor, Tensor, Factors]:
    """Applies `change` to all tensors (B, T, ...) of attention."""
    gates = None if factors.log_gate is None else change(factors.log_gate)
    return change(q), change(k), change(v), Factors(factors.map_transport(change), gates, factors.score)


def _over_pieces(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, documents: list[int] | None, cp: ContextParallel,
    inside: Inside,
) -> Tensor:  # fmt: skip
    """Attention of pieces as rows of a batch, (pieces · B, C, ...)."""
    _, log_gate, score = factors
    rotation, steps = factors.parts()
    if rotation is not None:
        turn = turned(q, k, v, factors, _phases_before(rotation.angles, cp))
        return turn.back(_over_pieces(turn.q, turn.k, turn.v, turn.factors, scale, documents, cp, inside))
    (rows, _, heads, _), dtype = k.shape, q.dtype
    if q.device.type == "cpu" or score != "softmax":  # where half precision gains nothing
        q, k, v = (x.to(work(dtype)) for x in (q, k, v))
    q, k, v = (by_head(x, heads) for x in (q, k, v))
    k, v = k.squeeze(2), v.squeeze(2)
    if isinstance(score, Power):
        q, k = _in_range(q, k, cp)
        scale = 1.0
    gates = None if log_gate is None else gates_by_head(log_gate, heads)
    sums = None if gates is None else gates.cumsum(1)
    inside_gates = gates if documents is None or inside.knows_documents else _apart(gates, documents, k, cp)
    w = beta = products = None
    queries, keys = q, k
    if steps is not None:
        w, beta = (by_head(x.to(work(dtype)), heads).squeeze(2) for x in (steps.w, steps.beta))
        queries, keys, products = Ends.apply(q, k, w, beta)
    if isinstance(score, Power) and steps is None and sends_states(score, k, v, gates, cp):
        output = States.apply(Handover(cp, score, documents), q, k, v, inside_gates, sums)
    else:
        plan = Plan(cp, inside, score, scale, documents)
        output = Ring.apply(plan, q, k, v, w, beta, inside_gates, queries, keys, products, sums)  # (M, C, G, E)
    return output.unflatten(0, (rows, heads)).transpose(1, 2).flatten(2, 3).to(dtype)


def _phases_before(angles: Tensor, cp: ContextParallel) -> Tensor:
    """The sum of the step angles (pieces · B, C, Hr, D/2) of all pieces before each: (pieces · B, 1, Hr, D/2)."""
    totals = angles.sum(1, keepdim=True, dtype=exact(angles.device))
    return cp.sums_before(totals.unflatten(0, (cp.pieces, -1))).flatten(0, 1)


def _in_range(q: Tensor, k: Tensor, cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """As :func:`deadreckon.ops.blockwise.precision.in_range`, with keys scaled by the longest of all ranks."""
    longest = lengths(k.detach()).amax(1, keepdim=True)  # (pieces · N, 1, 1)
    longest = cp.every(longest.unflatten(0, (cp.pieces, -1))).amax(0).repeat(cp.pieces, 1, 1)
    return q / power_of_two(lengths(q.detach())), k / power_of_two(longest)


def _apart(gates: Tensor | None, documents: list[int], k: Tensor, cp: ContextParallel) -> Tensor:
    """Gates (M, C, 1 | G), closed at the first token of each document, inside pieces."""
    size = k.shape[1]
    if gates is None:
        gates = k.new_zeros(*k.shape[:2], 1, dtype=exact(k.device))
    marks = torch.zeros(cp.pieces, size, dtype=torch.bool)
    for slot, piece in enumerate(cp.held):
        marks[slot, [x - piece * size for x in documents if piece * size <= x < (piece + 1) * size]] = True
    marks = sent(marks, k.device, marks.dtype).repeat_interleave(k.shape[0] // cp.pieces, 0)
    return gates.masked_fill(marks.unsqueeze(-1), CLOSED)
