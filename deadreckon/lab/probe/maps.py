"""Attention maps of all heads while a model answers a question, for any encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.pages.pictures import COLOURS, drawing
from deadreckon.lab.probe.attention import maps_of
from deadreckon.lab.probe.cursors import answer, words, written

ALL = (None, None)


class Map(NamedTuple):
    """The attention map of one head on a sequence of T tokens."""

    layer: int
    head: int
    weights: Tensor  # (T, T), a row for each query
    modes: Tensor  # (answers,) the key that each query of the answer looks at most
    sure: float  # the mean of its weight


def read_maps(
    model: dr.DeadReckonForCausalLM, tokens: Tensor, asked: int, chosen: tuple[int | None, int | None] = ALL
) -> list[Map]:
    """Attention maps on tokens (1, T), of which `asked` are the question: of all heads, or one layer's or head's."""
    maps = maps_of(model, tokens).cpu()
    places = []
    for name, wanted, count in zip(("layer", "head"), chosen, maps.shape, strict=False):
        if wanted is not None and not 0 <= wanted < count:
            raise ValueError(f"{name}: expected 0 to {count - 1}, got {wanted}")
        places.append(range(count) if wanted is None else (wanted,))
    found = []
    for layer in places[0]:
        for head in places[1]:
            # The question's last token predicts the first of the answer; the answer's last token predicts nothing.
            best = maps[layer, head, asked - 1 : -1].max(-1)
            found.append(Map(layer, head, maps[layer, head], best.indices, float(best.values.mean())))
    return found


def show(
    model: dr.DeadReckonForCausalLM, question: str, path: Path, chosen: tuple[int | None, int | None] = ALL
) -> str:
    """Generates the answer, plots the attention maps, and returns question and answer as text."""
    tokens, asked = answer(model, question)
    maps = read_maps(model, tokens, asked, chosen)
    spelt = words(tokens[0])
    maps_picture(maps, spelt, asked, path)
    return written(spelt)


def maps_picture(maps: list[Map], spelt: list[str], asked: int, path: Path) -> None:
    """Plots a panel for each head, those of a layer in a row."""
    rows, columns = len({one.layer for one in maps}), len({one.head for one in maps})
    size = len(spelt)
    side = max(1.6, min(6.0, 16 / columns, 2 + 0.12 * size))  # inches of a panel
    fitting = min(9.0, 50 * side / size)  # font size at which so many words fit side by side
    image: Any = {"aspect": "equal", "cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    with drawing(path, rows, columns, font=9, squeeze=False, figsize=(side * columns, (side + 0.4) * rows + 0.3)) as (
        figure,
        grid,
    ):
        for axes, one in zip(grid.flat, maps, strict=True):
            axes.imshow(one.weights.numpy(), **image)
            queries = torch.arange(asked - 1, asked - 1 + len(one.modes))
            axes.plot(one.modes, queries, ".", color=COLOURS[5], markersize=min(4.0, 3 * fitting / 4))
            axes.axhline(asked - 1.5, color="#555555", linestyle="--", linewidth=1)
            axes.set_title(f"layer {one.layer}, head {one.head}: {one.sure:.2f}")
            for ticks in (axes.set_xticks, axes.set_yticks):
                ticks(range(size), spelt, fontsize=fitting) if fitting >= 3 else ticks([])
        figure.suptitle("attention; dots: where answering tokens look most, and its mean weight")
