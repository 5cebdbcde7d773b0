"""How a tile of logits becomes weights, and what its gradients are, for each score.

A tile holds the logits z of a range of queries against a range of keys, (N, n, tokens, G, S). In the forward pass tiles
come from near to far: `add` folds each into the running output and one running number for each row, its statistic (the
log-sum-exp, for softmax); `finish` turns these into the output. In the backward pass tiles come from far to near:
`gradients` returns d logits, d log-weights (which is what a gate receives) and the weights.

`gate` is the sum of log gates along each route, or None; `visible` marks the keys that a query may see, or None.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from deadreckon.ops.blockwise.precision import exact, faded


class Tiled(Protocol):
    """The contract of a score."""

    normalised: bool  # whether weights are divided by their sum
    needs_double: bool  # whether leaves and outputs are computed in float64
    sees_itself: bool  # whether a token is among the keys of its own query
    padding_statistic: float  # makes all weights of a row zero: for rows of padding, in the backward pass

    def start(self, rows: Tensor) -> Tensor:
        """The statistic before any tile, shaped like rows (N, T, G)."""

    def add(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, statistic: Tensor
    ) -> None:
        """Folds a tile into out (N, n, tokens, G, E) and statistic (N, n, tokens, G), in place."""

    def finish(self, out: Tensor, statistic: Tensor) -> Tensor:
        """The output, after the last `add`."""

    def gradients(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, grad_weight: Tensor, statistic: Tensor,
        grad_farther: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """d z, d log-weight and the weights, given d weight = grad · v (less grad · out if rows are normalised).

        grad_farther (N, n, tokens, G) holds the sum of d log-weight over farther tiles. Stick-breaking adds to it.
        """


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """(N, n, tokens, G, S) × (N, n, S, E) -> (N, n, tokens, G, E)."""
    return (weights.flatten(2, 3) @ v).unflatten(2, weights.shape[2:4])


class Softmax:
    """exp, divided by the row's sum. The statistic is the log-sum-exp; `out` is kept normalised."""

    normalised = True
    needs_double = False
    sees_itself = True
    padding_statistic = float("inf")

    def start(self, rows: Tensor) -> Tensor:
        return torch.full_like(rows, -torch.inf)

    def add(self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, lse: Tensor) -> None:
        z = z if gate is None else z + gate
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        self.merge(weighted_sum(z.softmax(-1), v), z.logsumexp(-1), out, lse)

    def merge(self, tile_out: Tensor, tile_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """Folds in a part of the rows that is already normalised, with its log-sum-exp."""
        out.lerp_(tile_out.to(out.dtype), torch.sigmoid(tile_lse - lse).unsqueeze(-1))
        lse.copy_(torch.logaddexp(lse, tile_lse))

    def finish(self, out: Tensor, lse: Tensor) -> Tensor:
        return out

    def gradients(
        self,
        z: Tensor,
        gate: Tensor | None,
        visible: Tensor | None,
        grad_weight: Tensor,
        lse: Tensor,
        grad_farther: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z if gate is None else z + gate
        weights = (z - lse.unsqueeze(-1)).exp()
        weights = weights if visible is None else weights.masked_fill(~visible, 0)
        grad = weights * grad_weight
        return grad, grad, weights


class EvenPower:
    """z^p, divided by the row's sum, which is the statistic. Powers are taken directly: no logarithm, no lost sign.

    A row may hold one small logit alone. Its weight is 1 and its gradient 0 all the same, but a rounding error there is
    divided by the logit: so leaves, outputs and statistic are kept in float64.
    """

    normalised = True
    needs_double = True
    sees_itself = True
    padding_statistic = float("inf")

    def __init__(self, p: int) -> None:
        self.p = p

    def start(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows, dtype=exact(rows.device))

    def _gated(self, power: Tensor, gate: Tensor | None, visible: Tensor | None) -> Tensor:
        power = power if gate is None else power * faded(gate, power.dtype)
        return power if visible is None else power.masked_fill(~visible, 0)

    def add(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, total: Tensor
    ) -> None:
        weights = self._gated(z**self.p, gate, visible)
        out += weighted_sum(weights, v)
        total += weights.sum(-1, dtype=total.dtype)

    def finish(self, out: Tensor, total: Tensor) -> Tensor:
        total.copy_(torch.where(total > 0, total, torch.ones_like(total)))
        return out / total.unsqueeze(-1)

    def gradients(
        self,
        z: Tensor,
        gate: Tensor | None,
        visible: Tensor | None,
        grad_weight: Tensor,
        total: Tensor,
        grad_farther: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lower = self._gated(z ** (self.p - 1), gate, visible) / total.unsqueeze(-1).to(z.dtype)
        weights = lower * z
        return self.p * lower * grad_weight, weights * grad_weight, weights


class StickBreaking:
    """σ(z_j) Π_{nearer s} (1 − σ(z_s)), a token not seeing itself. The statistic is the log of what is left.

    It is float64: the backward pass restores it by undoing the steps, which must not lose the early, small ones.
    """

    normalised = False
    needs_double = False
    sees_itself = False
    padding_statistic = -float("inf")

    def start(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows, dtype=exact(rows.device))

    def _steps(self, z: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        return z, -logsigmoid(-z)  # softplus gives up its tail beyond 20

    def _weights(self, z: Tensor, broken: Tensor, gate: Tensor | None, log_left: Tensor) -> Tensor:
        left = log_left.unsqueeze(-1).to(z.dtype) - broken.flip(-1).cumsum(-1).flip(-1)
        log_weights = z + left
        return (log_weights if gate is None else log_weights + gate).exp()

    def add(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, log_left: Tensor
    ) -> None:
        z, broken = self._steps(z, visible)
        out += weighted_sum(self._weights(z, broken, gate, log_left), v)
        log_left -= broken.sum(-1, dtype=log_left.dtype)

    def finish(self, out: Tensor, log_left: Tensor) -> Tensor:
        return out

    def gradients(
        self,
        z: Tensor,
        gate: Tensor | None,
        visible: Tensor | None,
        grad_weight: Tensor,
        log_left: Tensor,
        grad_farther: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        z, broken = self._steps(z, visible)
        log_left += broken.sum(-1, dtype=log_left.dtype)
        weights = self._weights(z, broken, gate, log_left)
        grad = weights * grad_weight
        # Breaking at j shortens the stick for j itself and for all that is farther.
        shortened = grad.cumsum(-1) + grad_farther.unsqueeze(-1)
        grad_farther += grad.sum(-1)
        return grad - z.sigmoid() * shortened, grad, weights
