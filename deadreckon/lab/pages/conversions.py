"""A page about several conversions of one teacher: losses by length before and after, and what they cost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from deadreckon.lab.evaluation import format_value
from deadreckon.lab.pages.compare import draw_comparison
from deadreckon.lab.pages.comparison import Comparison, Test
from deadreckon.lab.pages.paired import paired_difference
from deadreckon.lab.pages.tables import markdown
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.conversion import STAGES
from deadreckon.lab.training.runs import Run

HELD_OUT = "held out"
Texts = dict[int, Sequence[float]]  # losses by length, of the same texts


@dataclass(frozen=True)
class Converted:
    """A finished conversion, as its folder tells of it."""

    name: str
    report: dict[str, Any]
    runs: list[Run]

    @classmethod
    def read(cls, folder: Path) -> Converted:
        path = folder / "report.json"
        if not path.exists():
            raise ValueError(f"runs: expected folders of finished conversions, with report.json, got {str(folder)!r}")
        stages = [folder / stage for stage in STAGES if (folder / stage / "recipe.json").exists()]
        return cls(folder.name, json.loads(path.read_text()), [Run(stage) for stage in stages])

    def texts(self, model: str) -> Texts:
        """Of "teacher", "start" or "student"; a conversion without stages ends as it starts."""
        found = self.report.get(model, self.report["student"])["texts"]
        return {int(length): losses for length, losses in found.items()}

    @property
    def tokens(self) -> int:
        """That the student was trained on."""
        return sum(run.progress().tokens for run in self.runs)

    @property
    def length(self) -> int:
        """That the teacher was trained at."""
        return int(self.report["conversion"]["length"])


def write_conversions(path: Path, folders: Sequence[Path], console: Console) -> None:
    """Writes a page of Markdown, and its picture beside it."""
    found = [Converted.read(folder) for folder in folders]
    teacher, first = found[0].texts("teacher"), found[0].report["environment"]
    if any(list(one.texts("teacher")) != list(teacher) for one in found):
        raise ValueError("runs: expected conversions that were tested at the same lengths, got different ones")
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    picture = draw_comparison(compared(found), path.with_suffix(".png"), console)
    lines = [
        "# Conversions", "",
        f"One RoPE teacher, trained at {found[0].length} tokens, and what it was converted to.", "",
        f"{first['date'][:10]}: {first['device']}; Python {first['python']}, {versions}; commit "
        f"{(first['commit'] or 'unknown')[:12]}. Seed {', '.join(seeds(found))}.", "",
        *(f"    {one.report['environment']['command']}" for one in found), "",
        f"Loss by length on the same {len(next(iter(teacher.values())))} held-out texts, nats:", "",
        loss_table(found, teacher), "",
        "Loss at the end less the teacher's on the same tokens, nats ± standard error between texts:", "",
        difference_table(found, teacher), "",
        "Training:", "", cost_table(found),
    ]  # fmt: skip
    if picture is not None:
        lines += ["", f"![Loss by length]({os.path.relpath(picture, path.parent)})"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    console.print(f"Page: {path}", highlight=False)


def seeds(found: Sequence[Converted]) -> list[str]:
    """The seeds of conversions, each once."""
    return list(dict.fromkeys(str(one.report["conversion"]["seed"]) for one in found))


def compared(found: Sequence[Converted]) -> Comparison:
    """What the picture shows: the teacher and every end."""
    rows = {"teacher": found[0].texts("teacher")} | {one.name: one.texts("student") for one in found}
    values = {
        name: {(HELD_OUT, length): [mean(losses)] for length, losses in texts.items()} for name, texts in rows.items()
    }
    recipe = Recipe(length=found[0].length, conditions={HELD_OUT: {}})
    return Comparison("Conversions", recipe, values, {HELD_OUT: Test("loss", "length", found[0].length)})


def loss_table(found: Sequence[Converted], teacher: Texts) -> str:
    """A row for the teacher, and two for each conversion: its start and its end."""

    def cells(texts: Texts) -> list[str]:
        return [format_value("loss", mean(texts[length])) for length in teacher]

    rows: list[list[object]] = [["teacher", "", *cells(teacher)]]
    for one in found:
        rows.append([f"{one.name}, start", 0, *cells(one.texts("start"))])
        if one.runs:
            rows.append([f"{one.name}, end", f"{one.tokens:,}", *cells(one.texts("student"))])
    return markdown(["", "tokens", *teacher], rows)


def difference_table(found: Sequence[Converted], teacher: Texts) -> str:
    """A row for each conversion."""
    rows = []
    for one in found:
        texts = one.texts("student")
        pairs = [paired_difference([texts[length]], [teacher[length]]) for length in teacher]
        rows.append([one.name, *("{:+.4f} ± {:.4f}".format(*pair) for pair in pairs)])
    return markdown(["", *teacher], rows)


def cost_table(found: Sequence[Converted]) -> str:
    """Stages with their steps, tokens, rates and lengths, and the share of greedily chosen tokens that stayed."""
    rows = []
    for one in found:
        for run in one.runs:
            recipe, progress = run.recipe, run.progress()
            rows.append([
                one.name, run.path.name, recipe.steps, f"{progress.tokens:,}", f"{recipe.length}",
                f"{recipe.learning_rate:g}", f"{one.report['same_tokens']:.0%}",
            ])  # fmt: skip
    headings = ["", "stage", "steps", "tokens", "length", "learning rate", "greedy tokens like the teacher"]
    return markdown(headings, rows, left=2)
