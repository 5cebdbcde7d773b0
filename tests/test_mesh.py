"""Training on a mesh: the metrics, scores and weights of one process; resumed by any number of processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from small_runs import SMALL, small
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from worlds import run_world

import deadreckon as dr
from deadreckon.lab.recipes.conversion import Conversion
from deadreckon.lab.training import Ranks, Run, Training, checkpoints, make_model, train_run
from deadreckon.lab.training.conversion import convert_run
from deadreckon.lab.training.ranks import sizes_in

STEPS = "steps=4"


def recipe(encoding: str = "path-fox", *changes: str) -> Any:
    sizes = ("batch_size=8", "accumulate=2", "evaluate_every=2", "test_lengths=[16]", "learning_rate=1e-3")
    return small(encoding, 0, STEPS, *sizes, *changes)


def stopped_after(steps: int) -> Any:
    """Makes training raise an exception after so many steps, on every rank; call the result to undo it."""
    from deadreckon.lab.training import engine

    original = engine.Training.advance

    def advance(self: Any) -> Any:
        if self.done == steps:
            raise KeyboardInterrupt
        return original(self)

    engine.Training.advance = advance  # type: ignore[method-assign]
    return lambda: setattr(engine.Training, "advance", original)


def begun(path: Path, ranks: Ranks | None = None) -> None:
    """Trains half of a run."""
    go_on = stopped_after(2)
    with pytest.raises(KeyboardInterrupt):
        train_run(recipe(), path, console=Console(quiet=True), ranks=ranks)
    go_on()


def on_meshes(folder: str) -> list[str]:
    """Trains on two meshes, and one run on both, one after the other."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp")) for shape in ((2, 2), (1, 4))]
    quiet = Console(quiet=True)
    train_run(recipe(), Path(folder, "mesh"), console=quiet, ranks=Ranks(meshes[0], timeout=60))
    checkpoints.SMALLEST, checkpoints.GRACE = 1, 30.0  # from here on all ranks write, and none is given up
    for name in ("moved", "left by a mesh"):
        begun(Path(folder, name), Ranks(meshes[0], timeout=60))
        dist.barrier()
        assert Run(Path(folder, name)).progress().step == 2
        dist.barrier()
    for name in ("moved", "left by one"):
        train_run(recipe(), Path(folder, name), console=quiet, ranks=Ranks(meshes[1], timeout=60))
    with pytest.raises(ValueError, match="mesh: expected dp to divide batch_size / accumulate = 1, got 2") as error:
        train_run(recipe("rope", "accumulate=8"), Path(folder, "bad"), console=quiet, ranks=Ranks(meshes[0]))
    wait_in_vain(meshes[0], Path(folder, "gave up"))
    return [str(error.value)]


def wait_in_vain(mesh: DeviceMesh, gave_up: Path) -> None:
    """One of two ranks along "cp" hangs: the other gives up after the timeout, which is not the default."""
    Ranks(mesh, timeout=0.5).divide(make_model(recipe(), 5))
    if dist.get_rank() == 2:
        with pytest.raises(RuntimeError, match=r"[tT]imed out"):
            dr.ContextParallel(mesh["cp"]).total(torch.ones(1))
        gave_up.touch()
    until = time.monotonic() + 20
    while dist.get_rank() == 3 and not gave_up.exists() and time.monotonic() < until:
        time.sleep(0.05)


