"""The one way to write a page of results in Markdown: tables by test, the paper's figures, how they came about."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from deadreckon.lab.evaluation import format_value
from deadreckon.lab.pages.comparison import SOLVED, WORD_PROBLEMS, Comparison, by_label
from deadreckon.lab.pages.paired import paired_table
from deadreckon.lab.pages.tables import markdown
from deadreckon.lab.recipes import Experiment, title_of
from deadreckon.lab.training import Run


def write_page(
    path: Path, comparison: Comparison, runs: Sequence[Run], experiment: Experiment, picture: Path | None
) -> None:
    """Writes the tables, what they are of, the commands that made them, and what the paper reports."""
    lines = [
        f"# {comparison.title}", "", experiment.about, "", experiment.source, "", describe_runs(runs), "",
        *(f"    {command}" for command in dict.fromkeys(start["command"] for run in runs for start in run.starts())),
    ]  # fmt: skip
    for condition in comparison.tabulated:
        for setting, part in comparison.by_setting().items():
            described = f"{part.describe(condition)}{f', {setting}' * bool(setting)}"
            lines += ["", f"{described}:", "", score_table(part, condition, experiment)]
        if solved := describe_solved(comparison, condition):
            lines += ["", solved]
        if paired := paired_table(comparison, condition):
            lines += ["", f"{paired[0]}:", "", markdown(paired[1], paired[2])]
    if comparison.recipe.task == "language":
        lines += ["", "Training:", "", speed_table(runs)]
    if picture is not None:
        lines += ["", f"![{comparison.title}]({os.path.relpath(picture, path.parent)})"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def describe_runs(runs: Sequence[Run]) -> str:
    """When, on what and by which versions they were made, their sizes and their budget."""
    starts = [start for run in runs for start in run.starts()]
    start, recipes = starts[-1], [run.recipe for run in runs]
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    devices = " and ".join(dict.fromkeys(one["device"] for one in starts))
    commits = ", ".join(dict.fromkeys((one["commit"] or "unknown")[:12] for one in starts))

    def distinct(name: str) -> str:
        return " or ".join(dict.fromkeys(f"{getattr(recipe, name):g}" for recipe in recipes))

    seeds = sorted({recipe.seed for recipe in recipes})
    return (
        f"{start['date'][:10]}: {devices}; Python {start['python']}, {versions}; commit {commits}. "
        f"{distinct('layers')} layer{'s' * (max(recipe.layers for recipe in recipes) > 1)}, {distinct('heads')} heads, "
        f"width {distinct('width')}; {distinct('steps')} steps of {distinct('batch_size')} sequences, "
        f"learning rate {distinct('learning_rate')}; "
        f"{f'seeds 0 to {seeds[-1]}' if seeds[-1] else 'seed 0'}; tests of up to {recipes[0].test_rows} sequences or "
        f"{recipes[0].test_tokens} tokens."
    )


def score_table(comparison: Comparison, condition: str, experiment: Experiment) -> str:
    """One test: a row for each length, and for each length of the paper's figures."""
    labels, measure = list(comparison.values), comparison.test(condition).measure
    headings, rows = comparison.table(condition)
    reported = experiment.reported.get(condition, {})
    for length in sorted({length for figures in reported.values() for length in figures}):
        figures = [reported.get(label, {}).get(length) for label in labels]
        cells = ["" if value is None else format_value(measure, value) for value in figures]
        rows.append([f"the paper's, {length}", *cells])
    return markdown(headings, rows)


def speed_table(runs: Sequence[Run]) -> str:
    """What was trained on, and how fast: the median of logged speeds, so that evaluations do not count."""
    rows = []
    for label, labelled in by_label(runs).items():
        speeds = [line["tokens_per_second"] for run in labelled for line in run.metrics()]
        progress = labelled[0].progress()
        minutes = mean(run.progress().seconds for run in labelled) / 60
        rows.append([title_of(label), f"{progress.tokens:,}", f"{median(speeds):,.0f}", f"{minutes:.1f}"])
    return markdown(["", "tokens", "tokens/s", "minutes"], rows)


def describe_solved(comparison: Comparison, condition: str) -> str:
    """How far each encoding gets in a word problem; nothing for other tasks."""
    if comparison.recipe.task not in WORD_PROBLEMS:
        return ""
    solved = comparison.solved(condition).items()
    reached = ", ".join(f"{title_of(label)} {length or 'nowhere'}" for label, length in solved)
    text = f"Solved (more than {SOLVED:.0%} of rows right) up to length: {reached}."
    fewest = [
        f"{title_of(name)} " + (", ".join(f"{length}: {count}" for length, count in found.items()) or "none")
        for name, found in comparison.fewest_layers(condition).items()
    ]
    return f"{text} Fewest layers by length: {'; '.join(fewest)}." if fewest else text
