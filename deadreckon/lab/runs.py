"""A run is a folder: its recipe, where and how it was made, its metrics, checkpoints and scores.

    recipe.json       everything that decides the result
    environment.json  each time it was started: date, command, machine, versions, commit
    metrics.jsonl     a line for each logged step
    last/, best/      checkpoints: models for from_pretrained; the last one with the optimiser's state
    scores.json       by test and length

Nothing is ever half there: files and folders are written beside their place, brought to the disk, then renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import deadreckon as dr
from deadreckon.lab.environment import describe_environment
from deadreckon.lab.evaluation import Score
from deadreckon.lab.recipe import Recipe
from deadreckon.lab.texts import save_tokenizer
from deadreckon.lab.training import Training, make_model

KINDS = ("last", "best")


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside weights and the optimiser's state."""

    step: int
    seconds: float = 0.0  # of training, before
    tokens: int = 0
    best: float | None = None  # the best evaluation so far, by the recipe's metric


class Run:
    """A run that is there; `Run.create` makes one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.recipe = Recipe.from_dict(json.loads((path / "recipe.json").read_text()))
        except OSError as error:
            raise ValueError(
                f"run: expected a folder with recipe.json, as train writes it, got {str(path)!r}"
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"run: {path / 'recipe.json'} is no recipe: {error}") from error

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> Run:
        """The run of this recipe in this folder: a new one, or the one that is there."""
        if not (path / "recipe.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "recipe.json", json.dumps(recipe.to_dict(), indent=2) + "\n")
        run = cls(path)
        if differences := run.recipe.differences(recipe):
            raise ValueError(f"out: {path} holds a run of another recipe: {'; '.join(differences)}")
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains this run meanwhile. The lock goes with the process, however it ends."""
        try:
            import fcntl
        except ModuleNotFoundError:  # where there are no such locks, people take care themselves
            yield
            return
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"out: another process is training {self.path}") from error
            yield

    def note_start(self, device: str) -> None:
        """Adds to the environment where and how the run is started this time."""
        write_text(self.path / "environment.json", json.dumps([*self.starts(), describe_environment(device)], indent=2))

    def starts(self) -> list[dict[str, Any]]:
        """The environment of each start, the first one first."""
        path = self.path / "environment.json"
        return json.loads(path.read_text()) if path.exists() else []

    def save(self, training: Training, progress: Progress) -> None:
        """Writes the last checkpoint, in place of the one before."""
        with replaced(self.path / "last") as folder:
            training.model.save_pretrained(folder)
            save_tokenizer(training.task, folder)
            save_file(training.memory(), folder / "optimizer.safetensors")
            (folder / "progress.json").write_text(json.dumps(asdict(progress)))

    def save_best(self, training: Training, score: Score) -> None:
        """Writes the best checkpoint, in place of the one before."""
        with replaced(self.path / "best") as folder:
            training.model.save_pretrained(folder)
            save_tokenizer(training.task, folder)
            (folder / "score.json").write_text(json.dumps({"step": training.done} | asdict(score)))

    def restore(self, device: str) -> tuple[Training, Progress]:
        """The training as it stood at the last checkpoint, or as it begins."""
        for kind in KINDS:
            recover(self.path / kind)
        task = self.recipe.make_task()
        folder = self.path / "last"
        if not folder.exists():
            return Training(make_model(self.recipe, task.vocab_size).to(device), task, self.recipe), Progress(0)
        model = dr.DeadReckonForCausalLM.from_pretrained(folder).to(device)
        training, progress = Training(model, task, self.recipe), self.progress()
        training.remember(load_file(folder / "optimizer.safetensors"), progress.step)
        return training, progress

    def progress(self) -> Progress:
        """How far the last checkpoint is."""
        path = self.path / "last" / "progress.json"
        return Progress(**json.loads(path.read_text())) if path.exists() else Progress(0)

    def load(self, kind: str = "last", device: str = "cpu") -> dr.DeadReckonForCausalLM:
        """The model of a checkpoint, to be scored."""
        folder = self.path / kind
        if not (folder / "config.json").exists():
            raise ValueError(f"run: {self.path} has no {kind} checkpoint yet")
        model: dr.DeadReckonForCausalLM = dr.DeadReckonForCausalLM.from_pretrained(folder).to(device)
        return model.eval()

    def scores(self, kind: str = "last") -> dict[tuple[str, int], Score]:
        """What a checkpoint reached, by test and length; scores of an earlier one do not count."""
        path = self.path / "scores.json"
        data = json.loads(path.read_text()) if path.exists() else []
        found = [Score(**one["score"]) for one in data if (one["kind"], one["step"]) == (kind, self._step(kind))]
        return {(score.condition, score.length): score for score in found}

    def add_scores(self, scores: Iterable[Score], kind: str = "last") -> None:
        """Keeps scores beside those that are there."""
        found = self.scores(kind) | {(score.condition, score.length): score for score in scores}
        path, step = self.path / "scores.json", self._step(kind)
        others = [one for one in json.loads(path.read_text()) if one["kind"] != kind] if path.exists() else []
        data = [{"kind": kind, "step": step, "score": asdict(found[place])} for place in sorted(found)]
        write_text(path, json.dumps([*others, *data], indent=1))

    def _step(self, kind: str) -> int:
        """The step of a checkpoint."""
        path = self.path / kind / ("progress.json" if kind == "last" else "score.json")
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics, without one that was cut off."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def cut_metrics(self, step: int) -> None:
        """Leaves out what was logged after a step: those steps are taken again."""
        if (self.path / "metrics.jsonl").exists():
            kept = [line for line in self.metrics() if line["step"] <= step]
            write_text(self.path / "metrics.jsonl", "".join(map(spell_line, kept)))

    @property
    def finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.progress().step == self.recipe.steps


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in folders, at any depth; each must have one."""
    found: dict[Path, Run] = {}
    for path in paths:
        places = sorted(file.parent for file in path.rglob("recipe.json")) if path.is_dir() else []
        if not places:
            raise ValueError(f"run: expected a folder with recipe.json, or with such folders in it, got {str(path)!r}")
        found |= {place.resolve(): Run(place) for place in places}
    return list(found.values())


def spell_line(values: dict[str, Any]) -> str:
    """A line of metrics. JSON has no infinities: None stands for them."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
    return json.dumps(finite) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    to_disk(new)
    os.replace(new, path)
    to_disk(path.parent)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder to write in, which takes the place of `folder` once all is written.

    Folders are not replaced in one go. So the old one is put aside first: if it is aside and none is in its place, the
    new one is whole, and `recover` ends what was begun. In any other case a new one is a leftover.
    """
    new, old = beside(folder)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    for path in (*new.rglob("*"), new):
        to_disk(path)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Ends what `replaced` was killed in, or takes back what it had begun."""
    new, old = beside(folder)
    if old.exists() and not folder.exists():
        new.rename(folder)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)


def beside(folder: Path) -> tuple[Path, Path]:
    """Where the next one is written, and where the one before is put aside."""
    return folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")


def to_disk(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    if path.is_dir() and sys.platform == "win32":  # which has no such thing for folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