def tensors_in(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """Of all files that a checkpoint has of weights, or of the optimizer's state."""
    return {name: x for file in folder.glob(f"{stem}*.safetensors") for name, x in load_file(file).items()}


def test_a_mesh_trains_as_one_process(tmp_path: Path) -> None:
    """Also where one of them begins and another goes on, whatever files they write."""
    begun(tmp_path / "left by one")
    run_world(4, on_meshes, str(tmp_path))
    quiet = Console(quiet=True)
    for stem in ("model", "optimizer"):
        assert len(list((tmp_path / "left by a mesh" / "last").glob(f"{stem}-*-of-*.safetensors"))) >= 4
    one = train_run(recipe(), tmp_path / "one", console=quiet)
    for name in ("mesh", "moved", "left by one", "left by a mesh"):
        train_run(recipe(), tmp_path / name, console=quiet)
        run = Run(tmp_path / name)
        assert run.finished
        for mine, its in zip(run.metrics(), one.metrics(), strict=True):
            assert mine["step"] == its["step"]
            assert mine["error"] == pytest.approx(its["error"], abs=1e-6)
            for key in its.keys() & {"loss", "validation_loss"}:
                assert mine[key] == pytest.approx(its[key], rel=1e-4)
        assert len(run.starts()) == (1 if name == "mesh" else 2)
        for stem in ("model", "optimizer"):
            mine, its = (tensors_in(path / "last", stem) for path in (run.path, one.path))
            assert mine.keys() == its.keys()
            for key, value in its.items():
                # AdamW divides by the root of small squares: an error of rounding, 1e-6, is a share of each step.
                assert torch.allclose(mine[key].float(), value.float(), atol=4e-4, rtol=1e-2), (name, key)
        assert {place: score.rows for place, score in run.scores().items()} == {
            place: score.rows for place, score in one.scores().items()
        }
        loaded = dr.DeadReckonForCausalLM.from_pretrained(run.path / "last").state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in tensors_in(run.path / "last", "model").items())


@pytest.mark.integration
def test_torchrun_trains_and_exports(tmp_path: Path) -> None:
    """The command itself, on four processes: losses, scores and the exported weights are those of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    four = ["torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(port), "-m"]
    command = ["deadreckon", "train", "flipflop", "--encoding", "path-fox", "--shard-size", "10KB"]
    change = ["--change", *SMALL, "steps=4", "batch_size=8"]
    for name, words in (("one", []), ("four", four)):
        mesh = ["--mesh", "dp=2,cp=2"] if words else []
        folders = ["--out", str(tmp_path / name), "--export", str(tmp_path / f"{name} exported")]
        done = subprocess.run(
            [sys.executable, "-m", *words, *command, *mesh, *folders, *change],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("Exported") == 1  # the first rank prints
    one, four_ranks = (Run(tmp_path / name) for name in ("one", "four"))
    for mine, its in zip(four_ranks.metrics(), one.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)
    assert four_ranks.scores().keys() == one.scores().keys()
    assert len(list((tmp_path / "four exported").glob("model-*.safetensors"))) > 2
    trained, loaded = (
        dr.DeadReckonForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "four" / "last", tmp_path / "four exported")
    )
    assert trained.keys() == loaded.keys() and all(torch.equal(x, loaded[name]) for name, x in trained.items())


def test_the_flag_names_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_in("dp=2,cp=4") == {"dp": 2, "cp": 4}
    assert sizes_in("") == {}
    for bad in ("dp", "tp=2", "dp=0", "dp=2,dp=2", "dp=x"):
        with pytest.raises(ValueError, match="mesh: expected sizes of dp and cp"):
            sizes_in(bad)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"mesh: dp=2 needs 2 processes of torchrun, got 1; start it with torchrun"):
        Ranks.start("dp=2", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"mesh: expected sizes for 3 processes, such as dp=3, got none"):
        Ranks.start("", "cpu")


def test_teachers_have_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objectives reach into layers, past what gathers their parameters."""
    ranks, model = Ranks(), make_model(recipe(), 5)
    ranks.size = 2
    with pytest.raises(ValueError, match="mesh: expected one process to learn from a teacher, got 2"):
        Training(model, recipe().make_task(), recipe(), teacher=model, ranks=ranks)
    monkeypatch.setenv("WORLD_SIZE", "2")
    conversion = Conversion("llama", "path-fox", "text", "")
    with pytest.raises(ValueError, match="convert: expected one process, as a teacher and its student need it, got 2"):
        convert_run(conversion, tmp_path / "new")
    assert not (tmp_path / "new").exists()
