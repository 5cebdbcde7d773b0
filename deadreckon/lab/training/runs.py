"""A run is a folder: its recipe, provenance, metrics, checkpoints and scores.

    recipe.json         everything that determines the result
    environment.json    each start: date, command, machine, versions, commit
    metrics.jsonl       a line for each logged step
    evaluations.jsonl   scores during training, if the recipe reports more than the last of them
    last/, best/        checkpoints: models for from_pretrained; the last one with the optimizer's state
    scores.json         by test and length

Writes are atomic: files and folders are written beside their place, synced to disk, then renamed. Checkpoints are
written in the background (`checkpoints.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deadreckon as dr
from deadreckon.lab.environment import check_model, describe_environment
from deadreckon.lab.evaluation.scores import Place, Score, is_better, mean_of_best
from deadreckon.lab.files import add_lines, format_line, interrupted, read_lines, recover, write_text
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.texts import fast_tokenizer, same_tokens, text_of
from deadreckon.lab.training.checkpoints import Writer, read, tensors_in
from deadreckon.lab.training.distillation import load_start, load_teacher
from deadreckon.lab.training.engine import Training, config_for_tests, make_model
from deadreckon.lab.training.ranks import Ranks
from deadreckon.tasks.files import locked

KINDS = ("last", "best")


@dataclass(frozen=True)
class Progress:
    """The training progress of a checkpoint."""

    step: int
    seconds: float = 0.0  # of training, before
    tokens: int = 0
    best: float | None = None  # the best evaluation so far, by the recipe's metric
    loss: float | None = None  # of the best one: it decides between equal ones
    kept: bool = False  # whether the last one is the best: its weights are kept
    idle: int = 0  # evaluations since the metric was last better
    ended: bool = False  # whether the recipe ends training here, before its last step

    def evaluated(self, recipe: Recipe, value: float, loss: float) -> Progress:
        """The progress after an evaluation with this value of the metric: what is best, patience, early stopping."""
        better = self.best is None or is_better(recipe.metric, value, self.best)
        kept = better or (value == self.best and (self.loss is None or loss < self.loss))
        best, lowest, idle = value if better else self.best, loss if kept else self.loss, 0 if better else self.idle + 1
        goal, patience = recipe.ends.get("reached"), recipe.ends.get("patience", math.inf)
        reached = goal is not None and (value == goal or is_better(recipe.metric, value, goal))
        return replace(self, best=best, loss=lowest, kept=kept, idle=idle, ended=reached or idle >= patience)


class Run:
    """An existing run; `Run.create` makes one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.recipe = Recipe.from_dict(json.loads((path / "recipe.json").read_text()))
        except OSError as error:
            raise ValueError(
                f"run: expected a folder with recipe.json, as train writes it, got {str(path)!r} (for a checkpoint in "
                "it, and for other models, `deadreckon eval` needs --recipe)"
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"run: {path / 'recipe.json'} is no recipe: {error}") from error

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> Run:
        """Creates the run of a recipe in a folder, or opens the one that is there, which must have the same recipe."""
        if not (path / "recipe.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "recipe.json", json.dumps(recipe.to_dict(), indent=2) + "\n")
        run = cls(path)
        if differences := run.recipe.differences(recipe):
            raise ValueError(f"out: {path} holds a run of another recipe: {'; '.join(differences)}")
        return run

    @property
    def recipe_in_use(self) -> Recipe:
        """The recipe with the run's own tokenizer: a tokenizer trained on a text that has changed would be another."""
        options, folder = self.recipe.options, self.path / "last"
        if self.recipe.task != "language" or options.get("tokenizer") or not (folder / "tokenizer.json").exists():
            return self.recipe
        if same_tokens(fast_tokenizer(str(folder)), text_of(self.recipe.make_task()).corpus.tokenizer):
            return self.recipe
        return replace(self.recipe, options=options | {"tokenizer": str(folder)})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """An exclusive lock on training this run, released when the process ends, however it ends."""
        try:
            import fcntl
        except ModuleNotFoundError:  # no such locks on this system
            yield
            return
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"out: another process is training {self.path}") from error
            yield

    def note_start(self, device: str) -> None:
        """Adds this start, with its environment, to environment.json."""
        write_text(self.path / "environment.json", json.dumps([*self.starts(), describe_environment(device)], indent=2))

    def starts(self) -> list[dict[str, Any]]:
        """The environment of each start, oldest first."""
        path = self.path / "environment.json"
        return json.loads(path.read_text()) if path.exists() else []

    def save(self, training: Training, progress: Progress, writer: Writer | None = None) -> None:
        """Starts writing the last checkpoint, replacing the previous one; without a writer, waits until it is written.

        All ranks must call this.
        """
        if writer is None:
            with Writer(training.ranks) as writer:
                return self.save(training, progress, writer)
        describe = partial(_describe, training, "progress.json", asdict(progress))
        writer.save(self.path / "last", {"model": training.weights(), "optimizer": training.memory()}, describe)

    def save_best(self, training: Training, score: Score, writer: Writer) -> None:
        """Starts writing the best checkpoint, in place of the previous one. All ranks must call this."""
        describe = partial(_describe, training, "score.json", {"step": training.done} | asdict(score))
        writer.save(self.path / "best", {"model": training.weights()}, describe)

    def restore(self, device: str, ranks: Ranks | None = None) -> tuple[Training, Progress]:
        """Restores training from the last checkpoint, or starts it, on any number of ranks."""
        ranks = ranks or Ranks()
        if ranks.first:
            for kind in KINDS:
                recover(self.path / kind)
        ranks.same(None)  # others wait until that is done
        recipe = self.recipe_in_use
        task = recipe.make_task()
        teacher = load_teacher(recipe.teacher).to(device) if recipe.teacher else None
        folder = self.path / "last"
        if not folder.exists():
            changes = {"sharpen_beyond": recipe.sharpen_beyond} if recipe.sharpen else {}
            begun = load_start(recipe.start, **changes) if recipe.start else make_model(recipe, task.vocab_size)
            return Training(begun.to(device), task, recipe, teacher=teacher, ranks=ranks), Progress(0)
        model = dr.DeadReckonForCausalLM(dr.DeadReckonConfig.from_pretrained(folder)).to(device)
        training, progress = Training(model, task, recipe, teacher=teacher, ranks=ranks), self.progress()
        memory = training.blank_memory(tensors_in(folder))
        read(folder, training.weights() | memory)
        training.remember(memory, progress.step)
        return training, progress

    def progress(self) -> Progress:
        """The progress of the last checkpoint."""
        path = self.path / "last" / "progress.json"
        return Progress(**json.loads(path.read_text())) if path.exists() else Progress(0)

    def load(
        self, kind: str = "last", device: str = "cpu", lengths: Sequence[int] = (), sharpen_beyond: int | None = None
    ) -> dr.DeadReckonForCausalLM:
        """Loads the model of a checkpoint, see `load_for_tests`."""
        return load_for_tests(self.checkpoint(kind), self.recipe, device, lengths, sharpen_beyond)

    def checkpoint(self, kind: str = "last") -> Path:
        """The folder of a checkpoint, recovered if it was being replaced when a process was killed."""
        folder = self.path / kind
        if not folder.exists() and interrupted(folder):
            with self.locked():
                recover(folder)
        if not (folder / "config.json").exists():
            raise ValueError(f"run: {self.path} has no {kind} checkpoint yet")
        return folder

    def scores(self, kind: str = "last", sharpen_beyond: int | None = None) -> dict[tuple[str, int], Score]:
        """Scores of a checkpoint by test and length; those of an earlier checkpoint do not count.

        With `sharpen_beyond`, the scores of the sharpened model, which are stored separately.
        """
        path = self.path / "scores.json"
        data = json.loads(path.read_text()) if path.exists() else []
        scores, step, kind = list[Score](), self.step(kind), _kept_as(kind, sharpen_beyond)
        for line in self.lines("evaluations") if kind == "last" else ():
            if line["step"] == step:
                scores += [Score(**one) for one in line["scores"]]
        # What was computed later takes precedence.
        scores += [Score(**one["score"]) for one in data if (one["kind"], one["step"]) == (kind, step)]
        return {score.place: score for score in scores}

    def add_scores(self, scores: Iterable[Score], kind: str = "last", sharpen_beyond: int | None = None) -> None:
        """Saves scores of a checkpoint, as it is or sharpened."""
        path, step, kept_as = self.path / "scores.json", self.step(kind), _kept_as(kind, sharpen_beyond)
        with locked(self.path / "scores.lock"):  # others may be scoring it, too
            merged = self.scores(kind, sharpen_beyond) | {score.place: score for score in scores}
            others = [one for one in json.loads(path.read_text()) if one["kind"] != kept_as] if path.exists() else []
            data = [{"kind": kept_as, "step": step, "score": asdict(merged[place])} for place in sorted(merged)]
            write_text(path, json.dumps([*others, *data], indent=1))

    @property
    def longest(self) -> int:
        """Tokens of the longest texts that the run was ever scored on, as it is or sharpened; 0 if it was on none."""
        path = self.path / "scores.json"
        kept = json.loads(path.read_text()) if path.exists() else []
        return max([0, *(one["score"].get("longest", 0) for one in kept)])

    def step(self, kind: str) -> int:
        """The training step of a checkpoint; 0 if there is none."""
        path = self.path / kind / ("progress.json" if kind == "last" else "score.json")
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    def reported(self) -> dict[Place, Score]:
        """Scores to report: of the last checkpoint, or for each place the mean of the best evaluations."""
        if self.recipe.reporting != "best-three":
            return self.scores()
        evaluations: dict[Place, list[Score]] = {}
        for line in self.lines("evaluations"):
            for one in line["scores"]:
                score = Score(**one)
                evaluations.setdefault(score.place, []).append(score)
        return {place: self._best(scores) for place, scores in evaluations.items()}

    def _best(self, scores: list[Score]) -> Score:
        measure = scores[0].measure or self.recipe.metric
        name = {"perplexity": "loss", "score": "exact"}.get(measure, measure)
        value = mean_of_best(measure, [score.value(name) for score in scores])
        return Score(**(asdict(scores[-1]) | {name: value}))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl or evaluations.jsonl, except one that was cut off."""
        return read_lines(self.path / f"{name}.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the logged steps."""
        return self.lines("metrics")

    def add_evaluation(self, step: int, scores: Iterable[Score]) -> None:
        """Saves the scores of an evaluation during training."""
        add_lines(self.path / "evaluations.jsonl", [{"step": step, "scores": [asdict(score) for score in scores]}])

    def evaluated(self) -> list[Score]:
        """Scores of the last evaluation during training; empty before the first."""
        return [Score(**one) for line in self.lines("evaluations")[-1:] for one in line["scores"]]

    def cut_lines(self, step: int) -> None:
        """Removes the lines logged after a step, since those steps will be taken again."""
        for name in ("metrics", "evaluations"):
            if (self.path / f"{name}.jsonl").exists():
                kept = [line for line in self.lines(name) if line["step"] <= step]
                write_text(self.path / f"{name}.jsonl", "".join(map(format_line, kept)))

    @property
    def finished(self) -> bool:
        """Whether training is over: all steps are taken, or it stopped early."""
        progress = self.progress()
        return progress.ended or progress.step == self.recipe.steps


