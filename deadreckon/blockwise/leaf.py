"""The leaves of the route tree: up to 64 tokens at a time, all routes inside a leaf at once by the UT transform.

With W the leaf's directions and T⁻¹ = (I + strictLower(diag(β) W Wᵀ))⁻¹ diag(β), every product of Householder steps
inside the leaf is I minus a piece of Wᵀ T⁻¹ W, so that (rows are tokens)

    logits = lower(Q Kᵀ) − lower(Q Wᵀ) T⁻¹ strictLower(W Kᵀ)
    Q̃ = Q − lower(Q Wᵀ) T⁻¹ W                    queries, carried back to the leaf's start
    K̃ = K − (T⁻¹ strictLower(W Kᵀ))ᵀ W           keys, carried on to the leaf's end
    P = I − Wᵀ T⁻ᵀ W                             the whole leaf, first step leftmost
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Leaf(NamedTuple):
    """Frames and logits of all leaves: n leaves of S tokens, G queries for each key."""

    logits: Tensor  # (N, n, S, G, S), not scaled; what is above the diagonal means nothing
    queries: Tensor  # (N, n, S, G, D) in the frame of the leaf's start
    keys: Tensor  # (N, n, S, D) in the frame of its end
    products: Tensor  # (N, n, D, D)


def plain_logits(q: Tensor, k: Tensor) -> Tensor:
    """(N, n, S, G, D) × (N, n, S, D) -> (N, n, S, G, S)."""
    return (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])


def householder_leaf(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Leaf:
    """q (N, n, S, G, D), k and w (N, n, S, D), beta (N, n, S)."""
    size, group = q.shape[2:4]
    beta = beta.unsqueeze(-1)
    q_w = plain_logits(q, w).mul(_lower(size, q)).flatten(2, 3)  # lower(Q Wᵀ), (N, n, S·G, S)
    w_k = (w @ k.mT).tril(-1)
    # One solve for T⁻¹ [W, strictLower(W Kᵀ)].
    solved = torch.linalg.solve_triangular(
        (beta * (w @ w.mT)).tril(-1), beta * torch.cat([w, w_k], dim=-1), upper=False, unitriangular=True
    )
    t_w, t_wk = solved.split([w.shape[-1], size], dim=-1)
    logits = plain_logits(q, k) - (q_w @ t_wk).unflatten(2, (size, group))
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return Leaf(
        logits=logits,
        queries=q - (q_w @ t_w).unflatten(2, (size, group)),
        keys=k - t_wk.mT @ w,
        products=identity - t_w.mT @ w,
    )


def _lower(size: int, like: Tensor) -> Tensor:
    """Which tokens a query meets on its way to the leaf's start: its own and those before, (S, 1, S)."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril().unsqueeze(1)
