"""Checkpoints in files of several ranks, which may be killed or hang; and exported models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, quiet, run_cli, small
from torch.distributed.device_mesh import init_device_mesh
from worlds import run_world

import deadreckon as dr
from deadreckon.lab.arguments import bytes_in
from deadreckon.lab.files import beside
from deadreckon.lab.pages.suite import find_model
from deadreckon.lab.probe.source import Source
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training import Ranks, Run, Training, checkpoints, train_run
from deadreckon.lab.training.checkpoints import divide, export

trainer = sys.modules["deadreckon.lab.training.trainer"]
TIMEOUT = 3.0  # seconds
KILLED = {"in a step": 1, "in half of a file": 1, "when its files are written": 1, "between renamings": 0}


def test_tensors_are_divided_among_files(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 40, "b": 30, "c": 30, "d": 100, "e": 10}
    assert divide("model", sizes) == {"model.safetensors": list("abcde")}
    assert divide("model", sizes, ranks=8) == {"model.safetensors": list("abcde")}  # too small for more
    three = {f"model-0000{i + 1}-of-00003.safetensors": names for i, names in enumerate((list("abc"), ["d"], ["e"]))}
    assert divide("model", sizes, largest=100) == three
    assert divide("model", sizes, largest=1) == {
        f"model-0000{i + 1}-of-00005.safetensors": [name] for i, name in enumerate("abcde")
    }
    monkeypatch.setattr(checkpoints, "SMALLEST", 1)
    assert list(divide("optimizer", sizes, ranks=2).values()) == [["a", "b", "c"], ["d"], ["e"]]


def recipe() -> Recipe:
    return small("path", 0, "steps=5", "evaluate_every=5", "learning_rate=1e-3")


def until_lost(folder: str, how: str, lost: int) -> dict[str, Any]:
    """Trains on two ranks and loses one in the third step or its checkpoint; returns the error of the other one."""
    timeout = TIMEOUT if how == "asleep" else 60.0
    ranks = Ranks(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), timeout=timeout)
    trainer.SAVE_SECONDS = 0.0  # type: ignore[attr-defined]
    checkpoints.SMALLEST, checkpoints.GRACE = 1, 0.1
    if ranks.rank == lost:
        lose(how)
    began = time.monotonic()
    try:
        train_run(recipe(), Path(folder), console=quiet(), ranks=ranks)
    except (RuntimeError, TimeoutError) as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": ""}


def lose(how: str) -> None:
    """Kills this process, or makes it hang, in the third step or the checkpoint after it."""
    steps = [0]
    advance, save_file, write, rename = Training.advance, checkpoints.save_file, checkpoints.Writer._write, Path.rename

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3 and how == "in a step":
            end()
        if steps[0] == 3 and how == "asleep":
            time.sleep(60)
        return advance(self)

    def third(new: Path) -> bool:
        return bool(json.loads((new / "progress.json").read_text())["step"] == 3)

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        if how == "in half of a file" and third(path.parent):
            path.write_bytes(b"half")
            end()
        save_file(tensors, path, metadata)

    def written(self: Any, folder: Path, *arguments: Any) -> None:
        last = how == "when its files are written" and third(beside(folder)[0])
        write(self, folder, *arguments)
        if last:
            end()

    def renamed(self: Path, target: Any) -> Any:
        rename(self, target)
        if how == "between renamings" and self.name == "last" and third(beside(self)[0]):
            end()

    Training.advance, checkpoints.save_file = counted, half  # type: ignore[method-assign]
    checkpoints.Writer._write, Path.rename = written, renamed  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run, trained by one process."""
    return train_run(recipe(), tmp_path_factory.mktemp("whole"), console=quiet())


@pytest.mark.parametrize(("how", "lost"), KILLED.items())
def test_kill_9_of_a_rank_keeps_the_last_checkpoint(how: str, lost: int, whole: Run, tmp_path: Path) -> None:
    (survivor,) = run_world(2, until_lost, str(tmp_path), how, lost, lost=lost)
    assert survivor["error"]
    step = Run(tmp_path).restore("cpu")[1].step
    assert step in {"in a step": (1, 2), "in half of a file": (2,)}.get(how, (3,))
    run = train_run(recipe(), tmp_path, console=quiet())
    assert run.finished and len(run.starts()) == 2
    for mine, its in zip(run.metrics(), whole.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)


def test_a_rank_that_hangs_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    (waited,) = run_world(2, until_lost, str(tmp_path), "asleep", 1, lost=1)
    assert "imed out" in waited["error"] or "imeout" in waited["error"], waited
    assert waited["seconds"] > TIMEOUT
    assert Run(tmp_path).restore("cpu")[1].step in (1, 2)


def test_an_exported_model_has_files_of_the_size_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "run", tmp_path / "exported"
    words = ["train", "flipflop", "--encoding", "path", "--out", str(out), "--export", str(folder)]
    change = ["--change", *SMALL, "steps=2", "tied=true"]
    assert run_cli(monkeypatch, *words, *change, "--shard-size", "10KB") == 0
    names = {path.name for path in folder.iterdir()}
    count = int(capsys.readouterr().out.split("weights in ")[1].split()[0])
    assert count > 2 and f"model-0000{count}-of-0000{count}.safetensors" in names
    assert {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"} <= names
    assert not any(name.startswith(("optimizer", "progress")) for name in names)
    trained, loaded = (dr.DeadReckonForCausalLM.from_pretrained(path).state_dict() for path in (out / "last", folder))
    assert trained.keys() == loaded.keys() and all(torch.equal(x, loaded[name]) for name, x in trained.items())
    held = [load_file(path) for path in folder.glob("*.safetensors")]
    assert all(sum(x.nbytes for x in one.values()) <= 10_000 or len(one) == 1 for one in held)
    (folder / "notes.txt").write_text("mine")
    assert export(out / "last", folder, 10**9) == ["model.safetensors"]
    assert {path.name for path in folder.glob("model*.s*")} == {"model.safetensors"}
    assert (folder / "notes.txt").exists()
    assert run_cli(monkeypatch, *words, *change, "--shard-size", "a lot") == 2


def test_numbers_of_bytes() -> None:
    assert [bytes_in(text, "x") for text in ("5GB", "200 MB", "3k", "17")] == [5 * 10**9, 200 * 10**6, 3000, 17]
    for bad in ("", "GB", "0", "-1", "1.5GB", "5 tons"):
        with pytest.raises(ValueError, match="shard_size: expected a number of bytes"):
            bytes_in(bad, "shard_size")


def test_an_interrupted_checkpoint_is_found_by_all(tmp_path: Path) -> None:
    """Whoever reads it puts it in its place: a kill between two renames leaves it beside."""
    run = train_run(small("nope"), tmp_path / "run", console=quiet())
    for read in (lambda: Source(run.path), lambda: find_model(run.path, "last"), run.load):
        shutil.copytree(run.path / "last", run.path / "last.new")
        (run.path / "last").rename(run.path / "last.old")
        read()
        assert sorted(path.name for path in run.path.glob("last*")) == ["last"]


def test_what_only_training_reads_may_be_broken(tmp_path: Path) -> None:
    run = train_run(small("nope"), tmp_path / "run", console=quiet())
    (run.path / "last" / "optimizer.safetensors").write_bytes(b"cut off")
    run.load()
    (run.path / "last" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"model: expected safetensors in .*model\.safetensors', whole"):
        run.load()
