"""Benchmark cases: our methods, random inputs for them, and the check against the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import deadreckon as dr
from deadreckon.lab.arguments import sizes_in
from deadreckon.lab.bench.rivals import Inputs, Method

CASES: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "RoPE": lambda x: {"transport": dr.Rotation(x["theta"])},
    "rotation": lambda x: {"transport": dr.Rotation(x["angles"])},
    "rotation of values too": lambda x: {"transport": dr.Rotation(x["angles"], values=True)},
    "FoX": lambda x: {"log_gate": x["log_gate"]},
    "forgetful FoX": lambda x: {"log_gate": x["strong_gate"]},
    "PaTH": lambda x: {"transport": dr.Householder(x["w"], x["beta"])},
    "PaTH-FoX": lambda x: {"transport": dr.Householder(x["w"], x["beta"]), "log_gate": x["log_gate"]},
    "forgetful PaTH-FoX": lambda x: {"transport": dr.Householder(x["w"], x["beta"]), "log_gate": x["strong_gate"]},
    "Power(2)": lambda x: {"score": dr.Power(2)},
    "stick-breaking": lambda x: {"score": "stick-breaking"},
}
KINDS: dict[str, Callable[[Inputs], dict[str, Any]]] = {"attention": lambda x: {}, **CASES}
"""What is timed of ours and, before that, what a rival without positions computes."""
PACKED = {"no positions": "attention", **{name: name for name in ("rotation", "FoX", "PaTH", "PaTH-FoX")}}
"""What is timed of ours on packed rows: name -> kind."""

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 4e-2)}
"""Relative errors allowed of the output and of a gradient; in bfloat16 twice the definition's own, if that is less.

But not of angles: their gradients are long sums, in which what fused attention has rounded does not cancel.
"""
CHECKS = {"cpu": ((200, 1.0), (256, 50.0)), "cuda": ((577, 1.0), (130, 50.0))}
"""Lengths to check at, and what gates are multiplied by there: the second are too strong for a single causal call."""


class Shape(NamedTuple):
    """Sizes of q, k and v, and the mean document length if rows are packed (0 if not)."""

    batch: int
    length: int
    heads: int
    width: int
    documents: int = 0

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parses "BxTxHxD"."""
        return cls(*sizes_in(text, "shapes", "BxTxHxD, such as 32x4096x32x64"))

    def __str__(self) -> str:
        return "x".join(map(str, self[:4])) + f" / {self.documents}" * bool(self.documents)


def boundaries(length: int, mean: int) -> Tensor:
    """cu_seqlens of a packed row whose document lengths are exponentially distributed."""
    drawn = torch.empty(length).exponential_(1 / mean, generator=torch.Generator().manual_seed(0)).ceil().long()
    ends = drawn.cumsum(0)  # of as many as there could be
    return torch.cat([torch.tensor([0]), ends[ends < length], torch.tensor([length])]).int()


