"""`deadreckon compare`: trains what is missing of a comparison, then prints, draws and writes its tables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from deadreckon.lab.arguments import check_counts
from deadreckon.lab.environment import check_device
from deadreckon.lab.pages.comparison import Comparison, gather
from deadreckon.lab.pages.page import describe_solved, write_page
from deadreckon.lab.pages.paired import paired_table
from deadreckon.lab.pages.tables import terminal
from deadreckon.lab.recipes import check_encodings, find_experiment, parse_sweep
from deadreckon.lab.training.parallel import make_runs


def compare(
    name: str, encodings: Sequence[str] = (), *, seeds: int = 1, size: str = "tiny", lengths: Sequence[int] = (),
    changes: Sequence[str] = (), sweep: Sequence[str] = (), runs: Path = Path("runs"), device: str = "cpu",
    jobs: int = 1, picture: Path | None = None, page: Path | None = None, console: Console | None = None,
) -> Comparison:  # fmt: skip
    """Trains what is missing, scores what is not scored, prints tables and draws the picture.

    Arguments are those of the command, `deadreckon.lab.cli.Compare`.
    """
    console = console or Console()
    experiment = find_experiment(name)
    encodings = tuple(encodings) or experiment.encodings
    check_encodings(encodings)
    check_device(device)
    check_counts(seeds=seeds, jobs=jobs)
    folder = runs / folder_name(name, size, changes)
    swept = parse_sweep(sweep, encodings) if sweep else None
    recipes = experiment.recipes(size, encodings, seeds, changes, swept)
    wanted = {folder / run: recipe for run, recipe in recipes.items()}
    recipe = next(iter(wanted.values()))
    if lengths and recipe.reporting != "last" and not set(lengths) <= set(recipe.test_lengths):
        raise ValueError(
            f"lengths: expected some of {', '.join(map(str, recipe.test_lengths))}, where this recipe evaluates while "
            f"training (--change test_lengths=[…]; `deadreckon eval` scores a trained model at any), got {lengths}"
        )
    done = make_runs(wanted, lengths, device, jobs, console)
    comparison = gather(f"{name}, {size}", done, lengths)
    print_comparison(comparison, console)
    picture = draw_comparison(comparison, picture or folder / "comparison.png", console)
    if page is not None:
        write_page(page, comparison, done, experiment, picture)
        console.print(f"Page: {page}", highlight=False)
    return comparison


def folder_name(name: str, size: str, changes: Sequence[str]) -> str:
    """The folder of a recipe's runs, named after its changes: in words, or by a hash of many words."""
    words = "-".join([name, size, *(re.sub(r"[^\w.=]+", "_", change) for change in changes)])
    if len(words) < 100:
        return words
    return f"{name}-{size}-{hashlib.sha256('|'.join(changes).encode()).hexdigest()[:12]}"


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table for each test, and of a grid for each setting."""
    for condition in comparison.tabulated:
        for setting, part in comparison.by_setting().items():
            console.print(f"\n{part.describe(condition)}{f', {setting}' * bool(setting)}", highlight=False)
            headings, rows = part.table(condition)
            for length, row in zip(part.lengths(condition), rows, strict=True):
                best = 1 + list(part.values).index(part.best(condition, length))
                row[best] = f"[bold]{row[best]}[/]"
            console.print(terminal(headings, rows, left=0))
        if solved := describe_solved(comparison, condition):
            console.print(solved, highlight=False)
        if paired := paired_table(comparison, condition):
            console.print(f"\n{paired[0]}", highlight=False)
            console.print(terminal(paired[1], paired[2], left=0))


def draw_comparison(comparison: Comparison, path: Path, console: Console) -> Path | None:
    """The picture, where there is matplotlib."""
    try:
        from deadreckon.lab.pages.pictures import comparison_picture
    except ModuleNotFoundError as error:
        console.print(
            f"No picture: {error.name} is not installed. Runs are kept; the same command draws them elsewhere."
        )
        return None
    comparison_picture(comparison, path)
    console.print(f"Picture: {path}", highlight=False)
    return path
