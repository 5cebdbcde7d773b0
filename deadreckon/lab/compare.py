"""Encodings side by side: the same recipe for each, some seeds, scores by length.

    python -m deadreckon.lab.compare flipflop --encodings rope,path --size tiny --seeds 3

That is `deadreckon compare` for machines without tyro. Runs that are there are used; those that are not are made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import mean, stdev
from threading import Thread

import torch
from rich.console import Console
from rich.table import Table

from deadreckon.lab.evaluation import SOLVED, is_better
from deadreckon.lab.markdown import table
from deadreckon.lab.recipe import Recipe
from deadreckon.lab.recipes import SIZES, Experiment, check_encodings, find_experiment, find_recipe, title_of
from deadreckon.lab.runs import Run
from deadreckon.lab.train import quiet_transformers, score_run, train_run
from deadreckon.lab.training import check_device

WORD_PROBLEMS = ("a5-products", "a5-identity")  # whose lengths are solved, or are not


@dataclass(frozen=True)
class Comparison:
    """Scores of one recipe: for each encoding, test and length, one value a seed.

    Args:
        recipe: but for the encoding and the seed, that of all runs.
        values: by encoding, then by (test, length).
    """

    title: str
    recipe: Recipe
    values: dict[str, dict[tuple[str, int], list[float]]]

    @property
    def conditions(self) -> list[str]:
        """The tests that there are scores of."""
        return [name for name in self.recipe.conditions if self.lengths(name)]

    def lengths(self, condition: str) -> list[int]:
        """Where there are scores, in one test."""
        return sorted({length for row in self.values.values() for name, length in row if name == condition})

    def seeds(self) -> int:
        """The most that any encoding has."""
        return max(len(found) for row in self.values.values() for found in row.values())

    def cell(self, encoding: str, condition: str, length: int) -> str:
        """Mean and spread, which is the standard deviation between seeds, for people."""
        found = self.values[encoding].get((condition, length), [])
        if not found:
            return ""
        if len(found) == 1:
            return self.spell(found[0])
        return f"{self.spell(mean(found))} ± {self.spell(stdev(found))}"

    def spell(self, value: float) -> str:
        """A value in three digits or so."""
        value = value if self.recipe.metric == "perplexity" else 100 * value
        if 0 < value < 0.005:
            return f"{value:.1g}"
        return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"

    def best(self, condition: str, length: int) -> str:
        """The encoding with the best mean."""
        found = {name: mean(row[condition, length]) for name, row in self.values.items() if (condition, length) in row}
        best = next(iter(found))
        for name, value in found.items():
            best = name if is_better(self.recipe.metric, value, found[best]) else best
        return best

    def describe(self, condition: str) -> str:
        """What a table of one test shows."""
        what = {"error": "Error in %", "exact": "Exactly right in %", "perplexity": "Perplexity"}[self.recipe.metric]
        seeds = self.seeds()
        spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ", one seed"
        return f"{what} by length, {condition}, trained at {self.recipe.length}{spread}"

    def solved(self, condition: str) -> dict[str, int | None]:
        """For each encoding, the greatest length up to which more than 90% of rows are right at all lengths tested."""
        found: dict[str, int | None] = {}
        for name, row in self.values.items():
            reached = None
            for length in self.lengths(condition):
                if mean(row.get((condition, length), [0.0])) <= SOLVED:
                    break
                reached = length
            found[name] = reached
        return found


def compare(
    name: str,
    encodings: Sequence[str] = (),
    *,
    seeds: int = 1,
    size: str = "tiny",
    lengths: Sequence[int] = (),
    changes: tuple[str, ...] = (),
    runs: Path = Path("runs"),
    device: str = "cpu",
    jobs: int = 1,
    picture: Path | None = None,
    page: Path | None = None,
    console: Console | None = None,
) -> Comparison:
    """Trains what is missing, scores what is not scored, prints tables and draws the picture.

    Args:
        name: in `RECIPES`.
        encodings: names; by default those of the paper's table.
        seeds: how many, from 0 on.
        size: one of `SIZES`.
        lengths: where to score, in place of the recipe's lengths.
        changes: of the recipe; see `Recipe.change`.
        runs: folder of runs.
        jobs: how many to train at a time. Small models leave most of a GPU to others.
        picture: where to save it; beside the runs by default.
        page: where to save the tables in Markdown, if anywhere.
    """
    console = console or Console()
    encodings = tuple(encodings) or find_experiment(name).encodings
    check_encodings(encodings)
    check_device(device)
    for what, count in (("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise ValueError(f"{what}: expected 1 or more, got {count}")
    folder = runs / folder_name(name, size, changes)
    recipes = [find_recipe(name, size, encoding, seed, changes) for encoding in encodings for seed in range(seeds)]
    wanted = {folder / f"{recipe.encoding}-{recipe.seed}": recipe for recipe in recipes}
    found = make_runs(wanted, lengths, device, jobs, console)
    comparison = gather(f"{name}, {size}", found, lengths or recipes[0].test_lengths)
    print_comparison(comparison, console)
    picture = draw_comparison(comparison, picture or folder / "comparison.png", console)
    if page is not None:
        write_page(page, comparison, found, find_experiment(name), picture)
        console.print(f"Page: {page}", highlight=False)
    return comparison


def make_runs(
    wanted: dict[Path, Recipe], lengths: Sequence[int], device: str, jobs: int, console: Console
) -> list[Run]:
    """The runs of these folders, trained and scored where they are not yet, so many at a time."""
    if min(jobs, len(wanted)) == 1:
        return [make_run(recipe, path, lengths, device, console) for path, recipe in wanted.items()]
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(threads,)) as pool:
        coming = {pool.submit(_make_quietly, recipe, path, lengths, device): path for path, recipe in wanted.items()}
        for number, one in enumerate(as_completed(coming), 1):
            one.result()
            console.print(f"{coming[one]}: {number} of {len(wanted)}", highlight=False, soft_wrap=True)
    return [Run(path) for path in wanted]


def make_run(recipe: Recipe, path: Path, lengths: Sequence[int], device: str, console: Console) -> Run:
    """One of them."""
    run = train_run(recipe, path, device=device, console=console)
    with quiet_transformers():
        score_run(run, lengths, device=device, console=console)
    return run


def _make_quietly(recipe: Recipe, path: Path, lengths: Sequence[int], device: str) -> None:
    make_run(recipe, path, lengths, device, Console(quiet=True))


def _begin(threads: int) -> None:
    """In a process of its own, which ends with the one that began it."""
    torch.set_num_threads(threads)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def folder_name(name: str, size: str, changes: Sequence[str]) -> str:
    """Where the runs of a recipe go, which its changes tell apart: in words, or by a hash of many words."""
    words = "-".join([name, size, *(re.sub(r"[^\w.=]+", "_", change) for change in changes)])
    if len(words) < 100:
        return words
    return f"{name}-{size}-{hashlib.sha256('|'.join(changes).encode()).hexdigest()[:12]}"


def gather(title: str, runs: Iterable[Run], lengths: Sequence[int] = ()) -> Comparison:
    """The scores of runs of one recipe, at these lengths or all there are; unfinished runs are left out."""
    runs = list(runs)
    values: dict[str, dict[tuple[str, int], list[float]]] = {}
    for name, of_name in by_label(runs).items():
        for run in sorted(of_name, key=lambda run: run.recipe.seed):
            for place, score in run.scores().items() if run.finished else ():
                if not lengths or place[1] in lengths:
                    values.setdefault(name, {}).setdefault(place, []).append(score.value(run.recipe.metric))
    return Comparison(title, alike(runs[0].recipe), values)


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the seed alone, one for each seed, by encoding and the options that set them apart.

    A seed counts once: a second run of it is the same figure again, not a second sample.
    """
    groups: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        options = json.dumps(run.recipe.encoding_options, sort_keys=True)
        groups.setdefault(run.recipe.encoding, {}).setdefault(options, {}).setdefault(run.recipe.seed, run)
    found: dict[str, list[Run]] = {}
    for encoding, group in groups.items():
        parsed = [json.loads(options) for options in group]
        keys = sorted({key for options in parsed for key in options})
        differing = [key for key in keys if len({json.dumps(options.get(key)) for options in parsed}) > 1]
        for options, seeds in zip(parsed, group.values(), strict=True):
            words = [f"{key}={options[key]}" for key in differing if key in options]
            found[" ".join([encoding, *words])] = list(seeds.values())
    return found


