"""The base class of encodings, modules that compute attention's factors from a layer's input, and what they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from deadreckon.encodings.maps import PLAIN, Ending, Map, Projection, SelfInitialised, in_step, maps
from deadreckon.ops.directions import ACTIVATIONS, directions
from deadreckon.ops.factors import Factors, Householder, Rotation
from deadreckon.ops.saving import Formula
from deadreckon.ops.token import directions_of_token

if TYPE_CHECKING:
    from deadreckon.ops.parallel.context import ContextParallel


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention layer that an encoding belongs to, its index (from 0), and the number of layers."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int | None = None
    max_length: int = 2048
    layer: int = 0
    layers: int = 1

    @property
    def even_head_dim(self) -> int:
        """head_dim, which rotations need to be even: they act on pairs of channels."""
        if self.head_dim % 2:
            raise ValueError(f"head_dim: rotations turn pairs of channels, expected an even one, got {self.head_dim}")
        return self.head_dim


@dataclass(frozen=True, eq=False)
class Context:
    """What encodings may use besides a layer's input.

    Attributes:
        positions: (B or 1, T) position of each token in its document.
        token_ids: (B, T), for encodings that look tokens up.
        cu_seqlens: boundaries of packed documents, always of the whole row.
        cp: context parallelism: which rank has which tokens. All else but cu_seqlens is then of this rank's shard.
        length: tokens of the whole row, over all ranks, without the padding to equal shards.
        seen: number of preceding tokens, where the host knows it: not in a step captured by a CUDA graph.
        recent: in prefill and decode, where an encoding keeps the last inputs that it needs for the next piece.
        shared: results that later layers of this forward pass reuse.
    """

    positions: Tensor
    token_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cp: ContextParallel | None = None
    length: int = 0
    seen: int = 0
    recent: dict[str, Tensor] | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        x: Tensor,
        token_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cp: ContextParallel | None = None,
        length: int | None = None,
    ) -> Context:
        """The context of x (B, T, d_model), or of this rank's shard of it; documents begin where cu_seqlens says."""
        positions = torch.arange(x.shape[1], device=x.device) if cp is None else cp.positions(x.shape[1], x.device)
        if cu_seqlens is not None:
            starts = cu_seqlens.to(x.device, torch.int64)
            positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
        whole = x.shape[1] * (1 if cp is None else cp.size)
        return cls(positions.unsqueeze(0), token_ids, cu_seqlens, cp, whole if length is None else length)

    def drawn_alike(self, x: Tensor) -> Tensor:
        """A random tensor x, made the same on all ranks."""
        return x if self.cp is None else self.cp.same(x)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of x (B, length, ...)."""
        return x if self.cp is None else self.cp.shard(x)

    def from_rows(self, x: Tensor) -> Tensor:
        """(B, T, ...) from x whose rows are this rank's pieces, with context parallelism; else x."""
        return x if self.cp is None else self.cp.from_rows(x)

    def after(self, length: int) -> Context:
        """The context of a piece with `length` preceding tokens."""
        return replace(self, positions=self.positions + length, seen=length)

    def rope_angles(self, width: int, base: float, scaling: dict[str, float] | None = None) -> Tensor:
        """As :func:`rope_angles`, computed once for all layers, which saves launches in each decoding step."""
        key = ("rope angles", width, base, None if scaling is None else tuple(sorted(scaling.items())))
        return self.once(key, lambda: rope_angles(width, base, self.positions.device, scaling))

    def sharpness(self, beyond: int) -> Tensor:
        """The factor on queries of a token that sees n tokens, (B or 1, T, 1, 1): log n / log beyond, at least 1.

        With softmax, a logit that leads by log `beyond` gets half of the weight among `beyond` tokens, and with this
        factor half at any n. With powers the factor cancels: their weights are normalised shares.
        """

        def compute() -> Tensor:
            tokens = (self.positions + 1).clamp(min=beyond)
            return (1 + (tokens.float() / beyond).log() / math.log(beyond))[..., None, None]

        return self.once(("sharpness", beyond), compute)

    def once(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """A value that all layers share, computed by the first that needs it."""
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Context:
        """The context for layers on another device, which share results among themselves; accelerate calls this."""
        place = torch.empty(0, device=device).device  # with its index
        if place == self.positions.device:
            return self
        ids, bounds = (
            None if x is None else x.to(place, non_blocking=non_blocking) for x in (self.token_ids, self.cu_seqlens)
        )
        positions, shared = self.positions.to(place, non_blocking=non_blocking), self.shared.setdefault(place, {})
        return replace(self, positions=positions, token_ids=ids, cu_seqlens=bounds, shared=shared)

    def remembering(self, recent: dict[str, Tensor]) -> Context:
        """This context with a dictionary for recent inputs."""
        return replace(self, recent=recent)


class Encoding(SelfInitialised, nn.Module, ABC):
    """A position encoding. Subclasses are final; `ENCODINGS` names them all.

    Args (of every subclass):
        sizes: the layer's sizes. Options of an encoding follow as keywords.

    Attributes:
        saved_without: options whose default has changed, with the value that configurations saved without them mean.
            Saved configurations now spell them out.
        precise: whether `widen` needs the layer's input unrounded: under autocast, not cast to the dtype of linear
            layers.
    """

    saved_without: ClassVar[dict[str, Any]] = {}
    precise: ClassVar[bool] = False

    def embed(self, x: Tensor, context: Context) -> Tensor:
        """Adds the encoding to the embeddings, for encodings that do. Called once, before the first layer."""
        return x

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Factors:
        """The factors of attention over x (B, T, d_model)."""

    def widen(self, q: Tensor, k: Tensor, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries (B, T, Hq, D) and keys (B, T, H, D), with extra channels for additional terms of the logits, if any.

        Logits are still scaled by D^(−1/2), without counting the extra channels.
        """
        return q, k

    def penalty(self) -> Tensor | None:
        """A regularisation term that training adds to the loss, or None."""
        return None

    def own_groups(self) -> list[dict[str, Any]]:
        """AdamW parameter groups with settings of their own; all other parameters and settings are the model's."""
        return []

    def resize_vocabulary(self, tokens: int) -> None:
        """Resizes per-token tables, if any: existing entries are kept, new ones are freshly initialised."""

    def reset_parameters(self) -> None:
        """Initialises all parameters: with PyTorch's defaults, unless an encoding overrides this."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]


def parameter_groups(model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """A model's parameters as AdamW groups: those that encodings define, and one for all other parameters.

    Each group has its learning rate also as ``initial_lr``, for schedules to multiply.
    """
    special = [group for part in model.modules() if isinstance(part, Encoding) for group in part.own_groups()]
    in_special = {id(parameter) for group in special for parameter in group["params"]}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_special]
    usual = {"lr": learning_rate, "weight_decay": weight_decay}
    groups = [usual | group for group in ({"params": rest}, *special)]
    return [{**group, "initial_lr": group["lr"]} for group in groups]


def rope_angles(width: int, base: float, device: torch.device, scaling: dict[str, float] | None = None) -> Tensor:
    """RoPE's grid of step angles, base^(−2m / width) for each pair m: (width / 2,), bit-identical to Llama's.

    Args:
        scaling: ``{"factor": s}`` divides all angles by s (position interpolation). With ``low_freq_factor``,
            ``high_freq_factor`` and ``original_max_position_embeddings`` in addition, as in Llama 3.1, angles that make
            fewer than `low` full turns in the original length are divided by s, those that make more than `high` are
            kept, and those in between are interpolated by their number of turns.
    """
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    angles = 1.0 / base ** (steps / width)
    if scaling is None:
        return angles
    if "low_freq_factor" not in scaling:
        return angles / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * angles / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * angles / scaling["factor"] + kept * angles


LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_scaling(scaling: dict[str, float] | None) -> None:
    """Raises a ValueError unless `rope_angles` supports the scaling."""
    if scaling is None:
        return
    known = set(scaling) in ({"factor"}, set(LLAMA3_SCALING))
    if not known or not all(isinstance(value, int | float) and value > 0 for value in scaling.values()):
        raise ValueError(
            f"scaling: expected positive numbers for factor, or for {', '.join(LLAMA3_SCALING)}, got {scaling!r}"
        )
    if len(scaling) > 1 and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError(f"scaling: expected high_freq_factor above low_freq_factor, got {scaling!r}")


def check_sharpening(beyond: object) -> None:
    """Raises a ValueError unless `sharpen_beyond` is a valid number of tokens, or None."""
    if beyond is not None and (type(beyond) is not int or not 2 <= beyond < 1 << 31):
        raise ValueError(f"sharpen_beyond: expected an integer from 2 to 2³¹ − 1, or None, got {beyond!r}")


def every_token(angles: Tensor, x: Tensor) -> Tensor:
    """The same step angles (D/2,) at every token of x (B, T, d_model), shared by heads: (B, T, 1, D/2), no copy."""
    return angles.expand(x.shape[0], x.shape[1], 1, -1)


class RopeSteps(SelfInitialised, nn.Module):
    """RoPE's rotation with a factor on its angles, initially 1, which a schedule may change or training may learn.

    At 0 there is no rotation. `new_factor`, which a schedule may change too, multiplies β and log f of the Householder
    steps and gates beside the rotation: at 0 only RoPE is left. Both factors are saved with the weights.

    Args:
        base, scaling: of the angles, see :func:`rope_angles`.
        learn_factor: whether the factor on the angles is a parameter, one per layer.
    """

    def __init__(self, sizes: Sizes, base: float, scaling: dict[str, float] | None, learn_factor: bool) -> None:
        super().__init__()
        check_scaling(scaling)
        self.head_dim, self.base, self.scaling = sizes.even_head_dim, base, scaling
        if learn_factor:
            self.angle_factor = nn.Parameter(torch.empty(()))
        else:
            self.register_buffer("angle_factor", torch.empty(()))
        self.register_buffer("new_factor", torch.empty(()))
        self.new_factor: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.angle_factor)
        nn.init.ones_(self.new_factor)

    def beside(self, steps: Householder) -> Householder:
        """Householder steps with β scaled by `new_factor`."""
        return replace(steps, beta=steps.beta * self.new_factor.to(steps.beta.dtype))

    def gated(self, log_gate: Tensor) -> Tensor:
        """Log gates scaled by `new_factor`."""
        return log_gate * self.new_factor.to(log_gate.dtype)

    def forward(self, x: Tensor, context: Context) -> Rotation:
        angles = context.rope_angles(self.head_dim, self.base, self.scaling)
        return Rotation(every_token(angles * self.angle_factor.float(), x))


CROPPABLE = 64  # minimum number of tokens that `crop` can undo
ALWAYS_AS_MANY = ("convolution",)  # recent inputs of fixed length, zero-padded before the first token and by `crop`
BY_PLACE = ("hidden", "histogram")  # recent inputs in ring buffers, indexed by position: `crop` has nothing to undo
GROWING = "copy"  # cache of all inputs, (B, F, room, W), indexed by position: reallocated once `room` is used up


class ShortConvolution(SelfInitialised, nn.Module):
    """A depthwise causal convolution, y_t = Σ_i weight_i · x_{t−i}, which does not cross document boundaries."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, context: Context, heads: int) -> Tensor:
        """y (B, T, H, D) of x (B, T, H·D), in float32 or more."""
        return context.from_rows(directions(*self.inputs(x, context), heads, unit=False))

    def inputs(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of :func:`convolve`: x (B, T, C) with its preceding tokens, the filters, and positions."""
        reach, length = self.weight.shape[0] - 1, x.shape[1]
        if context.cp is not None:  # a piece needs the last tokens of the previous one, which may be on another rank
            rows = context.cp.rows_with_tails(x, reach)
            places = context.cp.as_rows(context.positions.expand(x.shape[0], -1))
            return rows, self.weight, places
        if context.recent is not None:
            recent = context.recent.get("convolution")
            if recent is not None:
                recent = recent[:, -max(reach, reach + CROPPABLE - length) :]
                x = torch.cat([recent, x], dim=1)
            kept = x[:, -reach - CROPPABLE :]
            if recent is None or x.shape[1] != reach + CROPPABLE:  # as many, zeros at first; no view of a whole prefill
                kept = pad(kept, (0, 0, reach + CROPPABLE - kept.shape[1], 0))
            context.recent["convolution"] = kept
        return x, self.weight, context.positions

    def of_token(
        self,
        low: Tensor,
        up: Projection,
        context: Context,
        heads: int,
        activation: str = "none",
        epsilon: float = 0.0,
        unit: bool = True,
    ) -> Tensor | None:
        """One decoding step of `up`, convolution and directions in one kernel: (B, 1, H, D); None if there is none.

        Without `unit`, as :func:`directions`: the convolution itself, after its activation.
        """
        recent = None if context.recent is None else context.recent.get("convolution")
        if context.recent is None or recent is None or not in_step(low, up):
            return None
        y, context.recent["convolution"] = directions_of_token(
            low, up.weight, recent, self.weight, context.positions, heads, activation, epsilon, unit
        )
        return y


class HouseholderSteps(nn.Module):
    """A Householder step (direction w, strength β) for each token and key head, as PaTH computes them.

    w = normalise(activate(convolve(low-rank linear of x))), width 3; β: see :class:`Ending`. With `from_zero`
    directions are initialised as usual, and get gradients once β is not 0.

    Args:
        rank: of the low-rank projection to w.
        initial: standard deviation of the projections' initial weights; 0 for PyTorch's default.
        beta: initial β of a zero input, between 0 and 2: sets the bias b.
        activation: after the convolution, "none" or "silu".
        norm_eps: added to ‖w‖² before w is divided by its norm.
        from_zero: whether β is a ramp that starts at 0.
        recompute: less memory, slower backward pass: see :class:`deadreckon.Householder`.
    """

    def __init__(
        self,
        sizes: Sizes,
        rank: int,
        initial: float = 0.0,
        beta: float = 1.0,
        activation: str = "none",
        norm_eps: float = 0.0,
        from_zero: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        if not 0 < beta < 2:
            raise ValueError(f"beta: expected a number between 0 and 2, got {beta}")
        self.heads, self.head_dim = sizes.n_kv_heads, sizes.head_dim
        self.activation, self.norm_eps, self.recompute = activation, norm_eps, recompute
        self.down = Projection(sizes.d_model, rank, bias=False, initial=initial)
        self.up = Projection(rank, self.heads * self.head_dim, bias=False, initial=initial)
        self.convolution = ShortConvolution(self.heads * self.head_dim, width=3)
        start = math.log(beta / (2 - beta))
        self.strength = Projection(sizes.d_model, self.heads, initial=initial, start=start, from_zero=from_zero)
        self.ending = Ending("strength", from_zero=from_zero)

    def reset_parameters(self) -> None:
        for part in (self.down, self.up, self.convolution, self.strength):
            part.reset_parameters()

    def forward(self, x: Tensor, context: Context) -> Householder:
        low, beta = maps(x, *self.maps)
        return self.from_maps(low, beta, context)

    @property
    def maps(self) -> tuple[Map, Map]:
        """The projections of the input: the low-rank one, on the way to w, and that to β."""
        return (self.down, PLAIN), (self.strength, self.ending)

    def from_maps(self, low: Tensor, beta: Tensor, context: Context) -> Householder:
        """Householder steps from the outputs of `maps`."""
        options: dict[str, Any] = {"heads": self.heads, "activation": self.activation, "epsilon": self.norm_eps}
        if (w := self.convolution.of_token(low, self.up, context, **options)) is not None:
            return Householder(w, beta, self.recompute)
        unit: Callable[..., Tensor] = partial(directions, **options)
        inputs = self.convolution.inputs(self.up(low), context)
        w = unit(*inputs)
        formula, w = Formula(w, unit, inputs), context.from_rows(w)
        return Householder(w, beta, self.recompute, formula)
