"""A recipe: everything that determines a run, as one frozen dataclass that can be saved as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch

import deadreckon as dr
from deadreckon.lab.arguments import check_counts
from deadreckon.lab.recipes.texts import read_language
from deadreckon.tasks import TASKS
from deadreckon.tasks.curriculum import Curriculum
from deadreckon.tasks.task import Task

SCHEDULES = ("linear", "cosine", "constant")
# The measure of each evaluator; the evaluators themselves are in `deadreckon.lab.evaluation`.
MEASURES = {
    "error": "error", "exact": "exact", "perplexity": "perplexity", "perplexity-window": "perplexity",
    "loss-by-position": "loss", "training-loss": "loss", "long": "score",
}  # fmt: skip
ALIKE = ("error", "exact", "perplexity")  # evaluators that score the same tests at the same lengths
REPORTING = ("last", "every", "best-three")
ENDS = ("reached", "patience")
OBJECTIVES = ("next-token", "align", "distil")
# The configuration of blocks around attention, by name.
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {},  # RMSNorm and SwiGLU, no biases
    "gpt2": {
        "norm": "layer", "rms_norm_eps": 1e-5, "gated_mlp": False, "hidden_act": "gelu_new", "mlp_bias": True,
        "attention_bias": True, "attention_output_bias": True,
    },
}  # fmt: skip
# Factors of an encoding that a schedule may change; each forward pass reads their current values.
FACTORS = ("angle_factor", "new_factor")
SCHEDULABLE = {"prism": ("noise",), "rope-fox": FACTORS, "rope-path": FACTORS, "rope-path-fox": FACTORS}
SCHEDULABLE_ALWAYS = ("learning_rate", "length")
TASK_MAKERS: dict[str, Callable[..., Task]] = {**TASKS, "language": read_language}
OF_TESTS = ("evaluators", "conditions", "options")  # fields of tests, beside those that begin with test_
AT_LEAST_ONE = (
    "length", "batch_size", "accumulate", "layers", "width", "heads", "steps", "test_rows", "test_tokens",
    "evaluate_every", "validation_rows", "log_every", "longest",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Task, model, training and tests of one run. Equal recipes give equal runs."""

    task: str = "flip-flop"  # a name in `TASK_MAKERS`
    options: dict[str, Any] = field(default_factory=dict)  # its keywords
    length: int = 128  # of training sequences, in the task's own measure; with a curriculum, the greatest
    curriculum: Curriculum | None = None  # how lengths grow; without one, all are `length`
    batch_size: int = 32  # sequences of a step
    accumulate: int = 1  # equal parts that they are read in, to save memory (gradient accumulation)
    encoding: str = "path-fox"  # a name in `deadreckon.ENCODINGS`
    # Options of encodings, by encoding. The values "train_positions" and "test_positions" stand for these two fields:
    # the number of positions, in training and in tests, of encodings that limit or shift them; 0 for the tokens of the
    # longest row, rounded up to a multiple of 32 in training and 64 in tests.
    encoding_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    train_positions: int = 0
    test_positions: int = 0
    start: str = ""  # folder of the model to begin with; without one, it is drawn, of these sizes:
    layers: int = 1  # of the transformer
    width: int = 64
    heads: int = 2
    initial: float = 0.1  # standard deviation of its weights before training
    tied: bool = False  # embeddings and outputs share a matrix
    block: str = "llama"  # a name in `BLOCKS`
    qk_norm: bool = False  # queries and keys are RMS-normalised
    # The fraction of the training length, in tokens, beyond which attention is kept as sharp as there; 1 changes
    # nothing in training, 0 turns it off.
    sharpen: float = 0.0
    longest: int = 2048  # the longest document, for encodings that scale their angles by it
    steps: int = 500
    learning_rate: float = 8e-3  # at its peak, after `warmup` steps; `schedule` takes it to `floor` times that
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.1
    warmup: int = 30
    schedule: str = "linear"  # one of `SCHEDULES`
    floor: float = 0.0
    # Schedules by name: points (share of the steps, value), linear in between and constant outside, such as
    # {"noise": [[0.3, 0.3], [0.6, 2.0]]}. Names are numbers of the encoding (`SCHEDULABLE`), "length" in place of
    # `length`, and "learning_rate", a factor in place of `warmup` and `schedule`.
    schedules: dict[str, list[list[float]]] = field(default_factory=dict)
    # The training objective: "next-token"; or distillation from the model in the folder `teacher`: "align", of each
    # layer's attention output on the teacher's inputs, or "distil", of the distribution of the next token.
    objective: str = "next-token"
    teacher: str = ""
    freeze: tuple[str, ...] = ()  # parts of names, such as "mlp": parameters with such names stay as they are
    clip: float = 1.0  # the greatest norm of a step's gradients
    # Early stopping, by the validation measure: {"reached": 0.99} stops once an evaluation is as good as that,
    # {"patience": 10} after so many evaluations in a row without improvement.
    ends: dict[str, float] = field(default_factory=dict)
    seed: int = 0  # of weights and data
    # Names in `MEASURES`. The first one's measure is used in validation and selects the best checkpoint; of equal
    # ones the lowest loss does.
    evaluators: tuple[str, ...] = ("error",)
    # Scores to report: "last", of the last checkpoint; "every", the same, with all tests run every `evaluate_every`
    # steps, too; or "best-three", for each length the mean of the three best of those.
    reporting: str = "last"
    # The tests by name, with the task options that differ in them. The first one is used in validation.
    conditions: dict[str, dict[str, Any]] = field(default_factory=lambda: {"as trained": {}})
    test_lengths: tuple[int, ...] = ()
    test_rows: int = 256  # sequences of a test at a length, or fewer:
    test_tokens: int = 2**20  # tokens of them at most
    test_autocast: bool = True  # whether tests of a task compute in bfloat16 on a GPU, as training does
    test_piece: int = 0  # tokens of a text that tests read at once, through the KV cache, to save memory; 0 for all
    evaluate_every: int = 100  # steps between evaluations, on `validation_rows` fresh sequences of the training length
    validation_rows: int = 64
    log_every: int = 1  # steps between lines of metrics

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, _as_declared(one.name, str(one.type), getattr(self, one.name)))
        check_counts(**{name: getattr(self, name) for name in AT_LEAST_ONE})
        for name in ("test_piece", "train_positions", "test_positions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected a whole number from 0 to 2^63 − 1, got {self.seed}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate: expected a divisor of batch_size = {self.batch_size}, got {self.accumulate}")
        if self.learning_rate <= 0 or self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(
                "learning_rate, warmup, floor: expected above 0, 0 or more and a share, "
                f"got {self.learning_rate}, {self.warmup}, {self.floor}"
            )
        if self.width % self.heads:
            raise ValueError(f"heads: expected a divisor of width = {self.width}, got {self.heads}")
        for name in ("learning_rate", "weight_decay", "clip", "initial", "sharpen"):
            value, least = getattr(self, name), "above 0" if name in ("learning_rate", "clip") else "of 0 or more"
            finite = math.isfinite(value) or (name == "clip" and not math.isnan(value))  # of infinity nothing is cut
            if not finite or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"{name}: expected a number {least}, got {value}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {list(self.betas)}")
        if any(length < 1 for length in self.test_lengths):
            raise ValueError(f"test_lengths: expected 1 or more, got {list(self.test_lengths)}")
        if not all(isinstance(options, dict) for options in self.conditions.values()):
            raise ValueError(f"conditions: expected options by name, got {self.conditions}")
        for name, chosen, known in (
            ("schedule", [self.schedule], SCHEDULES), ("reporting", [self.reporting], REPORTING),
            ("objective", [self.objective], OBJECTIVES), ("block", [self.block], BLOCKS),
            ("evaluators", self.evaluators or [""], MEASURES),
        ):  # fmt: skip
            for word in chosen:
                if word not in known:
                    raise ValueError(f"{name}: expected one of {', '.join(known)}; got {word!r}")
        alike = [name for name in self.evaluators if name in ALIKE]
        if len(alike) > 1 or len({*self.evaluators}) < len(self.evaluators):
            raise ValueError(
                f"evaluators: expected each once, and one of {', '.join(ALIKE)}, whose scores have the same place; "
                f"got {', '.join(self.evaluators)}"
            )
        if bool(self.teacher) != (self.objective != "next-token"):
            raise ValueError(f"teacher: expected a folder to align or distil, else none, got {self.teacher!r}")
        if not self.conditions:
            raise ValueError("conditions: expected one or more, got none")
        for name, options in self.encoding_options.items():
            if name not in dr.ENCODINGS or not isinstance(options, dict):
                raise ValueError(
                    "encoding_options: expected options by encoding, such as encoding_options.path.rank=8, "
                    f"got {name!r}"
                )
        for name, points in self.schedules.items():
            _check_schedule(name, points)
        for name, value in self.ends.items():
            _check_end(name, value)

    @property
    def metric(self) -> str:
        """The measure of the first evaluator, used in validation."""
        return MEASURES[self.evaluators[0]]

    def learning_rate_at(self, step: int, peak: float | None = None) -> float:
        """The learning rate at a step, counted from 0, for this peak, by default the recipe's."""
        peak = self.learning_rate if peak is None else peak
        if "learning_rate" in self.schedules:
            return peak * self._scheduled("learning_rate", step)
        warmed = peak * min(1.0, (step + 1) / max(self.warmup, 1))
        if self.schedule == "constant":
            return warmed
        left = 1 - step / self.steps
        if self.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return warmed * (left if not self.floor else self.floor + (1 - self.floor) * left)

    def lengths_at(self, step: int) -> int | range:
        """The sequence length, or the range of lengths, at a step counted from 0."""
        if "length" in self.schedules:
            return round(self._scheduled("length", step))
        return self.length if self.curriculum is None else self.curriculum.lengths_at(step)

    def scheduled_at(self, step: int) -> dict[str, float]:
        """Values of the encoding's numbers that `schedules` change, at a step counted from 0."""
        names = SCHEDULABLE.get(self.encoding, ())
        return {name: self._scheduled(name, step) for name in names if name in self.schedules}

    def _scheduled(self, name: str, step: int) -> float:
        points, share = self.schedules[name], step / self.steps
        for (start, low), (stop, high) in pairwise(points):
            if share < stop:
                return low + (high - low) * max(0.0, share - start) / (stop - start)
        return float(points[-1][1])

    def make_task(self, condition: str | None = None) -> Task:
        """The training task, or that of a test condition."""
        if self.task not in TASK_MAKERS:
            raise ValueError(f"task: expected one of {', '.join(TASK_MAKERS)}; got {self.task!r}")
        if condition is not None and condition not in self.conditions:
            raise ValueError(f"condition: expected one of {', '.join(self.conditions)}; got {condition!r}")
        options = self.options | (self.conditions[condition] if condition is not None else {})
        try:
            return TASK_MAKERS[self.task](**options)
        except TypeError as error:
            raise ValueError(f"options: expected keywords of {self.task}, got {options} ({error})") from error

    def options_in_training(self) -> dict[str, Any]:
        """Encoding options of the model in training."""
        options = dict(self.encoding_options.get(self.encoding, {}))
        for name, value in options.items():
            if value == "train_positions":
                options[name] = self.train_positions or self._tokens_of(self.length, 32)
            elif value == "test_positions":
                options[name] = self._positions_for_tests(())
        return options

    def options_in_tests(self, lengths: Sequence[int] = ()) -> dict[str, int]:
        """Encoding options that differ in tests at these lengths and the recipe's: those set to "train_positions"."""
        options = self.encoding_options.get(self.encoding, {})
        limited = [name for name, value in options.items() if value == "train_positions"]
        return dict.fromkeys(limited, self._positions_for_tests(lengths)) if limited else {}

    def _positions_for_tests(self, lengths: Sequence[int]) -> int:
        known = self.test_positions or self._tokens_of(max(self.length, *self.test_lengths, 1))
        return max([known, *(self._tokens_of(length) for length in lengths)])

    def _tokens_of(self, length: int, multiple: int = 64) -> int:
        """Tokens of the longest row, rounded up."""
        return -(-self.longest_row(length) // multiple) * multiple

    def longest_row(self, length: int) -> int:
        """Tokens of the longest of 100 sampled rows."""
        tasks = map(self.make_task, (None, *self.conditions))  # one by one: texts to test on may be elsewhere
        task = next((task for task in tasks if length in task.lengths), None) or self.make_task()
        rows, _ = task.sample(100, length, torch.Generator().manual_seed(0))
        return int(rows.shape[1])

    @property
    def sharpen_beyond(self) -> int | None:
        """Tokens beyond which attention is kept as sharp; None if it is not."""
        return max(2, round(self.sharpen * self.longest_row(self.length))) if self.sharpen else None

    def at_length(self, length: int) -> Recipe:
        """The same recipe at another training length: the same tokens per step, test lengths in proportion."""
        if self.curriculum is not None:
            raise ValueError(f"length: expected one training length, got a curriculum, {self.curriculum}")
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"length: expected 1 or more, got {length!r}")
        batch = max(1, self.batch_size * self.length // length)
        tests = tuple(max(1, test * length // self.length) for test in self.test_lengths)
        accumulate = math.gcd(batch, self.accumulate)
        return replace(self, length=length, batch_size=batch, accumulate=accumulate, test_lengths=tests)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON types."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """A recipe from what `to_dict`, or that of an earlier version, returned."""
        data = dict(data)
        if "metric" in data:
            data["evaluators"] = [data.pop("metric")]
        data["sharpen"] = float(data.get("sharpen", 0.0))  # it was whether to be sharpened beyond the training length
        options = data.get("encoding_options") or {}
        if not options.keys() <= dr.ENCODINGS.keys():  # they were the options of the one encoding
            data["encoding_options"] = {data["encoding"]: options}
        return cls._of(data)

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Recipe:
        known = [one.name for one in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"recipe: expected names of its fields, {', '.join(known)}; got {', '.join(unknown)}")
        return cls(**data)

    def change(self, changes: Sequence[str]) -> Recipe:
        """This recipe with changes such as "steps=100", "options.ignore=0.9" or "betas=[0.9, 0.95]"."""
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
            inside[last] = parse(value)
        return Recipe._of(data)

    def change_tests(self, changes: Sequence[str], also: Sequence[str] = ()) -> Recipe:
        """As `change`, for a model that is already trained: only fields of tests, and those in `also`."""
        known = *OF_TESTS, *also
        for change in changes:
            field = change.partition("=")[0].partition(".")[0].strip()
            if not field.startswith("test_") and field not in known:
                raise ValueError(f"change: expected a field of tests, test_… or {', '.join(known)}; got {change!r}")
        return self.change(changes)

    def differences(self, other: Recipe) -> list[str]:
        """Descriptions of the fields that differ; options of encodings that neither recipe uses are ignored."""
        mine, its = (
            one.to_dict() | {"encoding_options": one.encoding_options.get(one.encoding, {})} for one in (self, other)
        )
        return [f"{name} {mine[name]!r}, not {its[name]!r}" for name in mine if mine[name] != its[name]]


def parse(text: str) -> Any:
    """Parses a value from the command line: as JSON if possible, else as text."""
    try:
        return json.loads(text.strip())
    except ValueError:
        return text.strip()


def _check_schedule(name: str, points: Any) -> None:
    known = dict.fromkeys([*SCHEDULABLE_ALWAYS, *(name for names in SCHEDULABLE.values() for name in names)])
    if name not in known:
        raise ValueError(f"schedules: expected numbers among {', '.join(known)}, got {name!r}")
    try:
        shares = [float(share) for share, value in points if math.isfinite(float(value)) and float(value) >= 0]
    except (TypeError, ValueError):
        shares = []
    if not shares or len(shares) < len(points) or sorted(set(shares)) != shares or shares[0] < 0 or shares[-1] > 1:
        raise ValueError(
            f"schedules.{name}: expected points [share of the steps, value of 0 or more], shares growing from 0 to 1, "
            f"got {points!r}"
        )


def _check_end(name: str, value: Any) -> None:
    if name not in ENDS:
        raise ValueError(f"ends: expected {' or '.join(ENDS)}, got {name!r}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (name == "patience" and (value < 1 or value != int(value))):
        wanted = "a number" if name == "reached" else "a whole number of evaluations, 1 or more"
        raise ValueError(f"ends.{name}: expected {wanted}, got {value!r}")


def _as_declared(name: str, kind: str, value: Any) -> Any:
    """Converts a value from Python or JSON to the declared type of its field; raises if it does not fit."""
    if kind.startswith("Curriculum"):
        if isinstance(value, dict) and "longest" in value:
            try:
                return Curriculum(**(value | {"stages": tuple(map(tuple, value.get("stages", ())))}))
            except TypeError as error:
                names = ", ".join(one.name for one in fields(Curriculum))
                raise ValueError(f"curriculum: expected {names}, in whole numbers, got {value!r}") from error
        good = value is None or isinstance(value, Curriculum)
    elif kind == "float":
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if good else value
    elif kind.startswith("tuple"):
        inner = (int,) if "int" in kind else (str,) if "str" in kind else (int, float)
        good = isinstance(value, (list, tuple, range)) and all(isinstance(one, inner) for one in value)
        value = tuple(value) if good else value
    else:
        wanted = {"int": int, "bool": bool, "str": str}.get(kind, dict)
        good = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not good:
        raise ValueError(f"{name}: expected {kind}, got {value!r}")
    return value
