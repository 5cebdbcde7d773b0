"""Recipes and experiments. To add an experiment, add one entry to the file of its theme."""

from collections.abc import Sequence
from dataclasses import replace

from deadreckon.lab.recipes.experiment import SIZES, Experiment, check_changes, check_encodings, parse_sweep, title_of
from deadreckon.lab.recipes.prism import PRISM
from deadreckon.lab.recipes.recipe import BLOCKS, MEASURES, Recipe
from deadreckon.lab.recipes.state_tracking import STATE_TRACKING
from deadreckon.lab.recipes.text import TEXT

EXPERIMENTS: dict[str, Experiment] = {**STATE_TRACKING, **PRISM, **TEXT}


def find_experiment(name: str) -> Experiment:
    """Looks up an experiment by name."""
    if name not in EXPERIMENTS:
        raise ValueError(f"recipe: expected one of {', '.join(EXPERIMENTS)}; got {name!r}")
    return EXPERIMENTS[name]


def find_recipe(
    name: str, size: str = "tiny", encoding: str = Recipe.encoding, seed: int = 0, changes: Sequence[str] = ()
) -> Recipe:
    """The complete recipe of one run."""
    check_changes(changes, (encoding,))
    return replace(find_experiment(name).recipe(size, encoding).change(changes), seed=seed)
