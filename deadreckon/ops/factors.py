"""The factors of the equation, as plain data: what a route does to a key, and how a logit becomes a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

from deadreckon.ops.saving import Formula


@dataclass(frozen=True, eq=False)
class Rotation:
    """Each token rotates everything before it: block m, the pair (m, m + D/2), by ``angles[..., m]`` radians.

    Rotations of one plane commute, so a route's rotation is the sum of its steps. With equal steps at every token this
    is RoPE, in the pairing of Hugging Face's Llama.

    Args:
        angles: (B, T, Hr, D/2) step angles, Hr one of 1, H, Hq.
        values: also carry the values along the route, rotated back by its angle (needs E = D).
    """

    angles: Tensor
    values: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Rotation:
        """The rotation with `change` applied to its angles."""
        return Rotation(change(self.angles), self.values)


@dataclass(frozen=True, eq=False)
class Householder:
    """Each token reflects everything before it: H = I - beta w w^T, and the order of the route matters.

    Args:
        w: (B, T, H, D) directions, used as given (encodings normalise them).
        beta: (B, T, H) strengths: 0 is the identity, 1 a projection, 2 (with a unit w) a reflection.
        recompute: on CUDA, whether the backward pass recomputes the routes inside leaves of 64 tokens. Otherwise the
            forward pass saves them, which takes six times the memory of the keys for D = 64.
        formula: how an encoding has computed w: on CUDA the inputs of w are then saved in place of w.
    """

    w: Tensor
    beta: Tensor
    recompute: bool = False
    formula: Formula | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Householder:
        """The steps with `change` applied to directions and strengths."""
        return replace(self, w=change(self.w), beta=change(self.beta))


Form = Literal["auto", "attention", "chunked", "recurrent"]


@dataclass(frozen=True)
class Power:
    """The weight of a logit is its p-th power, p even; the row is divided by its sum.

    A row whose weights are all zero attends to nothing: its output is zero. Keys are scaled by the longest of a head;
    those shorter by a factor of about 1e-38^(1/p) are lost in float32. The scale of the logits cancels, unless it is 0.

    A power is a dot product of symmetric tensor powers, of C(D + p − 1, p) dimensions, so that a state of fixed size
    can hold all keys: see ``deadreckon/ops/blockwise/power.py``. Where all keys of a state are within (16 ε)^(1/p) of a
    right angle to a query, what it reads is rounding error and counts as zero; the nearest keys (of the same chunk, or
    the last eight tokens) are never read from a state, so that this cannot be all that a query sees.

    Args:
        p: an even number, 2 or more.
        form: how to compute it. ``"attention"`` is quadratic in T; ``"chunked"``, quadratic within chunks, carries the
            state from chunk to chunk; ``"recurrent"`` carries it from token to token, in a Python loop, for reading and
            testing; ``"auto"`` picks one of the first two by size. States must fit in memory: for D = 32 and p = 6 one
            has 2.3 million rows. Householder steps need ``"attention"`` or ``"auto"``; ``impl="reference"`` computes
            the definition, whatever the form. When streaming, keys are folded into a state as soon as that is smaller,
            unless the form is ``"attention"``.
    """

    p: int
    form: Form = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.p, int) or isinstance(self.p, bool) or self.p < 2 or self.p % 2:
            raise ValueError(f"Power.p: expected an even integer of 2 or more, got {self.p!r}")
        if self.form not in ("auto", "attention", "chunked", "recurrent"):
            raise ValueError(f"Power.form: expected 'auto', 'attention', 'chunked' or 'recurrent', got {self.form!r}")


Transport = Rotation | Householder | tuple[Rotation, Householder]
"""What a token does to all preceding tokens. For a pair (R, H) a step is R_s H_s: T_ji = Π_{s=j+1..i} R_s H_s."""
Score = Literal["softmax", "stick-breaking"] | Power


class Factors(NamedTuple):
    """What an encoding computes from its input: the keyword arguments of :func:`deadreckon.attend`."""

    transport: Transport | None = None
    log_gate: Tensor | None = None
    score: Score = "softmax"

    def parts(self) -> tuple[Rotation | None, Householder | None]:
        """The transport's rotation and Householder steps, either of which may be missing."""
        match self.transport:
            case Rotation() as rotation:
                return rotation, None
            case Householder() as steps:
                return None, steps
            case (rotation, steps):
                return rotation, steps
            case _:
                return None, None

    def map_transport(self, change: Callable[[Tensor], Tensor]) -> Transport | None:
        """The transport with `change` applied to each of its tensors."""
        match self.transport:
            case (rotation, steps):
                return rotation.map(change), steps.map(change)
            case None:
                return None
            case transport:
                return transport.map(change)
