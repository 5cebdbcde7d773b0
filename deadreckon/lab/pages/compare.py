"""`deadreckon compare`: trains the missing runs of a comparison, then prints, plots and saves its tables.

The Markdown page has a table for each test, the paper's figures, hardware, versions and commands.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from rich.console import Console

import deadreckon as dr
from deadreckon.lab.arguments import PICTURES, check_counts, check_output
from deadreckon.lab.environment import check_device
from deadreckon.lab.evaluation import format_value
from deadreckon.lab.pages.comparison import (
    HEADINGS,
    SHARPENED,
    Comparison,
    further_tables,
    gather,
)
from deadreckon.lab.pages.tables import fitting, image, markdown, save_markdown
from deadreckon.lab.recipes import Experiment, Recipe, find_experiment, parse_sweep, title_of
from deadreckon.lab.training import Run
from deadreckon.lab.training.parallel import make_runs

MANY = 16  # commands that a page lists


def compare(
    name: str, encodings: Sequence[str] = (), *, seeds: int = 1, size: str = "tiny", lengths: Sequence[int] = (),
    changes: Sequence[str] = (), sweep: Sequence[str] = (), runs: Path = Path("runs"), device: str = "cpu",
    jobs: int = 1, finished: bool = False, picture: Path | None = None, page: Path | None = None,
    sharpen_beyond: int | None = None, console: Console | None = None,
) -> Comparison:  # fmt: skip
    """Trains and scores what is missing, prints tables and draws the picture.

    Arguments are those of the command, `deadreckon.lab.cli.Compare`.
    """
    console = console or Console()
    experiment = find_experiment(name)
    encodings = tuple(encodings) or experiment.encodings
    check_device(device)
    check_counts(seeds=seeds, jobs=jobs)
    if not finished:
        check_output("runs", runs)
    check_output("picture", picture, *PICTURES)
    check_output("page", page, ".md")
    dr.DeadReckonConfig(sharpen_beyond=sharpen_beyond)  # which says if it cannot be, before anything is trained
    folder = runs / folder_name(name, size, changes)
    swept = parse_sweep(sweep, encodings) if sweep else None
    recipes = experiment.recipes(size, encodings, seeds, changes, swept)
    wanted = {folder / run: recipe for run, recipe in recipes.items()}
    recipe = next(iter(wanted.values()))
    if lengths and recipe.reporting == "best-three" and not set(lengths) <= set(recipe.test_lengths):
        raise ValueError(
            f"lengths: expected some of {', '.join(map(str, recipe.test_lengths))}, where this recipe evaluates while "
            f"training (--change test_lengths=[…]; `deadreckon eval` scores a trained model at any), got {lengths}"
        )
    done = find_begun(wanted) if finished else make_runs(wanted, lengths, device, jobs, console, sharpen_beyond)
    comparison = gather(f"{name}, {size}", done, lengths, list(wanted.values()), sharpen_beyond)
    if sharpen_beyond is not None and not any(label.endswith(SHARPENED) for label in comparison.values):
        raise ValueError(
            f"sharpen_beyond: expected runs that were scored sharpened beyond {sharpen_beyond}, which this command "
            "does without --finished, got none"
        )
    print_comparison(comparison, console)
    picture = draw_comparison(comparison, picture or folder / "comparison.png", console)
    if page is not None:
        whole = spell_command(name, encodings, seeds, size, sweep, changes, sharpen_beyond)
        write_page(page, comparison, done, experiment, picture, whole)
        console.print(f"Page: {page}", highlight=False)
    return comparison


def spell_command(
    name: str, encodings: Sequence[str], seeds: int, size: str, sweep: Sequence[str], changes: Sequence[str],
    sharpen_beyond: int | None,
) -> str:  # fmt: skip
    """The command line of a comparison, without the device."""
    words = ["deadreckon", "compare", name, "--seeds", str(seeds), "--size", size, "--encodings", ",".join(encodings)]
    words += [] if sharpen_beyond is None else ["--sharpen-beyond", str(sharpen_beyond)]
    for flag, values in (("--sweep", sweep), ("--change", changes)):
        words += [flag, *values] if values else []
    return shlex.join(words)


def find_begun(wanted: dict[Path, Recipe]) -> list[Run]:
    """Those of the runs that exist; raises unless at least one is finished."""
    begun = [Run.create(path, recipe) for path, recipe in wanted.items() if (path / "recipe.json").exists()]
    if not any(run.finished for run in begun):
        raise ValueError(
            f"finished: expected a finished run of this comparison in {next(iter(wanted)).parent}, got none"
        )
    return begun


def folder_name(name: str, size: str, changes: Sequence[str]) -> str:
    """The folder of a recipe's runs, named after its changes: spelled out, or as a hash if they are long."""
    words = "-".join([name, size, *(re.sub(r"[^\w.=]+", "_", change) for change in changes)])
    if len(words) < 100:
        return words
    return f"{name}-{size}-{hashlib.sha256('|'.join(changes).encode()).hexdigest()[:12]}"


