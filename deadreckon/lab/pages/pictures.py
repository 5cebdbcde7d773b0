"""Plots of results, in a palette for colour-blind readers (Okabe and Ito's)."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from deadreckon.lab.evaluation import GROWING, SHARES
from deadreckon.lab.pages.comparison import CURVES, SHARPENED, Comparison
from deadreckon.lab.recipes import title_of
from deadreckon.tasks.files import writing

PLAIN: Any = {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "deadreckon"}
MARKERS = "osD^vPX"  # one fewer than colours, so that pairs of them differ
# Plots scale to the curve from this share on: loss is high for all at the first positions and steps.
LATE = {"position": 1 / 64, "step": 1 / 10}
COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
# Encodings with a look of their own, by its number: grey for those that others are compared with.
FAMILIAR = {
    "rope": 0, "sinusoidal": 0, "fox": 1, "path": 2, "prism": 2, "path-fox": 3, "stickbreaking": 4, "alibi": 5,
}  # fmt: skip


def looks(labels: Iterable[str], first: int = 0) -> dict[str, tuple[str, str]]:
    """Colour and marker of each label: encodings in `FAMILIAR` look alike in all pictures, others take what is left.

    Args:
        labels: encodings, with the options or the seed behind their name, if any, such as "path-0".
        first: number of the look that others begin with.
    """
    encodings = {label: re.sub(r"-\d+$", "", label.split(" ")[0]) for label in labels}
    alone = [name for name, times in Counter(encodings.values()).items() if times == 1]
    owners = {FAMILIAR[name]: name for name in reversed(alone) if name in FAMILIAR}  # of two, the first
    others = (number for number in count(first) if number not in owners)
    numbers = {label: FAMILIAR[name] if name in owners.values() else next(others) for label, name in encodings.items()}
    return {label: (COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]) for label, n in numbers.items()}


@contextmanager
def drawing(
    target: Path | io.StringIO, rows: int = 1, columns: int = 1, font: int = 10, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes to draw on, which is then saved to a file, or as SVG."""
    with plt.rc_context(PLAIN | {"font.size": font}):
        figure, panels = plt.subplots(rows, columns, layout="constrained", **options)
        try:
            yield figure, panels
            if isinstance(target, Path):
                with writing(target) as new:
                    figure.savefig(new, dpi=160, format=target.suffix[1:] or "png")
            else:  # without the date, so that equal results are equal files
                figure.savefig(target, format="svg", metadata={"Date": None})
        finally:
            plt.close(figure)


def flipflop_picture(
    learning: dict[str, list[float]], tested: dict[str, list[float]], tests: Sequence[str], step: str, path: Path
) -> None:
    """Plots errors of each encoding during training, by `step`, on the left, and in each test on the right."""
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
    """Plots scores by length, a panel for each test and for each setting of a grid, with the training length marked."""
    conditions, settings = comparison.pictured, comparison.by_setting()
    wanted = [(condition, setting) for condition in conditions for setting in settings]
    kinds = Counter((comparison.test(condition).measure, comparison.test(condition).axis) for condition in conditions)
    columns = min(len(wanted), 5)
    if 1 < len(settings) <= 5:
        columns = len(settings)
    elif len(kinds) > 1 and len(set(kinds.values())) == 1:
        columns = min(columns, *kinds.values())  # a kind in each row
    rows, shared = -(-len(wanted) // columns), len(kinds) == 1
    size = (max(1.2 + 3.6 * columns, 5.5), 3.8 * rows)
    with drawing(path, rows, columns, figsize=size, sharey=shared, squeeze=False) as (figure, panels):
        for axes, (condition, setting) in zip(panels.flat, wanted, strict=False):
            _draw_scores(axes, settings[setting], condition)
            title = ", ".join(filter(None, [condition * (len(conditions) > 1), setting]))
            axes.set_title(fill(title, 44), fontsize="medium", pad=18)
        for axes in panels[:, 1:].flat if shared else ():
            axes.set_ylabel("")
        for axes in panels.flat[len(wanted) :]:
            axes.axis("off")
        handles, labels = panels[0][0].get_legend_handles_labels()
        size_of_words = "small" if len(labels) > 12 else "medium"
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=size_of_words)
        figure.suptitle(comparison.title)


def suite_picture(
    scores: dict[str, dict[str, dict[int, float]]], depths: dict[str, dict[float, dict[int, float]]], path: Path
) -> None:
    """Plots the long-context suite: a panel for each task, a line for each model; then a heat map of passkey per model.

    Args:
        scores: from 0 to 1, by model, task and length.
        depths: scores in passkey, by model, depth and length.
    """
    tasks = list(dict.fromkeys(task for by_task in scores.values() for task in by_task))
    maps = {name: by_depth for name, by_depth in depths.items() if by_depth}
    panels_wanted = len(tasks) + len(maps)
    columns = min(panels_wanted, 5)
    rows = -(-panels_wanted // columns)
    size = (1 + 2.6 * columns, 0.9 + 2.3 * rows)
    with drawing(path, rows, columns, font=9, figsize=size, squeeze=False) as (figure, panels):
        flat = list(panels.ravel())
        for axes, task in zip(flat, tasks, strict=False):
            _draw_task(axes, {name: by_task.get(task, {}) for name, by_task in scores.items()})
            axes.set_title(task)
        image = None
        for axes, (name, by_depth) in zip(flat[len(tasks) :], maps.items(), strict=False):
            image = _draw_depths(axes, by_depth)
            axes.set_title(f"passkey, {name}" if len(scores) > 1 else "passkey by depth")
        for axes in flat[panels_wanted:]:
            axes.axis("off")
        if image is not None:
            figure.colorbar(image, ax=flat[panels_wanted - 1])
        figure.supxlabel("length in tokens", fontsize=10)
        figure.supylabel("score, %", fontsize=10)
        if len(scores) > 1:
            handles, labels = flat[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)


def _draw_task(axes: Axes, by_model: dict[str, dict[int, float]]) -> None:
    """Plots scores in % by length, a line for each model."""
    for name, (colour, marker) in looks(by_model, first=2).items():
        values = [100 * value for value in by_model[name].values()]
        axes.plot(list(by_model[name]), values, color=colour, marker=marker, markersize=4, linewidth=1.6, label=name)
    lengths = sorted({length for by_length in by_model.values() for length in by_length})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-3, 108)


