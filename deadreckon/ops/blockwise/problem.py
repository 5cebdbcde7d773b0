"""`Problem`: inputs, precision and layout of one route-tree attention, shared by the forward and the backward pass.

N = B·H: one row for each key head. The G query heads that share a key head (GQA) are a dimension of q after the tokens.
T is a whole number of leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.ops.blockwise.causal import CausalLeaves, leaf_size
from deadreckon.ops.blockwise.dense import DenseBlocks
from deadreckon.ops.blockwise.finite import contained
from deadreckon.ops.blockwise.leaf import HouseholderLeaf, plain_logits
from deadreckon.ops.blockwise.precision import exact, work
from deadreckon.ops.blockwise.runs import LEAF, Run, levels
from deadreckon.ops.blockwise.stock import backend_for
from deadreckon.ops.factors import Score

CACHED = 64 * LEAF**2  # entries of the logits that a CPU works on at a time, so that they stay in its cache


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, H·G, ...) -> (B·H, T, G, ...)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)


def gates_by_head(log_gate: Tensor, heads: int) -> Tensor:
    """(B, T, H or Hq) -> (B·H, T, 1 or G), clamped for summing: exp(-1e4) is 0 too, and -inf - (-inf) is NaN."""
    return by_head(log_gate, heads).to(exact(log_gate.device)).clamp(min=-1e4)


def leaf_tokens(length: int, householder: bool, gates: Tensor | None, score: Score, like: Tensor) -> int:
    """The size of a leaf: as large as one causal call of the stock kernel can handle, else `LEAF` at most."""
    small = min(LEAF, -(-length // 8) * 8)
    if householder or score != "softmax" or backend_for(like) is None:
        return small
    if gates is not None and like.device.type != "cpu":  # reading the gates would synchronise with the device
        return small
    return max(small, leaf_size(gates, length) or 0)


@dataclass(frozen=True)
class Problem:
    """Causal attention along routes. Tensors are contiguous, finite, and in the working precision."""

    queries: Tensor  # (N, T, G, D)
    keys: Tensor  # (N, T, D)
    values: Tensor  # (N, T, E)
    w: Tensor | None  # (N, T, D)
    beta: Tensor | None  # (N, T)
    sums: Tensor | None  # (N, T, 1 | G) running sums of log gates, float64
    poison: Tensor | None  # (N, T) NaN from the first token that is not finite on, else 0; None if all are finite
    dense: DenseBlocks  # how blocks above the leaves are computed
    leaf: int  # tokens of a leaf
    leaf_dtype: torch.dtype  # of logits and weights in leaves, and of outputs
    levels: list[list[Run]]  # pairs of blocks above the leaves, near to far
    dtype: torch.dtype  # of the inputs

    @classmethod
    def prepare(
        cls, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
        score: Score, scale: float, leaf: int,
    ) -> Problem:  # fmt: skip
        """From q (N, T, G, D), k (N, T, D), v (N, T, E), w (N, T, D), beta (N, T), log gates (N, T, 1 | G)."""
        strengths = None if w is None or beta is None else beta * w.square().sum(-1)
        inputs, poison = contained((k, v, w, beta, gates), strengths)
        keys, values, w, beta, gates = inputs
        assert keys is not None
        assert values is not None
        dense = DenseBlocks.choose(q, score, scale, q.shape[1])
        queries, keys, values = (x.to(work(q.dtype)).contiguous() for x in (q, keys, values))
        return cls(
            queries,
            keys,
            values,
            w=None if w is None else w.contiguous(),
            beta=None if beta is None else beta.contiguous(),
            sums=None if gates is None else gates.contiguous().cumsum(1),
            poison=poison,
            dense=dense,
            leaf=leaf,
            leaf_dtype=exact(q.device) if dense.score.needs_double else work(q.dtype),
            levels=list(levels(q.shape[1], leaf)),
            dtype=q.dtype,
        )

    @property
    def stock_leaves(self) -> bool:
        """Whether a leaf is one causal call of the stock kernel: only then it is larger than LEAF."""
        return self.leaf > LEAF

    def in_leaves(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """x (N, T, ...), or some of its leaves, as (1, leaves, S, ...): the leaves of all heads in one batch."""
        return x.view(-1, self.leaf, *x.shape[2:])[part].unsqueeze(0)  # always a view: it is written to

    def leaf_parts(self) -> Iterator[slice]:
        """Which leaves to compute at a time: all on a GPU; on a CPU as many as its cache holds."""
        size = count = self.keys.shape[0] * self.keys.shape[1] // self.leaf
        if self.keys.device.type == "cpu":
            size = max(1, CACHED // (self.leaf**2 * self.queries.shape[2]))
        for start in range(0, count, size):
            yield slice(start, start + size)

    def visible(self) -> Tensor:
        """(S, 1, S): which keys of its leaf a query sees."""
        ones = torch.ones(self.leaf, self.leaf, dtype=torch.bool, device=self.keys.device)
        return ones.tril(0 if self.dense.score.sees_itself else -1).unsqueeze(1)

    def leaf_gate(self, part: slice) -> Tensor | None:
        """(1, leaves, S, 1 | G, S) sums of log gates along the routes inside each leaf."""
        if self.sums is None:
            return None
        sums = self.in_leaves(self.sums, part)
        between = sums.unsqueeze(-1) - sums.mT.unsqueeze(2)
        # Entries above the diagonal are no routes: keep them from overflowing.
        return between.masked_fill(~self.visible(), 0).to(self.leaf_dtype)

    def householder_leaf(self, part: slice, to_ends: bool = False) -> HouseholderLeaf | None:
        """Some of the leaves; carried to their ends if that is asked for, or if the tree has levels above them."""
        if self.w is None or self.beta is None:
            return None
        q, k, w, beta = (self.in_leaves(x, part) for x in (self.queries, self.keys, self.w, self.beta))
        return HouseholderLeaf(q, k, w, beta, carried=to_ends or bool(self.levels))

    def leaf_logits(self, leaf: HouseholderLeaf | None, part: slice) -> Tensor:
        """(1, leaves, S, G, S) logits inside each leaf, scaled."""
        if leaf:
            return self.dense.scale * leaf.logits.to(self.leaf_dtype)
        q, k = (self.in_leaves(x, part) for x in (self.queries, self.keys))
        return self.dense.scale * plain_logits(q, k).to(self.leaf_dtype)

    def causal_leaves(self) -> CausalLeaves:
        """All leaves, as causal calls of the stock kernel."""
        assert self.dense.stock is not None
        q, k, v = (self.in_leaves(x)[0] for x in (self.queries, self.keys, self.values))
        sums = None if self.sums is None else self.in_leaves(self.sums)[0]
        return CausalLeaves(self.dense.stock, self.dtype, q, k, v, sums, self.dense.scale)
