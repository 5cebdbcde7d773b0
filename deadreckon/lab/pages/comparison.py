"""Scores of several runs side by side: for each encoding, test and length, one value per seed.

Paired differences compare the losses of two models on the same tokens, text by text. Texts vary in difficulty far more
than models do, so the standard error of a difference is taken across texts: rows of the greatest test length, from as
many documents as are that long. It estimates the variation with other text, not with another seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isnan, sqrt
from statistics import mean, stdev
from typing import Any, NamedTuple

from deadreckon.lab.evaluation import Place, Score, format_value, is_better
from deadreckon.lab.recipes import Recipe, title_of
from deadreckon.lab.training import Run

SOLVED = 0.9  # a word problem counts as solved where more rows than this are right
WORD_PROBLEMS = ("a5-products", "a5-identity")
BASELINE = "rope"  # that others are paired with
AXES = ("length", "training length", "step", "position")  # in the order of pictures
CURVES = ("step", "position")  # those of so many places that they are drawn, and not tabulated
WHILE_TRAINING = "training"  # the test that is training itself
CURVE_POINTS = 40  # of training, at most
SHARPENED = " sharpened"  # behind a label, of the same models with sharper attention
NOT_NAMED = ("encoding", "encoding_options", "seed")
BY_LENGTH = ("length", "batch_size", "accumulate", "test_lengths")  # what `Recipe.at_length` changes
HEADINGS = {
    "error": "Error in %", "exact": "Exact match in %", "score": "Score in %", "perplexity": "Perplexity",
    "loss": "Loss",
}  # fmt: skip
Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


class Test(NamedTuple):
    """The measure of a test, the axis of its lengths (see `Score`), and the training length unless that is the axis."""

    measure: str
    axis: str
    trained: int | None


@dataclass(frozen=True)
class Comparison:
    """Scores of runs that are compared."""

    title: str
    recipe: Recipe  # what they have in common
    values: dict[str, dict[Place, list[float]]]  # by label (encoding and what sets its runs apart); one for each seed
    tests: dict[str, Test] = field(default_factory=dict)  # by default the recipe's metric, by length
    # Scores with per-text losses, by label and place, one for each seed.
    texts: dict[str, dict[Place, list[Score]]] = field(default_factory=dict)
    # By label, also unfinished runs: where scores come from. Not compared: equal scores may be from other folders.
    runs: dict[str, list[Run]] = field(default_factory=dict, compare=False)

    def test(self, name: str) -> Test:
        """Measure, axis and training length of a test."""
        return self.tests.get(name, Test(self.recipe.metric, "length", self.recipe.length))

    @property
    def conditions(self) -> list[str]:
        """The names of all tests that have scores, in the order of the recipe."""
        names = dict.fromkeys([*self.recipe.conditions, *self.tests, *(p[0] for v in self.values.values() for p in v)])
        return [name for name in names if self.lengths(name)]

    def lengths(self, condition: str) -> list[int]:
        """Lengths of a test that have scores."""
        return sorted({length for scores in self.values.values() for name, length in scores if name == condition})

    def seeds(self) -> int:
        """The greatest number of seeds of any label."""
        return max((len(values) for scores in self.values.values() for values in scores.values()), default=0)

    def cell(self, label: str, condition: str, length: int) -> str:
        """Mean ± standard deviation over seeds; empty without a score."""
        values, measure = self.values[label].get((condition, length), []), self.test(condition).measure
        figures = [figure(values) for figure, least in ((mean, 1), (stdev, 2)) if len(values) >= least]
        return " ± ".join(format_value(measure, figure) for figure in figures)

    def best(self, condition: str, length: int) -> str:
        """The label with the best mean."""
        place, measure = (condition, length), self.test(condition).measure
        means = {label: mean(scores[place]) for label, scores in self.values.items() if place in scores}
        return reduce(lambda best, label: label if is_better(measure, means[label], means[best]) else best, means)

    def table(self, condition: str) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of one test, a row for each length."""
        rows = [[f"{n}", *(self.cell(label, condition, n) for label in self.values)] for n in self.lengths(condition)]
        return [self.test(condition).axis, *map(title_of, self.values)], rows

    @property
    def tabulated(self) -> list[str]:
        """Tests that are shown as tables: all but curves, which are plotted."""
        return [name for name in self.conditions if self.test(name).axis not in CURVES]

    @property
    def pictured(self) -> list[str]:
        """Tests that are plotted, by axis; those by training length with a single point only if there are no others."""
        points = [name for name in self.conditions if self.test(name).axis == "training length"]
        single = [name for name in points if len(self.lengths(name)) == 1]
        drawn = [name for name in self.conditions if name not in single] or self.conditions
        return sorted(drawn, key=lambda name: AXES.index(self.test(name).axis))

    def by_setting(self) -> dict[str, Comparison]:
        """Splits a grid, such as four encodings with one to four layers, into a comparison per setting ("layers=1").

        An encoding without scores in a setting (its runs are unfinished, say) is empty there. A comparison that is no
        grid stays whole, under "".
        """
        settings: dict[str, dict[str, str]] = {}  # setting -> encoding -> label
        for label in self.values:
            encoding, _, setting = label.partition(" ")
            settings.setdefault(setting, {})[encoding] = label
        encodings = dict.fromkeys(encoding for names in settings.values() for encoding in names)
        if len(settings) < 2 or "" in settings or max(map(len, settings.values())) < 2:
            return {"": self}
        return {
            setting: replace(self, values={one: self.values.get(names.get(one, ""), {}) for one in encodings})
            for setting, names in settings.items()
        }

    def describe(self, condition: str) -> str:
        """The title of a test's table."""
        test, seeds = self.test(condition), self.seeds()
        counts = {len(values) for row in self.values.values() for place, values in row.items() if place[0] == condition}
        fewer = "up to " * (len(counts) > 1)
        spread = f", mean ± standard deviation of {fewer}{seeds} seeds" if seeds > 1 else ", one seed"
        trained = f", trained at {test.trained}" if test.trained else ""
        trained = "" if condition.endswith(trained) else trained
        best = "; for each seed the mean of the three best evaluations" if self.recipe.reporting == "best-three" else ""
        return f"{HEADINGS[test.measure]} by {test.axis}, {condition}{trained}{spread}{best}"

    def solved(self, condition: str) -> dict[str, int | None]:
        """For each label, the greatest length up to which more than 90% of rows are right at all lengths tested."""
        solved = dict[str, int | None]()
        for label, scores in self.values.items():
            solved[label] = None
            for length in self.lengths(condition):
                if mean(scores.get((condition, length), [0.0])) <= SOLVED:
                    break
                solved[label] = length
        return solved

    def by_layers(self) -> dict[str, dict[int, str]]:
        """For each label without its number of layers, the labels by that number; empty if layers are not swept."""
        labels: dict[str, dict[int, str]] = {}
        for label in self.values:
            words = label.split(" ")
            for layers in (word for word in words if word.startswith("layers=")):
                name = " ".join(word for word in words if word != layers)
                labels.setdefault(name, {})[int(layers.removeprefix("layers="))] = label
        return labels


