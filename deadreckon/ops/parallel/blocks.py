"""Which pieces see which, and what lies between them: Householder products, gates, documents.

A query of piece a goes back to the start of its piece, crosses the pieces between, and meets the keys of piece t < a
in the frame of their piece's end. So what is between two pieces is one D × D product, P_{t+1} ⋯ P_{a−1}, and one sum of
log gates. Every rank has those of all pieces, which are O(R · D²) numbers per key head, whatever the length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import Gate
from deadreckon.ops.parallel.context import ContextParallel


class Pair(NamedTuple):
    """A local piece of queries and a piece of keys before it."""

    rows: int  # which of this rank's pieces the queries are
    keys: int  # which of its rank's pieces the keys are
    piece: int  # number of the queries' piece
    past: int  # number of the keys' piece
    queries_to: int  # of the piece's queries, those before this one
    keys_from: int  # of the piece's keys, this one and those after it


def pairs(cp: ContextParallel, rank: int, length: int, documents: list[int] | None) -> Iterator[Pair]:
    """Pairs of a local piece of queries and a piece of keys of `rank` that it sees; pieces have `length` tokens.

    With packed rows each pair is a rectangle: only the document across the end of the keys' piece can span both.
    """
    for rows, piece in enumerate(cp.held):
        for keys, past in enumerate(cp.pieces_of(rank)):
            if past >= piece:
                continue
            first, end = 0, length
            if documents is not None:
                last = (past + 1) * length - 1  # the token whose document it is
                number = bisect_right(documents, last)
                first = max(0, documents[number - 1] - past * length)
                end = min(length, documents[number] - piece * length)
            if end > 0:
                yield Pair(rows, keys, piece, past, end, first)


@dataclass
class Between:
    """What lies between pieces, N rows each. Gradients accumulate in place.

    Attributes:
        products: (count, N, D, D) of each piece's Householder steps, if there are any.
        totals: (count, N, 1 | G) sums of each piece's log gates, if there are any.
        crossed: for each local piece a, by t < a: the product of the pieces between, None where there are none.
        grad_crossed: their gradients, where there are some.
        grad_totals: of `totals`.
    """

    products: Tensor | None
    totals: Tensor | None
    crossed: list[list[Tensor | None]]
    grad_crossed: list[dict[int, Tensor]]
    grad_totals: Tensor | None

    @classmethod
    def gather(cls, cp: ContextParallel, products: Tensor | None, sums: Tensor | None) -> Between:
        """From this rank's products (pieces · N, D, D) and running sums of log gates (pieces · N, C, 1 | G)."""
        every = totals = None
        if products is not None:
            every = cp.every(products.unflatten(0, (cp.pieces, -1)))
        if sums is not None:
            totals = cp.every(sums[:, -1].unflatten(0, (cp.pieces, -1)))
        crossed = list[list[Tensor | None]]()
        for piece in cp.held:
            ways: list[Tensor | None] = [None] * piece
            for past in range(piece - 2, -1, -1) if every is not None else ():
                assert every is not None
                after = ways[past + 1]
                ways[past] = every[past + 1] if after is None else every[past + 1] @ after
            crossed.append(ways)
        grad_totals = None if totals is None else torch.zeros_like(totals)
        return cls(every, totals, crossed, [{} for _ in cp.held], grad_totals)

    def queries(self, pair: Pair, q: Tensor) -> Tensor:
        """Queries (N, R, G, D), from the frame of their piece's start to that of the keys."""
        way = self.crossed[pair.rows][pair.past]
        return q if way is None else (q.flatten(1, 2) @ way.mT).view_as(q)

    def queries_back(self, pair: Pair, q: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `queries`; stores that of the product."""
        way = self.crossed[pair.rows][pair.past]
        if way is None:
            return grad
        rows = grad.flatten(1, 2)
        self.grad_crossed[pair.rows][pair.past] = rows.mT @ q.flatten(1, 2)
        return (rows @ way).view_as(grad)

    def gate(self, pair: Pair, sums: Tensor | None, bias: Tensor | None) -> Gate | None:
        """The gates of a block: queries' sums (N, R, 1 | G) and the keys' bias (N, S, 1 | G)."""
        if sums is None or bias is None or self.totals is None:
            return None
        shift = sums + self.totals[pair.past + 1 : pair.piece].sum(0).unsqueeze(1)
        return Gate(shift.unsqueeze(1), bias.unsqueeze(1))

    def gate_back(self, pair: Pair, by_query: Tensor) -> None:
        """Gates of the pieces between are on all routes of a block: by_query (N, R, 1 | G) are d log-weights."""
        assert self.grad_totals is not None
        self.grad_totals[pair.past + 1 : pair.piece] += by_query.sum(1)

    def product_gradients(self, cp: ContextParallel) -> Tensor | None:
        """Gradients of this rank's products, (pieces · N, D, D)."""
        if self.products is None:
            return None
        grad = torch.zeros_like(self.products)
        for ways, grads in zip(self.crossed, self.grad_crossed, strict=True):
            for past in range(len(ways) - 1):  # ways[past] = products[past + 1] · ways[past + 1]
                if past not in grads:
                    continue
                after, received = ways[past + 1], grads[past]
                if after is None:
                    grad[past + 1] += received
                    continue
                grad[past + 1] += received @ after.mT
                more = self.products[past + 1].mT @ received
                grads[past + 1] = more + grads[past + 1] if past + 1 in grads else more
        return cp.total_of_own(grad).flatten(0, 1)

    def total_gradients(self, cp: ContextParallel) -> Tensor | None:
        """Gradients of this rank's totals, (pieces · N, 1 | G)."""
        return None if self.grad_totals is None else cp.total_of_own(self.grad_totals).flatten(0, 1)