def make_inputs(shape: Shape, device: str, strength: float = 1.0) -> Inputs:
    """Random q, k, v and factors of every case, with gradients; constants. Gates have a half-life of some 70 tokens."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    dtype = DTYPES[device]
    *sizes, documents = shape
    batch, length, heads, width = sizes
    leaves = {name: draw(*sizes).to(dtype) for name in ("q", "k", "v")}
    leaves["w"] = normalize(draw(*sizes), dim=-1).to(dtype)
    leaves["beta"] = 2 * draw(batch, length, heads).sigmoid()
    leaves["angles"] = draw(batch, length, heads, width // 2)
    leaves["log_gate"] = strength * logsigmoid(draw(batch, length, heads) + 5)  # half is forgotten in some 70 tokens
    leaves["strong_gate"] = 20 * leaves["log_gate"]  # in 4
    theta = 10000 ** -(torch.arange(0, width, 2, device=device) / width)  # RoPE's angles
    phases = (torch.arange(length, device=device)[:, None] * theta).repeat(1, 2).unsqueeze(1)  # (T, 1, D)
    bounds = boundaries(length, documents) if documents else None
    packing = {} if bounds is None else {"cu_seqlens": bounds.to(device), "longest": bounds.diff().max()}
    return {
        **{name: x.requires_grad_() for name, x in leaves.items()},
        "theta": theta.expand(batch, length, 1, -1),
        "cos": phases.cos().to(dtype),
        "sin": phases.sin().to(dtype),
        "grad": draw(*sizes).to(dtype),
        **packing,
    }


def attend(kind: str, impl: Any, inputs: Inputs) -> Tensor:
    """Our attention with the factors of a case."""
    factors, documents = KINDS[kind](inputs), inputs.get("cu_seqlens")
    return dr.attend(inputs["q"], inputs["k"], inputs["v"], **factors, cu_seqlens=documents, impl=impl)


def bytes_of(past: dr.Past) -> int:
    """Size of a cache in bytes."""
    return sum(x.nbytes for x in past.tensors())


def output_and_gradients(run: Callable[[Inputs], Tensor], inputs: Inputs) -> Inputs:
    """The output, and the gradient of every leaf, by name."""
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    output = run(inputs)
    gradients = torch.autograd.grad(output, list(leaves.values()), inputs["grad"].to(output.dtype), allow_unused=True)
    by_name = {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}
    return {"output": output.detach(), **by_name}


def relative_error(computed: Tensor, exact: Tensor) -> float:
    """‖computed − exact‖ / ‖exact‖."""
    return float((computed.double() - exact).norm() / exact.norm())


def relative_errors(computed: Inputs, truth: Inputs) -> dict[str, float]:
    """Relative errors by name; infinite where a tensor is missing or NaN."""
    errors = {name: relative_error(computed[name], x) for name, x in truth.items() if name in computed}
    return {name: errors[name] if errors.get(name, torch.nan) >= 0 else torch.inf for name in truth}


@cache
def definition(kind: str, shape: Shape, strength: float, device: str) -> tuple[Inputs, dict[str, float]]:
    """Output and gradients of the definition in float64, and the relative tolerance of each."""
    inputs, run = make_inputs(shape, device, strength), partial(attend, kind, "reference")
    exact = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    truth = output_and_gradients(run, exact)
    dtype = DTYPES[device]
    limits = {name: LIMITS[dtype][name != "output"] for name in truth}
    if dtype == torch.bfloat16:
        rounding = relative_errors(output_and_gradients(run, inputs), truth)
        limits |= {name: min(limit, 2 * rounding[name]) for name, limit in limits.items() if name != "angles"}
    return truth, limits


def check(method: Method, width: int, packed: bool, device: str) -> dict[str, float]:
    """Worst errors of output and gradients against float64, as multiples of the tolerance: up to 1 is correct."""
    worst: dict[str, float] = {}
    for length, strength in CHECKS[device]:
        shape = Shape(1, length, 2, width, documents=length // 4 if packed else 0)
        truth, limits = definition(method.kind, shape, strength, device)
        inputs = method.prepare(make_inputs(shape, device, strength))
        for name, error in relative_errors(output_and_gradients(method.run, inputs), truth).items():
            worst[name] = max(worst.get(name, 0.0), error / limits[name])
    return worst


@torch.no_grad()
def sticks_in_reach(q: Tensor, k: Tensor) -> float:
    """The share of 64 × 64 tiles of the causal triangle in which some row has stick left; first sequence of the batch.

    The kernel treats a stick as used up when less than 2⁻²⁹ of it is left.
    """
    length, reached, tiles = q.shape[1], 0.0, 0
    q, k = (x[0].float().transpose(0, 1) for x in (q, k))  # (H, T, D)
    for start in range(0, length, 64):
        end = min(start + 64, length)
        logits = q[:, start:end] @ k[:, :end].mT * q.shape[-1] ** -0.5
        hidden = torch.ones_like(logits[0], dtype=torch.bool).triu(start)  # a row's own key, and what comes after it
        broken = logsigmoid(-logits).masked_fill(hidden, 0)
        left = broken.flip(-1).cumsum(-1).flip(-1)[..., 64::64].amax(1)  # (H, tiles) in front of all but the last
        reached += 1 + float((left > -29 * math.log(2)).sum(-1).float().mean())
        tiles += 1 + left.shape[-1]
    return reached / tiles
