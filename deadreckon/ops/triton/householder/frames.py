"""Tensors that the stages pass on, head-major: n key heads, T padded to whole leaves, G queries for each key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.tiles import ceil_div

Place = tuple[int, int, int, int]
"""Of a run: start, count of pairs of blocks, tokens of a left block and of a right one."""


class Frames(NamedTuple):
    """Queries at the start of their block, keys at its end, values beside them; and each block's product of steps.

    Products of leaves are rounded to the dtype of the queries, which is as precise as the queries that cross them; with
    16 bits the rounding error is kept in `rest`: products of products need it.
    """

    queries: Tensor  # (n, T, G, D)
    keys: Tensor  # (n, T, D)
    values: Tensor  # (n, T, E)
    products: Tensor  # (n, blocks, D, D); float32, unless the blocks are leaves
    rest: Tensor | None = None  # like products of leaves

    @classmethod
    def room(cls, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Frames:
        """Empty frames of leaves, for `heads` key heads of q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E)."""
        leaves, width = ceil_div(k.shape[1], LEAF), k.shape[3]
        return cls(*_rows(q, k, v, heads), *q.new_empty(_parts(q), heads, leaves, width, width))


class Saved(NamedTuple):
    """What the forward pass saves of leaves for the backward pass, all heads: recomputing it costs as much again.

    Shapes depend on no branch, and no size is 1 for some lengths alone, so that a symbolic length stays general.
    """

    queries: Tensor  # see `Frames`; these four are not written to where one leaf is all there is
    keys: Tensor
    values: Tensor
    products: Tensor  # (1 | 2, N, leaves · D, D): products and, in 16 bits, their rounding errors
    inverse: Tensor  # (N, leaves · 64, 64): M⁻¹ of `leaf.py`

    @classmethod
    def room(cls, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        """Empty tensors to write to."""
        heads, leaves, width = k.shape[0] * k.shape[2], ceil_div(k.shape[1], LEAF), k.shape[3]
        products = q.new_empty(_parts(q), heads, leaves * width, width)
        return cls(*_rows(q, k, v, heads), products, q.new_empty(heads, leaves * LEAF, LEAF))

    @classmethod
    def nothing(cls, q: Tensor) -> Saved:
        """Tensors of no size: there is no backward pass, or it recomputes."""
        return cls(*(q.new_empty(0) for _ in range(5)))

    def frames(self, heads: slice) -> Frames:
        """The frames of some heads, as views."""
        products = self.products[:, heads].unflatten(2, (-1, self.products.shape[3]))
        return Frames(self.queries[heads], self.keys[heads], self.values[heads], *products)

    def inverses(self, heads: slice) -> Tensor:
        """The inverses of some heads, a view (n, leaves, 64, 64)."""
        return self.inverse[heads].unflatten(1, (-1, LEAF))


def _parts(q: Tensor) -> int:
    """How many numbers of q's dtype an entry of a product takes."""
    return 1 if q.dtype == torch.float32 else 2


def _rows(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for queries, keys and values of `heads` key heads, padded to whole leaves."""
    tokens, group = ceil_div(k.shape[1], LEAF) * LEAF, q.shape[2] // k.shape[2]
    queries = buffer(q, heads, tokens, group, k.shape[3])
    return queries, buffer(q, heads, tokens, k.shape[3]), buffer(q, heads, tokens, v.shape[3])


class Back(NamedTuple):
    """What the backward pass knows of each row, and the gradients of log-weights that it sums up for gates."""

    grad: Tensor  # (n, T, G, E): of the output
    delta: Tensor  # (n, T, G): output · its gradient
    lse: Tensor  # (n, T, G)
    row_shift: Tensor  # (n, T, G): −lse in base 2, with gates since the start of the row's leaf
    by_query: Tensor  # (n, T, G)
    by_key: Tensor  # (n, T, G)


def buffer(like: Tensor, heads: int, tokens: int, *shape: int) -> Tensor:
    """(n, T, ...) with room for one more token in each head.

    PyTorch caches cuDNN's plans by the layout of q, k and v alone. This gives them a layout that is used nowhere else,
    always with the same layout of output and gradient.
    """
    return like.new_empty(heads, tokens + 1, *shape)[:, :tokens]