def check_start(recipe: Recipe) -> None:
    """Raises ValueError unless the model to start from fits the recipe's encoding and tokens."""
    folder, task = Path(recipe.start), recipe.make_task()
    check_model(folder)
    config = dr.DeadReckonConfig.from_pretrained(folder)
    if config.encoding != recipe.encoding:
        raise ValueError(f"start: expected a model with {recipe.encoding}, got {config.encoding}")
    advice = f"--change options.tokenizer={recipe.start} reads a text by its tokenizer"
    if config.vocab_size < task.vocab_size:
        raise ValueError(
            f"start: expected a model of {task.vocab_size} tokens at least, as the task has, got {config.vocab_size}; "
            f"{advice}"
        )
    if recipe.task != "language" or not (folder / "tokenizer.json").exists():
        return
    if not same_tokens(fast_tokenizer(recipe.start), text_of(task).corpus.tokenizer):
        raise ValueError(f"start: expected a text in the tokens of its own tokenizer, got others; {advice}")


def _describe(training: Training, name: str, about: dict[str, Any], folder: Path) -> None:
    """Writes the files of a checkpoint besides its tensors; `about` as JSON."""
    training.describe(folder)
    (folder / name).write_text(json.dumps(about))


def _kept_as(kind: str, sharpen_beyond: int | None) -> str:
    """The key of a checkpoint's scores in scores.json."""
    return kind if sharpen_beyond is None else f"{kind} beyond {sharpen_beyond}"


def load_for_tests(
    folder: Path, recipe: Recipe, device: str, lengths: Sequence[int] = (), sharpen_beyond: int | None = None
) -> dr.DeadReckonForCausalLM:
    """Loads a saved model, with enough positions for tests at the recipe's lengths and these; sharpened if asked to."""
    check_model(folder)
    sharper = {} if sharpen_beyond is None else {"sharpen_beyond": sharpen_beyond}
    config = config_for_tests(dr.DeadReckonConfig.from_pretrained(folder, **sharper), recipe, lengths)
    model: dr.DeadReckonForCausalLM = dr.DeadReckonForCausalLM.from_pretrained(folder, config=config).to(device)
    return model.eval()


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Finds the runs in folders, at any depth; each folder must have one."""
    runs: dict[Path, Run] = {}
    for path in paths:
        places = sorted(file.parent for file in path.rglob("recipe.json")) if path.is_dir() else []
        if not places:
            raise ValueError(f"run: expected a folder with recipe.json, or with such folders in it, got {str(path)!r}")
        runs |= {place.resolve(): Run(place) for place in places}
    return list(runs.values())
