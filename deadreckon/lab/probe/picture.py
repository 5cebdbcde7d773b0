"""One page of pictures of a probe: a line for each head, in the colour of its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from deadreckon.lab.pages.pictures import COLOURS, drawing
from deadreckon.lab.probe.findings import Findings
from deadreckon.lab.probe.report import spell_tokens

PALE = "#CCCCCC"


def probe_picture(found: Findings, path: Path) -> None:
    """Mean transport, logits and attention by distance, far mass between its bounds, cancellation, and ranges."""
    draws = (_transport, _logits, _attention, _far, _cancellation, _ranges)
    with drawing(path, 2, 3, font=9, figsize=(13, 7.2)) as (figure, panels):
        for draw, panel in zip(draws, panels.flat, strict=True):
            draw(found, panel)
        about = found.about
        names = ", ".join(dict.fromkeys(about["encodings"]))
        figure.suptitle(f"{names}: {about['rows']} × {about['length']} tokens, {about['queries']} queries a row")
        layers = sorted({head.layer for head in found.heads})
        lines = [Line2D([], [], color=_colour(layer), linewidth=2, label=f"layer {layer}") for layer in layers]
        figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 12), frameon=False)


def _colour(layer: int) -> str:
    return COLOURS[1:][layer % (len(COLOURS) - 1)]


def _lines(found: Findings, panel: Any, x: list[int], name: str, **how: Any) -> None:
    """A line for each head that has values of this name."""
    for head in found.heads:
        y: Any = head
        for word in name.split("."):
            y = getattr(y, word, None)
        if y is not None:
            panel.plot(x[: len(y)], y, color=_colour(head.layer), linewidth=1.2, alpha=0.8, **how)


def _transport(found: Findings, panel: Any) -> None:
    for name, style in (("mixing.norm", "-"), ("mixing.typical", ":"), ("mixing.mixed", "-."), ("gates", "--")):
        _lines(found, panel, found.lengths, name, linestyle=style)
    noises = [head.mixing.noise for head in found.heads if head.mixing is not None]
    if noises:
        worst = [max(values) for values in zip(*noises, strict=True)]
        panel.fill_between(found.lengths, worst, 1e-4, color=PALE, alpha=0.6, linewidth=0)
        panel.axhline(found.about["tolerance"], color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    styles: Any = {"‖E[T]‖": "-", "root mean square": ":", "share of pairs mixed": "-.", "E[Π f], gates": "--"}
    lines = [Line2D([], [], color="black", linestyle=style, label=name) for name, style in styles.items()]
    panel.legend(handles=lines, frameon=False)
    panel.set(xscale="log", yscale="log", ylim=(1e-3, 1.5), xlabel="route length", title="Mean transport (grey: noise)")
    if not noises and all(head.gates is None for head in found.heads):
        panel.text(0.5, 0.5, "no transport, no gates:\nT = I, nothing mixes", transform=panel.transAxes, ha="center")


def _distance_axis(found: Findings, panel: Any) -> list[int]:
    """Bins by number: distance 0 has no place on a logarithmic axis."""
    places = list(range(len(found.bins)))
    panel.set_xticks(places[::2], [str(start) for start in found.bins[::2]])
    panel.set(xlabel="distance (bins begin at)")
    return places


def _logits(found: Findings, panel: Any) -> None:
    _lines(found, panel, _distance_axis(found, panel), "scores.by_distance")
    panel.set(ylabel="mean logit, nats", title="Score by distance, without gates")


def _attention(found: Findings, panel: Any) -> None:
    _lines(found, panel, _distance_axis(found, panel), "mass.by_distance")
    panel.set(ylabel="share of attention", ylim=(0, None), title="Attention by distance")


def _far(found: Findings, panel: Any) -> None:
    for place, head in enumerate(found.heads):
        mass = head.mass
        if mass.floor is not None and mass.ceiling is not None:
            panel.plot([place] * 2, [mass.floor, mass.ceiling], color=PALE, linewidth=3, solid_capstyle="butt")
        panel.errorbar(place, mass.far, 2 * (mass.error or 0.0), color=_colour(head.layer), marker="o", markersize=4)
    _head_axis(found, panel)
    panel.set(ylim=(-0.02, 1.02), ylabel="far mass", title="Far mass (grey: Propositions 3 and 1)")


def _cancellation(found: Findings, panel: Any) -> None:
    for place, head in enumerate(found.heads):
        colour = _colour(head.layer)
        panel.plot(place, head.values.plain, color=colour, marker="o", markersize=5, fillstyle="none")
        if head.values.carried is not None:
            panel.plot([place] * 2, [head.values.plain, head.values.carried], color=colour, linewidth=0.8, alpha=0.5)
            panel.plot(place, head.values.carried, color=colour, marker="v", markersize=5)
    _head_axis(found, panel)
    panel.plot([], [], "o", color="black", fillstyle="none", label="values as they are")
    panel.plot([], [], "v", color="black", label="carried along routes")
    panel.legend(frameon=False)
    panel.set(ylim=(0, 1.05), ylabel="‖Σ a v‖ / Σ a ‖v‖, far", title="What is left of far values")


def _ranges(found: Findings, panel: Any) -> None:
    panel.errorbar(found.places, found.loss, found.loss_error, color="black", linewidth=1.2, elinewidth=0.6)
    if found.loss_more is not None:
        short = [loss - more for loss, more in zip(found.loss, found.loss_more, strict=True)]
        panel.plot(found.places, short, color="#999999", linewidth=1.2, label="same, context as trained")
    marks: list[tuple[str, float | None, str, str, str]] = [
        ("trained", found.about["trained"], "not given", "--", "#999999"),
        ("predicted", found.predicted.tokens, "no limit", "-", "#0072B2"),
        ("measured", found.measured.tokens, "not reached", "-", "#D55E00"),
    ]
    for name, tokens, none, style, colour in marks:
        label = f"{name}: {none if tokens is None else spell_tokens(tokens)}"
        if tokens is not None and tokens <= 16 * found.about["length"]:
            panel.axvline(tokens, color=colour, linestyle=style, linewidth=1.5, label=label)
        else:
            panel.plot([], [], color=colour, linestyle=style, linewidth=1.5, label=label)
    panel.legend(framealpha=0.8, edgecolor="none")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.set(xlabel="position", ylabel="loss, nats", title="Loss by position, and ranges")


def _head_axis(found: Findings, panel: Any) -> None:
    skip = -(-len(found.heads) // 16)
    labels = [f"{head.layer}.{head.head}" for head in found.heads]
    panel.set_xticks(range(0, len(labels), skip), labels[::skip])
    panel.set(xlabel="layer.head", xlim=(-0.6, len(labels) - 0.4))
