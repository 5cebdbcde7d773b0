"""Runs: checkpoints, resuming after any interruption, and scores."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, quiet, run_cli, small
from worlds import prepared

import deadreckon as dr
from deadreckon.lab import cli, files
from deadreckon.lab.evaluation import Score, score
from deadreckon.lab.files import recover, replacing
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training import Progress, Run, Training, checkpoints, make_model, train, train_run
from deadreckon.tasks.curriculum import Curriculum


def contents(run: Run) -> dict[str, Any]:
    """Everything in a run's folder that must not depend on interruptions."""
    timeless = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in run.metrics()]
    return {
        "last": load_file(run.path / "last" / "model.safetensors"),
        "optimizer": load_file(run.path / "last" / "optimizer.safetensors"),
        "best": load_file(run.path / "best" / "model.safetensors"),
        "progress": replace(run.progress(), seconds=0.0),
        "metrics": timeless,
        "scores": run.scores(),
    }


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if name in ("last", "optimizer", "best"):
            assert value.keys() == other[name].keys()
            assert all(torch.equal(tensor, other[name][key]) for key, tensor in value.items()), name
        else:
            assert value == other[name]


class KilledError(BaseException):
    """An exception that nothing catches."""


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only number, if any, says how many more events may happen before a simulated kill.

    An event is a step, or a file operation: before and after each rename, before each fsync, before leftovers are
    removed, and in the midst of writing a file.
    """
    left: list[int] = []

    def may_end() -> None:
        if left:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError

    def watch(owner: Any, name: str, after: bool = False) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            may_end()
            found = original(*args, **kwargs)
            if after:
                may_end()
            return found

        monkeypatch.setattr(owner, name, watched)

    def write_half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half of it")
        may_end()
        save_file(tensors, path, metadata)

    save_file = checkpoints.save_file
    monkeypatch.setattr(checkpoints, "save_file", write_half)
    monkeypatch.setattr(sys.modules["deadreckon.lab.training.trainer"], "SAVE_SECONDS", 0.0)
    watch(Training, "advance", after=True)
    watch(Path, "rename", after=True)
    watch(os, "replace", after=True)
    watch(checkpoints, "to_disk")
    watch(files, "to_disk")
    watch(shutil, "rmtree")
    return left


def test_ten_interruptions_change_nothing(tmp_path: Path, fate: list[int]) -> None:
    """`randomized` draws numbers in each forward pass."""
    recipe = small("randomized", 3)
    whole = train_run(recipe, tmp_path / "whole", console=quiet())
    chance = random.Random("randomized")
    interruptions = 0
    while interruptions < 10:
        fate[:] = [chance.randrange(5, 60)]
        try:
            train_run(recipe, tmp_path / "torn", console=quiet())
        except KilledError:
            interruptions += 1
        else:
            raise AssertionError(f"over after {interruptions} interruptions: too few")
    fate.clear()
    torn = train_run(recipe, tmp_path / "torn", console=quiet())
    assert_equal(contents(whole), contents(torn))
    assert [line["step"] for line in torn.metrics()] == list(range(1, 25))
    assert len(torn.starts()) > 5 and len(whole.starts()) == 1
    assert not [path for path in torn.path.iterdir() if path.suffix in (".new", ".old")]


def test_ended_anywhere_in_a_checkpoint_it_goes_on(
    tmp_path: Path, fate: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third place where writing a checkpoint can end; what was saved once is never lost."""
    saved: list[int] = []

    class InPlace:
        """Writes at once, so that all happens in one order."""

        def __init__(self, *arguments: Any) -> None:
            pass

        def submit(self, work: Any, folder: Path, *arguments: Any) -> Future[None]:
            work(folder, *arguments)
            saved.append(Run(folder.parent).progress().step)
            done = Future[None]()
            done.set_result(None)
            return done

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(checkpoints, "ThreadPoolExecutor", InPlace)
    recipe = small("rope", 0, "steps=2", "evaluate_every=1", "test_lengths=[8]", "validation_rows=1", "test_rows=1")
    whole = contents(train_run(recipe, tmp_path / "whole", console=quiet()))
    for things in range(0, 200, 3):
        fate[:] = [things]
        saved.clear()
        try:
            train_run(recipe, tmp_path / str(things), console=quiet())
        except KilledError:
            fate.clear()
            if saved:
                assert Run(tmp_path / str(things)).restore("cpu")[1].step >= saved[-1]
            assert_equal(whole, contents(train_run(recipe, tmp_path / str(things), console=quiet())))
            shutil.rmtree(tmp_path / str(things))
        else:
            break
    assert 50 < things < 199


