"""What all pieces of one sequence have in common, so that a piece that does not belong to its past is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deadreckon.ops.factors import Factors, Householder, Power, Rotation


@dataclass(frozen=True)
class Signature:
    """Sizes, dtype, device and factors of a piece; a past records those of its first."""

    batch: int
    query_heads: int
    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    transport: str
    gate: str
    score: str
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float) -> Signature:
        """Of arguments that are checked, with gates as (B, T, heads)."""
        batch, _, query_heads, width = q.shape
        transport, log_gate, score = factors
        return cls(
            batch, query_heads, k.shape[2], width, v.shape[3], q.dtype, q.device, _transport_name(transport),
            "None" if log_gate is None else f"gates of {log_gate.shape[2]} heads",
            f"Power({score.p})" if isinstance(score, Power) else repr(score), scale,
        )  # fmt: skip

    def check(self, piece: Signature) -> None:
        """Raises a ValueError that names the first argument in which a piece differs from the pieces before."""
        if self == piece:
            return
        for field in fields(self):
            expected, came = getattr(self, field.name), getattr(piece, field.name)
            if expected != came:
                argument = _ARGUMENTS[field.name]
                raise ValueError(f"{argument} {expected}, like the pieces before it in `past`, got {came}")


_ARGUMENTS = {
    "batch": "q: expected B =",
    "query_heads": "q: expected Hq =",
    "heads": "k: expected H =",
    "width": "q: expected D =",
    "value_width": "v: expected E =",
    "dtype": "q: expected dtype",
    "device": "q: expected device",
    "transport": "transport: expected",
    "gate": "log_gate: expected",
    "score": "score: expected",
    "scale": "scale: expected",
}
"""Field -> the argument of `attend_next` that it is about, and how a message about it begins."""


def _transport_name(transport: Rotation | Householder | None) -> str:
    """The kind of transport, for comparison and for messages."""
    if isinstance(transport, Rotation):
        return f"Rotation of {transport.angles.shape[2]} heads, values={transport.values}"
    return "None" if transport is None else "Householder"
