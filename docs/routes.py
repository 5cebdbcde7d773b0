"""Draws what transport along a route does to a key: `python docs/routes.py` writes docs/routes.png.

One key in two dimensions, passed by eight tokens, one panel per mechanism; below, kᵀ T q with a fixed query, or Π f.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

KEY = torch.tensor([1.0, 0.25])
QUERY = torch.tensor([0.8, 0.6])
ROTATIONS = torch.tensor([0.5, 0.5, 0.1, 0.1, 0.5, 0.9, 0.1, 0.5])
MIRRORS = torch.tensor([0.0, 0.0, 1.3, 0.0, 2.2, 0.0, 0.0, 1.4])  # direction of w; tokens with β = 0 do nothing
BETAS = torch.tensor([0.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 1.0])
GATES = torch.tensor([0.9, 0.9, 0.5, 1.0, 1.0, 0.9, 0.4, 1.0])
INK, PALE, RED = "#1f4e79", "#9cb8d3", "#c0504d"


def rotated() -> list[Tensor]:
    """The key after 0, 1, … tokens, each of which rotates it by its own angle."""
    keys = [KEY]
    for angle in ROTATIONS:
        turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
        keys.append(turn @ keys[-1])
    return keys


def reflected() -> list[Tensor]:
    """The key after each step (I − β w wᵀ)."""
    keys = [KEY]
    for direction, beta in zip(MIRRORS, BETAS, strict=True):
        w = torch.stack([direction.cos(), direction.sin()])
        keys.append(keys[-1] - beta * w * (w @ keys[-1]))
    return keys


def draw_key(axes: Axes, keys: list[Tensor], title: str, note: str) -> None:
    """A fan of arrows from pale (the key as it was) to dark (as the query meets it)."""
    for number, key in enumerate(keys):
        last = number == len(keys) - 1
        colour = INK if last else PALE
        axes.annotate("", key, (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2.4 if last else 1.2})
    places: dict[tuple[float, float], list[int]] = {}
    for number, key in enumerate(keys):
        places.setdefault((round(key[0].item(), 2), round(key[1].item(), 2)), []).append(number)
    for (x, y), numbers in places.items():
        name = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        far = 1.13 / max((x * x + y * y) ** 0.5, 0.6)
        axes.text(x * far, y * far, name, ha="center", va="center", fontsize=8, color="#555555")
    axes.annotate("", QUERY * 1.25, (0, 0), arrowprops={"arrowstyle": "-|>", "color": RED, "lw": 1.5, "ls": "--"})
    axes.text(*(QUERY * 1.36), "q", color=RED, ha="center", va="center")
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.45), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=12, fontweight="bold")
    axes.set_xlabel(note, fontsize=9)


def draw_left(axes: Axes, values: list[float], label: str) -> None:
    """Plots kᵀ T q, or Π f, by how many tokens have passed the key."""
    axes.axhline(0, color="#aaaaaa", lw=0.8)
    axes.plot(range(len(values)), values, "o-", color=INK, ms=4)
    axes.set(ylim=(-1.15, 1.15), xlabel="tokens between key and query", xticks=range(len(values)))
    axes.set_ylabel(label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes the picture."""
    figure, panels = plt.subplots(2, 3, figsize=(9.4, 5.6), height_ratios=[2.2, 1], layout="constrained")
    turned, mirrored = rotated(), reflected()
    draw_key(panels[0, 0], turned, "rotation", "each token turns the key: angles add up")
    draw_key(panels[0, 1], mirrored, "reflection", "3 and 5 reflect it (β = 2), 8 projects it (β = 1)")
    kept = torch.cat([torch.ones(1), GATES.cumprod(0)])
    for number, share in enumerate(kept):
        panels[0, 2].barh(number, share.item(), color=INK if number == 8 else PALE)
    panels[0, 2].set_title("forgetting", fontsize=12, fontweight="bold")
    panels[0, 2].set(xlim=(0, 1.05), yticks=range(9), ylabel="tokens passed", ylim=(8.6, -0.6))
    panels[0, 2].set_xlabel("weight of the key: the product of gates f", fontsize=9)
    panels[0, 2].spines[["top", "right"]].set_visible(False)
    for axes, keys in zip(panels[1], (turned, mirrored), strict=False):
        draw_left(axes, [(key @ QUERY).item() for key in keys], "kᵀ T q")
    draw_left(panels[1, 2], kept.tolist(), "Π f")
    figure.savefig(Path(__file__).with_name("routes.png"), dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
