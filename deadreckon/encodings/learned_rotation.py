"""Learned rotations: every token of the vocabulary has its own step angles, one table per layer.

    step angles at t = table[token_t],   (vocabulary, D/2), shared by heads

Cost: that of RoPE. State: keys and values, and the running angle.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deadreckon.encodings.base import Context, Encoding, Sizes, rope_angles
from deadreckon.ops.factors import Factors, Rotation
from deadreckon.ops.pointwise import at_least_single

STARTS = ("normal", "rope", "grid")


class LearnedRotation(Encoding):
    """Rotates queries and keys.

    Args:
        initial: units and initialisation of the table. "normal": angles in radians, initialised as N(0, 1), PyTorch's
            default for embeddings, as in "Why Do Accumulated Transformations Extrapolate?": the mean phasor of every
            pair shrinks by e^{−1/2} per token, to less than 1% after ten.
            "rope": in radians too, around RoPE's step angles in place of 0. With a small spread, such as 0.05, training
            starts near RoPE; with the default of 1 it does not.
            "grid": multiples of RoPE's grid, initialised uniformly in [−1, 1], as random rotations are drawn: slow
            pairs start slow and are trained on their own scale.
        spread: standard deviation σ of "normal" and "rope": the mean phasor shrinks by e^{−σ²/2} per token, to 1% after
            T tokens where σ² = 9.2 / T. Short training runs at T tokens need that or less.
        base: of RoPE's angles.
        rate: the table's learning rate in place of the model's, with the model's weight decay. Angles must decay as
            well as be learned: those of rare tokens stay at N(0, 1) and make every route that contains them incoherent
            unless learning rate × weight decay, summed over the training steps, is well above 1, as in the paper's
            200 000 steps. A few thousand steps from N(0, 1) need a rate of 0.02; around RoPE's angles, with a spread of
            0.05, 0.0015 has RoPE's perplexity at the training length, and higher rates extrapolate further.
    """

    values = False
    saved_without: ClassVar[dict[str, Any]] = {"initial": "grid"}

    def __init__(
        self,
        sizes: Sizes,
        base: float = 10000.0,
        initial: str = "normal",
        spread: float = 1.0,
        rate: float | None = None,
    ) -> None:
        super().__init__()
        if sizes.vocab_size is None:
            raise ValueError("learned-rotation: expected vocab_size, a table of angles needs it; got None")
        if initial not in STARTS:
            raise ValueError(f"initial: expected one of {', '.join(STARTS)}; got {initial!r}")
        if not 0 < spread < math.inf:
            raise ValueError(f"spread: expected a positive number, got {spread!r}")
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"rate: expected a positive learning rate or None, got {rate!r}")
        self.head_dim, self.base, self.spread, self.rate = sizes.even_head_dim, base, spread, rate
        # Two parameter names, so that a table in one unit does not load into the other.
        self.initial, self.name = initial, "table" if initial == "grid" else "angles"
        self.register_parameter(self.name, nn.Parameter(torch.empty(sizes.vocab_size, self.head_dim // 2)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        table = self.get_parameter(self.name)
        if self.initial == "grid":
            nn.init.uniform_(table, -1, 1)
            return
        nn.init.normal_(table, std=self.spread)
        if self.initial == "rope":
            with torch.no_grad():
                table.add_(rope_angles(self.head_dim, self.base, table.device))

    def own_groups(self) -> list[dict[str, Any]]:
        return [] if self.rate is None else [{"params": [self.get_parameter(self.name)], "lr": self.rate}]

    def resize_vocabulary(self, tokens: int) -> None:
        old = self.get_parameter(self.name)
        if len(old) != tokens:
            self.register_parameter(self.name, nn.Parameter(old.new_empty(tokens, old.shape[1]), old.requires_grad))
            self.reset_parameters()
            kept = min(len(old), tokens)
            with torch.no_grad():
                self.get_parameter(self.name)[:kept] = old[:kept]

    def forward(self, x: Tensor, context: Context) -> Factors:
        if context.token_ids is None:
            raise ValueError("learned-rotation: expected token_ids beside x, angles are looked up by token; got None")
        angles = at_least_single(getattr(self, self.name)[context.token_ids])  # with torch.func no nn.Parameter
        if self.name == "table":
            angles = angles * context.rope_angles(self.head_dim, self.base)
        return Factors(Rotation(angles.unsqueeze(2), self.values))


class LearnedRotationValues(LearnedRotation):
    """Rotates queries, keys and values."""

    values = True
