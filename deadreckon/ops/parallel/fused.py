"""Attention inside pieces on Triton kernels (`Inside` of `ring.py`): softmax, gates, Householder steps, documents.

The operators of `attend` return the log-sum-exp of their rows, and their backward passes take that of whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.ops.factors import Score
from deadreckon.ops.layout import sent
from deadreckon.ops.parallel.context import ContextParallel
from deadreckon.ops.triton.gated.gates import pruned
from deadreckon.ops.triton.gated.operator import gated_backward, gated_forward
from deadreckon.ops.triton.householder.operator import directions, householder_backward, householder_forward

Optional = Tensor | None


class InsideKernels:
    """`Inside` on Triton kernels. If packed, with boundaries `documents`, all pieces of a rank form one packed row."""

    knows_documents = True

    def __init__(self, cp: ContextParallel, documents: list[int] | None) -> None:
        self.cp, self.documents = cp, documents

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional, score: Score, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert score == "softmax"
        inputs = [
            None if x is None else self._row(x, y) for x, y in zip((q, k, v, w, beta, gates), "qkvwbg", strict=True)
        ]
        bounds, prune = self._boundaries(q), inputs[1] is not None and pruned(inputs[1], inputs[5])
        if w is None:
            out, lse, *saved = gated_forward(*self._without_steps(inputs), bounds, prune, scale)
        else:
            inputs[3] = directions(inputs[3])  # type: ignore[arg-type]
            out, lse, *saved = householder_forward(*inputs, bounds, prune, scale, True)
        return self._pieces(out, q).float(), self._statistic(lse, q).clone(), [lse, *saved]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Optional, beta: Optional, gates: Optional,
        saved: list[Tensor], out: Tensor, statistic: Tensor, grad_farther: Tensor, score: Score, scale: float,
    ) -> list[Tensor]:  # fmt: skip
        tensors = (q, k, v, w, beta, gates)
        inputs = [None if x is None else self._row(x, y) for x, y in zip(tensors, "qkvwbg", strict=True)]
        bounds, (local_lse, *saved) = self._boundaries(q), saved
        lse = local_lse.clone()  # with the padding of tiles
        self._statistic(lse, q, write=statistic)
        grad, out = (self._row(x.to(q.dtype), "q") for x in (grad, out))
        if w is None:
            found = gated_backward(grad, *self._without_steps(inputs), bounds, out, lse, *saved, scale)
        else:
            inputs[3] = directions(inputs[3])  # type: ignore[arg-type]
            found = householder_backward(grad, *inputs, bounds, out, lse, *saved, scale)
        present = [x for x in tensors if x is not None]
        return [self._pieces(x, like).view_as(like).to(like.dtype) for x, like in zip(found, present, strict=True)]

    @staticmethod
    def _without_steps(inputs: list[Optional]) -> list[Optional]:
        return [*inputs[:3], inputs[5]]

    def _row(self, x: Tensor, name: str) -> Tensor:
        """Pieces (M, C, ...) of key heads -> (M, C, 1 or G, ...), or one packed row (1, pieces · C, heads, ...)."""
        if name in "kvwb":
            x = x.unsqueeze(2)
        if name == "g":
            x = x.float()
        if self.documents is None:
            return x.contiguous()
        x = x.unflatten(0, (self.cp.pieces, -1)).transpose(1, 2)  # (pieces, C, H, G, ...)
        return x.flatten(2, 3).flatten(0, 1).unsqueeze(0).contiguous()

    def _pieces(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of `_row`, except for a dimension of 1."""
        if self.documents is None:
            return x
        heads = like.shape[0] // self.cp.pieces
        x = x[0].unflatten(0, (self.cp.pieces, -1)).unflatten(2, (heads, -1))  # (pieces, C, H, G, ...)
        return x.transpose(1, 2).flatten(0, 1)

    def _statistic(self, lse: Tensor, q: Tensor, write: Tensor | None = None) -> Tensor:
        """(M, C, G) of the kernels' (M, C padded, G) or (H, pieces · C padded, G), after writing `write` to it."""
        if self.documents is None:
            view = lse[:, : q.shape[1]]
        else:
            tokens = self.cp.pieces * q.shape[1]
            view = lse[:, :tokens].unflatten(1, (self.cp.pieces, -1)).transpose(0, 1)  # (pieces, H, C, G)
        if write is not None:
            view.copy_(write.view(view.shape))
        return view if self.documents is None else view.flatten(0, 1)

    def _boundaries(self, q: Tensor) -> Tensor | None:
        """Boundaries of the packed row: those of documents and of pieces."""
        if self.documents is None:
            return None
        size, bounds = q.shape[1], [0]
        for slot, piece in enumerate(self.cp.held):
            inner = [x - piece * size for x in self.documents if piece * size < x < (piece + 1) * size]
            bounds += [slot * size + x for x in (*inner, size)]
        return sent(bounds, q.device, torch.int32)
