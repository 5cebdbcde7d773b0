"""Runs that take a second or two, the command line in this process, and the tables of pages."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from deadreckon.lab import cli
from deadreckon.lab.recipes import Recipe, find_recipe

SMALL = (
    "length=16", "batch_size=4", "accumulate=2", "width=16", "steps=24", "evaluate_every=6", "validation_rows=4",
    "test_lengths=[8, 16, 32]", "test_rows=4",
)  # fmt: skip


def small(encoding: str = "path", seed: int = 0, *changes: str) -> Recipe:
    return find_recipe("flipflop", "tiny", encoding, seed, (*SMALL, *changes))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["deadreckon", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rows_of(page: str, *columns: str) -> list[list[str]]:
    """Cells of its tables' lines that hold all of these."""
    lines = [line for line in page.splitlines() if line.startswith("|") and all(f"| {c} |" in line for c in columns)]
    return [[cell.strip() for cell in line[1:-1].split(" |")] for line in lines]
