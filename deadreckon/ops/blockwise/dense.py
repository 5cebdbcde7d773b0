"""Dense blocks of the route tree: every query sees every key, both in one frame, so only gates are left on the routes.

Softmax runs on a stock kernel (`stock.py`) where the device has one. Other scores, and other devices, go tile by tile
(`scores.py`). Shapes: n blocks a call, R query tokens and S keys each, G query heads for each key head (GQA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.leaf import plain_logits
from deadreckon.ops.blockwise.runs import Gate
from deadreckon.ops.blockwise.scores import EvenPower, Softmax, StickBreaking, Tiled
from deadreckon.ops.blockwise.stock import Backend, backend_for, dense_backward, dense_forward
from deadreckon.ops.blockwise.wide import Wide
from deadreckon.ops.factors import Power, Score

TILE = 1 << 20  # logits held at a time where no stock kernel serves
REACH = 256  # query tokens that share a decision on which keys are in reach


class Rows(NamedTuple):
    """What the backward pass needs of each query's row of weights, over all keys: (N, T, G, ...), or a view of it."""

    grad: Tensor  # (..., E) of the output
    out: Tensor  # (..., E)
    statistic: Tensor  # (...,) see `scores.py`; stick-breaking restores earlier values in place
    inner: Tensor  # (...,) grad · out if weights are divided by their sum, else 0
    grad_farther: Tensor  # (...,) sum of d log-weight over the keys already visited; stick-breaking adds to it

    @classmethod
    def of(cls, score: Tiled, grad: Tensor, out: Tensor, statistic: Tensor, dtype: torch.dtype) -> Rows:
        """The rows before any key is visited, with sums in `dtype`."""
        inner = (grad.to(dtype) * out.to(dtype)).sum(-1)
        if not score.normalised:  # d weight = grad · v alone
            inner = torch.zeros_like(inner)
        return cls(grad, out, statistic.clone(), inner, torch.zeros_like(inner))

    def view(self, view: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(*(view(x) for x in self))


class GateGradients(NamedTuple):
    """Sums of d log-weight over a block."""

    by_query: Tensor  # (N, n, R, G)
    by_key: Tensor  # (N, n, S, 1 | G)


def tiled_score(score: Score) -> Tiled:
    """The tiled form of a score."""
    if isinstance(score, Power):
        return EvenPower(score.p)
    return Softmax() if score == "softmax" else StickBreaking()


@dataclass(frozen=True)
class DenseBlocks:
    """How dense blocks are computed."""

    score: Tiled
    scale: float
    tokens: int  # of the sequence: how many keys a query may meet in all
    stock: Backend | None  # None: tile by tile
    stock_dtype: torch.dtype

    @classmethod
    def choose(cls, like: Tensor, score: Score, scale: float, tokens: int) -> DenseBlocks:
        """For inputs on the device and in the dtype of `like`."""
        stock = backend_for(like) if score == "softmax" else None
        return cls(tiled_score(score), scale, tokens, stock, like.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, out: Tensor, statistic: Tensor) -> None:
        """Adds keys to the running output (N, n, R, G, E) and statistic (N, n, R, G) of the rows, in place.

        q (N, n, R, G, D), k (N, n, S, D), v (N, n, S, E).
        """
        if self.stock is None:
            for tokens in self._tiles(q, k):
                z = self.scale * plain_logits(q[:, :, tokens], k)  # (N, n, tokens, G, S)
                log_gate = _tile_gate(gate, tokens, q.dtype)
                self.score.add(z, log_gate, None, v, out[:, :, tokens], statistic[:, :, tokens])
            return
        assert isinstance(self.score, Softmax)
        for tokens, keys in self.reach(q, k, gate, statistic):
            wide = Wide(self.stock, self.stock_dtype, q, k, v, gate, self.scale, tokens, keys)
            block_out, lse = dense_forward(self.stock, wide.q, wide.k, wide.v, self.scale)  # (N, n, tokens·G, ...)
            block_out, lse = (x.unflatten(2, wide.tokens_and_group) for x in (block_out, lse))
            lse = lse if gate is None else lse + gate.shift[:, :, tokens].to(lse.dtype)
            self.score.merge(block_out[..., : v.shape[-1]], lse, out[:, :, tokens], statistic[:, :, tokens])

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, rows: Rows, grad_q: Tensor, grad_k: Tensor,
        grad_v: Tensor,
    ) -> GateGradients | None:  # fmt: skip
        """Adds to the gradients of q, k and v in place; returns those of the gates, if there are any."""
        gates = None
        if gate is not None:
            gates = GateGradients(q.new_zeros(q.shape[:4]), k.new_zeros(gate.bias.shape))
        if self.stock is None:
            self._tiled_backward(q, k, v, gate, rows, grad_q, grad_k, grad_v, gates)
        else:
            self._stock_backward(self.stock, q, k, v, gate, rows, grad_q, grad_k, grad_v, gates)
        return gates

    def _stock_backward(
        self, stock: Backend, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, rows: Rows, grad_q: Tensor,
        grad_k: Tensor, grad_v: Tensor, gates: GateGradients | None,
    ) -> None:  # fmt: skip
        """With the log-sum-exp of the whole row, the stock kernel returns the exact gradients of its block."""
        for tokens, keys in self.reach(q, k, gate, rows.statistic):
            wide = Wide(stock, self.stock_dtype, q, k, v, gate, self.scale, tokens, keys)
            lse = rows.statistic[:, :, tokens]
            lse = lse if gate is None else lse - gate.shift[:, :, tokens].to(lse.dtype)
            wide_q, wide_k, wide_v = dense_backward(
                stock, wide.like(rows.grad[:, :, tokens]), wide.q, wide.k, wide.v, wide.like(rows.out[:, :, tokens]),
                lse.flatten(2, 3), self.scale,
            )  # fmt: skip
            grad_q[:, :, tokens] += wide_q[..., : q.shape[-1]].unflatten(2, wide.tokens_and_group)
            grad_k[:, :, keys] += wide_k[..., : k.shape[-1]]
            grad_v[:, :, keys] += wide_v[..., : v.shape[-1]]
            if gates is not None:
                by_query, by_key = wide.gate_gradients(wide_q, wide_k)
                gates.by_query[:, :, tokens] += by_query
                gates.by_key[:, :, keys] += by_key

    def _tiled_backward(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, rows: Rows, grad_q: Tensor, grad_k: Tensor,
        grad_v: Tensor, gates: GateGradients | None,
    ) -> None:  # fmt: skip
        inner = rows.inner.to(k.dtype)
        for tokens in self._tiles(q, k):
            grad = rows.grad[:, :, tokens].to(k.dtype)  # (N, n, tokens, G, E)
            grad_weight = plain_logits(grad, v) - inner[:, :, tokens].unsqueeze(-1)  # (N, n, tokens, G, S)
            z = self.scale * plain_logits(q[:, :, tokens], k)
            grad_z, grad_log_weight, weights = self.score.gradients(
                z, _tile_gate(gate, tokens, q.dtype), None, grad_weight, rows.statistic[:, :, tokens],
                rows.grad_farther[:, :, tokens],
            )  # fmt: skip
            grad_logits = self.scale * grad_z.flatten(2, 3)  # (N, n, tokens·G, S)
            grad_q[:, :, tokens] += (grad_logits @ k).unflatten(2, grad_z.shape[2:4])
            grad_k += grad_logits.mT @ q[:, :, tokens].flatten(2, 3)
            grad_v += weights.flatten(2, 3).mT @ grad.flatten(2, 3)
            if gates is not None:
                gates.by_query[:, :, tokens] = grad_log_weight.sum(-1)
                column = grad_log_weight.sum(2).mT  # (N, n, S, G)
                gates.by_key.add_(column if gates.by_key.shape[-1] > 1 else column.sum(-1, keepdim=True))

    def _tiles(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        """Slices of a block's query tokens, sized so that a tile of logits stays small."""
        size = max(16, TILE // (k.shape[:3].numel() * q.shape[3]))
        for start in range(0, q.shape[2], size):
            yield slice(start, start + size)

    def reach(self, q: Tensor, k: Tensor, gate: Gate | None, lse: Tensor) -> Iterator[tuple[slice, slice]]:
        """Slices of query tokens and of the keys in reach; keys gated below the output's precision are skipped.

        A weight is at most exp(scale ‖q‖ ‖k‖ + gates − lse), with lse (N, n, R, G) over nearer keys, or over all.
        Together, the keys skipped in a row weigh less than an eighth of the rounding error. On a CPU only, where
        reading the data needs no synchronisation, and where skipping spares the kernel slow denormal arithmetic.
        """
        whole = slice(0, k.shape[2])
        if gate is None or k.device.type != "cpu":
            yield slice(0, q.shape[2]), whole
            return
        negligible = math.log(torch.finfo(k.dtype).eps / 8 / self.tokens)
        longest = self.scale * k.norm(dim=-1).amax(2)
        bound = longest[:, :, None, None] * q.norm(dim=-1) + gate.shift - lse
        bound = bound if gate.bias.shape[-1] > 1 else bound.amax(-1, keepdim=True)
        pending: tuple[int, int, int] | None = None  # (first token, end, first key) of neighbours that share a call
        for start in range(0, q.shape[2], REACH):
            nearest = bound[:, :, start : start + REACH].amax(2, keepdim=True)
            reached = (~(nearest + gate.bias < negligible)).flatten(0, 1).any(0).any(-1).nonzero()  # NaN reaches
            if reached.numel() == 0:
                continue
            first, stop = int(reached[0]), min(start + REACH, q.shape[2])
            if pending and pending[1:] == (start, first):
                pending = (pending[0], stop, first)
                continue
            if pending:
                yield slice(*pending[:2]), slice(pending[2], whole.stop)
            pending = (start, stop, first)
        if pending:
            yield slice(*pending[:2]), slice(pending[2], whole.stop)


def _tile_gate(gate: Gate | None, tokens: slice, dtype: torch.dtype) -> Tensor | None:
    """(N, n, tokens, 1 | G, S) sums of log gates along the routes of a tile."""
    if gate is None:
        return None
    return (gate.shift[:, :, tokens].unsqueeze(-1) + gate.bias.mT.unsqueeze(2)).to(dtype)
