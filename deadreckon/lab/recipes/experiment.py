"""An experiment: a recipe at three sizes, what it compares or sweeps, and the paper's reported figures."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import deadreckon as dr
from deadreckon.lab.recipes.recipe import Recipe, parse
from deadreckon.tasks.curriculum import Curriculum

SIZES = ("tiny", "small", "paper")
TITLES = {
    "rope": "RoPE", "fox": "FoX", "path": "PaTH", "path-fox": "PaTH-FoX", "alibi": "ALiBi", "nope": "NoPE",
    "prism": "PRISM", "rope-fox": "RoPE-FoX", "rope-path": "RoPE-PaTH", "rope-path-fox": "RoPE-PaTH-FoX",
    "stickbreaking": "stick-breaking",
}  # fmt: skip
OF_THEIR_OWN = ("encoding", "seed")  # fields that have arguments of their own
# Values by name: a field of the recipe, an option of its task ("options.back"), or of encodings that have it.
Sweep = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Sizes mean the same everywhere: `paper` has the model, lengths and budget of the paper; `small` takes minutes a
    model on a GPU; `tiny` is the same comparison for a CPU, about a minute a model.
    """

    about: str  # what is learnt
    source: str  # where it is from, and what of its recipe is ours
    paper: Recipe
    small: dict[str, Any]  # fields that differ at this size
    tiny: dict[str, Any]
    encodings: tuple[str, ...] = ("rope", "stickbreaking", "fox", "path")  # those that are compared
    by_encoding: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields that differ if the size sets none
    sweep: dict[str, Sweep] = field(default_factory=dict)  # by size, what else is compared: every combination
    # The paper's figures, by test, encoding and length, in the units of the measure.
    reported: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)

    def recipe(self, size: str, encoding: str = Recipe.encoding) -> Recipe:
        """The recipe at one of `SIZES`, for an encoding."""
        if size not in SIZES:
            raise ValueError(f"size: expected one of {', '.join(SIZES)}; got {size!r}")
        check_encodings((encoding,))
        at_size = {"paper": {}, "small": self.small, "tiny": self.tiny}[size]
        return replace(self.paper, **(self.by_encoding.get(encoding, {}) | at_size | {"encoding": encoding}))

    def recipes(
        self, size: str, encodings: Iterable[str], seeds: int, changes: Sequence[str] = (), sweep: Sweep | None = None
    ) -> dict[str, Recipe]:
        """The recipes of all runs of a comparison, by folder name."""
        encodings = tuple(encodings)
        check_encodings(encodings)
        check_changes(changes, encodings)
        sweep = self.sweep.get(size, {}) if sweep is None else sweep
        options = options_of(encodings)
        runs = {}
        for values in product(*sweep.values()):
            for encoding in encodings:
                recipe, words = self.recipe(size, encoding).change(changes), [encoding]
                for name, value in zip(sweep, values, strict=True):
                    if name in options_of((encoding,)):
                        recipe = recipe.change([f"encoding_options.{encoding}.{name}={json.dumps(value)}"])
                    elif name in options or name.partition(".")[0] not in vars(recipe):
                        continue  # an option of other encodings, also where a field of the recipe has its name
                    elif name == "length":
                        recipe = recipe.at_length(value)
                    else:
                        recipe = recipe.change([f"{name}={json.dumps(value)}"])
                    words.append(f"{name}={value}")
                for seed in range(seeds):
                    runs["-".join([*words, str(seed)])] = replace(recipe, seed=seed)
        return runs


def check_changes(changes: Iterable[str], encodings: Sequence[str]) -> None:
    """Raises ValueError for changes that another argument would overrule, or that are of no encoding to be trained."""
    for change in changes:
        name, *inside = (part.strip() for part in change.partition("=")[0].split("."))
        if name in OF_THEIR_OWN:
            raise ValueError(f"change: expected a field without an argument of its own, as {name} has; got {change!r}")
        if name == "encoding_options" and inside and inside[0] not in encodings:
            raise ValueError(f"change: expected options of {', '.join(encodings)}, which are trained; got {change!r}")


def check_encodings(names: Sequence[str]) -> None:
    """Raises ValueError for unknown encodings, or an empty list of names."""
    if not names:
        raise ValueError("encodings: expected at least one name, got none")
    for name in names:
        if name not in dr.ENCODINGS:
            raise ValueError(f"encoding: expected one of {', '.join(dr.ENCODINGS)}; got {name!r}")


def options_of(encodings: Iterable[str]) -> set[str]:
    """The options that any of these encodings has."""
    return {name for one in encodings for name in inspect.signature(dr.ENCODINGS[one]).parameters} - {"sizes"}


def parse_sweep(words: Iterable[str], encodings: Sequence[str]) -> Sweep:
    """Parses sweeps such as "length=256,1024" or "p=2,4"."""
    sweep: Sweep = {}
    for word in words:
        name, _, values = word.partition("=")
        if name in sweep:
            raise ValueError(f"sweep: expected each name once, such as length=256,1024, got {name} again")
        sweep[name] = tuple(parse(value) for value in values.split(",") if value.strip())
        known = name.startswith("options.") or name in {*vars(Recipe()), *options_of(encodings)} - {*OF_THEIR_OWN}
        if not sweep[name] or not known:
            raise ValueError(
                f"sweep: expected values of a field of the recipe or an option, such as length=256,1024, got {word!r}"
            )
    return sweep


def title_of(label: str) -> str:
    """An encoding's published name, with the options that follow it, if any: "sympow p=4"."""
    encoding, *options = label.split(" ", 1)
    return " ".join([TITLES.get(encoding, encoding), *options])


def quicker(curriculum: Curriculum, times: int) -> Curriculum:
    """A curriculum with the same lengths in a fraction of the steps."""
    return replace(curriculum, stages=tuple((steps // times, longest) for steps, longest in curriculum.stages))
