"""The mesh's machinery on CUDA, where there is one device: one rank of NCCL, and two of gloo that share the device.

Without a GPU the same runs on a CPU, with shorter sequences.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, relative_errors, run
from rich.console import Console
from small_runs import small
from test_parallel import divided
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from worlds import run_world

import deadreckon as dr
from deadreckon.lab.training import Ranks, train_run
from deadreckon.ops.parallel.attend import attend_parallel

trainer = sys.modules["deadreckon.lab.training.trainer"]
SIZES = {"batch": 1, "heads": 2}
CASES = {
    "gated": Case("rotation", "learned", length=1500, width=64, value_width=64, **SIZES),
    "householder, gated": Case("householder", "learned", length=1500, width=64, value_width=64, **SIZES),
    "power": Case("rotation", "learned", dr.Power(2), length=700, width=32, value_width=32, **SIZES),
}
DTYPES = (torch.float32, torch.bfloat16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def case_on(device: str, name: str) -> Case:
    case = CASES[name]
    return case if device == "cuda" else replace(case, length=case.length // 10, width=8, value_width=8)


def around_a_ring(case: Case, leaves: dict[str, Tensor], cp: dr.ContextParallel) -> Tensor:
    """`attend` itself has no need of one where there is one rank."""
    q, k, v = (leaves[name] for name in "qkv")
    factors = dr.Factors(case.steps(leaves), leaves["log_gate"], case.score)
    return attend_parallel(q, k, v, factors, case.width**-0.5, None, cp, kernels=q.is_cuda)


def on_one_rank(device: str, folder: str) -> dict[str, Any]:
    """Attention and its gradients through a ring of one, whose second piece sees the first; a training, resumed."""
    cp = dr.ContextParallel()
    assert cp._on_host == (device == "cpu")  # not with NCCL, though there is gloo, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "attend", around_a_ring)
        shards = divided(case_on(device, "householder, gated"), cp, torch.float32, device)
    assert cp.bytes_sent == 0
    found: dict[str, Any] = {"attention": {name: x.cpu() for name, x in shards.items()}}
    mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "cp"))
    recipe = small("path-fox", 0, "steps=6", "accumulate=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SAVE_SECONDS", 0.0)
        for name, ranks in (("mesh", Ranks(mesh)), ("one", None)):
            made = train_run(recipe, Path(folder, name), device=device, console=Console(quiet=True), ranks=ranks)
            found[name] = [line["loss"] for line in made.metrics()]
    training, progress = made.restore(device, Ranks(mesh))
    found["step"] = progress.step
    trained, saved = training.model.named_parameters(), dict(made.load().named_parameters())
    found["same"] = all(torch.equal(x.cpu(), saved[name]) for name, x in trained)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_one_rank(device: str, tmp_path: Path) -> None:
    case = case_on(device, "householder, gated")
    exact = run(case, impl="blockwise")
    one = relative_errors(run(case, torch.float32, device), exact)  # also compiles kernels that the rank finds cached
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    (found,) = run_world(
        1, on_one_rank, device, str(tmp_path), timeout=300, backend=backend, cuda=device == "cuda"
    )  # fmt: skip
    for key, error in relative_errors(found["attention"], exact).items():
        assert error <= 2 * one[key] + 1e-5, (key, error, one[key])
    assert found["mesh"] == pytest.approx(found["one"], rel=2e-2)  # on CUDA in bfloat16
    assert found["step"] == 6 and found["same"]


def on_two_ranks(device: str) -> dict[Any, dict[str, Tensor]]:
    cp, found = dr.ContextParallel(), dict[Any, dict[str, Tensor]]()
    assert cp._on_host
    for dtype in DTYPES:
        for name in CASES:
            results = divided(case_on(device, name), cp, dtype, device)
            found[dtype, name] = {key: x.cpu() for key, x in results.items()}
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_whose_messages_go_over_the_host(device: str) -> None:
    exact = {name: run(case_on(device, name), impl="blockwise") for name in CASES}
    one = {  # process, in the same precision
        (dtype, name): relative_errors(run(case_on(device, name), dtype, device), exact[name])
        for dtype in DTYPES
        for name in CASES
    }
    for ranks in run_world(2, on_two_ranks, device, timeout=300, cuda=device == "cuda"):
        for (dtype, name), found in ranks.items():
            for key, error in relative_errors(found, exact[name]).items():
                alone = one[dtype, name][key]
                assert error <= 2 * alone + 1e-5, (dtype, name, key, error, alone)
