"""Word problems in comparisons: the longest length that is solved, and by how many layers."""

from __future__ import annotations

from pathlib import Path

from small_runs import quiet

from deadreckon.lab.pages.compare import compare
from deadreckon.lab.pages.comparison import Comparison, solved_tables
from deadreckon.lab.recipes import find_recipe


def test_solved_lengths(tmp_path: Path) -> None:
    changes = ("steps=1", "test_rows=10", "validation_rows=2", "test_lengths=[2, 4, 6]")
    console = quiet()
    found = compare("a5-products", ("nope",), changes=changes, runs=tmp_path, console=console)
    assert "Longest length solved (more than 90% of rows right)" in console.file.getvalue()  # type: ignore[attr-defined]
    title = "Longest length solved (more than 90% of rows right)"
    assert [*solved_tables(found, "held out")] == [(title, ["", "length"], [["NoPE", "–"]])]
    found.values["nope"] = {("held out", 2): [1.0], ("held out", 4): [0.95, 0.9], ("held out", 6): [0.9]}
    assert found.solved("held out") == {"nope": 4}
    assert [rows for *_, rows in solved_tables(found, "held out")] == [[["NoPE", "4"]]]


def test_fewest_layers_by_length() -> None:
    shares = {"path layers=1": (1.0, 0.95, 0.5), "path layers=2": (1.0, 0.2, 1.0), "path layers=3": (1.0, 1.0, 0.91)}
    shares |= {"rope layers=1": (0.9, 1.0, 1.0)}  # 90% is not more than 90%
    values = {
        label: {("held out", n): [x] for n, x in zip((2, 4, 6), row, strict=True)} for label, row in shares.items()
    }
    found = Comparison("", find_recipe("a5-grid"), values)
    (about, counts, longest), (_, lengths, fewest) = solved_tables(found, "held out")
    assert about.endswith("by number of layers") and counts == ["", "1", "2", "3"] and lengths == ["", "2", "4", "6"]
    assert longest == [["PaTH", "4", "2", "6"], ["RoPE", "–", "–", "–"]]
    assert fewest == [["PaTH", "1", "1", "3"], ["RoPE", "–", "–", "–"]]
    some = Comparison("", find_recipe("a5-grid"), {"nope": values["path layers=1"], **values})
    assert [len(rows) for *_, rows in solved_tables(some, "held out")] == [5]  # all, where some name no layers
    alone = Comparison("", find_recipe("a5-1"), {"path": values["path layers=1"]})
    assert [rows for *_, rows in solved_tables(alone, "held out")] == [[["PaTH", "4"]]]
