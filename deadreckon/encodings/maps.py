"""Linear maps of an input that encodings compute factors from, each with what follows it: gates and strengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from deadreckon.ops.pointwise import at_least_single, has_kernels, log_gate, strength
from deadreckon.ops.token import maps_of_token

MOST_SEQUENCES = 64  # of a step whose small maps are one kernel: each sequence's programs read all weights


class SelfInitialised:
    """Marks a module whose `reset_parameters` initialises it: models do not apply their default initialisation."""


class Projection(SelfInitialised, nn.Linear):
    """A linear map of an encoding.

    Args:
        initial: standard deviation of normal weights before training; 0 for PyTorch's default.
        start: of the bias.
        from_zero: whether weights and bias are 0 before training.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        initial: float = 0.0,
        start: float = 0.0,
        from_zero: bool = False,
    ) -> None:
        self.initial, self.start, self.from_zero = initial, start, from_zero  # nn.Linear initialises itself
        super().__init__(inputs, outputs, bias)

    ending: str | None = "none"  # what follows the map, as kernels know it; None if they do not
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.end(linear(x, self.weight, self.bias))

    def end(self, y: Tensor) -> Tensor:
        """What follows the map."""
        return y

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.initial:
            nn.init.normal_(self.weight, std=self.initial)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.start)
        if self.from_zero:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)


class ForgetGate(Projection):
    """log f for each head: (B, T, d_model) -> (B, T, heads).

    log f = scale · log σ(a), a = u · x + b. With `from_zero`, log f = scale · min(0, a), which is log σ(a) for large
    |a|, and u = b = 0 before training: nothing is forgotten, exactly, and ∂ log f / ∂a = 1, twice that of log σ at 0
    (`clamp` passes gradients at its bound). After a step, tokens with a < 0 are on the ramp; others begin to forget
    when u turns.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        bias: bool = True,
        *,
        initial: float = 0.0,
        scale: float = 1.0,
        from_zero: bool = False,
    ) -> None:
        super().__init__(d_model, heads, bias, initial=initial, from_zero=from_zero)
        self.scale, self.ending = scale, None if from_zero else "log gate"

    def end(self, y: Tensor) -> Tensor:
        return self.scale * at_least_single(y).clamp(max=0) if self.from_zero else log_gate(y, self.scale)


class Strength(Projection):
    """β for each key head: (B, T, d_model) -> (B, T, heads).

    β = 2σ(a), a = u · x + b. With `from_zero`, β = 2 max(0, tanh(a / 2)) = 2 max(0, 2σ(a) − 1), and u = b = 0 before
    training: the route is the identity, exactly, and ∂β/∂a = 1, twice that of 2σ at 0.
    """

    def __init__(self, d_model: int, heads: int, *, initial: float, start: float, from_zero: bool) -> None:
        super().__init__(d_model, heads, initial=initial, start=start, from_zero=from_zero)
        self.ending = None if from_zero else "strength"

    def end(self, y: Tensor) -> Tensor:
        return 2 * (at_least_single(y) / 2).tanh().clamp(min=0) if self.from_zero else strength(y)


def maps(x: Tensor, *parts: Projection) -> list[Tensor]:
    """What each part makes of x (B, T, d_model); of one token, on a GPU, all of them in one kernel."""
    if in_step(x, *parts):
        return maps_of_token(x, [(part.weight, part.bias, str(part.ending), part.scale) for part in parts])
    return [part(x) for part in parts]


def in_step(x: Tensor, *parts: nn.Module) -> bool:
    """Whether x is one more token, of few sequences, and kernels can do what these parts, Projections, would."""
    return (
        x.shape[1] == 1
        and len(x) <= MOST_SEQUENCES
        and has_kernels(x)
        and not torch.is_grad_enabled()
        and all(
            isinstance(part, Projection)  # not an adapter in its place, such as LoRA's
            and part.ending is not None
            and type(part.weight) is nn.Parameter
            and part.weight.is_contiguous()
            and not (part._forward_hooks or part._forward_pre_hooks)
            for part in parts
        )
    )
