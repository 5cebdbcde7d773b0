"""A recipe: all that an experiment is, as one frozen dataclass that goes to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from deadreckon.lab.texts import read_language
from deadreckon.tasks import TASKS
from deadreckon.tasks.curriculum import Curriculum
from deadreckon.tasks.task import Task

SCHEDULES = ("linear", "cosine", "constant")
METRICS = ("error", "exact", "perplexity")
TASK_MAKERS: dict[str, Callable[..., Task]] = {**TASKS, "language": read_language}


@dataclass(frozen=True)
class Recipe:
    """What is learnt, by which model, how, and how it is scored. Two runs of one recipe are alike.

    Args:
        task: a name in `TASK_MAKERS`; `options` are its keywords.
        length: of training sequences, in the task's own measure; with a curriculum, the greatest.
        curriculum: how lengths grow; without one, all are `length`.
        batch_size: sequences of a step, in as many equal parts as `accumulate` says, to save memory; the data of a
            step and, but for rounding, its gradient are the same.
        encoding: a name in `deadreckon.ENCODINGS`; `encoding_options` are its keywords.
        layers, width, heads: of the transformer, whose weights begin with a standard deviation of `initial`; `tied`
            makes embeddings and outputs one matrix.
        longest: what encodings that scale their angles take for the longest document.
        learning_rate: at its peak, after `warmup` steps; the schedule takes it to `floor` times that, or leaves it.
        metric: what is compared: `error` (share of scored tokens), `exact` (share of rows) or `perplexity`.
        conditions: options of the task that differ in a test, by the name of the test. The first is the one that is
            looked at while training.
        test_lengths: where models are scored, with `test_rows` sequences each, or fewer, of `test_tokens` in all.
        evaluate_every: steps between looks at `validation_rows` fresh sequences of the training length.
        log_every: steps between lines of metrics.
    """

    task: str = "flip-flop"
    options: dict[str, Any] = field(default_factory=dict)
    length: int = 128
    curriculum: Curriculum | None = None
    batch_size: int = 32
    accumulate: int = 1
    encoding: str = "path-fox"
    encoding_options: dict[str, Any] = field(default_factory=dict)
    layers: int = 1
    width: int = 64
    heads: int = 2
    initial: float = 0.1
    tied: bool = False
    longest: int = 2048
    steps: int = 500
    learning_rate: float = 8e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.1
    warmup: int = 30
    schedule: str = "linear"
    floor: float = 0.0
    clip: float = 1.0
    seed: int = 0
    metric: str = "error"
    conditions: dict[str, dict[str, Any]] = field(default_factory=lambda: {"as trained": {}})
    test_lengths: tuple[int, ...] = ()
    test_rows: int = 256
    test_tokens: int = 2**20
    evaluate_every: int = 100
    validation_rows: int = 64
    log_every: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, _as_declared(one.name, str(one.type), getattr(self, one.name)))
        for name in (
            "length", "batch_size", "accumulate", "layers", "width", "heads", "steps", "test_rows", "test_tokens",
            "evaluate_every", "validation_rows", "log_every",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch_size = {self.batch_size}, got {self.accumulate}")
        if self.learning_rate <= 0 or self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(
                "learning_rate, warmup, floor: expected above 0, 0 or more and a share, "
                f"got {self.learning_rate}, {self.warmup}, {self.floor}"
            )
        for name, known in (("schedule", SCHEDULES), ("metric", METRICS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {getattr(self, name)!r}")
        if not self.conditions:
            raise ValueError("conditions: expected one or more, got none")

    def learning_rate_at(self, step: int, peak: float | None = None) -> float:
        """The learning rate of a step, counted from 0, if `peak` is the greatest: the recipe's own by default."""
        warmed = (self.learning_rate if peak is None else peak) * min(1.0, (step + 1) / max(self.warmup, 1))
        if self.schedule == "constant":
            return warmed
        left = 1 - step / self.steps
        if self.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return warmed * (left if not self.floor else self.floor + (1 - self.floor) * left)

    def lengths_at(self, step: int) -> int | range:
        """The length of sequences, or the range of it, at a step counted from 0."""
        return self.length if self.curriculum is None else self.curriculum.lengths_at(step)

    def make_task(self, condition: str | None = None) -> Task:
        """The task that is learnt, or a condition that it is tested in."""
        if self.task not in TASK_MAKERS:
            raise ValueError(f"task: expected one of {', '.join(TASK_MAKERS)}; got {self.task!r}")
        if condition is not None and condition not in self.conditions:
            raise ValueError(f"condition: expected one of {', '.join(self.conditions)}; got {condition!r}")
        options = self.options | (self.conditions[condition] if condition is not None else {})
        try:
            return TASK_MAKERS[self.task](**options)
        except TypeError as error:
            raise ValueError(f"options: expected keywords of {self.task}, got {options} ({error})") from error

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """What `to_dict` gave."""
        if unknown := set(data) - {one.name for one in fields(cls)}:
            raise ValueError(f"recipe: expected names of its fields, got {', '.join(sorted(unknown))}")
        return cls(**data)

    def change(self, changes: tuple[str, ...]) -> Recipe:
        """This recipe but for changes such as "steps=100", "options.ignore=0.9" or "betas=[0.9, 0.95]"."""
        data = self.to_dict()
        for change in changes:
            place, equals, value = change.partition("=")
            if not equals:
                raise ValueError(f"change: expected field=value, such as steps=100, got {change!r}")
            *path, last = place.strip().split(".")
            inside: Any = data
            for part in path:
                if inside.get(part) is None:
                    inside[part] = {}
                inside = inside[part]
                if not isinstance(inside, dict):
                    raise ValueError(f"change: expected a field of the recipe, got {place!r}")
            inside[last] = _parse(value.strip())
        return Recipe.from_dict(data)

    def differences(self, other: Recipe) -> list[str]:
        """Where another recipe differs, in words."""
        mine, its = self.to_dict(), other.to_dict()
        return [f"{name} {mine[name]!r}, not {its[name]!r}" for name in mine if mine[name] != its[name]]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_declared(name: str, kind: str, value: Any) -> Any:
    """A value of a field in its own type, whether it comes from Python or from JSON."""
    if kind.startswith("Curriculum"):
        if isinstance(value, dict) and "longest" in value:
            return Curriculum(**(value | {"stages": tuple(map(tuple, value.get("stages", ())))}))
        good = value is None or isinstance(value, Curriculum)
    elif kind == "float":
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if good else value
    elif kind.startswith("tuple"):
        inner = (int,) if "int" in kind else (int, float)
        good = isinstance(value, (list, tuple, range)) and all(isinstance(one, inner) for one in value)
        value = tuple(value) if good else value
    else:
        wanted = {"int": int, "bool": bool, "str": str}.get(kind, dict)
        good = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not good:
        raise ValueError(f"{name}: expected {kind}, got {value!r}")
    return value
