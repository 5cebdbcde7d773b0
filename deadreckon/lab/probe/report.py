"""A probe's findings as tables on a terminal, and as one plot: a line for each head, coloured by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

from matplotlib import colormaps
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter
from rich.console import Console

from deadreckon.lab.pages.pictures import COLOURS, drawing
from deadreckon.lab.pages.tables import terminal
from deadreckon.lab.probe.findings import Findings, Head

PALE = "#CCCCCC"
TABLES = {
    "Routes": ("encoding", "layer", "head", "‖E[T₁]‖", "r₂", "gap", "window", "far from", "range"),
    "Attention": ("layer", "head", "Δ logit", "far mass", "floor", "ceiling", "far values", "carried"),
}
"""Title -> headings of two tables, each narrow enough for a terminal."""


def print_findings(findings: Findings, console: Console) -> None:
    """Prints a row for each head, then the ranges, then what is undefined."""
    about = findings.about
    looked_at = f"{about['rows']} × {about['length']} tokens, {about['queries']} queries a row"
    names = dict.fromkeys(head.encoding for head in findings.heads)
    if len(names) == 1:  # of all heads alike, it needs no column
        looked_at = f"{next(iter(names))}, {looked_at}"
    for title, headings in TABLES.items() if findings.heads else ():
        headings = headings if len(names) > 1 else tuple(heading for heading in headings if heading != "encoding")
        rows = [[_cells(head)[heading] for heading in headings] for head in findings.heads]
        console.print(terminal(headings, rows, left=int(headings[0] == "encoding"), title=f"{title}: {looked_at}"))
    if findings.heads:
        console.print(
            "r₂: ‖E[T₁ ⊗ T₁]‖ but for the trace; window: after which ‖E[T]‖ is below the tolerance; far from: that, "
            "or, with a *, assumed; range: predicted; floor, ceiling: Propositions 3 and 1; far values: ‖Σ a v‖ / "
            "Σ a ‖v‖, as they are and carried along their routes",
            highlight=False,
        )  # fmt: skip
    for where, why in findings.undefined.items():
        console.print(f"{where}: not defined: {why}", markup=False, highlight=False)
    for what, reach, none in (
        ("predicted", findings.predicted, "no limit"),
        ("measured", findings.measured, _unmeasured(findings)),
    ):
        length = none if reach.tokens is None else spell_tokens(reach.tokens)
        console.print(f"{what} range: {length} ({reach.why})", markup=False, highlight=False)


def _unmeasured(findings: Findings) -> str:
    """Text for a measured range without an end: not reached in these tokens, or not measured at all."""
    trained = findings.about["trained"] or findings.about["length"]
    told = findings.loss_more is not None or any(trained // 2 <= place < trained for place in findings.places)
    return "not reached" if told else "not measured"


def spell_tokens(tokens: float) -> str:
    """A short form of a number of tokens."""
    return f"{tokens:.0f}" if tokens < 1e5 else f"{tokens:.1e}"


def _cells(head: Head) -> dict[str, str]:
    mixing, mass, values = head.mixing, head.mass, head.values
    gap = "–"
    if mixing is not None:
        gap = f"{mixing.gap:.3g}" if mixing.gap is not None else f"< {max(mixing.gap_ceiling, 1e-9):.1g}"
    return {
        "layer": str(head.layer),
        "head": str(head.head),
        "encoding": head.encoding,
        "‖E[T₁]‖": "1" if mixing is None else f"{mixing.step:.4f}",
        "r₂": "–" if mixing is None or mixing.second is None else f"{mixing.second:.3f}",
        "gap": gap,
        "window": "–" if mixing is None or mixing.window is None else spell_tokens(mixing.window),
        "far from": f"{head.window}{'*' if head.window_from == 'assumed' else ''}",
        "range": "no limit" if head.range.tokens is None else spell_tokens(head.range.tokens),
        "Δ logit": f"{head.scores.gap_mean:+.2f}",
        "far mass": _percent(mass.far),
        "floor": _percent(mass.floor),
        "ceiling": _percent(mass.ceiling),
        "far values": f"{values.plain:.2f}",
        "carried": "–" if values.carried is None else f"{values.carried:.2f}",
    }


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%" if share >= 5e-4 or not share else f"{100 * share:.0e}%"


def probe_picture(findings: Findings, path: Path) -> None:
    """Plots mean transport, logits and attention by distance, far mass with its bounds, cancellation, and ranges."""
    logits = partial(_by_distance, "scores.by_distance", "mean logit, nats", "Score by distance, without gates")
    attention = partial(_by_distance, "mass.by_distance", "share of attention", "Attention by distance")
    draws: list[Callable[[Findings, Any], None]]
    draws = [_transport, logits, attention, _far, _cancellation, _ranges]
    with drawing(path, 2, 3, font=9, figsize=(13, 7.2)) as (figure, panels):
        for draw, panel in zip(draws, panels.flat, strict=True):
            draw(findings, panel)
        panels.flat[2].set_ylim(0, None)
        about = findings.about
        names = ", ".join(dict.fromkeys(about["encodings"]))
        figure.suptitle(f"{names}: {about['rows']} × {about['length']} tokens, {about['queries']} queries a row")
        layers = sorted({head.layer for head in findings.heads})
        lines = [
            Line2D([], [], color=_colour(findings, layer), linewidth=2, label=f"layer {layer}") for layer in layers
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 12), frameon=False)


def _colour(findings: Findings, layer: int) -> Any:
    """Distinct colours for a few layers; for many, a scale from dark to light."""
    known, layers = COLOURS[1:], sorted({head.layer for head in findings.heads})
    place = layers.index(layer)
    return known[place] if len(layers) <= len(known) else colormaps["viridis"](0.95 * place / (len(layers) - 1))


def _lines(findings: Findings, panel: Any, x: list[int], name: str, **how: Any) -> None:
    """A line for each head that has values of this name."""
    for head in findings.heads:
        y = reduce(lambda part, word: getattr(part, word, None), name.split("."), cast(Any, head))
        if y is not None:
            panel.plot(x[: len(y)], y, color=_colour(findings, head.layer), linewidth=1.2, alpha=0.8, **how)


def _transport(findings: Findings, panel: Any) -> None:
    for name, style in (("mixing.norm", "-"), ("mixing.typical", ":"), ("mixing.mixed", "-."), ("gates", "--")):
        _lines(findings, panel, findings.lengths, name, linestyle=style)
    noises = [head.mixing.noise for head in findings.heads if head.mixing is not None]
    if noises:
        worst = [max(values) for values in zip(*noises, strict=True)]
        panel.fill_between(findings.lengths, worst, 1e-4, color=PALE, alpha=0.6, linewidth=0)
        panel.axhline(findings.about["tolerance"], color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    styles: Any = {"‖E[T]‖": "-", "root mean square": ":", "share of pairs mixed": "-.", "E[Π f], gates": "--"}
    lines = [Line2D([], [], color="black", linestyle=style, label=name) for name, style in styles.items()]
    panel.legend(handles=lines, frameon=False)
    panel.set(xscale="log", yscale="log", ylim=(1e-3, 1.5), xlabel="route length", title="Mean transport (grey: noise)")
    if not noises and all(head.gates is None for head in findings.heads):
        panel.text(0.5, 0.5, "no transport, no gates:\nT = I, nothing mixes", transform=panel.transAxes, ha="center")


def _by_distance(name: str, ylabel: str, title: str, findings: Findings, panel: Any) -> None:
    """Plots by number of bin, since distance 0 has no place on a logarithmic axis."""
    places = list(range(len(findings.bins)))
    _lines(findings, panel, places, name)
    panel.set_xticks(places[::2], [str(start) for start in findings.bins[::2]])
    panel.set(xlabel="distance (bins begin at)", ylabel=ylabel, title=title)


def _far(findings: Findings, panel: Any) -> None:
    for place, head in enumerate(findings.heads):
        mass, colour = head.mass, _colour(findings, head.layer)
        if mass.floor is not None and mass.ceiling is not None:
            panel.plot([place] * 2, [mass.floor, mass.ceiling], color=PALE, linewidth=3, solid_capstyle="butt")
        panel.errorbar(place, mass.far, 2 * (mass.error or 0.0), color=colour, marker="o", markersize=4)
    _head_axis(findings, panel)
    panel.set(ylim=(-0.02, 1.02), ylabel="far mass", title="Far mass (grey: Propositions 3 and 1)")


def _cancellation(findings: Findings, panel: Any) -> None:
    for place, head in enumerate(findings.heads):
        colour = _colour(findings, head.layer)
        panel.plot(place, head.values.plain, color=colour, marker="o", markersize=5, fillstyle="none")
        if head.values.carried is not None:
            panel.plot([place] * 2, [head.values.plain, head.values.carried], color=colour, linewidth=0.8, alpha=0.5)
            panel.plot(place, head.values.carried, color=colour, marker="v", markersize=5)
    _head_axis(findings, panel)
    panel.plot([], [], "o", color="black", fillstyle="none", label="values as they are")
    panel.plot([], [], "v", color="black", label="carried along routes")
    panel.legend(frameon=False)
    panel.set(ylim=(0, 1.05), ylabel="‖Σ a v‖ / Σ a ‖v‖, far", title="What is left of far values")


def _ranges(findings: Findings, panel: Any) -> None:
    panel.errorbar(findings.places, findings.loss, findings.loss_error, color="black", linewidth=1.2, elinewidth=0.6)
    if findings.loss_more is not None:
        short = [loss - more for loss, more in zip(findings.loss, findings.loss_more, strict=True)]
        panel.plot(findings.places, short, color="#999999", linewidth=1.2, label="same, context as trained")
    marks: list[tuple[str, float | None, str, str, str]] = [
        ("trained", findings.about["trained"], "not given", "--", "#999999"),
        ("predicted", findings.predicted.tokens, "no limit", "-", "#0072B2"),
        ("measured", findings.measured.tokens, _unmeasured(findings), "-", "#D55E00"),
    ]
    for name, tokens, none, style, colour in marks:
        label = f"{name}: {none if tokens is None else spell_tokens(tokens)}"
        if tokens is not None and tokens <= 16 * findings.about["length"]:
            panel.axvline(tokens, color=colour, linestyle=style, linewidth=1.5, label=label)
        else:
            panel.plot([], [], color=colour, linestyle=style, linewidth=1.5, label=label)
    panel.legend(framealpha=0.8, edgecolor="none")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.set(xlabel="position", ylabel="loss, nats", title="Loss by position, and ranges")


def _head_axis(findings: Findings, panel: Any) -> None:
    skip = -(-len(findings.heads) // 16)
    labels = [f"{head.layer}.{head.head}" for head in findings.heads]
    panel.set_xticks(range(0, len(labels), skip), labels[::skip])
    panel.set(xlabel="layer.head", xlim=(-0.6, len(labels) - 0.4))