def paired_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of one's losses minus the other's, and its standard error across texts.

    Args:
        one: losses (seeds, texts) of a model, which are averaged over seeds.
        other: likewise, on the same texts.
    """
    pairs = zip(*(map(mean, zip(*seeds, strict=True)) for seeds in (one, other)), strict=True)
    differences = [left - right for left, right in pairs]
    return mean(differences), stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else float("nan")


def same_texts(scores: Sequence[Score]) -> bool:
    """Whether scores are on the same texts, so that losses can be paired: a held-out file may have changed."""
    digests = {one.digest for one in scores} - {""}
    return len(digests) < 2 and len({(one.longest, len(one.texts)) for one in scores}) == 1


def format_difference(mean: float, error: float) -> str:
    """Mean ± standard error, or the mean alone for a single text."""
    return f"{mean:+.4f}" if isnan(error) else f"{mean:+.4f} ± {error:.4f}"


def difference_unit(texts: int) -> str:
    """The unit of paired differences on so many texts, for the title of their table."""
    return f"nats ± standard error between {texts} texts" if texts > 1 else "nats, on one text"


def paired_table(comparison: Comparison, condition: str) -> Table | None:
    """Title, headings and rows of the table of paired differences by length; None if there is nothing to pair."""
    tested = [label for label, places in comparison.texts.items() if any(name == condition for name, _ in places)]
    if len(tested) < 2:
        return None
    baseline = BASELINE if BASELINE in tested else tested[0]
    others = [label for label in tested if label != baseline]
    rows, count = [], 0
    for length in comparison.lengths(condition):
        row, reference = [f"{length}"], comparison.texts[baseline].get((condition, length))
        for label in others:
            texts = comparison.texts[label].get((condition, length))
            if not texts or not reference or not same_texts((*texts, *reference)):
                row.append("")
                continue
            count = len(texts[0].texts)
            both = ([one.texts for one in scores] for scores in (texts, reference))
            row.append(format_difference(*paired_difference(*both)))
        rows.append(row)
    about = f"Loss less that of {title_of(baseline)} on the same tokens, {condition}, {difference_unit(count)}"
    return about, [comparison.test(condition).axis, *map(title_of, others)], rows


def solved_tables(comparison: Comparison, condition: str) -> Iterator[Table]:
    """Word problems: the longest length each encoding solves and, if layers are swept, the fewest for each length."""
    if comparison.recipe.task not in WORD_PROBLEMS:
        return
    title = f"Longest length solved (more than {SOLVED:.0%} of rows right)"
    solved, swept = comparison.solved(condition), comparison.by_layers()
    if sum(map(len, swept.values())) < len(solved):  # some labels name no layers
        yield title, ["", "length"], [[title_of(label), str(length or "–")] for label, length in solved.items()]
        return
    lengths, counts = comparison.lengths(condition), sorted({count for labels in swept.values() for count in labels})
    longest, fewest = [], []
    for name, labels in swept.items():
        reach = {count: solved[labels[count]] or 0 for count in counts if count in labels}
        longest.append([title_of(name), *(str(reach.get(count) or "–") for count in counts)])
        enough = [[count for count in reach if reach[count] >= length] for length in lengths]
        fewest.append([title_of(name), *(str(min(some)) if some else "–" for some in enough)])
    yield f"{title}, by number of layers", ["", *map(str, counts)], longest
    yield "Fewest layers that solve each length", ["", *map(str, lengths)], fewest


def further_tables(comparison: Comparison, condition: str) -> Iterator[Table]:
    """What a test shows beside its scores: what is solved, and differences paired on the same texts."""
    yield from solved_tables(comparison, condition)
    if paired := paired_table(comparison, condition):
        yield paired


def gather(
    title: str, runs: Iterable[Run], lengths: Sequence[int] | None = None, planned: Sequence[Recipe] = (),
    sharpen_beyond: int | None = None,
) -> Comparison:  # fmt: skip
    """Collects reported scores of finished runs: at these lengths, at those of their recipes if (), or all if None.

    `planned` are recipes of runs that do not exist yet, see :func:`by_label`. With `sharpen_beyond`, scores of the same
    models sharpened are added.
    """
    runs = list(runs)
    several = len({run.recipe.length for run in runs}) > 1  # training lengths
    values: dict[str, dict[Place, list[float]]] = {}
    tests: dict[str, Test] = {}
    texts: dict[str, dict[Place, list[Score]]] = {}
    labelled = by_label(runs, planned)
    for label, run, scores in _scored(labelled, sharpen_beyond):
        recipe = run.recipe
        wanted = lengths or recipe.test_lengths or (recipe.length,)
        for score in scores:
            if lengths is not None and score.axis == "length" and score.length not in wanted:
                continue
            trained = recipe.length if score.axis != "training length" else None
            name = f"{score.condition}, trained at {trained}" if several and trained else score.condition
            tests[name] = Test(score.measure or recipe.metric, score.axis, trained)
            value = score.value(tests[name].measure)
            values.setdefault(label, {}).setdefault((name, score.length), []).append(value)
            if score.texts:
                texts.setdefault(label, {}).setdefault((name, score.length), []).append(score)
    return Comparison(title, alike(runs[0].recipe), values, tests, texts, labelled)


def _scored(labelled: dict[str, list[Run]], sharpen_beyond: int | None) -> Iterator[tuple[str, Run, list[Score]]]:
    """Labels, finished runs and their scores; and, if asked for, the scores of the sharpened models."""
    for label, seeds in labelled.items():
        finished = [run for run in seeds if run.finished]
        yield from ((label, run, [*with_mean(run.reported().values()), *learning(run)]) for run in finished)
        for run in finished if sharpen_beyond is not None else ():
            yield label + SHARPENED, run, with_mean(run.scores(sharpen_beyond=sharpen_beyond).values())


def learning(run: Run) -> list[Score]:
    """The training curve, means over stretches of steps, if the recipe has the evaluator training-loss."""
    if "training-loss" not in run.recipe.evaluators:
        return []
    points = [(line["step"], line["loss"]) for line in run.metrics() if line["loss"] is not None]
    stretches: dict[int, list[float]] = {}
    long = -(-points[-1][0] // CURVE_POINTS) if points else 1  # steps
    for step, loss in points:
        stretches.setdefault(-(-step // long) * long, []).append(loss)
    return [
        Score(WHILE_TRAINING, step, None, None, mean(losses), len(losses), "loss", "step")
        for step, losses in stretches.items()
    ]


def with_mean(scores: Iterable[Score]) -> list[Score]:
    """Adds the mean over the tasks of a suite, at each length that all tasks have."""
    scores = list(scores)
    of_tasks = [score for score in scores if score.measure == "score"]
    tasks = len({score.condition for score in of_tasks})
    for length in sorted({score.length for score in of_tasks}) if tasks > 1 else ():
        there = [score for score in of_tasks if score.length == length]
        if len(there) == tasks:
            average = mean(score.value("score") for score in there)
            scores.append(replace(there[0], condition=f"mean of {tasks} tasks", exact=average))
    return scores


def alike(recipe: Recipe) -> Recipe:
    """The settings that compared runs share: all but the encoding, its options, the seed and the width."""
    width = recipe.heads * Recipe.width  # any that the heads can divide
    return replace(recipe, encoding=Recipe.encoding, encoding_options={}, seed=0, width=width, initial=0.0)


def by_label(runs: Iterable[Run], planned: Sequence[Recipe] = ()) -> dict[str, list[Run]]:
    """Groups runs by encoding and by settings that tell runs of an encoding apart, planned ones too: "sympow p=4".

    Runs with the same label differ only in seed and training length. A seed counts once: a second run of it repeats the
    same figure and is not a second sample.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe.encoding, []).append(run)
    labelled: dict[str, dict[tuple[int, int], Run]] = {}
    for encoding, group in groups.items():
        recipes = [*(run.recipe for run in group), *(recipe for recipe in planned if recipe.encoding == encoding)]
        several = len({recipe.length for recipe in recipes}) > 1
        settings = [_settings(recipe, (*NOT_NAMED, *(BY_LENGTH if several else ()))) for recipe in recipes]
        keys = dict.fromkeys(key for one in settings for key in one)
        differing = [key for key in keys if len({json.dumps(one.get(key)) for one in settings}) > 1]
        for run, one in zip(group, settings, strict=False):
            words = [f"{key}={one[key]}" for key in differing if key in one]
            seeds = labelled.setdefault(" ".join([encoding, *words]), {})
            seeds.setdefault((run.recipe.seed, run.recipe.length), run)
    return {label: [seeds[key] for key in sorted(seeds)] for label, seeds in labelled.items()}


def _settings(recipe: Recipe, left_out: Sequence[str]) -> dict[str, Any]:
    """Settings that a label may name: recipe fields, options of task and encoding ("prism.width" beside "width")."""
    data = recipe.to_dict()
    of_task = {f"options.{key}" if key in data else key: value for key, value in data.pop("options").items()}
    options = data["encoding_options"].get(recipe.encoding, {})
    named = {f"{recipe.encoding}.{key}" if key in data else key: value for key, value in options.items()}
    return {key: value for key, value in data.items() if key not in left_out} | of_task | named