def in_silence(words: list[str]) -> None:
    """The command line, in a process of its own."""
    torch.set_num_threads(1)
    sys.argv, sys.stdout = ["deadreckon", *words], io.StringIO()
    cli.main()


@pytest.mark.slow
def test_killed_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of the command, at random; then the same words again, in this process."""
    changes = [*SMALL, "steps=60", "evaluate_every=20"]
    words = ["train", "flipflop", "--encoding", "path", "--out", str(tmp_path / "killed"), "--change", *changes]
    chance, metrics = random.Random(5), tmp_path / "killed" / "metrics.jsonl"
    process = prepared().Process(target=in_silence, args=(words,), daemon=True)
    process.start()
    reached = chance.randrange(10, 40)
    while not metrics.exists() or metrics.read_text().count("\n") < reached:
        assert process.is_alive(), "it ended by itself"
        time.sleep(0.002)
    time.sleep(chance.random() / 50)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert Run(tmp_path / "killed").progress().step < 60
    assert run_cli(monkeypatch, *words) == 0
    killed = Run(tmp_path / "killed")
    assert killed.finished and len(killed.starts()) == 2
    whole = train_run(killed.recipe, tmp_path / "whole", console=quiet())
    assert_equal(contents(whole), contents(killed))


def test_half_a_checkpoint_is_never_picked_up(tmp_path: Path) -> None:
    recipe = small("rope", 0, "steps=6")
    run = train_run(recipe, tmp_path, console=quiet())
    whole = load_file(tmp_path / "last" / "model.safetensors")
    (tmp_path / "last.new").mkdir()
    (tmp_path / "last.new" / "model.safetensors").write_bytes(b"half")
    training, progress = run.restore("cpu")
    assert progress.step == training.done == 6
    assert all(
        torch.equal(tensor, whole[name]) for name, tensor in training.model.state_dict().items() if name in whole
    )
    assert not (tmp_path / "last.new").exists()


def test_folders_are_replaced_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for text in ("one", "two"):
        with replacing(place) as folder:
            (folder / "file").write_text(text)
            assert not place.exists() or (place / "file").read_text() == "one"
    assert (place / "file").read_text() == "two" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(KeyboardInterrupt), replacing(place) as folder:
        raise KeyboardInterrupt
    recover(place)
    assert (place / "file").read_text() == "two" and len(list(tmp_path.iterdir())) == 1
    with replacing(tmp_path / "place.old"):
        (tmp_path / "place.old.new" / "file").write_text("before")
    place.rename(tmp_path / "place.new")  # as if killed between the two renamings
    recover(place)
    assert (place / "file").read_text() == "two" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "first.new").mkdir()  # as if killed while the very first one was written
    recover(tmp_path / "first")
    assert list(tmp_path.iterdir()) == [place]


def test_a_checkpoint_that_was_cut_off_is_read(tmp_path: Path) -> None:
    """Killed between two renamings, before it is trained again; and what is no model is said to be none."""
    run = train_run(small("nope", 0, "steps=1"), tmp_path / "run", console=quiet())
    last, expected = run.path / "last", run.load().state_dict()
    for name in (".new", ".old"):
        shutil.copytree(last, last.with_name(last.name + name))
    shutil.rmtree(last)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.load().state_dict().items())
    assert [path.name for path in run.path.iterdir() if path.name.startswith("last")] == ["last"]
    weights = (last / "model.safetensors").read_bytes()
    (last / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ValueError, match=r"model: expected safetensors in '.*/last/model.safetensors', whole"):
        run.load()


def test_a_run_keeps_all_about_it(tmp_path: Path) -> None:
    run = train_run(small("fox", 2), tmp_path / "x", console=quiet())
    assert Run(tmp_path / "x").recipe == small("fox", 2)
    start = run.starts()[0]
    assert start["versions"]["torch"] == version("torch") and start["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"[0-9a-f]{40}\+?", start["commit"] or "0" * 40)
    best = json.loads((run.path / "best" / "score.json").read_text())
    looks = {line["step"]: line["validation_error"] for line in run.metrics() if "validation_error" in line}
    assert list(looks) == [6, 12, 18, 24]
    assert best["error"] == looks[best["step"]] == min(looks.values())
    idle = 3 - list(looks.values()).index(best["error"])
    expected = Progress(24, run.progress().seconds, 24 * 4 * 16, best["error"], best["loss"], best["step"] == 24, idle)
    assert run.progress() == expected
    for kind in ("last", "best"):
        model = dr.DeadReckonForCausalLM.from_pretrained(run.path / kind)
        assert model.config.encoding == "fox"
    assert set(run.scores()) == {(name, length) for name in ("as trained", "sparse", "dense") for length in (8, 16, 32)}


def test_runs_do_not_mix(tmp_path: Path) -> None:
    run = train_run(small("rope", 0, "steps=2"), tmp_path / "x", console=quiet())
    with pytest.raises(ValueError, match=r"out: .*x holds a run of another recipe: encoding 'rope', not 'path'"):
        train_run(small("path", 0, "steps=2"), tmp_path / "x", console=quiet())
    with run.locked(), pytest.raises(ValueError, match="out: another process is training"):
        train_run(run.recipe, tmp_path / "x", console=quiet())
    with pytest.raises(ValueError, match=r"run: expected a folder with recipe\.json, as train writes it, got"):
        Run(tmp_path / "nowhere")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "recipe.json").write_text('{"steps": 3, "pace": 1}')
    with pytest.raises(
        ValueError, match=r"recipe\.json is no recipe: recipe: expected names of its fields, .*got pace"
    ):
        Run(tmp_path / "y")


def test_other_threads_are_told(tmp_path: Path) -> None:
    console, recipe = quiet(), small("rope", 0, "steps=6")
    run = Run.create(tmp_path, recipe)
    training, _ = run.restore("cpu")
    training.advance()
    run.save(training, Progress(1))
    run.note_start("cpu")
    environment = [run.starts()[0] | {"threads": 99}]
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    train_run(recipe, tmp_path, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "resumes at step 1." in said and "There were 99 threads" in said


def test_tensorboard_gets_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="tensorboard: not installed"):
        train_run(small("rope", 0, "steps=2"), tmp_path / "x", console=quiet(), tensorboard=True)
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: Path, purge_step: int) -> None:
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    run = train_run(small("rope", 0, "steps=2"), tmp_path / "x", console=quiet(), tensorboard=True)
    assert [("loss", line["loss"], line["step"]) for line in run.metrics()] == [x for x in written if x[0] == "loss"]
    assert written[-1][0] == "closed"


def test_runs_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Options were those of the one encoding, and one metric stood for the evaluators."""
    run = train_run(small("path", 0, "steps=2", "encoding_options.path.rank=4"), tmp_path, console=quiet())
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    before = recipe | {"metric": "error", "encoding_options": {"rank": 4}}
    for name in (
        "evaluators",
        "reporting",
        "schedules",
        "train_positions",
        "test_positions",
        "test_autocast",
        "test_piece",
    ):
        del before[name]
    (tmp_path / "recipe.json").write_text(json.dumps(before))
    scores = json.loads((tmp_path / "scores.json").read_text())
    for one in scores:
        del one["score"]["measure"], one["score"]["axis"]
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    again = train_run(run.recipe, tmp_path, console=quiet())
    assert again.recipe == run.recipe and again.scores() == run.scores() and len(again.starts()) == 1


