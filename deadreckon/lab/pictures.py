"""Pictures of results, in colours that most colour-blind people tell apart (Okabe and Ito's palette)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from deadreckon.lab.recipes import title_of

if TYPE_CHECKING:
    from deadreckon.lab.compare import Comparison
    from deadreckon.lab.demo import Contestant, Test
    from deadreckon.lab.recipe import Recipe

PLAIN: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "deadreckon"}
MARKERS = "osD^vPX*"
COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")


def flipflop_picture(contestants: Sequence[Contestant], tests: Sequence[Test], recipe: Recipe, path: Path) -> None:
    """Error while learning, on the left, and on each test, on the right."""
    with plt.rc_context(PLAIN):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(1, 1.25), layout="constrained")
        for contestant, colour in zip(contestants, cycle(COLOURS), strict=False):
            numbers, errors = _smooth([step.error for step in contestant.steps])
            left.plot(numbers, [100 * error for error in errors], color=colour, linewidth=2, label=contestant.title)
        left.set(xlabel=f"training step ({recipe.batch_size} × {recipe.length} tokens)", ylabel="read-bit error, %")
        left.set(ylim=(-1, 60), xlim=(0, recipe.steps), title="Learning to remember one bit")
        left.legend(frameon=False)

        width = 0.8 / len(contestants)
        for number, (contestant, colour) in enumerate(zip(contestants, cycle(COLOURS), strict=False)):
            places = [place + (number - (len(contestants) - 1) / 2) * width for place in range(len(tests))]
            errors = [100 * error for error in contestant.errors]
            bars = right.bar(places, errors, width * 0.92, color=colour, label=contestant.title)
            right.bar_label(bars, [f"{error:.1f}" if error >= 0.05 else "0" for error in errors], padding=2, fontsize=9)
        right.set_xticks(range(len(tests)), [_describe(test, recipe) for test in tests])
        right.set(ylabel="read-bit error, %", ylim=(0, 60), title="Flip-flop after training")
        right.tick_params(axis="x", length=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def comparison_picture(comparison: Comparison, path: Path) -> None:
    """Scores against length, a panel for each test, the training length marked."""
    conditions = comparison.conditions
    with plt.rc_context(PLAIN):
        width = 1.2 + 3.6 * len(conditions)
        figure, panels = plt.subplots(
            1, len(conditions), figsize=(max(width, 5.5), 3.8), sharey=True, squeeze=False, layout="constrained"
        )
        for axes, condition in zip(panels[0], conditions, strict=True):
            _draw_scores(axes, comparison, condition)
            axes.set_title(condition if len(conditions) > 1 else "", pad=18)
        for axes in panels[0][1:]:
            axes.set_ylabel("")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(comparison.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def scores_svg(comparison: Comparison, condition: str) -> str:
    """One test as SVG, narrow enough for a phone."""
    with plt.rc_context(PLAIN):
        figure, axes = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
        _draw_scores(axes, comparison, condition)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        return _svg(figure)


def learning_svg(curves: dict[str, list[tuple[list[int], list[float]]]]) -> str:
    """Loss while learning: (steps, values) of each run, by encoding."""
    with plt.rc_context(PLAIN):
        figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        for (name, some), colour in zip(curves.items(), cycle(COLOURS), strict=False):
            for number, (steps, values) in enumerate(some):
                label = None if number else title_of(name)
                axes.plot(steps, _smooth(values)[1], color=colour, linewidth=1.5, label=label)
        axes.set(xlabel="training step", ylabel="loss")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        return _svg(figure)


def _draw_scores(axes: Axes, comparison: Comparison, condition: str) -> None:
    """Means with a band of the spread between seeds."""
    recipe, lengths = comparison.recipe, comparison.lengths(condition)
    scale = 1.0 if recipe.metric == "perplexity" else 100.0
    looks = zip(comparison.values.items(), cycle(COLOURS), cycle(MARKERS), strict=False)
    for (name, row), colour, marker in looks:
        there = [length for length in lengths if (condition, length) in row]
        found = [[scale * value for value in row[condition, length]] for length in there]
        middle, spread = [mean(some) for some in found], [stdev(some) if len(some) > 1 else 0.0 for some in found]
        axes.plot(there, middle, color=colour, marker=marker, markersize=5, linewidth=1.8, label=title_of(name))
        low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(there, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axvline(recipe.length, color="black", linestyle="--", linewidth=1, zorder=0)
    axes.text(
        recipe.length, 1.01, "trained", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45 if len(lengths) > 5 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    if recipe.metric == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        top = 100 * max(value for row in comparison.values.values() for found in row.values() for value in found)
        top = 100 if recipe.metric == "exact" else max(top, 1)  # the same in each panel
        axes.set_ylim(-0.02 * top, 1.08 * top)
    labels = {"error": "error, %", "exact": "exactly right, %", "perplexity": "perplexity"}
    axes.set(xlabel="length", ylabel=labels[recipe.metric])


def _svg(figure: Figure) -> str:
    """Without the date, so that equal results are equal files."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    return file.getvalue()


def _describe(test: Test, recipe: Recipe) -> str:
    length = test.times * recipe.length
    return f"{test.title}\n{100 * test.ignore:.0f}% ignored\n{length} tokens"


def _smooth(values: list[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Averages over the last `span` steps."""
    means = [sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]
    return list(range(1, len(values) + 1)), means
