"""Context parallelism: whatever is divided among ranks, output and every gradient are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, relative_errors, run
from torch import Tensor
from worlds import run_world

import deadreckon as dr

SMALL = {"width": 8, "value_width": 12, "batch": 2}
CASES = {
    "plain": Case(length=41, **SMALL),
    "gated": Case(gate="learned", length=50, **SMALL),
    "gated per key head": Case(gate="learned per key head", length=37, **SMALL),
    "alibi": Case(gate="constant", length=24, **SMALL),
    "rotation": Case("rotation", length=45, **SMALL),
    "rotation per query head, gated": Case("rotation per query head", "learned", length=29, **SMALL),
    "rotation of values": Case("rotation of values", "learned per key head", length=33, **SMALL),
    "householder": Case("householder", length=90, **SMALL),
    "householder, projections": Case("householder", beta=1.0, length=20, **SMALL),
    "householder, gated": Case("householder", "learned", length=47, **SMALL),
    "householder, gated per key head": Case("householder", "learned per key head", length=31, **SMALL),
    "sticks": Case(score="stick-breaking", length=43, **SMALL),
    "sticks, rotation, gated": Case("rotation", "learned", "stick-breaking", length=30, **SMALL),
    "sticks, householder, gated": Case("householder", "learned", "stick-breaking", length=35, **SMALL),
    "power": Case(score=dr.Power(2), length=39, **SMALL),
    "power, chunked, gated": Case("rotation", "learned", dr.Power(4, "chunked"), length=28, **SMALL),
    "power, householder, gated": Case("householder", "learned", dr.Power(4), length=34, **SMALL),
    "one token a piece": Case("householder", "learned", length=5, **SMALL),
}
PACKED = {
    "plain": Case(length=48, batch=1, width=8, value_width=12),
    "gated": Case("rotation", "learned", length=48, batch=1, width=8, value_width=12),
    "householder": Case("householder", length=48, batch=1, width=8, value_width=12),
    "householder, gated": Case("householder", "learned per key head", length=48, batch=1, width=8, value_width=12),
    "sticks": Case("householder", "learned", "stick-breaking", length=48, batch=1, width=8, value_width=12),
    "power": Case("rotation", "learned", dr.Power(2), length=48, batch=1, width=8, value_width=12),
}
DOCUMENTS = (0, 3, 3, 20, 24, 45, 48)  # some within a piece, one across several, an empty one, some at edges
WORLDS = ((2, "contiguous"), (3, "zigzag"), (4, "zigzag"))


def divided(
    case: Case, cp: dr.ContextParallel, dtype: torch.dtype = torch.float64, **keywords: Any
) -> dict[str, Tensor]:
    """As `cases.run`, with cp: each rank attends with its shard."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in case.inputs().items()}
    shards = {name: x if x.dim() == 1 else cp.shard(x) for name, x in leaves.items()}
    output = cp.gather(case.attend(shards, cp=cp, **keywords), length=case.length)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad.to(dtype))
    found = {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
    if case.gate == "constant":  # a parameter, whole on every rank, each having seen its own tokens
        dist.all_reduce(found["log_gate"])
    return found


def all_cases(layout: Any) -> dict[str, dict[str, Tensor]]:
    """Every case on this rank."""
    cp = dr.ContextParallel(layout=layout)
    found = {name: divided(case, cp) for name, case in CASES.items()}
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
    found |= {f"packed, {name}": divided(case, cp, cu_seqlens=bounds) for name, case in PACKED.items()}
    found["float32"] = divided(CASES["householder, gated"], cp, torch.float32)
    found["float32, sticks"] = divided(CASES["sticks"], cp, torch.float32)
    return found


@cache
def world(size: int, layout: str) -> list[dict[str, dict[str, Tensor]]]:
    return run_world(size, all_cases, layout)


@cache
def expected(name: str) -> dict[str, Tensor]:
    if name.startswith("packed, "):
        bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
        return run(PACKED[name.removeprefix("packed, ")], impl="reference", cu_seqlens=bounds)
    return run(CASES[name], impl="reference")


@pytest.mark.parametrize(("size", "layout"), WORLDS)
@pytest.mark.parametrize("name", [*CASES, *(f"packed, {name}" for name in PACKED)])
def test_ranks_equal_one_process(size: int, layout: str, name: str) -> None:
    for found in world(size, layout):
        errors = relative_errors(found[name], expected(name))
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(("size", "layout"), WORLDS)
@pytest.mark.parametrize(("name", "case"), [("float32", "householder, gated"), ("float32, sticks", "sticks")])
def test_single_precision_stays_within_1e_5(size: int, layout: str, name: str, case: str) -> None:
    for found in world(size, layout):
        errors = relative_errors(found[name], expected(case))
        assert max(errors.values()) < 1e-5, errors
