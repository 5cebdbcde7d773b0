"""Causality and document boundaries under context parallelism: not even NaN leaks."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from cases import Case
from test_parallel import DOCUMENTS, KERNELS, PACKED, packing
from torch import Tensor
from worlds import run_world

import deadreckon as dr

CASES = {
    **PACKED,
    "rotation of values": Case("rotation of values", length=48, batch=1, width=8),
    "rotation per query head": Case("rotation per query head", "constant", length=48, batch=1, width=8),
    "sticks, plain": Case(None, None, "stick-breaking", length=48, batch=1, width=8),
}
# In documents within a piece, across two, behind one that goes on and before another, over two whole pieces.
NUMBERS = {2: torch.nan, 10: torch.inf, 21: torch.nan, 30: torch.inf}


def attended(case: Case, leaves: dict[str, Tensor], **keywords: Any) -> Tensor:
    """All outputs of the first row."""
    cp = dr.ContextParallel()
    shards = {name: x if x.dim() == 1 else cp.shard(x) for name, x in leaves.items()}
    return cp.gather(case.attend(shards, cp=cp, **keywords))[0]


def spread(case: Case, packed: bool, places: tuple[int, ...], impl: Any = "blockwise") -> list[str]:
    """What a NaN or infinity at one token reaches and should not, or should and does not."""
    found, keywords = list[str](), {"impl": impl, **packing("packed" if packed else "")}
    leaves = {name: x.float() for name, x in case.inputs().items()}
    expected = attended(case, leaves, **keywords)
    tokenwise = [name for name, x in leaves.items() if x.dim() > 1]
    for name, at in ((name, at) for number, name in enumerate(tokenwise) for at in places[number % 2 :: 2]):
        bad = leaves[name].clone()
        bad[(0, at, -1, 0)[: bad.dim()]] = NUMBERS[at]
        outputs = attended(case, {**leaves, name: bad}, **keywords)
        end = DOCUMENTS[bisect_right(DOCUMENTS, at)] if packed else case.length
        same = ((outputs - expected).abs() < 1e-5).flatten(1).all(1)
        if reached := [row for row in range(case.length) if not same[row] and not at <= row < end]:
            found.append(f"{name} at {at} reaches {reached}")
        if not outputs[at if name == "q" else end - 1].isnan().any():
            found.append(f"{name} at {at} is hidden")
    return found


def everywhere() -> dict[str, list[str]]:
    packed = {f"packed, {name}": spread(case, True, tuple(NUMBERS)) for name, case in CASES.items()}
    return packed | {name: spread(case, False, (10, 30)) for name, case in CASES.items()}


def inside_kernels() -> dict[str, list[str]]:
    names = ("packed, rotation", "packed, householder, gated")
    return {name: spread(KERNELS[name], True, (2,), "triton") for name in names}


def test_a_nan_stays_in_its_document() -> None:
    for found in run_world(2, everywhere):
        assert not any(found.values()), {name: leaks for name, leaks in found.items() if leaks}


def test_kernels_inside_pieces() -> None:
    for found in run_world(2, inside_kernels):
        assert not any(found.values()), found
