"""Pictures of results, in colours that most colour-blind people tell apart (Okabe and Ito's palette)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from deadreckon.lab.pages.comparison import Comparison
from deadreckon.lab.recipes import title_of

PLAIN: Any = {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "deadreckon"}
MARKERS = "osD^vPX*"
COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")


@contextmanager
def drawing(
    target: Path | io.StringIO, rows: int = 1, columns: int = 1, font: int = 10, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """A figure and its panels to draw on; then it is written to a file, or as SVG."""
    with plt.rc_context(PLAIN | {"font.size": font}):
        figure, panels = plt.subplots(rows, columns, layout="constrained", **options)
        yield figure, panels
        if isinstance(target, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target, dpi=160)
        else:  # without the date, so that equal results are equal files
            figure.savefig(target, format="svg", metadata={"Date": None})
        plt.close(figure)


def flipflop_picture(
    learning: dict[str, list[float]], tested: dict[str, list[float]], tests: Sequence[str], step: str, path: Path
) -> None:
    """Errors of each encoding while learning, by `step`, on the left, and in each test, on the right."""
    with drawing(path, 1, 2, figsize=(10, 3.8), width_ratios=(1, 1.25)) as (_, (left, right)):
        for (title, errors), colour in zip(learning.items(), cycle(COLOURS), strict=False):
            numbers, means = _smooth([100 * error for error in errors])
            left.plot(numbers, means, color=colour, linewidth=2, label=title)
        left.set(xlabel=step, ylabel="read-bit error, %", ylim=(-1, 60), xlim=(0, None))
        left.set(title="Learning to remember one bit")
        left.legend(frameon=False)
        width = 0.8 / len(tested)
        for number, ((title, errors), colour) in enumerate(zip(tested.items(), cycle(COLOURS), strict=False)):
            places = [place + (number - (len(tested) - 1) / 2) * width for place in range(len(tests))]
            bars = right.bar(places, [100 * error for error in errors], width * 0.92, color=colour, label=title)
            words = [f"{100 * error:.1f}" if error >= 0.0005 else "0" for error in errors]
            right.bar_label(bars, words, padding=2, fontsize=9)
        right.set_xticks(range(len(tests)), tests)
        right.set(ylabel="read-bit error, %", ylim=(0, 60), title="Flip-flop after training")
        right.tick_params(axis="x", length=0)


def comparison_picture(comparison: Comparison, path: Path) -> None:
    """Scores against length, a panel for each test, the training length marked."""
    conditions = comparison.pictured
    measures = {comparison.test(condition).measure for condition in conditions}
    size, shared = (max(1.2 + 3.6 * len(conditions), 5.5), 3.8), len(measures) == 1
    with drawing(path, 1, len(conditions), figsize=size, sharey=shared, squeeze=False) as (figure, panels):
        for axes, condition in zip(panels[0], conditions, strict=True):
            _draw_scores(axes, comparison, condition)
            axes.set_title(condition if len(conditions) > 1 else "", pad=18)
        for axes in panels[0][1:] if shared else ():
            axes.set_ylabel("")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.suptitle(comparison.title)


def scores_svg(comparison: Comparison, condition: str) -> str:
    """One test as SVG, narrow enough for a phone."""
    with drawing(file := io.StringIO(), figsize=(5.2, 3.8)) as (figure, axes):
        _draw_scores(axes, comparison, condition)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return file.getvalue()


def learning_svg(curves: dict[str, list[tuple[list[int], list[float]]]]) -> str:
    """Loss while learning: (steps, values) of each run, by label."""
    with drawing(file := io.StringIO(), figsize=(5.2, 3.4)) as (figure, axes):
        for (label, seeds), colour in zip(curves.items(), cycle(COLOURS), strict=False):
            for number, (steps, values) in enumerate(seeds):
                title = None if number else title_of(label)
                axes.plot(steps, _smooth(values)[1], color=colour, linewidth=1.5, label=title)
        axes.set(xlabel="training step", ylabel="loss")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return file.getvalue()


def _draw_scores(axes: Axes, comparison: Comparison, condition: str) -> None:
    """Means with a band of the standard deviation between seeds."""
    lengths, test = comparison.lengths(condition), comparison.test(condition)
    scale = 100.0 if test.measure in ("error", "exact") else 1.0
    looks = zip(comparison.values.items(), cycle(COLOURS), cycle(MARKERS), strict=False)
    for (label, scores), colour, marker in looks:
        there = [length for length in lengths if (condition, length) in scores]
        seeds = [[scale * value for value in scores[condition, length]] for length in there]
        middle, spread = [mean(values) for values in seeds], [stdev(v) if len(v) > 1 else 0.0 for v in seeds]
        marker = "" if test.axis == "position" else marker
        axes.plot(there, middle, color=colour, marker=marker, markersize=5, linewidth=1.8, label=title_of(label))
        low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(there, low, high, color=colour, alpha=0.2, linewidth=0)
    if test.trained:
        axes.axvline(test.trained, color="black", linestyle="--", linewidth=1, zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(test.trained, 1.01, "trained", transform=place, ha="center", va="bottom", fontsize=8)
    axes.set_xscale("log", base=2)
    ticks = lengths if test.axis != "position" else [2**n for n in range(max(lengths).bit_length())][::3]
    axes.set_xticks(ticks, [str(length) for length in ticks], rotation=45 if len(ticks) > 5 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    if test.measure == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    elif test.measure != "loss":
        values = [value for scores in comparison.values.values() for seeds in scores.values() for value in seeds]
        top = 100 if test.measure == "exact" else max(100 * max(values), 1)  # the same in each panel
        axes.set_ylim(-0.02 * top, 1.08 * top)
    labels = {"error": "error, %", "exact": "exact match, %", "perplexity": "perplexity", "loss": "loss"}
    axes.set(xlabel=test.axis, ylabel=labels[test.measure])


def _smooth(values: list[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Averages over the last `span` steps."""
    means = [sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]
    return list(range(1, len(values) + 1)), means
