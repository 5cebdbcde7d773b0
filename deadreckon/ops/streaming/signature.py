"""`Signature`: what all pieces of one sequence must have in common, or they are rejected."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.factors import Factors, Power


class Signature(NamedTuple):
    """Sizes, dtype, device and factors of a piece; a past records those of its first. Cheap: every token builds one."""

    batch: int
    query_heads: int
    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    rotation: tuple[int, bool] | None  # how many heads have angles of their own, and whether values rotate
    householder: bool
    gate_heads: int | None
    score: str | int  # its name, or the power
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float) -> Signature:
        """The signature of validated arguments, with gates as (B, T, heads)."""
        batch, _, query_heads, width = q.shape
        _, log_gate, score = factors
        rotation, steps = factors.parts()
        turns = None if rotation is None else (rotation.angles.shape[2], rotation.values)
        return cls(
            batch, query_heads, k.shape[2], width, v.shape[3], q.dtype, q.device, turns, steps is not None,
            None if log_gate is None else log_gate.shape[2], score.p if isinstance(score, Power) else score, scale,
        )  # fmt: skip

    def check(self, piece: Signature) -> None:
        """Raises a ValueError that names the first argument in which a piece differs from the preceding ones."""
        if self == piece:
            return
        for field, argument in _ARGUMENTS.items():
            expected, came = (_said(field, signature) for signature in (self, piece))
            if expected != came:
                raise ValueError(f"{argument} {expected}, like the pieces before it in `past`, got {came}")


_ARGUMENTS = {
    "batch": "q: expected B =",
    "query_heads": "q: expected Hq =",
    "heads": "k: expected H =",
    "width": "q: expected D =",
    "value_width": "v: expected E =",
    "dtype": "q: expected dtype",
    "device": "q: expected device",
    "rotation": "transport: expected",
    "householder": "transport: expected",
    "gate_heads": "log_gate: expected",
    "score": "score: expected",
    "scale": "scale: expected",
}
"""Field -> the beginning of its error message, with the argument of `attend_next` that it is about."""


def _said(field: str, signature: Signature) -> str:
    """A signature's field, as error messages show it."""
    if field in ("rotation", "householder"):
        turns = signature.rotation
        kinds = [f"Rotation of {turns[0]} heads, values={turns[1]}"] if turns else []
        return " and ".join(kinds + ["Householder"] * signature.householder) or "None"
    value = getattr(signature, field)
    if field == "gate_heads" and value is not None:
        return f"gates of {value} heads"
    return f"Power({value})" if field == "score" and isinstance(value, int) else str(value)
