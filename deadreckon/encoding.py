"""What an encoding is, a module that computes factors from a layer's input, and the parts that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, normalize, pad

from deadreckon.factors import Factors, Householder


@dataclass(frozen=True)
class Sizes:
    """The sizes of the layer that an encoding serves."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int | None = None
    max_length: int = 2048


@dataclass(frozen=True, eq=False)
class Context:
    """What is known of the tokens beside their vectors.

    Attributes:
        positions: (B or 1, T) place of each token in its document.
        token_ids: (B, T), for encodings that look tokens up.
        cu_seqlens: boundaries of packed documents.
        recent: where an encoding keeps the last inputs that it needs again, while a sequence comes in pieces.
    """

    positions: Tensor
    token_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    recent: dict[str, Tensor] | None = None

    @classmethod
    def of(cls, x: Tensor, token_ids: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Context:
        """The context of x (B, T, d_model), whose documents begin where cu_seqlens says."""
        positions = torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None:
            starts = cu_seqlens.to(x.device, torch.int64)
            positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
        return cls(positions.unsqueeze(0), token_ids, cu_seqlens)

    def after(self, length: int) -> Context:
        """The context of a piece that so many tokens have gone before."""
        return replace(self, positions=self.positions + length)

    def remembering(self, recent: dict[str, Tensor]) -> Context:
        """The same, with a place to keep recent inputs in."""
        return replace(self, recent=recent)


class Encoding(nn.Module, ABC):
    """One way to reckon positions. Subclasses are final; `ENCODINGS` names them all.

    Args (of every subclass):
        sizes: the layer's sizes. Options of an encoding follow as keywords.
    """

    def embed(self, x: Tensor, context: Context) -> Tensor:
        """Called once on the embeddings, before the first layer, for encodings that are added there."""
        return x

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Factors:
        """The factors of attention over x (B, T, d_model)."""

    def reset_parameters(self) -> None:
        """Draws fresh parameters: PyTorch's defaults, unless an encoding says otherwise."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]


def rope_angles(width: int, base: float, device: torch.device) -> Tensor:
    """RoPE's grid of step angles, base^(−2m / width) for each pair m: (width / 2,)."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    return base ** (-steps / width)


def every_token(angles: Tensor, x: Tensor) -> Tensor:
    """The same step angles (D/2,) at every token of x (B, T, d_model), shared by heads: (B, T, 1, D/2), no copy."""
    return angles.expand(x.shape[0], x.shape[1], 1, -1)


def at_least_single(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision: gates and angles add up over long routes."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


GOING_BACK = 64  # tokens by which a state can at least go back


class ShortConvolution(nn.Module):
    """A causal convolution along time, one filter a channel: y_t = Σ_i weight_i · x_{t−i}, within its document."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        reach, length = self.weight.shape[0] - 1, x.shape[1]
        recent = None if context.recent is None else context.recent.get("convolution")
        x = pad(x, (0, 0, reach, 0)) if recent is None else torch.cat([recent, x], dim=1)
        if context.recent is not None:
            context.recent["convolution"] = x[:, -reach - GOING_BACK :]
            x = x[:, -reach - length :]
        y = x[:, reach:] * self.weight[0]
        for lag in range(1, reach + 1):
            earlier = x[:, reach - lag : reach - lag + length]
            y = y + earlier * self.weight[lag] * (context.positions >= lag).unsqueeze(-1).to(x.dtype)
        return y


class Projection(nn.Linear):
    """A linear map of an encoding. Its weights begin with PyTorch's default, in a model too, and its bias with zero."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ForgetGate(Projection):
    """log σ(u · x + b) for each head: (B, T, d_model) -> (B, T, heads)."""

    def forward(self, x: Tensor) -> Tensor:
        return logsigmoid(at_least_single(linear(x, self.weight, self.bias)))


class HouseholderSteps(nn.Module):
    """A direction and a strength for each token and key head, as PaTH computes them.

    w = normalise(convolve(low-rank linear of x)), width 3; β = 2σ(u · x + b).
    """

    def __init__(self, sizes: Sizes, rank: int) -> None:
        super().__init__()
        self.heads, self.head_dim = sizes.n_kv_heads, sizes.head_dim
        self.down = Projection(sizes.d_model, rank, bias=False)
        self.up = Projection(rank, self.heads * self.head_dim, bias=False)
        self.convolution = ShortConvolution(self.heads * self.head_dim, width=3)
        self.strength = Projection(sizes.d_model, self.heads)

    def reset_parameters(self) -> None:
        for part in (self.down, self.up, self.convolution, self.strength):
            part.reset_parameters()

    def forward(self, x: Tensor, context: Context) -> Householder:
        w = self.convolution(self.up(self.down(x)), context).unflatten(-1, (self.heads, self.head_dim))
        return Householder(normalize(at_least_single(w), dim=-1), 2 * at_least_single(self.strength(x)).sigmoid())
