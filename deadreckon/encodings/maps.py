"""Projections that encodings compute factors with, each with the function that follows it: log gates and β."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deadreckon.ops.modules import is_plain
from deadreckon.ops.pointwise import at_least_single, has_kernels, log_gate, strength
from deadreckon.ops.token import maps_of_token

MOST_SEQUENCES = 64  # of a decoding step whose projections are one kernel: each sequence's programs read all weights


class SelfInitialised:
    """Marks a module whose `reset_parameters` initialises it: models do not apply their default initialisation."""


class Projection(SelfInitialised, nn.Linear):
    """An encoding's projection: nn.Linear with its own initialisation.

    Args:
        initial: standard deviation of the initial weights, which are normal; 0 for PyTorch's default.
        start: initial bias.
        from_zero: whether weights and bias are initialised to 0.
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
        if initial < 0:
            raise ValueError(f"initial: expected 0 or more, got {initial}")
        self.initial, self.start, self.from_zero = initial, start, from_zero  # nn.Linear initialises itself
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.initial:
            nn.init.normal_(self.weight, std=self.initial)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.start)
        if self.from_zero:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)


@dataclass(frozen=True)
class Ending:
    """The function that follows a projection a = u · x + b.

    It is not part of the projection's module, so that a module that replaces it, such as a LoRA adapter, adds to a.

        log gate    log f = scale · log σ(a), per query head
        strength    β = 2σ(a), per key head

    With `from_zero` both are ramps, and u = b = 0 initially. log f = scale · min(0, a), which is log σ(a) for
    large |a|: initially nothing is forgotten, exactly, and ∂ log f / ∂a = scale, twice that of log σ at 0 (not by
    `clamp`, whose gradient at its bound is 0 in torch 2.15). After a training step, tokens with a < 0 are on the ramp;
    others start to forget when u changes direction.
    β = 2 max(0, tanh(a / 2)) = 2 max(0, 2σ(a) − 1): initially the route is the identity, exactly, and ∂β/∂a = 1, twice
    that of 2σ at 0.
    """

    name: Literal["none", "strength", "log gate"] = "none"  # as kernels know it
    scale: float = 1.0
    from_zero: bool = False

    def __call__(self, y: Tensor) -> Tensor:
        if self.name == "none":
            return y
        if not self.from_zero:
            return log_gate(y, self.scale) if self.name == "log gate" else strength(y)
        a = at_least_single(y)
        if self.name == "log gate":
            return self.scale * torch.where(a > 0, 0.0, a)
        return 2 * torch.where(a < 0, 0.0, (a / 2).tanh())


PLAIN = Ending()
Map = tuple[Projection, Ending]
"""A projection, or the module that replaces it, and the function that follows it."""


def maps(x: Tensor, *parts: Map) -> list[Tensor]:
    """Applies each map to x (B, T, d_model); in a decoding step on a GPU, all of them in one kernel."""
    modules, endings = zip(*parts, strict=True)
    if in_step(x, *modules) and not any(ending.from_zero for ending in endings):
        return maps_of_token(x, [(part.weight, part.bias, ending.name, ending.scale) for part, ending in parts])
    return [ending(part(x)) for part, ending in parts]


def in_step(x: Tensor, *parts: nn.Module) -> bool:
    """Whether x is a decoding step of a small batch, and kernels can replace these Projections."""
    return (
        has_kernels(x)  # first, so that tracers do not note the sizes that are asked for next
        and x.shape[1] == 1
        and len(x) <= MOST_SEQUENCES
        and not torch.is_grad_enabled()
        and all(
            isinstance(part, Projection)  # not an adapter in its place, such as LoRA's
            and is_plain(part)
            and part.weight.is_contiguous()
            for part in parts
        )
    )
