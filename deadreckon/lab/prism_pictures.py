"""How far PRISM goes beyond what it was trained on, drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from deadreckon.lab.pictures import COLOURS, plt
from deadreckon.lab.recipes import title_of


def lengths_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Exact match by length, a line for each result; the dashed line is the longest that was trained on."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        names = sorted({result["encoding"] for result in results}, key=lambda name: (name == "prism", name))
        colours = dict(zip(names, cycle(COLOURS), strict=False))
        seeds = Counter(result["encoding"] for result in results)
        labels = {name: title_of(name) + (f", {count} seeds" if count > 1 else "") for name, count in seeds.items()}
        for result in results:
            name, best = result["encoding"], {int(n): 100 * share for n, share in result["best"].items()}
            label = labels.pop(name, None)  # once
            axes.plot(
                list(best), list(best.values()), "o-", color=colours[name], linewidth=2, markersize=4, label=label
            )
        for longest in {result["trained_up_to"] for result in results}:
            axes.axvline(longest, color="#555555", linestyle="--", linewidth=1)
        axes.set(xlabel="length", ylabel="exact match, %", ylim=(-3, 103), xlim=(0, None))
        axes.set(title=f"{results[0]['task']}, trained left of the dashed line")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)
