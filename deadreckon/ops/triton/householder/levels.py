"""The levels above blocks of leaves: dense attention between the halves of a pair, and frames that rise level by level.

A pair of neighbouring blocks has its left keys at its middle (the end of their block) and its right queries there too
(the start of theirs), so that right × left is dense attention. Then both halves become one block: queries of the right
cross the left one's product, keys of the left cross the right one's, and the level above does the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import Run
from deadreckon.ops.blockwise.stock import Backend, backend_for, dense_backward, dense_forward
from deadreckon.ops.triton.gated.backward import flash_backward
from deadreckon.ops.triton.gated.forward import flash_forward
from deadreckon.ops.triton.gated.launch import Documents, Pairs, Reach, Sums
from deadreckon.ops.triton.householder.cross import Side, cross, cross_back, multiply, multiply_back, place
from deadreckon.ops.triton.householder.frames import Back, Frames, Place, buffer
from deadreckon.ops.triton.householder.merge import Part
from deadreckon.ops.triton.householder.prefill import Closed


class Rows(NamedTuple):
    """What the backward pass of dense blocks needs of each query, head-major."""

    out: Tensor  # (n, T, G, E)
    back: Back


class Routes(NamedTuple):
    """What lies on the routes of n key heads besides Householder steps, and who sees whom."""

    sums: Sums | None  # of log gates
    reach: Reach | None  # what gates leave in reach
    documents: Documents | None
    scale: float


def stock_for(q: Tensor, v: Tensor) -> Backend | None:
    """The stock kernel for dense blocks without gates, if it is faster than ours."""
    return "cudnn" if q.shape[-1] == v.shape[-1] <= 128 and backend_for(q) == "cudnn" else None


class Levels:
    """All levels over the blocks of n key heads; `frames` (queries and keys) rise in place."""

    def __init__(self, runs: list[list[Run]], frames: Frames, routes: Routes) -> None:
        self.runs, self.frames, self.routes = runs, frames, routes
        self.group, self.dtype = frames.queries.shape[2], frames.queries.dtype
        plain = routes.sums is None and routes.documents is None
        self.stock = stock_for(frames.queries, frames.values) if plain else None

    def forward(self, closed: Closed | None, to_top: bool) -> list[Part]:
        """Outputs and log-sum-exps of all levels. Frames stop below the topmost; queries may go on to the top."""
        parts: list[Part] = []
        for number, runs in enumerate(self.runs):
            parts += [self._attend(run) for run in runs]
            if closed:
                closed.take_block(self.frames, runs[0].left)
            if number + 1 < len(self.runs):
                products = self._rise(runs, self.frames.products, keep=False)[1]
                self.frames = self.frames._replace(products=products)
            elif to_top:  # one pair of blocks
                cross(self.frames.queries.flatten(1, 2), self.frames.products, 0, 2, self._sides(runs[0])[0], True)
        return parts

    def backward(
        self, back: Back, out: Tensor, parts: list[tuple[Tensor, Place]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the blocks' queries, keys and (unless there is one level) products; dv is added to parts."""
        rows, documents = Rows(out, back), self.routes.documents
        products, kept = [self.frames.products], []
        for runs in self.runs[:-1]:
            old, above = self._rise(runs, products[-1], keep=True)
            kept.append(old)
            products.append(above)
        grad_q, grad_k = (buffer(x, x.shape[0], *x.shape[1:]) for x in self.frames[:2])
        grad_products: Tensor | None = None
        for number in range(len(self.runs) - 1, -1, -1):
            at_top = number == len(self.runs) - 1
            outer, first = [], 0
            for i, run in enumerate(self.runs[number]):
                q, k = (run.right_of(self.frames.queries), run.left_of(self.frames.keys)) if at_top else kept[number][i]
                fresh_q, fresh_k, fresh_v = self._attend_back(run, q, k, rows)
                parts.append((fresh_v, run))
                if at_top:  # one pair of blocks
                    place(grad_q.flatten(1, 2), fresh_q, run.left * self.group, False, documents, self.group)
                    place(grad_k, fresh_k, run.left, True, documents)
                    continue
                queries, keys = self._sides(run)
                outer_q = cross_back(
                    grad_q.flatten(1, 2), q, fresh_q, products[number], first, queries, True, documents, self.group
                )
                outer_k = cross_back(grad_k, k, fresh_k, products[number], first + 1, keys, False, documents)
                outer.append((outer_q, outer_k))
                first += 2 * run.pairs
            if not at_top:
                grad_products = multiply_back(products[number], grad_products, outer, self.dtype)
                kept.pop()
                products.pop()
        return grad_q, grad_k, grad_products

    def _sides(self, run: Run) -> tuple[Side, Side]:
        """Rows of queries and of keys that cross to the level above."""
        step = run.left + run.right
        queries = Side((run.start + run.left) * self.group, run.pairs, run.right * self.group, step * self.group)
        return queries, Side(run.start, run.pairs, run.left, step)

    def _rise(self, runs: list[Run], products: Tensor, keep: bool) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Takes frames up a level; returns queries and keys as they were, if `keep`, and the new products."""
        kept, first, documents = [], 0, self.routes.documents
        for run in runs:
            queries, keys = self._sides(run)
            old_q = cross(
                self.frames.queries.flatten(1, 2), products, first, 2, queries, True, None, keep, documents, self.group
            )
            old_k = cross(self.frames.keys, products, first + 1, 2, keys, False, None, keep, documents)
            if old_q is not None and old_k is not None:
                kept.append((old_q.unflatten(2, (-1, self.group)), old_k))
            first += 2 * run.pairs
        return kept, multiply(products, self.dtype)

    def _attend(self, run: Run) -> Part:
        """Output and log-sum-exp of a run's queries (n, pairs, right, G, D) over its keys (n, pairs, left, D)."""
        q, k, v = run.right_of(self.frames.queries), run.left_of(self.frames.keys), run.left_of(self.frames.values)
        if self.stock:
            out, lse = dense_forward(self.stock, q.flatten(2, 3), k, v, self.routes.scale)
            return (out.contiguous(), lse.contiguous()), run
        sums, reach, documents, scale = self.routes
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        flash_forward(
            _grouped(q), k.unsqueeze(1), v.unsqueeze(1), sums, scale, _grouped(out), _grouped(lse), Pairs(*run), reach,
            documents,
        )  # fmt: skip
        return (out, lse), run

    def _attend_back(self, run: Run, q: Tensor, k: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q (n, pairs, right, G, D), k and v (n, pairs, left, ·); q and k are in the run's frames."""
        v = run.left_of(self.frames.values)
        if self.stock and not torch.are_deterministic_algorithms_enabled():  # cuDNN adds up dq in any order
            grad, out, lse = (run.right_of(x).flatten(2, 3) for x in (rows.back.grad, rows.out, rows.back.lse))
            gradients = dense_backward(
                self.stock, grad, q.flatten(2, 3), k, v, out, lse, self.routes.scale, steady=True
            )
            grad_q, grad_k, grad_v = (x.contiguous() for x in gradients)
            return grad_q.view(q.shape), grad_k, grad_v
        sums, reach, documents, scale = self.routes
        back = rows.back
        grad, delta, lse, row_shift, by_query = (
            run.right_of(x) for x in (back.grad, back.delta, back.lse, back.row_shift, back.by_query)
        )
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        flash_backward(
            _grouped(q), k.unsqueeze(1), v.unsqueeze(1), sums, scale, _grouped(grad), _grouped(delta),
            _grouped(lse), _grouped(row_shift), _grouped(grad_q), grad_k.unsqueeze(1), grad_v.unsqueeze(1),
            _grouped(by_query), back.by_key, Pairs(*run), reach, documents,
        )  # fmt: skip
        return grad_q, grad_k, grad_v


def _grouped(x: Tensor) -> Tensor:
    """(n, pairs, tokens, G, ...) -> (n, 1, G, pairs, tokens, ...), a view."""
    return x.movedim(3, 1).unsqueeze(1)
