"""Frames at the ends of a sequence as a differentiable operation, for attention to it from other ranks.

    q̃_i = H_0 ⋯ H_i q_i      k̃_j = (H_{j+1} ⋯ H_{T−1})ᵀ k_j      P = H_0 ⋯ H_{T−1}

Climbs the route tree without computing attention (`frames.py`). The backward pass climbs it again, then descends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.blockwise.frames import Crossing, crossings, fall, leaf_frames, rise
from deadreckon.ops.blockwise.leaf import Frames, HouseholderLeaf
from deadreckon.ops.blockwise.problem import Problem
from deadreckon.ops.blockwise.tree import LeafPadding
from deadreckon.ops.tracing import first_derivatives_only, without_autocast


class Ends(torch.autograd.Function):
    """q (N, T, G, D), k and w (N, T, D), beta (N, T) -> queries and keys like q and k, product (N, D, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, w, beta)
        ctx.set_materialize_grads(True)
        padding, problem, leaves = _leaves(q, k, w, beta)
        frames = _frames(problem, leaves)
        for runs in problem.levels:
            frames = rise(frames, runs)
        queries, keys = padding.cut(frames.queries, frames.keys)
        assert frames.products is not None
        product = frames.products[:, 0]
        return queries, keys, product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first_derivatives_only()
        with without_autocast(grads[0]):
            return _backward(*ctx.saved_tensors, *grads)


def _backward(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs, from those of queries, keys and product."""
    padding, problem, leaves = _leaves(q, k, w, beta)
    frames, saved = _frames(problem, leaves), list[list[Crossing]]()
    for runs in problem.levels:
        saved.append(crossings(frames, runs))
        frames = rise(frames, runs)
    dtype = problem.queries.dtype
    grad_q, grad_k = (x.to(dtype).clone(memory_format=torch.contiguous_format) for x in padding.pad(*grads[:2]))
    grad_products = grads[2].to(dtype).unsqueeze(1)  # (N, 1, D, D)
    for runs in reversed(problem.levels):
        grad_products = fall(frames, runs, saved.pop(), grad_q, grad_k, grad_products)
    grad_w, grad_beta = torch.empty_like(problem.keys), torch.empty_like(problem.keys[..., 0])
    places = grad_q, grad_k, grad_w, grad_beta
    for part, leaf in zip(problem.leaf_parts(), leaves, strict=True):
        here = [problem.in_leaves(x, part) for x in places]
        grad_part = grad_products.flatten(0, 1)[part].unsqueeze(0)
        new = leaf.gradients(torch.zeros_like(leaf.logits), here[0], here[1], grad_part)
        for place, value in zip(here, new, strict=True):
            place.copy_(value)
    grad_q, grad_k, grad_w, grad_beta = padding.cut(*places)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_w.to(w.dtype), grad_beta.to(beta.dtype)


def _leaves(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[LeafPadding, Problem, list[HouseholderLeaf]]:
    padding = LeafPadding(q, True, None, "softmax")
    q, k, w, beta = padding.pad(q, k, w, beta)
    problem = Problem.prepare(q, k, k, w, beta, None, "softmax", 1.0, padding.leaf)
    parts = (problem.householder_leaf(part, to_ends=True) for part in problem.leaf_parts())
    return padding, problem, [leaf for leaf in parts if leaf]


def _frames(problem: Problem, leaves: list[HouseholderLeaf]) -> Frames:
    return leaf_frames(problem, [leaf.frames for leaf in leaves if leaf.frames])
