"""Even powers over pieces: one state passed from piece to piece, in place of keys and values around a ring.

    piece      0 ─────────▶ 1 ─────────▶ 2 ─────────▶ …     S_{t+1} = f_t · S_t + W_t
                 S_1          S_2          S_3

W_t is what piece t writes (`blockwise/power.py`), f_t the product of its gates, and the queries of piece t read S_t,
all keys before them. Attention inside a piece is the route tree's. In the backward pass gradients of states travel the
other way: dS_t = f_t · dS_{t+1} plus that of what the piece has read, and dW_t = dS_{t+1}; so the gradients of gates
arise on their own rank.

A rank sends one state per piece and key head each way, F · (E + 1) numbers, whatever the length and number of ranks.
The ring sends (R − 1) · T / R keys and values forward and twice that back. So states are sent where they are fewer
bytes: from about 2 F tokens in all on, two ranks; F tokens, many. The price is that pieces wait for each other: 2 R − 1
messages, one after the other (while a piece waits, its inside and what it writes are computed).

Packed rows: a state that enters a piece holds the keys of the document that continues into it, and no others. Piece t
passes S_t on only if no document ends in it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.dense import Rows, tiled_score
from deadreckon.ops.blockwise.power import (
    chunked_from,
    read,
    read_gradients,
    state_dtype,
    write_gradients,
    written,
)
from deadreckon.ops.blockwise.precision import exact, faded
from deadreckon.ops.blockwise.symmetric import dimension
from deadreckon.ops.blockwise.tree import gradients_of_rows, unfinished_rows
from deadreckon.ops.factors import Power
from deadreckon.ops.parallel.context import ContextParallel
from deadreckon.ops.tracing import first_derivatives_only, without_autocast


def sends_states(score: Power, k: Tensor, v: Tensor, gates: Tensor | None, cp: ContextParallel) -> bool:
    """Whether to pass on states of k (M, C, D), v (M, C, E) and gates (M, C, kinds), not a ring: as the form says.

    With ``"auto"``, if they are fewer bytes and there are enough tokens for the chunked form to be faster.
    """
    if score.form != "auto":
        return score.form != "attention"
    width, tokens = k.shape[2], k.shape[1]
    kinds = 1 if gates is None else gates.shape[2]
    size = torch.empty((), dtype=state_dtype(k.dtype, score.p, k.device)).element_size()
    state = dimension(width, score.p) * kinds * (v.shape[2] + 1) * size
    ring = (cp.size - 1) * tokens * (width + v.shape[2]) * k.element_size()
    return tokens * cp.count >= chunked_from(width, score.p, k.device, gates is not None) and state < ring


@dataclass(frozen=True)
class Handover:
    """The settings that the forward and the backward pass share."""

    cp: ContextParallel
    score: Power
    documents: list[int] | None

    def reach(self, size: int) -> list[tuple[int, int]]:
        """For each of this rank's pieces: how many queries see what is before it, and the first key seen after it."""
        if self.documents is None:
            return [(size, 0)] * self.cp.pieces
        found = []
        for piece in self.cp.held:
            start, end = piece * size, (piece + 1) * size
            before, last = (bisect_right(self.documents, token) for token in (start - 1, end - 1))
            seeing = min(size, self.documents[before] - start) if piece else 0
            found.append((seeing, max(0, self.documents[last - 1] - start)))
        return found


class Fades(NamedTuple):
    """Products of gates in the precision of states, 0 across documents."""

    from_start: Tensor  # (M, C, 1 | G) up to a query
    to_end: Tensor  # (M, C, 1 | G) after a key
    across: Tensor  # (M, 1 | G) of the piece

    @classmethod
    def of(cls, plan: Handover, like: Tensor, sums: Tensor | None, dtype: torch.dtype) -> Fades:
        size = like.shape[1]
        if sums is None:
            ones = torch.ones((), dtype=dtype, device=like.device).expand(*like.shape[:2], 1)
            found = [ones, ones, ones[:, -1]]
        else:
            found = [faded(x, dtype) for x in (sums, sums[:, -1:] - sums, sums[:, -1])]
        if plan.documents is not None:
            found = [x.clone().unflatten(0, (plan.cp.pieces, -1)) for x in found]
            for slot, (seeing, first) in enumerate(plan.reach(size)):
                found[0][slot, :, seeing:] = 0
                found[1][slot, :, :first] = 0
                found[2][slot] *= seeing == size
            found = [x.flatten(0, 1) for x in found]
        return cls(*found)


