"""The mesh's machinery on CUDA, where there is one device: a rank of NCCL, by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import relative_errors, run
from rich.console import Console
from small_runs import small
from test_parallel import ON_GPU, divided
from torch.distributed.device_mesh import init_device_mesh
from worlds import run_world

import deadreckon as dr
from deadreckon.lab.training import Ranks, train_run

trainer = sys.modules["deadreckon.lab.training.trainer"]


def on_one_gpu(folder: str) -> dict[str, Any]:
    """One rank of NCCL: attention and its gradients through the ring, and a training that is resumed."""
    cp = dr.ContextParallel()
    assert not cp._on_host  # though there is gloo, too
    shards = divided(ON_GPU["householder, gated"], cp, torch.float32, device="cuda")
    found: dict[str, Any] = {"attention": {name: x.cpu() for name, x in shards.items()}}
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "cp"))
    recipe = small("path-fox", 0, "steps=6", "accumulate=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SAVE_SECONDS", 0.0)
        for name, ranks in (("mesh", Ranks(mesh)), ("one", None)):
            made = train_run(recipe, Path(folder, name), device="cuda", console=Console(quiet=True), ranks=ranks)
            found[name] = [line["loss"] for line in made.metrics()]
    training, progress = made.restore("cuda", Ranks(mesh))
    found["step"] = progress.step
    found["same"] = all(
        torch.equal(x.cpu(), y) for (_, x), y in zip(
            training.model.named_parameters(), made.load().cpu().parameters(), strict=True
        )
    )  # fmt: skip
    return found


@pytest.mark.gpu
def test_one_rank_of_nccl(tmp_path: Path) -> None:
    (found,) = run_world(1, on_one_gpu, str(tmp_path), backend="cpu:gloo,cuda:nccl")
    exact = run(ON_GPU["householder, gated"], impl="blockwise")
    one = relative_errors(run(ON_GPU["householder, gated"], torch.float32, "cuda"), exact)
    for key, error in relative_errors(found["attention"], exact).items():
        assert error <= 2 * one[key] + 1e-5, (key, error, one[key])
    assert found["mesh"] == pytest.approx(found["one"], rel=2e-2)  # bfloat16, with and without CUDA graphs
    assert found["step"] == 6 and found["same"]
