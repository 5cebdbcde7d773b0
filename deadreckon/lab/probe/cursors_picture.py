"""A picture of PRISM's cursors at work on one question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deadreckon as dr
from deadreckon.lab.pages.pictures import COLOURS, drawing
from deadreckon.lab.probe.cursors import Trace, answer, trace, words


def show(
    model: dr.DeadReckonForCausalLM,
    question: str,
    path: Path,
    layer: int | None = None,
    head: int | None = None,
    cursor: int | None = None,
) -> str:
    """Lets the model answer, draws what its cursors did, and returns the whole as text."""
    tokens, asked = answer(model, question)
    cursors_picture(trace(model, tokens, asked, layer, head, cursor), path)
    spelt = words(tokens[0])
    return (" " if max(map(len, spelt)) > 1 else "").join(spelt)


def cursors_picture(trace: Trace, path: Path) -> None:
    """Gates and histograms of a pair of cursors, the likeliest positions of all pairs of its head, its attention."""
    sides, size = {"query": COLOURS[2], "key": COLOURS[5]}, len(trace.words)
    reach = int(max(modes.max() for modes in trace.modes.values())) + 2
    width = min(18.0, 9.5 + 0.16 * size)  # titles need so much
    fitting = max(3.0, min(9.0, 220 / size))  # font size at which so many words fit side by side
    image: Any = {"aspect": "auto", "cmap": "Blues", "vmin": 0, "interpolation": "nearest"}
    with drawing(path, 2, 3, font=9, figsize=(width, 0.5 * width)) as (figure, grid):
        for axes, side in zip(grid[:, 0], sides, strict=True):
            axes.imshow(trace.gates[side].T.numpy(), vmax=1, **image)
            axes.set_yticks(range(4), ("reset", "+1", "−1", "stay"))
            axes.set_title(f"what its {side} cursor does")
        for axes, side in zip(grid[:, 1], sides, strict=True):
            shown = trace.histograms[side][:, :reach].T.numpy()
            axes.imshow(shown, origin="lower", **image)
            axes.set(title=f"where its {side} cursor may be", ylabel="position")
            axes.yaxis.get_major_locator().set_params(integer=True)
        modes, attention = grid[:, 2]
        for side, colour in sides.items():
            for number, places in enumerate(trace.modes[side].T.tolist()):
                chosen = number == trace.cursor
                label = f"{side} cursor {number}" if chosen else None
                shape = {"linewidth": 2.5, "alpha": 1.0} if chosen else {"linewidth": 1.0, "alpha": 0.35}
                modes.plot(range(size), places, color=colour, label=label, drawstyle="steps-mid", **shape)
        modes.set(title="likeliest positions, all its cursors", ylabel="position")
        modes.yaxis.get_major_locator().set_params(integer=True)
        modes.legend(frameon=False)
        attention.imshow(trace.attention.numpy(), vmax=1, **image)
        attention.set(title="attention of the head", ylabel="from")
        attention.set_yticks(range(size), trace.words, fontsize=fitting)
        for axes in grid.flat:
            axes.set_xticks(range(size), trace.words, fontsize=fitting, rotation=90 * (max(map(len, trace.words)) > 1))
            if axes is not attention:
                axes.axvline(trace.asked - 0.5, color="#555555", linestyle="--", linewidth=1)
                axes.set_xlim(-0.5, size - 0.5)
        names = f"layer {trace.layer}, head {trace.head}, cursor {trace.cursor}"
        figure.suptitle(f"{names}:   μ = {trace.mix:.2f},  |α| = {', '.join(f'{a:.1f}' for a in trace.alpha.tolist())}")
