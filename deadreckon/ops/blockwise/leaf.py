"""The leaves of the route tree: up to 64 tokens at a time, all routes inside a leaf at once by the UT transform.

With W the leaf's directions, M = I + strictLower(diag(β) W Wᵀ), and rows for tokens, let

    A = lower(Q Wᵀ)    C = strictLower(W Kᵀ)    [X, Y] = M⁻¹ diag(β) [W, C]

Every product of Householder steps inside the leaf is I minus a piece of Xᵀ W, so that

    Q̃ = Q − A X          queries, carried back to the leaf's start
    logits = Q Kᵀ − A Y
    P = I − Xᵀ W         the whole leaf, first step leftmost
    K̃ = K − Yᵀ W         keys, carried on to the leaf's end

A row of one leaf needs its logits alone, which take Y and not X.

M has a unit diagonal, so the solve is safe for every β; nothing inverts a Householder step. All inner products are one
matrix, [Q; W] [W; K]ᵀ, and what uses X and Y uses both: a few large products are faster than many small ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.products import times_transposed


class Frames(NamedTuple):
    """Tokens carried to the ends of their blocks: in the frames of one level of the tree."""

    queries: Tensor  # (N, T, G, D) in the frame of their block's first token; of leaves (1, leaves, S, G, D)
    keys: Tensor  # (N, T, D) in the frame of their block's last token; of leaves (1, leaves, S, D)
    products: Tensor | None  # (N, blocks, D, D); None without Householder steps, where all frames are one


def plain_logits(q: Tensor, k: Tensor) -> Tensor:
    """(N, n, S, G, D) × (N, n, S, D) -> (N, n, S, G, S)."""
    return times_transposed(q.flatten(2, 3), k).unflatten(2, q.shape[2:4])


class HouseholderLeaf:
    """n leaves of S tokens, G queries for each key: q (N, n, S, G, D), k and w (N, n, S, D), beta (N, n, S).

    Args:
        carried: whether frames are wanted, too.

    Attributes:
        logits: (N, n, S, G, S), not scaled; entries above the diagonal are meaningless.
        frames: queries and keys like q and k, products (N, n, D, D); None if not wanted.
    """

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, beta: Tensor, carried: bool) -> None:
        self.shape = q.shape[2:4]
        self.rows, self.size = self.shape.numel(), k.shape[2]
        self.width = k.shape[3] if carried else 0  # columns of X
        self.w, self.beta = w, beta.unsqueeze(-1)
        self.from_rows = torch.cat([q.flatten(2, 3), w], dim=2)  # [Q; W]
        self.to_rows = torch.cat([w, k], dim=2)  # [W; K]
        inner = times_transposed(self.from_rows, self.to_rows)
        (q_w, q_k), (self.w_w, w_k) = self._quarters(inner)
        self.a = self._lower(q_w)
        self.right = torch.cat([w[..., : self.width], w_k.tril(-1)], dim=-1)  # [W, C]
        self.solved = torch.linalg.solve_triangular(
            self.beta * self.w_w, self.beta * self.right, upper=False, unitriangular=True
        )
        from_queries, from_logits = self._columns(self.a @ self.solved)
        self.logits = (q_k - from_logits).unflatten(2, self.shape)
        self.frames: Frames | None = None
        if carried:
            queries = (q.flatten(2, 3) - from_queries).unflatten(2, self.shape)
            products, keys = (self.solved.mT @ w).neg_().split([self.width, self.size], dim=2)
            products.diagonal(dim1=-2, dim2=-1).add_(1)
            self.frames = Frames(queries, keys + k, products)

    def _quarters(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The parts of a matrix shaped like [Q; W] [W; K]ᵀ."""
        upper, lower = x.split([self.rows, self.size], dim=2)
        first, second = (part.split([self.size, self.size], dim=3) for part in (upper, lower))
        return (first[0], first[1]), (second[0], second[1])

    def _columns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of x that belong to X and Y."""
        first, second = x.split([self.width, self.size], dim=-1)
        return first, second

    def _lower(self, rows: Tensor) -> Tensor:
        """Keeps the tokens that a query meets on its way to the leaf's start: its own and those before."""
        return rows.unflatten(2, self.shape).transpose(2, 3).tril().transpose(2, 3).flatten(2, 3)

    def gradients(
        self, grad_logits: Tensor, grad_queries: Tensor, grad_keys: Tensor, grad_products: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """d q, d k, d w, d beta, from the gradients of what this leaf has computed; of what is not carried, zeros."""
        grad_logits, grad_queries = grad_logits.flatten(2, 3), grad_queries.flatten(2, 3)
        # What −A [X, Y] receives.
        grad_from_a = torch.cat([grad_queries, grad_logits], dim=-1) if self.frames else grad_logits
        grad_solved = self.a.mT @ grad_from_a
        if self.frames:
            if grad_products is None:
                grad_products = grad_keys.new_zeros(*grad_keys.shape[:2], self.width, self.width)
            grad_from_w = torch.cat([grad_products, grad_keys], dim=2)  # what −[X, Y]ᵀ W receives
            grad_solved += times_transposed(self.w, grad_from_w)
        # Through the solve: with R = M⁻ᵀ d[X, Y], its right-hand side receives R, and M receives −R [X, Y]ᵀ.
        back = torch.linalg.solve_triangular(
            (self.beta * self.w_w).mT, grad_solved, upper=True, unitriangular=True
        ).neg_()
        grad_m = times_transposed(back, self.solved).tril(-1).neg_()
        grad_beta = (back * self.right).sum(-1) + (grad_m * self.w_w).sum(-1)
        back *= self.beta
        grad_inner = grad_logits.new_empty(*grad_logits.shape[:2], self.rows + self.size, 2 * self.size)
        (grad_q_w, grad_q_k), (grad_w_w, grad_w_k) = self._quarters(grad_inner)
        grad_q_w.copy_(self._lower(times_transposed(grad_from_a, self.solved))).neg_()
        grad_q_k.copy_(grad_logits)
        torch.mul(grad_m, self.beta, out=grad_w_w)
        grad_w_k.copy_(back[..., self.width :].tril(-1))
        grad_q, grad_w = (grad_inner @ self.to_rows).split([self.rows, self.size], dim=2)
        grad_w_too, grad_k = (grad_inner.mT @ self.from_rows).split([self.size, self.size], dim=2)
        grad_w = grad_w + grad_w_too
        if self.frames:
            grad_w += back[..., : self.width] - self.solved @ grad_from_w
        return (grad_q + grad_queries).unflatten(2, self.shape), grad_k + grad_keys, grad_w, grad_beta
