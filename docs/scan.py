"""Plots the lengths of SCAN's sequences, figures 21 to 23 of the PRISM paper: `python docs/scan.py` writes the picture.

Tokens of whole sequences, right of = (the chain of thought and the actions, with the end) and left of it, for training
and test commands.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from deadreckon.tasks import task
from deadreckon.tasks.scan import Scan

COLOURS = {"train": "#1f4e79", "test": "#c0504d"}


def lengths(split: str) -> dict[str, Tensor]:
    """Token counts of every command of a split, by part."""
    tokens, labels = Scan(split).everything()
    whole, right = (tokens != task.PAD).sum(1), (labels != task.NOT_SCORED).sum(1)
    return {"whole sequence": whole, "right of =": right, "left of =": whole - right - 1}


def main() -> None:
    """Writes the picture."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for split, colour in COLOURS.items():
        for axes, (part, found) in zip(panels, lengths(split).items(), strict=True):
            edges = torch.arange(0.5, int(found.max()) + 1).tolist()
            axes.hist(found, bins=edges, color=colour, alpha=0.6, label=split)
            axes.set(title=f"SCAN, {part}", xlabel="tokens", ylabel="commands")
            axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_yscale("log")
    panels[0].legend(frameon=False)
    figure.savefig(Path(__file__).parent.parent / "results" / "scan-lengths.png", dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
