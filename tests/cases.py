"""Combinations of factors for tests: inputs in float64, runs in any precision, errors against the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import deadreckon as dr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4  # to the definition; a GPU's products are sums of products of halves
TRANSPORTS = (
    None, "rotation", "rotation per query head", "rotation of values", "householder", "rotation and householder",
)  # fmt: skip
GATES = (None, "constant", "learned", "learned per key head")
SCORES = ("softmax", "stick-breaking", dr.Power(2), dr.Power(4))

# Options with which an untrained encoding behaves as it does after training.
AWAKE: dict[str, dict[str, Any]] = {"conformal-sympow": {"initial": 0.0}}


@dataclass(frozen=True)
class Case:
    """One combination of factors, and sizes."""

    transport: str | None = None
    gate: str | None = None
    score: Any = "softmax"
    length: int = 100
    batch: int = 2
    heads: int = 2
    group: int = 2
    width: int = 16
    value_width: int = 24
    beta: float | None = None  # one strength for every token, in place of random ones
    scale: float | None = None
    forgetting: float = 1.0  # what log gates are multiplied by: with 1, little is left after a hundred tokens
    seed: int = 0

    def inputs(self) -> dict[str, Tensor]:
        """Leaves in float64."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, length, heads, query_heads = self.batch, self.length, self.heads, self.heads * self.group
        value_width = self.width if self.turns_values else self.value_width
        leaves = {
            "q": draw(batch, length, query_heads, self.width),
            "k": draw(batch, length, heads, self.width),
            "v": draw(batch, length, heads, value_width),
        }
        if self.transport is not None and "householder" in self.transport:
            leaves["w"] = normalize(draw(batch, length, heads, self.width), dim=-1)
            strengths = 2 * draw(batch, length, heads).sigmoid()
            leaves["beta"] = strengths if self.beta is None else torch.full_like(strengths, self.beta)
        if self.transport is not None and "rotation" in self.transport:
            turns = query_heads if "per query head" in self.transport else heads if self.turns_values else 1
            leaves["angles"] = draw(batch, length, turns, self.width // 2)
        if self.gate == "constant":
            leaves["log_gate"] = self.forgetting * -draw(query_heads).abs()
        elif self.gate:
            gated = query_heads if self.gate == "learned" else heads
            leaves["log_gate"] = self.forgetting * logsigmoid(draw(batch, length, gated) + 2)
        return leaves

    @property
    def turns_values(self) -> bool:
        return self.transport is not None and "of values" in self.transport

    def steps(self, leaves: dict[str, Tensor]) -> Any:
        """The transport of these leaves."""
        rotation = dr.Rotation(leaves["angles"], values=self.turns_values) if "angles" in leaves else None
        if "w" not in leaves:
            return rotation
        steps = dr.Householder(leaves["w"], leaves["beta"])
        return steps if rotation is None else (rotation, steps)

    def attend(self, leaves: dict[str, Tensor], **keywords: Any) -> Tensor:
        """attend() of these leaves."""
        return dr.attend(
            leaves["q"], leaves["k"], leaves["v"],
            transport=self.steps(leaves), log_gate=leaves.get("log_gate"), score=self.score, scale=self.scale,
            **keywords,
        )  # fmt: skip


def run(
    case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu", exact: tuple[str, ...] = (), **keywords: Any
) -> dict[str, Tensor]:
    """Output and gradients of every leaf, by name. Leaves named in `exact` stay in float32 where dtype is half."""
    half = dtype in (torch.bfloat16, torch.float16)
    leaves = {
        name: x.to(device, torch.float32 if half and name in exact else dtype).requires_grad_()
        for name, x in case.inputs().items()
    }
    output = case.attend(leaves, **keywords)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad.to(device, output.dtype))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖found − expected‖ / ‖expected‖, by name; absolute where the expected is zero, infinite where it is no number.

    (No number is no maximum either: `max` would pass over it.)
    """
    errors = {}
    for name, reference in expected.items():
        difference = (found[name].cpu().double() - reference).norm()
        norm = reference.norm()
        errors[name] = float((difference / norm if norm > 1e-10 else difference).nan_to_num(torch.inf))
    return errors


def remainder(case: Case) -> float:
    """What may be left of gradients by q and k that are zero, as those of one token alone: its logit's gradient is the
    difference of two equal sums of E products, each off by up to E roundings to float32 of about E."""
    return 2 * case.value_width**2 * 2**-24 if case.length == 1 else 0.0