def alike(recipe: Recipe) -> Recipe:
    """What runs that are compared have in common."""
    return replace(recipe, encoding="", encoding_options={}, seed=0)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table for each test."""
    for condition in comparison.conditions:
        console.print(f"\n{comparison.describe(condition)}", highlight=False)
        table = Table()
        for heading in ("length", *map(title_of, comparison.values)):
            table.add_column(heading, justify="right")
        for length in comparison.lengths(condition):
            cells = {name: comparison.cell(name, condition, length) for name in comparison.values}
            best = comparison.best(condition, length)
            cells[best] = f"[bold]{cells[best]}[/]"
            table.add_row(f"{length}", *cells.values())
        console.print(table)
        if comparison.recipe.task in WORD_PROBLEMS:
            console.print(describe_solved(comparison, condition), highlight=False)


def describe_solved(comparison: Comparison, condition: str) -> str:
    """How far each encoding gets in a word problem."""
    solved = comparison.solved(condition).items()
    reached = ", ".join(f"{title_of(name)} {length or 'nowhere'}" for name, length in solved)
    return f"Solved (more than {SOLVED:.0%} of rows right) up to length: {reached}."


def draw_comparison(comparison: Comparison, path: Path, console: Console) -> Path | None:
    """The picture, where there is matplotlib."""
    try:
        from deadreckon.lab.pictures import comparison_picture
    except ModuleNotFoundError as error:
        console.print(
            f"No picture: {error.name} is not installed. Runs are kept; the same command draws them elsewhere."
        )
        return None
    comparison_picture(comparison, path)
    console.print(f"Picture: {path}", highlight=False)
    return path


def write_page(
    path: Path, comparison: Comparison, runs: Sequence[Run], experiment: Experiment, picture: Path | None
) -> None:
    """The tables in Markdown, what they are of and how they came about, and what the paper has."""
    recipe, starts = comparison.recipe, [start for run in runs for start in run.starts()]
    start = starts[-1]
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    devices, commands = (list(dict.fromkeys(one[what] for one in starts)) for what in ("device", "command"))
    seeds = f"seeds 0 to {comparison.seeds() - 1}" if comparison.seeds() > 1 else "seed 0"
    lines = [
        f"# {comparison.title}", "", experiment.about, "", f"{experiment.source}", "",
        f"{start['date'][:10]}: {' and '.join(devices)}; Python {start['python']}, {versions}. {recipe.layers} "
        f"layer{'s' * (recipe.layers > 1)}, {recipe.heads} heads, width {recipe.width}; {recipe.steps} steps of "
        f"{recipe.batch_size} sequences, learning rate {recipe.learning_rate:g}; {seeds}; "
        f"tests of up to {recipe.test_rows} sequences.", "", *(f"    {command}" for command in commands),
    ]  # fmt: skip
    names = list(comparison.values)
    for condition in comparison.conditions:
        rows = [
            [f"{length}", *(comparison.cell(name, condition, length) for name in names)]
            for length in comparison.lengths(condition)
        ]
        reported = experiment.reported.get(condition, {})
        if reported:
            told = [comparison.spell(reported[name]) if name in reported else "" for name in names]
            rows.append([f"the paper's, {experiment.paper.length}", *told])
        lines += ["", f"{comparison.describe(condition)}:", "", table(["length", *map(title_of, names)], rows)]
        if recipe.task in WORD_PROBLEMS:
            lines += ["", describe_solved(comparison, condition)]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += ["", f"![{comparison.title}]({place})"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """`python -m deadreckon.lab.compare`."""
    parser = argparse.ArgumentParser(description="Compare encodings; see `deadreckon compare`.")
    parser.add_argument("task")
    parser.add_argument("--encodings", default="", help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--lengths", default="", help="where to score, separated by commas")
    parser.add_argument("--change", nargs="*", default=[], help="fields of the recipe, such as steps=100")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs to train at a time")
    parser.add_argument("--page", type=Path, help="where to save the tables in Markdown")
    chosen = parser.parse_args()
    try:
        compare(
            chosen.task, names_in([chosen.encodings]), seeds=chosen.seeds, size=chosen.size,
            lengths=numbers_in([chosen.lengths]), changes=tuple(chosen.change), runs=chosen.runs, device=chosen.device,
            jobs=chosen.jobs, page=chosen.page,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))


def names_in(texts: Iterable[str]) -> tuple[str, ...]:
    """Names that are separated by commas or already apart."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def numbers_in(texts: Iterable[str], name: str = "lengths") -> tuple[int, ...]:
    """Likewise, of whole numbers above 0."""
    for text in names_in(texts):
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{name}: expected whole numbers above 0, such as 512,4096, got {text!r}")
    return tuple(int(text) for text in names_in(texts))


if __name__ == "__main__":
    main()
