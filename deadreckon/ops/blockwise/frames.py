"""Frames: queries and keys carried to the ends of their block, with the block's Householder steps already applied.

    block [a, b)     queries in the frame of a: H_a ⋯ H_i q_i        keys in the frame of b: (H_{j+1} ⋯ H_{b−1})ᵀ k_j

With P the product of all steps of a block, two neighbours become one by

    queries of the right half ← P_left · q̃,   keys of the left half ← P_rightᵀ · k̃,   P ← P_left P_right

and the other halves are in their new frame already. Nothing is inverted: a step with β = 1 is singular.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.leaf import Frames
from deadreckon.ops.blockwise.problem import Problem
from deadreckon.ops.blockwise.products import times_transposed
from deadreckon.ops.blockwise.runs import Run


class Crossing(NamedTuple):
    """What the gradients of `rise` need of one run of pairs."""

    queries: Tensor  # (N, pairs, right · G, D) of the right halves, before they rose
    keys: Tensor  # (N, pairs, left, D) of the left halves, before they rose
    left_products: Tensor  # (N, pairs, D, D)
    right_products: Tensor  # (N, pairs, D, D)


def leaf_frames(problem: Problem, parts: list[Frames]) -> Frames:
    """The frames of the leaves, from parts (1, leaves, S, ...); without parts, queries and keys stay as they are."""
    if not parts:
        return Frames(problem.queries, problem.keys, None)
    products = torch.cat([part.products for part in parts if part.products is not None], dim=1)  # (1, leaves, D, D)
    return Frames(
        torch.cat([part.queries for part in parts], dim=1).view_as(problem.queries),
        torch.cat([part.keys for part in parts], dim=1).view_as(problem.keys),
        products.view(problem.keys.shape[0], -1, *products.shape[2:]),
    )


def _products_by_run(runs: list[Run], products: Tensor) -> Iterator[tuple[Run, Tensor, Tensor]]:
    """Each run with the products of its left and right blocks, (N, pairs, D, D)."""
    first = 0
    for run in runs:
        blocks = slice(first, first + 2 * run.pairs)
        yield run, products[:, blocks][:, ::2], products[:, blocks][:, 1::2]
        first = blocks.stop


def rise(frames: Frames, runs: list[Run]) -> Frames:
    """The frames of the next level; queries and keys move in place."""
    queries, keys, products = frames
    if products is None:
        return frames
    for run, left_products, right_products in _products_by_run(runs, products):
        right, left = run.halves(queries)[1], run.halves(keys)[0]  # (N, pairs, right, G, D), (N, pairs, left, D)
        right.copy_(times_transposed(right.flatten(2, 3), left_products).view_as(right))
        left.copy_(left @ right_products)
    paired = 2 * (products.shape[1] // 2)  # a block without a partner keeps its product
    joined = products[:, 0:paired:2] @ products[:, 1:paired:2]
    return Frames(queries, keys, torch.cat([joined, products[:, paired:]], dim=1))


def crossings(frames: Frames, runs: list[Run]) -> list[Crossing]:
    """What `rise` is about to overwrite, for `fall`."""
    assert frames.products is not None
    return [
        Crossing(
            run.halves(frames.queries)[1].flatten(2, 3).clone(), run.halves(frames.keys)[0].clone(),
            left_products, right_products,
        )
        for run, left_products, right_products in _products_by_run(runs, frames.products)
    ]  # fmt: skip


def fall(
    frames: Frames, runs: list[Run], saved: list[Crossing], grad_queries: Tensor, grad_keys: Tensor,
    grad_products: Tensor | None,
) -> Tensor:  # fmt: skip
    """The backward pass of `rise`. Queries and keys, and their gradients (N, T, ...), go back down in place.

    Args:
        grad_products: (N, blocks, D, D) of the level above; None where that is the top, whose products are not used.

    Returns:
        The gradient of this level's products.
    """
    grad_pairs, first = [], 0
    for run, (queries, keys, left_products, right_products) in zip(runs, saved, strict=True):
        right, left = run.halves(frames.queries)[1], run.halves(frames.keys)[0]
        right.copy_(queries.view_as(right))
        left.copy_(keys)
        grad_right, grad_left = run.halves(grad_queries)[1], run.halves(grad_keys)[0]
        grad_rows = grad_right.flatten(2, 3)  # (N, pairs, right · G, D)
        grad_left_products, grad_right_products = grad_rows.mT @ queries, keys.mT @ grad_left
        grad_right.copy_((grad_rows @ left_products).view_as(grad_right))
        grad_left.copy_(times_transposed(grad_left, right_products))
        if grad_products is not None:
            above = grad_products[:, first : first + run.pairs]
            grad_left_products += times_transposed(above, right_products)
            grad_right_products += left_products.mT @ above
        first += run.pairs
        grad_pairs.append(torch.stack([grad_left_products, grad_right_products], dim=2).flatten(1, 2))
    if grad_products is None:
        paired = sum(2 * run.pairs for run in runs)
        blocks = -(-frames.keys.shape[1] // runs[0].left)
        lone = grad_pairs[0].new_zeros(grad_pairs[0].shape[0], blocks - paired, *grad_pairs[0].shape[2:])
    else:
        lone = grad_products[:, first:]
    return torch.cat([*grad_pairs, lone], dim=1)
