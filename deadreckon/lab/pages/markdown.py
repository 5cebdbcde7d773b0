"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A table; all columns but the first `left` are of numbers, and end on the right."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join(map(line, [heads, ["---"] * left + ["---:"] * (len(heads) - left), *rows]))
