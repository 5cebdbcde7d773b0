"""Entry points of the encodings' decode kernels, for one token: see `deadreckon/ops/triton/token.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def maps_of_token(x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None, str, float]]) -> list[Tensor]:
    """Linear maps of x (B, 1, inputs) in one launch; parts are weight, bias, ending (an activation) and its scale."""
    from deadreckon.ops.triton.token import maps

    return maps(x, parts)


def directions_of_token(
    low: Tensor, up: Tensor, recent: Tensor, filters: Tensor, places: Tensor, heads: int, activation: str,
    epsilon: float, unit: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Directions (B, 1, H, D) of the next token from its low-rank map (B, 1, rank), and the updated recent inputs."""
    from deadreckon.ops.triton.token import directions

    return directions(low, up, recent, filters, places, heads, activation, epsilon, unit)
