"""Tables for terminal, Markdown and HTML: all columns but the first `left` are numeric and right-aligned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from deadreckon.lab.files import write_text


def by_length(rows: Mapping[str, Mapping[int, str]], heading: str = "") -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table with a column for each length that occurs in any row."""
    lengths = sorted({length for cells in rows.values() for length in cells})
    return [heading, *map(str, lengths)], [
        [name, *(cells.get(length, "") for length in lengths)] for name, cells in rows.items()
    ]


def terminal(
    headings: Sequence[str], rows: Iterable[Sequence[RenderableType]], left: int = 1, title: str | None = None
) -> Table:
    """A table for the console; names in the first column are not wrapped."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def fitting(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> Table:
    """A table of numbers for the console; transposed if it is too wide, and narrower that way."""
    lying: list[Sequence[str]] = list(zip(headings, *rows, strict=True))
    tables = [terminal(headings, rows, left=0), terminal(lying[0], lying[1:])]
    unbounded = console.options.update(max_width=100_000)
    widths = [Measurement.get(console, unbounded, table).maximum for table in tables]
    return tables[console.width < widths[0] > widths[1]]


def markdown(headings: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join(map(line, [headings, ["---"] * left + ["---:"] * (len(headings) - left), *rows]))


def save_markdown(path: Path, parts: Iterable[str]) -> None:
    """Writes paragraphs, tables and headings, separated by empty lines."""
    write_text(path, "\n\n".join(parts) + "\n")


def image(title: str, picture: Path, page: Path) -> str:
    """A picture in Markdown, with its path relative to the page."""
    return f"![{title}]({os.path.relpath(picture, page.parent)})"


def html(headings: Iterable[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """An HTML table, which scrolls if it is wider than the screen. A pair is a cell and whether it is the best."""

    def cell(value: Any) -> str:
        text, best = value if isinstance(value, tuple) else (value, False)
        return f"<td{' class=best' if best else ''}>{escape(str(text))}</td>"

    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'
