"""Backward pass over the route tree: recomputes leaves and frames, then propagates gradients down level by level.

It visits keys from far to near, the opposite of the forward pass: first the widest dense blocks, the leaves last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.dense import GateGradients, Rows
from deadreckon.ops.blockwise.frames import Crossing, crossings, fall, leaf_frames, rise
from deadreckon.ops.blockwise.leaf import Frames, HouseholderLeaf, plain_logits
from deadreckon.ops.blockwise.problem import Problem
from deadreckon.ops.blockwise.runs import Run, gate_of


class Gradients(NamedTuple):
    """Gradients of the inputs, in their shapes. Dense blocks and leaves add to them in place."""

    q: Tensor  # (N, T, G, D)
    k: Tensor  # (N, T, D)
    v: Tensor  # (N, T, E)
    w: Tensor | None  # (N, T, D)
    beta: Tensor | None  # (N, T)
    gates: Tensor | None  # (N, T, 1 | G)


def backward(
    problem: Problem, grad: Tensor, out: Tensor, statistic: Tensor, grad_farther: Tensor | None = None
) -> Gradients:
    """Gradients of the inputs, from grad and out (N, T, G, E) and the statistic (N, T, G) of the forward pass.

    Where rows extend beyond these keys (context parallel: keys of other ranks), out and statistic are those of the
    whole rows. With stick-breaking the statistic is that of these keys alone, and grad_farther (N, T, G) is the sum of
    d log-weight over all farther keys.
    """
    leaves = [leaf for part in problem.leaf_parts() if (leaf := problem.householder_leaf(part))]
    frames = leaf_frames(problem, [leaf.frames for leaf in leaves if leaf.frames])
    saved: list[list[Crossing]] = []
    if leaves:
        for runs in problem.levels[:-1]:
            saved.append(crossings(frames, runs))
            frames = rise(frames, runs)

    rows, gradients = _rows(problem, grad, out, statistic, grad_farther), _room(problem)
    grad_products: Tensor | None = None  # (N, blocks, D, D) of the level that was computed last
    for number in range(len(problem.levels) - 1, -1, -1):
        runs = problem.levels[number]
        if number < len(saved):
            grad_products = fall(frames, runs, saved.pop(), gradients.q, gradients.k, grad_products)
        for run in runs:
            _pairs_backward(problem, run, frames, rows, gradients)
    if problem.stock_leaves:
        _stock_leaves_backward(problem, rows, gradients)
    else:
        _leaves_backward(problem, leaves, rows, gradients, grad_products)
    q, k, v = (x.to(problem.dtype) for x in gradients[:3])
    return gradients._replace(q=q, k=k, v=v)


def _rows(problem: Problem, grad: Tensor, out: Tensor, statistic: Tensor, grad_farther: Tensor | None) -> Rows:
    rows = Rows.of(problem.dense.score, grad, out, statistic, problem.leaf_dtype)
    return rows if grad_farther is None else rows._replace(grad_farther=grad_farther.clone())


def _room(problem: Problem) -> Gradients:
    q, k, v = (torch.zeros_like(x) for x in (problem.queries, problem.keys, problem.values))
    w, beta = (None if x is None else torch.empty_like(x) for x in (problem.w, problem.beta))  # written once
    return Gradients(q, k, v, w, beta, None if problem.sums is None else torch.zeros_like(problem.sums))


def _pairs_backward(problem: Problem, run: Run, frames: Frames, rows: Rows, gradients: Gradients) -> None:
    """Right halves × left halves of a run, as dense blocks."""
    block = problem.dense.backward(
        run.halves(frames.queries)[1], run.halves(frames.keys)[0], run.halves(problem.values)[0],
        gate_of(problem.sums, run), rows.view(lambda x: run.halves(x)[1]),
        run.halves(gradients.q)[1], run.halves(gradients.k)[0], run.halves(gradients.v)[0],
    )  # fmt: skip
    if block is not None and gradients.gates is not None:
        _add_gate_gradients(gradients.gates, run, block)


def _add_gate_gradients(grad_gates: Tensor, run: Run, block: GateGradients) -> None:
    """A gate at s is on the routes that cross it: from keys before s in the left half, to queries from s on."""
    by_query, by_key = block
    if grad_gates.shape[2] == 1:
        by_query = by_query.sum(-1, keepdim=True)
    by_query, by_key = by_query.to(grad_gates.dtype), by_key.to(grad_gates.dtype)
    left, right = run.halves(grad_gates)
    left[:, :, 1:] += by_key[:, :, :-1].cumsum(2)
    right += by_query.flip(2).cumsum(2).flip(2)


def _add_leaf_gate_gradients(grad_gates: Tensor, by_query_less_by_key: Tensor) -> None:
    """A gate at s is on the routes that end at s or later, less those that also begin there.

    Both (1, leaves, S, 1 | G): the gradients to add to, and sums of d log-weight by query less those by key.
    """
    grad_gates += by_query_less_by_key.to(grad_gates.dtype).flip(2).cumsum(2).flip(2)


def _stock_leaves_backward(problem: Problem, rows: Rows, gradients: Gradients) -> None:
    grad, out, lse, *_ = rows.view(lambda x: problem.in_leaves(x)[0])  # (leaves, S, G, ...)
    grad_q, grad_k, grad_v, by_query_less_by_key = problem.causal_leaves().gradients(grad, out, lse)
    problem.in_leaves(gradients.q)[0].add_(grad_q)
    problem.in_leaves(gradients.k)[0].add_(grad_k)
    problem.in_leaves(gradients.v)[0].add_(grad_v)
    if gradients.gates is None or by_query_less_by_key is None:
        return
    if gradients.gates.shape[2] == 1:
        by_query_less_by_key = by_query_less_by_key.sum(-1, keepdim=True)
    _add_leaf_gate_gradients(problem.in_leaves(gradients.gates), by_query_less_by_key.unsqueeze(0))


def _leaves_backward(
    problem: Problem, leaves: list[HouseholderLeaf], rows: Rows, gradients: Gradients, grad_products: Tensor | None
) -> None:
    """Takes gradients from the leaves' frames to the inputs, and adds those of the attention inside leaves."""
    for number, part in enumerate(problem.leaf_parts()):
        leaf = leaves[number] if leaves else None
        grad_logits = _leaf_logits_backward(problem, leaf, part, rows, gradients)  # (1, leaves, S, G, S)
        grad_q, grad_k = (problem.in_leaves(x, part) for x in (gradients.q, gradients.k))
        if leaf and gradients.w is not None and gradients.beta is not None:
            grad_p = None if grad_products is None else grad_products.flatten(0, 1)[part].unsqueeze(0)
            new = leaf.gradients(grad_logits, grad_q, grad_k, grad_p)
            places = grad_q, grad_k, problem.in_leaves(gradients.w, part), problem.in_leaves(gradients.beta, part)
            for place, value in zip(places, new, strict=True):
                place.copy_(value)
        else:
            flat = grad_logits.flatten(2, 3)  # (1, leaves, S · G, S)
            grad_q += (flat @ problem.in_leaves(problem.keys, part)).view_as(grad_q)
            grad_k += flat.mT @ problem.in_leaves(problem.queries, part).flatten(2, 3)