def parts_of(comparison: Comparison, condition: str) -> Iterator[tuple[str, Comparison]]:
    """The tables of a test, with their titles: one, or one for each setting of a grid."""
    for setting, part in comparison.by_setting().items():
        yield f"{part.describe(condition)}{f', {setting}' * bool(setting)}", part


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints a table for each test, and for each setting of a grid."""
    for condition in comparison.tabulated:
        for title, part in parts_of(comparison, condition):
            console.print(f"\n{title}", highlight=False)
            headings, rows = part.table(condition)
            for length, row in zip(part.lengths(condition), rows, strict=True):
                best = 1 + list(part.values).index(part.best(condition, length))
                row[best] = f"[bold]{row[best]}[/]"
            console.print(fitting(headings, rows, console))
        for title, headings, rows in further_tables(comparison, condition):
            console.print(f"\n{title}", highlight=False)
            console.print(fitting(headings, rows, console))


def draw_comparison(comparison: Comparison, path: Path, console: Console) -> Path | None:
    """Draws the picture if matplotlib is installed."""
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


def write_page(
    path: Path, comparison: Comparison, runs: Sequence[Run], experiment: Experiment, picture: Path | None, whole: str
) -> None:
    """Writes the page: tables with their titles, provenance, the commands that made the runs, and the paper's figures.

    Args:
        whole: command of the whole comparison, which is listed if the runs were made by too many commands.
    """
    commands = list(dict.fromkeys(start["command"] for run in runs for start in run.starts()))
    if len(commands) > MANY:
        commands = [whole]
    parts = [f"# {comparison.title}", experiment.about, experiment.source, describe_runs(runs)]
    parts.append("\n".join(f"    {command}" for command in commands))
    for condition in comparison.tabulated:
        for title, part in parts_of(comparison, condition):
            parts += [f"{title}:", score_table(part, condition, experiment)]
        for title, headings, rows in further_tables(comparison, condition):
            parts += [f"{title}:", markdown(headings, rows)]
    if any(run.recipe.ends or not run.finished for run in runs):
        measure = HEADINGS[comparison.recipe.metric]
        parts += [
            f"Steps, and {measure[0].lower()}{measure[1:]} in the last evaluation of training:",
            steps_table(comparison),
        ]
    if comparison.recipe.task == "language":
        parts += ["Training:", speed_table(comparison)]
    if picture is not None:
        parts.append(image(comparison.title, picture, path))
    save_markdown(path, parts)


def describe_runs(runs: Sequence[Run]) -> str:
    """Provenance of runs: date, hardware, versions, commits, model sizes and training budget."""
    starts = [start for run in runs for start in run.starts()]
    start, recipes = starts[-1], [run.recipe for run in runs]
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    devices = " and ".join(dict.fromkeys(one["device"] for one in starts))
    commits = ", ".join(dict.fromkeys(short_commit(one["commit"]) for one in starts))

    def distinct(name: str) -> str:
        return " or ".join(dict.fromkeys(f"{getattr(recipe, name):g}" for recipe in recipes))

    seeds = sorted({recipe.seed for recipe in recipes})
    return (
        f"{start['date'][:10]}: {devices}; Python {start['python']}, {versions}; commit {commits}. "
        f"{distinct('layers')} layer{'s' * (max(recipe.layers for recipe in recipes) > 1)}, {distinct('heads')} heads, "
        f"width {distinct('width')}; {describe_ends(recipes)}{distinct('steps')} steps of "
        f"{distinct('batch_size')} sequences, learning rate {distinct('learning_rate')}; "
        f"{f'seeds 0 to {seeds[-1]}' if seeds[-1] else 'seed 0'}; tests of up to {recipes[0].test_rows} sequences or "
        f"{recipes[0].test_tokens} tokens."
    )


def short_commit(commit: str | None) -> str:
    """Twelve digits of a commit, with the plus of modified source."""
    return commit[:12] + "+" * commit.endswith("+") if commit else "unknown"


def describe_ends(recipes: Sequence[Recipe]) -> str:
    """The rule of early stopping; empty if there is none."""
    ends = [recipe.ends for recipe in recipes if recipe.ends]
    if not ends:
        return ""
    measure, words = recipes[0].metric, []
    for goal in dict.fromkeys(one["reached"] for one in ends if "reached" in one):
        words.append(f"an evaluation has {measure} {goal:g}")
    for patience in dict.fromkeys(one["patience"] for one in ends if "patience" in one):
        words.append(f"{patience:g} in a row are no better than the best")
    return f"until {' or '.join(words)}, at most "


def score_table(comparison: Comparison, condition: str, experiment: Experiment) -> str:
    """Table of one test: a row for each length, then the paper's figures, a row for each of their lengths."""
    labels, measure = list(comparison.values), comparison.test(condition).measure
    headings, rows = comparison.table(condition)
    reported, trained = experiment.reported.get(condition, {}), experiment.paper.length
    whose = "the paper's" if trained == comparison.recipe.length else f"the paper's, trained at {trained}"
    for length in sorted({length for figures in reported.values() for length in figures}):
        figures = [reported.get(label, {}).get(length) for label in labels]
        cells = ["" if value is None else format_value(measure, value) for value in figures]
        rows.append([f"{whose}, {length}", *cells])
    return markdown(headings, rows)


