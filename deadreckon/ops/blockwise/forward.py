"""The forward pass over the route tree: leaves first, then one batch of dense blocks a level, from near to far."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deadreckon.ops.blockwise.frames import leaf_frames, rise
from deadreckon.ops.blockwise.leaf import Frames
from deadreckon.ops.blockwise.problem import Problem
from deadreckon.ops.blockwise.runs import gate_of


class Top(NamedTuple):
    """A sequence as one block at the top of the tree: the tokens before and after it can be attended from here."""

    out: Tensor  # (N, T, G, E), not finished: see `scores.py`
    statistic: Tensor  # (N, T, G)
    queries: Tensor  # (N, T, G, D) in the frame of the first token
    keys: Tensor  # (N, T, D) in the frame of the last token
    product: Tensor | None  # (N, D, D) of all Householder steps, if there are any
    sums: Tensor | None  # (N, T, 1 | G) running sums of log gates


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output (N, T, G, E) and the statistic of each row (N, T, G), not finished: see `scores.py`."""
    out, statistic, _ = _forward(problem, to_top=False)
    return out, statistic


def forward_to_top(problem: Problem) -> Top:
    """The same, with queries and keys carried to the ends of the sequence."""
    out, statistic, (queries, keys, products) = _forward(problem, to_top=True)
    sums = problem.sums
    if problem.poison is not None:  # whoever attends to these tokens from later on gets NaN
        keys = keys + problem.poison[:, -1:, None]
        sums = None if sums is None else sums + problem.poison.unsqueeze(2)
    return Top(out, statistic, queries, keys, None if products is None else products[:, 0], sums)


def _forward(problem: Problem, to_top: bool) -> tuple[Tensor, Tensor, Frames]:
    values, score = problem.values, problem.dense.score
    out = values.new_zeros(*problem.queries.shape[:3], values.shape[2], dtype=problem.leaf_dtype)  # (N, T, G, E)
    statistic = score.start(problem.queries[..., 0])  # (N, T, G)
    frames = _add_leaves(problem, out, statistic, to_top)
    for number, runs in enumerate(problem.levels, start=1):
        for run in runs:
            q, k, v = run.halves(frames.queries)[1], run.halves(frames.keys)[0], run.halves(values)[0]
            gate = gate_of(problem.sums, run)
            problem.dense.forward(q, k, v, gate, run.halves(out)[1], run.halves(statistic)[1])
        if to_top or number < len(problem.levels):
            frames = rise(frames, runs)
    if problem.poison is not None:
        out += problem.poison[:, :, None, None]
    return out, statistic, frames


def _add_leaves(problem: Problem, out: Tensor, statistic: Tensor, to_ends: bool) -> Frames:
    """The causal attention inside leaves, written to out and statistic; returns the frames of carried leaves."""
    if problem.stock_leaves:
        leaf_out, lse = problem.causal_leaves().forward()
        problem.in_leaves(out)[0].copy_(leaf_out)
        problem.in_leaves(statistic)[0].copy_(lse)
        return leaf_frames(problem, [])
    parts = []
    for part in problem.leaf_parts():
        leaf = problem.householder_leaf(part, to_ends)
        values = problem.in_leaves(problem.values, part).to(problem.leaf_dtype)  # (1, leaves, S, E)
        problem.dense.score.add(
            problem.leaf_logits(leaf, part), problem.leaf_gate(part), problem.visible(), values,
            problem.in_leaves(out, part), problem.in_leaves(statistic, part),
        )  # fmt: skip
        if leaf and leaf.frames:
            parts.append(leaf.frames)
    return leaf_frames(problem, parts)