def _leaf_logits_backward(
    problem: Problem, leaf: HouseholderLeaf | None, part: slice, rows: Rows, gradients: Gradients
) -> Tensor:
    """d logits of these leaves, before scaling; adds d values and d gates."""
    grad, _, statistic, inner, grad_farther = rows.view(lambda x: problem.in_leaves(x, part))
    values, grad = (x.to(problem.leaf_dtype) for x in (problem.in_leaves(problem.values, part), grad))
    grad_weight = plain_logits(grad, values) - inner.unsqueeze(-1)
    grad_z, grad_log_weight, weights = problem.dense.score.gradients(
        problem.leaf_logits(leaf, part), problem.leaf_gate(part), problem.visible(), grad_weight, statistic,
        grad_farther,
    )  # fmt: skip
    problem.in_leaves(gradients.v, part).add_(weights.flatten(2, 3).mT @ grad.flatten(2, 3))
    if gradients.gates is not None:
        if gradients.gates.shape[2] == 1:
            grad_log_weight = grad_log_weight.sum(3, keepdim=True)
        by_query_less_by_key = grad_log_weight.sum(-1) - grad_log_weight.sum(2).mT
        _add_leaf_gate_gradients(problem.in_leaves(gradients.gates, part), by_query_less_by_key)
    return (problem.dense.scale * grad_z).to(problem.keys.dtype)