class States(torch.autograd.Function):
    """Attention of pieces by head, M = pieces · N rows: q (M, C, G, D), k (M, C, D), v (M, C, E), gates inside pieces
    and their sums from the piece's start (M, C, 1 | G), or None. Returns (M, C, G, E) in the dtype of q."""

    @staticmethod
    def forward(
        ctx: Any, plan: Handover, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, sums: Tensor | None
    ) -> Tensor:
        p, dtype = plan.score.p, state_dtype(q.dtype, plan.score.p, q.device)
        fades = Fades.of(plan, k, sums, dtype)
        wrote = written(k.to(dtype), v.to(dtype), fades.to_end, p)
        out, total = unfinished_rows(q, k, v, None, None, gates, plan.score, 1.0)
        before = torch.empty_like(wrote)
        ours, news, across = (x.unflatten(0, (plan.cp.pieces, -1)) for x in (before, wrote, fades.across))

        def after(slot: int, state: Tensor) -> Tensor:
            ours[slot] = state
            fade = across[slot][:, None, :, None]
            return news[slot] + torch.where(fade == 0, 0, fade * state)

        plan.cp.relay(news[0], after, direction=1)
        past = read(before, q.to(dtype), p)  # (M, C, G, E + 1)
        answered = (past[..., -1] != 0) & (fades.from_start != 0)
        past = torch.where(answered.unsqueeze(3), past * fades.from_start.unsqueeze(3), 0)
        out += past[..., :-1]
        total += past[..., -1]
        out = tiled_score(plan.score).finish(out, total)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, gates, sums, before, answered, out, total)
        return out.to(q.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_derivatives_only()
        with without_autocast(grads[0]):
            return _backward(ctx.plan, grads[0].contiguous(), *ctx.saved_tensors)


def _backward(plan: Handover, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs of `States`, from that of its output and the saved tensors."""
    q, k, v, gates, sums, before, answered, out, total = saved
    p, dtype, precise = plan.score.p, before.dtype, exact(q.device)
    fades = Fades.of(plan, k, sums, dtype)
    rows = Rows.of(tiled_score(plan.score), grad, out, total, precise)
    inside = gradients_of_rows(
        rows.grad, q, k, v, None, None, gates, out, rows.statistic, rows.grad_farther, plan.score, 1.0
    )
    grad_past = torch.cat([grad.to(precise), -rows.inner.unsqueeze(-1)], dim=-1)
    grad_past = grad_past / torch.where(total == 0, 1, total).unsqueeze(-1) * fades.from_start.unsqueeze(3)
    grad_past = torch.where(answered.unsqueeze(3), grad_past, 0).to(dtype)
    grad_before, grad_wrote = torch.zeros_like(before), torch.empty_like(before)
    grad_q = read_gradients(before, q.to(dtype), p, grad_past, grad_before)
    ours, news, across = (x.unflatten(0, (plan.cp.pieces, -1)) for x in (grad_before, grad_wrote, fades.across))

    def earlier(slot: int, grad_state: Tensor) -> Tensor:
        news[slot] = grad_state
        fade = across[slot][:, None, :, None]
        return ours[slot] + torch.where(fade == 0, 0, fade * grad_state)

    plan.cp.relay(ours[0], earlier, direction=-1)
    grad_k, grad_v, by_key = write_gradients(k.to(dtype), v.to(dtype), fades.to_end, p, grad_wrote)
    grad_sums = None
    if sums is not None:
        # What is read is homogeneous of degree p in q: so d log-weights add up to q · dq / p.
        by_query = (q.to(dtype) * grad_q).sum(-1, dtype=precise) / p
        grad_sums = (by_query if sums.shape[2] > 1 else by_query.sum(-1, keepdim=True)) - by_key.to(precise)
        passed = torch.where(fades.across[:, None, :, None] == 0, 0, grad_wrote * before)
        by_piece = fades.across * passed.sum((1, 3))
        grad_sums[:, -1] += by_key.sum(1, dtype=precise) + by_piece.to(precise)
        grad_sums = grad_sums.to(sums.dtype)
    pairs = zip(inside[:3], (grad_q, grad_k, grad_v), strict=True)
    grad_gates = inside[3] if gates is not None else None
    return None, *(x + y.to(x.dtype) for x, y in pairs), grad_gates, grad_sums