def _draw_depths(axes: Axes, by_depth: dict[float, dict[int, float]]) -> Any:
    """Draws a heat map of passkey scores by depth and length, the beginning of the text on top."""
    lengths = sorted({length for by_length in by_depth.values() for length in by_length})
    cells = [[100 * by_length.get(n, float("nan")) for n in lengths] for by_length in by_depth.values()]
    image = axes.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
    marked = [place for place, depth in enumerate(by_depth) if round(100 * depth) % 50 == 0]
    axes.set_yticks(marked, [f"{100 * list(by_depth)[place]:.0f} %" for place in marked])
    axes.set_ylabel("depth")
    axes.spines[:].set_visible(False)
    return image


def _short(length: int) -> str:
    """2048 as 2k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def scores_svg(comparison: Comparison, condition: str) -> str:
    """Plots one test as SVG, narrow enough for a phone."""
    with drawing(file := io.StringIO(), figsize=(5.2, 3.8)) as (figure, axes):
        _draw_scores(axes, comparison, condition)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return file.getvalue()


def learning_svg(curves: dict[str, list[tuple[list[int], list[float]]]]) -> str:
    """Plots training curves as SVG: (steps, values) of each run, by label."""
    with drawing(file := io.StringIO(), figsize=(5.2, 3.4)) as (figure, axes):
        for label, (colour, _) in looks(curves).items():
            for number, (steps, values) in enumerate(curves[label]):
                title = None if number else title_of(label)
                axes.plot(steps, _smooth(values)[1], color=colour, linewidth=1.5, label=title)
        axes.set(xlabel="training step", ylabel="loss")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return file.getvalue()


def _draw_scores(axes: Axes, comparison: Comparison, condition: str) -> None:
    """Plots means with a band of the standard deviation over seeds, in percent from 0 to 100."""
    lengths, test = comparison.lengths(condition), comparison.test(condition)
    scale, least, most = (100.0, 0.0, 100.0) if test.measure in SHARES else (1.0, -math.inf, math.inf)
    by_model = looks(dict.fromkeys(label.removesuffix(SHARPENED) for label in comparison.values))
    for label, scores in comparison.values.items():
        colour, marker = by_model[label.removesuffix(SHARPENED)]
        line = {"linestyle": "--", "markerfacecolor": "white"} if label.endswith(SHARPENED) else {}
        there = [length for length in lengths if (condition, length) in scores]
        seeds = [[scale * value for value in scores[condition, length]] for length in there]
        middle, spread = [mean(values) for values in seeds], [stdev(v) if len(v) > 1 else 0.0 for v in seeds]
        marker = "" if test.axis in CURVES else marker
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8, **line}
        axes.plot(there, middle, label=title_of(label), **look)
        low = [max(m - s, least) for m, s in zip(middle, spread, strict=True)]
        high = [min(m + s, most) for m, s in zip(middle, spread, strict=True)]
        axes.fill_between(there, low, high, color=colour, alpha=0.2, linewidth=0)
    if test.trained and test.axis != "step":
        axes.axvline(test.trained, color="black", linestyle="--", linewidth=1, zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(test.trained, 1.01, "trained", transform=place, ha="center", va="bottom", fontsize=8)
    if test.axis != "step":
        axes.set_xscale("log", base=2)
        ticks = [2**n for n in range(max(lengths).bit_length())][::3]
        if test.axis != "position":
            ticks = _apart(lengths, test.trained)
        names = [_short(length) for length in ticks]
        axes.set_xticks(ticks, names, rotation=45 if len(" ".join(names)) > 24 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    if test.axis in CURVES:
        places = [(condition, length) for length in lengths if length > LATE[test.axis] * max(lengths)]
        means = [mean(scores[place]) for scores in comparison.values.values() for place in places if place in scores]
        if shown := [value for value in means if math.isfinite(value)]:
            margin = 0.1 * (max(shown) - min(shown)) or 0.1
            axes.set_ylim(min(shown) - margin, max(shown) + margin)
    if test.measure == "perplexity":
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if top > 4 * bottom else MaxNLocator(5))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    elif test.measure != "loss":
        values = [value for scores in comparison.values.values() for seeds in scores.values() for value in seeds]
        top = 100 if test.measure in GROWING else max(100 * max(values), 1)  # the same in each panel
        axes.set_ylim(-0.02 * top, 1.08 * top)
    labels = {"error": "error, %", "exact": "exact match, %", "score": "score, %"}
    axes.set(xlabel=test.axis, ylabel=labels.get(test.measure, test.measure))


def _apart(lengths: Sequence[int], first: int | None) -> list[int]:
    """Chooses lengths, `first` before others, whose labels do not overlap on a logarithmic axis."""
    least = 0.055 * math.log2(max(lengths) / min(lengths))
    kept: list[int] = []
    for length in sorted(lengths, key=lambda length: (length != first, length)):
        if all(abs(math.log2(length / other)) >= least for other in kept):
            kept.append(length)
    return sorted(kept)


def _smooth(values: list[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Moving average over the last `span` steps."""
    means = [sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]
    return list(range(1, len(values) + 1)), means
