"""Packed sequences on kernels: boundaries anywhere, forward and every gradient; no uninitialised memory is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cases import DEVICE, Case, relative_errors, run
from torch import Tensor

import deadreckon as dr

BOUNDARIES = {
    "awkward": [0, 1, 70, 70, 200, 260],  # one token, nothing, inside of leaves
    "on leaves": [0, 64, 128, 260],
    "one": [0, 260],
}
CASES = {
    "path": Case("householder", None, length=260, batch=1, heads=1, group=3, beta=1.9),  # products do not fade
    "path-fox": Case("householder", "learned", length=260, batch=1, heads=2, group=1),
    "fox": Case(None, "learned per key head", length=260, batch=1),
    "plain": Case(None, None, length=260, batch=1),
    "rotation": Case("rotation of values", None, length=260, batch=1),
}


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """What was never written must not be read: deterministic mode fills new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("short_walks", "fresh_memory_is_nan")
@pytest.mark.parametrize(("name", "boundaries"), [
    ("path", "awkward"), ("path", "one"), ("path-fox", "awkward"), ("path-fox", "on leaves"), ("fox", "awkward"),
    ("fox", "on leaves"), ("plain", "awkward"), ("plain", "one"), ("rotation", "awkward"),
])  # fmt: skip
def test_packed_is_the_definition(name: str, boundaries: str) -> None:
    case, bounds = CASES[name], torch.tensor(BOUNDARIES[boundaries], dtype=torch.int32)
    found = run(case, torch.float32, DEVICE, cu_seqlens=bounds.to(DEVICE), impl="triton")
    expected = run(case, cu_seqlens=bounds, impl="reference")
    errors = relative_errors(found, expected)
    assert errors.pop("output") < 1e-5, errors
    assert max(errors.values()) < 1e-4, errors


def test_boundaries_on_a_cpu_are_looked_at_each_time() -> None:
    """NumPy may write to a tensor unnoticed."""
    case, array = CASES["plain"], np.array([0, 100, 260], dtype=np.int32)
    leaves, bounds = {key: x.float() for key, x in case.inputs().items()}, torch.from_numpy(array)
    other = torch.tensor([0, 37, 260], dtype=torch.int32)
    expected = [case.attend(leaves, cu_seqlens=x, impl="reference") for x in (bounds, other)]
    found = [case.attend(leaves, cu_seqlens=bounds, impl="blockwise")]
    array[1] = 37
    found.append(case.attend(leaves, cu_seqlens=bounds, impl="blockwise"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["path", "fox", "plain"])
def test_boundaries_of_another_tensor_are_looked_at(name: str) -> None:
    """Boundaries are checked once for each tensor, and again when it has changed."""
    case = CASES[name]
    leaves = {key: x.float().to(DEVICE) for key, x in case.inputs().items()}
    bounds = torch.tensor([0, 100, 260], dtype=torch.int32, device=DEVICE)
    case.attend(leaves, cu_seqlens=bounds, impl="blockwise")
    bounds[1] = 300
    with pytest.raises(ValueError, match="cu_seqlens: expected sorted boundaries"):
        case.attend(leaves, cu_seqlens=bounds, impl="blockwise")
    with pytest.raises(ValueError, match="cu_seqlens: expected it to run from 0 to T = 260"):
        case.attend(leaves, cu_seqlens=torch.tensor([0, 100], device=DEVICE), impl="blockwise")


@pytest.mark.parametrize("bounds", [[0, 60, 30, 100], [10, 60, 100], [0, 60, 90], [0, 60, 200]])
@pytest.mark.parametrize("name", ["plain", "path"])
@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on a GPU ends its process")
def test_boundaries_that_are_none_are_refused_when_compiled(name: str, bounds: list[int]) -> None:
    x, beta = torch.randn(1, 100, 1, 16), torch.full((1, 100, 1), 0.5)
    steps = dr.Householder(torch.nn.functional.normalize(x, dim=-1), beta) if name == "path" else None

    def attended(boundaries: Tensor) -> Tensor:
        return dr.attend(x, x, x, transport=steps, cu_seqlens=boundaries, impl="triton")

    with pytest.raises(ValueError, match="cu_seqlens: expected "):
        torch.compile(attended, backend="eager")(torch.tensor(bounds, dtype=torch.int32))