@pytest.mark.parametrize("encoding", ["path", "prism"])
def test_accumulation_changes_rounding_alone(encoding: str) -> None:
    """In a batch of rows with more and fewer scored tokens; PRISM adds a penalty to the loss, once a batch."""
    options = {"prism": {"positions": 24, "width": 8, "hidden": 8, "orthogonality": 0.1}}
    found = []
    for accumulate in (1, 2, 4):
        recipe = Recipe(encoding=encoding, steps=5, batch_size=8, curriculum=Curriculum(24, shortest=4), width=16)
        recipe = replace(recipe, accumulate=accumulate, encoding_options=options)
        model = make_model(recipe, 5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.5 if "weight_hh" in name else 1.0)  # away from orthogonal: a penalty of 1.25 or so
        steps = list(train(model, recipe.make_task(), recipe))
        found.append(([(step.loss, step.error) for step in steps], model.lm_head.weight))
    for steps, weight in found[1:]:
        # Losses of single precision, added up in another order, five steps of Adam in a row.
        assert torch.allclose(torch.tensor(steps), torch.tensor(found[0][0]), rtol=0, atol=1e-4)
        assert torch.allclose(weight, found[0][1], rtol=0, atol=1e-3)


def test_gradients_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimiser sees has at most the recipe's norm, also where gradients are added up in parts."""
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def look(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    for clip, accumulate in ((1e-3, 1), (1e-3, 2), (1e6, 1)):
        recipe = small("path", 0, "steps=1", f"clip={clip}", f"accumulate={accumulate}")
        list(train(make_model(recipe, 5), recipe.make_task(), recipe))
    assert norms[:2] == pytest.approx([1e-3, 1e-3], rel=1e-3) and norms[2] > 1e-2


def test_scores_of_random_encodings_repeat() -> None:
    recipe = small("random-rotation")
    model = make_model(recipe, 5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = score(model, recipe, "as trained", 16)
    assert torch.equal(torch.rand(3), expected)  # nobody else's numbers were used up
    torch.rand(5)
    assert score(model, recipe, "as trained", 16) == first


def test_training_ends_where_the_recipe_says(tmp_path: Path) -> None:
    """Followed is the error on fresh rows: 0 or less is not reached here, 1 is at once."""
    whole = train_run(small("rope"), tmp_path / "whole", console=quiet())
    at_once = train_run(small("rope", 0, "ends.reached=1"), tmp_path / "reached", console=quiet())
    assert at_once.finished and at_once.progress().step == len(at_once.metrics()) == 6
    assert at_once.metrics()[-1]["loss"] == whole.metrics()[5]["loss"]
    assert set(at_once.scores()) == set(whole.scores())
    never = train_run(small("rope", 0, "ends.reached=-1"), tmp_path / "never", console=quiet())
    assert never.finished and never.progress().step == 24
    assert len(train_run(at_once.recipe, at_once.path, console=quiet()).starts()) == 1  # not begun again


def test_scores_may_be_added_at_once(tmp_path: Path) -> None:
    """By several processes, as `eval` and `eval --sharpen-beyond` of one run are: none is lost."""
    run = Run.create(tmp_path, small("rope", 0))
    kinds = [("last", None), ("last", 32), ("best", None)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(lambda kind: add_one_by_one(tmp_path, *kind), kinds))
    for kind, beyond in kinds:
        assert [length for _, length in run.scores(kind, beyond)] == list(range(1, 21))
    assert not list(tmp_path.glob(".scores.json*"))


def add_one_by_one(path: Path, kind: str, sharpen_beyond: int | None) -> None:
    for length in range(1, 21):
        score = Score("as trained", length, 0.5, 0.5, 1.0, 4)
        Run(path).add_scores([score], kind, sharpen_beyond)


def test_patience_counts_evaluations_that_were_no_better() -> None:
    recipe = small("rope", 0, "ends.patience=2")
    progress = Progress(0)
    followed = []
    for value in (0.5, 0.4, 0.4, 0.3, 0.3, math.nan):
        progress = progress.evaluated(recipe, value, loss=1.0)
        followed.append((progress.best, progress.idle, progress.ended))
    assert followed == [
        (0.5, 0, False), (0.4, 0, False), (0.4, 1, False), (0.3, 0, False), (0.3, 1, False), (0.3, 2, True)
    ]  # fmt: skip
    progress = Progress(0).evaluated(recipe, math.nan, loss=1.0)
    assert progress.evaluated(recipe, 0.5, loss=1.0).best == 0.5  # better than no number
    exact = small("rope", 0, 'evaluators=["exact"]', "ends.reached=0.9")
    ended = [Progress(0).evaluated(exact, value, loss=1.0).ended for value in (0.89, 0.9, 1.0, math.nan)]
    assert ended == [False, True, True, False]


def test_of_equal_evaluations_the_one_with_the_lower_loss_is_kept() -> None:
    recipe = small("rope", 0)  # by its error
    progress = Progress(0, best=0.25)  # of a run that noted no loss
    evaluations = [(0.25, 1.0), (0.25, 1.5), (0.5, 0.1), (0.25, 0.5), (0.0, 2.0), (0.0, math.nan), (math.nan, 0.1)]
    followed = []
    for value, loss in evaluations:
        progress = progress.evaluated(recipe, value, loss)
        followed.append((progress.kept, progress.loss, progress.idle))
    assert followed == [
        (True, 1.0, 1), (False, 1.0, 2), (False, 1.0, 3), (True, 0.5, 4), (True, 2.0, 0), (False, 2.0, 1),
        (False, 2.0, 2),
    ]  # fmt: skip
