"""A probe's findings on a terminal."""

from __future__ import annotations

from rich.console import Console

from deadreckon.lab.pages.tables import terminal
from deadreckon.lab.probe.findings import Findings, Head

TABLES = {
    "Routes": ("encoding", "layer", "head", "‖E[T₁]‖", "gap", "window", "far from", "predicted range"),
    "Attention": ("layer", "head", "Δ logit", "far mass", "floor", "ceiling", "far values", "carried"),
}
"""Title -> headings of two tables, each narrow enough for a terminal."""


def print_findings(found: Findings, console: Console) -> None:
    """One row a head, then the ranges, then what is not defined."""
    about = found.about
    looked_at = f"{about['rows']} × {about['length']} tokens, {about['queries']} queries a row"
    for title, headings in TABLES.items() if found.heads else ():
        rows = [[_cells(head)[heading] for heading in headings] for head in found.heads]
        console.print(terminal(headings, rows, left=1, title=f"{title}: {looked_at}"))
    if found.heads:
        console.print(
            "window: after which ‖E[T]‖ is below the tolerance; far from: that, or, with a *, assumed; floor, ceiling: "
            "Propositions 3 and 1; far values: ‖Σ a v‖ / Σ a ‖v‖, as they are and carried along their routes",
            highlight=False,
        )  # fmt: skip
    for where, why in found.undefined.items():
        console.print(f"{where}: not defined: {why}", markup=False, highlight=False)
    for what, reach, none in (("predicted", found.predicted, "no limit"), ("measured", found.measured, "not reached")):
        length = none if reach.tokens is None else spell_tokens(reach.tokens)
        console.print(f"{what} range: {length} ({reach.why})", markup=False, highlight=False)


def spell_tokens(tokens: float) -> str:
    """A number of tokens, short."""
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
        "gap": gap,
        "window": "–" if mixing is None or mixing.window is None else spell_tokens(mixing.window),
        "far from": f"{head.window}{'*' if head.window_from == 'assumed' else ''}",
        "predicted range": "no limit" if head.range.tokens is None else spell_tokens(head.range.tokens),
        "Δ logit": f"{head.scores.gap_mean:+.2f}",
        "far mass": _percent(mass.far),
        "floor": _percent(mass.floor),
        "ceiling": _percent(mass.ceiling),
        "far values": f"{values.plain:.2f}",
        "carried": "–" if values.carried is None else f"{values.carried:.2f}",
    }


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%" if share >= 5e-4 or not share else f"{100 * share:.0e}%"
