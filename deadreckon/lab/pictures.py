"""Pictures of results, in colours that most colour-blind people tell apart (Okabe and Ito's palette)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
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


def _describe(test: Test, recipe: Recipe) -> str:
    length = test.times * recipe.length
    return f"{test.title}\n{100 * test.ignore:.0f}% ignored\n{length} tokens"


def _smooth(values: list[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Averages over the last `span` steps."""
    means = [sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]
    return list(range(1, len(values) + 1)), means
