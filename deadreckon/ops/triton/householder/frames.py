"""What stages hand on, head by head: n key heads, T padded to whole leaves, G queries for each key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.tiles import ceil_div

Place = tuple[int, int, int, int]
"""Of a run: start, count of pairs of blocks, tokens of a left block and of a right one."""


class Frames(NamedTuple):
    """Queries at the start of their block, keys at its end, values beside them; and each block's product of steps."""

    queries: Tensor  # (n, T, G, D)
    keys: Tensor  # (n, T, D)
    values: Tensor  # (n, T, E)
    products: Tensor  # (n, blocks, D, D) float32

    @classmethod
    def room(cls, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Frames:
        """Room for those of leaves, of so many key heads of q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E)."""
        leaves, width = ceil_div(k.shape[1], LEAF), k.shape[3]
        tokens, group = leaves * LEAF, q.shape[2] // k.shape[2]
        return cls(
            buffer(q, heads, tokens, group, width), buffer(q, heads, tokens, width),
            buffer(q, heads, tokens, v.shape[3]), q.new_empty(heads, leaves, width, width, dtype=torch.float32),
        )  # fmt: skip


class Saved(NamedTuple):
    """What the forward pass saves of leaves for the backward pass, all heads: recomputing it costs as much again."""

    queries: Tensor  # see `Frames`; empty where one leaf is all there is
    keys: Tensor
    values: Tensor
    products: Tensor
    inverse: Tensor  # (N, leaves, 64, 64): M⁻¹ of `leaf.py`

    @classmethod
    def room(cls, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        """To be written to."""
        heads, leaves = k.shape[0] * k.shape[2], ceil_div(k.shape[1], LEAF)
        inverse = q.new_empty(heads, leaves, LEAF, LEAF)
        return cls(*Frames.room(q, k, v, heads), inverse) if leaves > 1 else cls.nothing(q)._replace(inverse=inverse)

    @classmethod
    def nothing(cls, q: Tensor) -> Saved:
        """Where there will be no backward pass."""
        return cls(*(q.new_empty(0) for _ in range(5)))


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

    PyTorch finds cuDNN's plans by the layout of q, k and v alone. This gives them a layout that is used nowhere else,
    always with the same layout of output and gradient.
    """
    return like.new_empty(heads, tokens + 1, *shape)[:, :tokens]
