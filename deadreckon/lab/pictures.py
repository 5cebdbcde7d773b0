"""Pictures of results, in colours that most colour-blind people tell apart (Okabe and Ito's palette)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from deadreckon.lab.cursors import Trace
    from deadreckon.lab.demo import Contestant, Test
    from deadreckon.lab.training import Recipe

COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")


def flipflop_picture(contestants: Sequence[Contestant], tests: Sequence[Test], recipe: Recipe, path: Path) -> None:
    """Error while learning, on the left, and on each test, on the right."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
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


def lengths_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Exact match by length, a line for each result; the dashed line is the longest that was trained on."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        names = sorted({result["encoding"] for result in results}, key=lambda name: (name == "prism", name))
        colours = dict(zip(names, cycle(COLOURS), strict=False))
        for result in results:
            lengths = [int(length) for length in result["best"]]
            shares = [100 * share for share in result["best"].values()]
            label = f"{result['encoding']}, seed {result['seed']}"
            axes.plot(lengths, shares, "o-", color=colours[result["encoding"]], linewidth=2, markersize=4, label=label)
        for longest in {result["trained_up_to"] for result in results}:
            axes.axvline(longest, color="#555555", linestyle="--", linewidth=1)
        axes.set(xlabel="length", ylabel="exact match, %", ylim=(-3, 103), xlim=(0, None))
        axes.set(title=f"{results[0]['task']}: mean of the best evaluations, trained left of the dashed line")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def cursors_picture(trace: Trace, path: Path) -> None:
    """Gates and histograms of a pair of cursors, the likeliest positions of all pairs of its head, its attention."""
    sides, size = {"query": COLOURS[2], "key": COLOURS[5]}, len(trace.words)
    reach = int(max(modes.max() for modes in trace.modes.values())) + 2
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        width = min(18.0, 7 + 0.16 * size)
        figure, grid = plt.subplots(2, 3, figsize=(width, 0.55 * width), layout="constrained")
        for axes, side in zip(grid[:, 0], sides, strict=True):
            axes.imshow(
                trace.gates[side].T.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest"
            )
            axes.set_yticks(range(4), ("reset", "+1", "−1", "stay"))
            axes.set_title(f"what its {side} cursor does")
        for axes, side in zip(grid[:, 1], sides, strict=True):
            shown = trace.histograms[side][:, :reach].T.numpy()
            axes.imshow(shown, aspect="auto", cmap="Blues", vmin=0, origin="lower", interpolation="nearest")
            axes.set(title=f"where its {side} cursor may be", ylabel="position")
        modes, attention = grid[:, 2]
        for side, colour in sides.items():
            for number, places in enumerate(trace.modes[side].T.tolist()):
                chosen = number == trace.cursor
                label = f"{side} cursor {number}" if chosen else None
                shape = {"linewidth": 2.5, "alpha": 1.0} if chosen else {"linewidth": 1.0, "alpha": 0.35}
                modes.plot(range(size), places, color=colour, label=label, drawstyle="steps-mid", **shape)
        modes.set(title="likeliest positions, all cursors of the head", ylabel="position")
        modes.legend(frameon=False)
        attention.imshow(trace.attention.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        attention.set(title="attention of the head", ylabel="from")
        attention.set_yticks(range(size), trace.words, fontsize=_fitting(size))
        for axes in grid.flat:
            axes.set_xticks(range(size), trace.words, fontsize=_fitting(size), rotation=90 * (_longest(trace) > 1))
            if axes is not attention:
                axes.axvline(trace.asked - 0.5, color="#555555", linestyle="--", linewidth=1)
                axes.set_xlim(-0.5, size - 0.5)
        names = f"layer {trace.layer}, head {trace.head}, cursor {trace.cursor}"
        figure.suptitle(f"{names}:   μ = {trace.mix:.2f},  |α| = {', '.join(f'{a:.1f}' for a in trace.alpha.tolist())}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _fitting(size: int) -> float:
    """A font size at which so many words fit side by side."""
    return max(3.0, min(9.0, 220 / size))


def _longest(trace: Trace) -> int:
    return max(len(word) for word in trace.words)


def _describe(test: Test, recipe: Recipe) -> str:
    length = test.times * recipe.length
    return f"{test.title}\n{100 * test.ignore:.0f}% ignored\n{length} tokens"


def _smooth(values: list[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Averages over the last `span` steps."""
    means = [sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]
    return list(range(1, len(values) + 1)), means