def speed_table(comparison: Comparison) -> str:
    """Training tokens, speed and time; speed is the median of logged values, so that evaluations do not count."""
    rows = []
    for label, runs in comparison.runs.items():
        speeds = [line["tokens_per_second"] for run in runs for line in run.metrics()]
        progress = runs[0].progress()
        minutes = mean(run.progress().seconds for run in runs) / 60
        rows.append([title_of(label), f"{progress.tokens:,}", f"{median(speeds):,.0f}", f"{minutes:.1f}"])
    return markdown(["", "tokens", "tokens/s", "minutes"], rows)


def steps_table(comparison: Comparison) -> str:
    """Steps of each run, fewer if it stopped early, and its last validation: a column for each seed."""
    seeds, rows = sorted({run.recipe.seed for runs in comparison.runs.values() for run in runs}), []
    for label, runs in comparison.runs.items():
        cells = dict.fromkeys(seeds, "")
        for run in runs:
            metrics, name = run.metrics(), f"validation_{run.recipe.metric}"
            looks = [format_value(run.recipe.metric, line[name]) for line in metrics if line.get(name) is not None]
            steps = f"{metrics[-1]['step'] if metrics else 0}{'' if run.finished else ', not finished'}"
            cells[run.recipe.seed] = ": ".join([steps, *looks[-1:]])
        rows.append([title_of(label), *cells.values()])
    return markdown(["", *(f"seed {seed}" for seed in seeds)], rows)
