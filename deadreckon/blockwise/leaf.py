"""The leaves of the route tree: up to 64 tokens at a time, all routes inside a leaf at once by the UT transform.

With W the leaf's directions, M = I + strictLower(diag(β) W Wᵀ), and rows for tokens, let

    A = lower(Q Wᵀ)    C = strictLower(W Kᵀ)    X = M⁻¹ diag(β) W    Y = M⁻¹ diag(β) C

Every product of Householder steps inside the leaf is I minus a piece of Xᵀ W, so that

    logits = lower(Q Kᵀ) − A Y
    Q̃ = Q − A X          queries, carried back to the leaf's start
    K̃ = K − Yᵀ W         keys, carried on to the leaf's end
    P = I − Xᵀ W         the whole leaf, first step leftmost

M has a unit diagonal, so the solve is safe for every β; nothing inverts a Householder step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plain_logits(q: Tensor, k: Tensor) -> Tensor:
    """(N, n, S, G, D) × (N, n, S, D) -> (N, n, S, G, S)."""
    return (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])


class HouseholderLeaf:
    """n leaves of S tokens, G queries for each key: q (N, n, S, G, D), k and w (N, n, S, D), beta (N, n, S).

    Attributes:
        logits: (N, n, S, G, S), not scaled; what stands above the diagonal means nothing.
        queries, keys: like q and k, in the frames of the leaf's start and end.
        products: (N, n, D, D).
    """

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> None:
        self.shape = q.shape[2:4]
        self.q, self.k, self.w, self.beta = q.flatten(2, 3), k, w, beta.unsqueeze(-1)
        self.w_w = w @ w.mT
        self.a = self._lower(self.q @ w.mT)
        self.c = (w @ k.mT).tril(-1)
        solved = torch.linalg.solve_triangular(
            self.beta * self.w_w, self.beta * torch.cat([w, self.c], dim=-1), upper=False, unitriangular=True
        )
        self.x, self.y = solved.split([w.shape[-1], k.shape[2]], dim=-1)
        self.logits = torch.baddbmm(*_flat(self.q @ k.mT, self.a, self.y), alpha=-1).view(*q.shape[:4], -1)
        self.queries = torch.baddbmm(*_flat(self.q, self.a, self.x), alpha=-1).view(q.shape)
        self.keys = torch.baddbmm(*_flat(k, self.y.mT, w), alpha=-1).view(k.shape)
        self.products = -self.x.mT @ w
        self.products.diagonal(dim1=-2, dim2=-1).add_(1)

    def forget(self) -> None:
        """Drops what only the gradients need."""
        del self.q, self.k, self.w, self.beta, self.w_w, self.a, self.c, self.x, self.y, self.logits

    def _lower(self, rows: Tensor) -> Tensor:
        """Keeps the tokens that a query meets on its way to the leaf's start: its own and those before."""
        return rows.unflatten(2, self.shape).transpose(2, 3).tril().transpose(2, 3).flatten(2, 3)

    def gradients(
        self, grad_logits: Tensor, grad_queries: Tensor, grad_keys: Tensor, grad_products: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """d q, d k, d w, d beta, from the gradients of what this leaf has computed."""
        grad_logits, grad_queries = grad_logits.flatten(2, 3), grad_queries.flatten(2, 3)
        width = self.w.shape[-1]
        grad_both = torch.cat([grad_queries, grad_logits], dim=-1)  # with [X, Y]: what multiplies A
        solved = torch.cat([self.x, self.y], dim=-1)
        grad_a = self._lower(grad_both @ solved.mT).neg_()
        grad_solved = -(self.a.mT @ grad_both)
        grad_solved[..., width:] -= self.w @ grad_keys.mT
        grad_w = -self.y @ grad_keys
        if grad_products is not None:
            grad_solved[..., :width] -= self.w @ grad_products.mT
            grad_w -= self.x @ grad_products
        # Through the solve: with R = M⁻ᵀ d[X, Y], the right-hand side receives R and M receives −R [X, Y]ᵀ.
        back = torch.linalg.solve_triangular((self.beta * self.w_w).mT, grad_solved, upper=True, unitriangular=True)
        grad_m = (back @ solved.mT).tril(-1).neg_()
        right = torch.cat([self.w, self.c], dim=-1)
        grad_beta = (back * right).sum(-1) + (grad_m * self.w_w).sum(-1)
        back *= self.beta
        grad_c = back[..., width:].tril(-1)
        grad_m *= self.beta
        grad_w += back[..., :width]
        grad_w += (grad_m + grad_m.mT) @ self.w
        grad_w += grad_c @ self.k
        grad_w += grad_a.mT @ self.q
        grad_k = grad_keys + grad_c.mT @ self.w
        grad_k += grad_logits.mT @ self.q
        grad_q = grad_queries + grad_logits @ self.k
        grad_q += grad_a @ self.w
        return grad_q.unflatten(2, self.shape), grad_k, grad_w, grad_beta


def _flat(*matrices: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.flatten(0, 1) for x in matrices)
