"""One run from its recipe: trained, or gone on with, then scored by length.

    python -m deadreckon.lab.train flipflop --encoding path --size tiny --out runs/x

That is `deadreckon train` for machines without tyro.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from deadreckon.lab.display import Display, spell_seconds
from deadreckon.lab.evaluation import Score, is_better, places_to_test, score, spell
from deadreckon.lab.recipe import Recipe
from deadreckon.lab.recipes import SIZES, find_recipe
from deadreckon.lab.runs import Progress, Run, spell_line
from deadreckon.lab.training import Step, Training, check_device

SAVE_SECONDS = 60.0  # the most that is lost when a run is killed; how often it is saved changes no result
VALIDATION_SEED = 4321

Log = Callable[[int, dict[str, float]], None]


def train_run(
    recipe: Recipe, out: Path, *, device: str = "cpu", console: Console | None = None, tensorboard: bool = False
) -> Run:
    """Trains and scores a run, from where it was left. What is finished is left as it is.

    Args:
        out: the run's folder.
        tensorboard: also write metrics for TensorBoard, there.
    """
    console = console or Console()
    check_device(device)
    recipe.make_task(), places_to_test(recipe)  # what is wrong with the recipe shows before anything is written
    run = Run.create(out, recipe)
    with run.locked(), quiet_transformers():
        if not run.finished:
            _train(run, device, console, tensorboard)
        score_run(run, device=device, console=console)
    return run


def _train(run: Run, device: str, console: Console, tensorboard: bool) -> None:
    recipe = run.recipe
    training, progress = run.restore(device)
    run.cut_metrics(progress.step)
    if progress.step:
        console.print(f"{run.path} goes on from step {progress.step}.", highlight=False, soft_wrap=True)
        before = run.starts()[-1]["threads"] if run.starts() else torch.get_num_threads()
        if before != torch.get_num_threads():
            console.print(
                f"There were {before} threads, now {torch.get_num_threads()}: results may differ by rounding."
            )
    run.note_start(device)
    began = saved = time.perf_counter()
    display = Display(console, str(run.path), recipe, training.done)
    with display, metrics_log(run, tensorboard) as log:
        while training.done < recipe.steps:
            step = training.advance()
            due = step.number % recipe.evaluate_every == 0 or step.number == recipe.steps
            logged = due or step.number % recipe.log_every == 0
            display.step(step, logged)
            found = validate(training) if due else None
            if found is not None:
                display.evaluated(found)
            if logged:
                log(step.number, _line(recipe, step, found, display.speed))
            best = progress.best
            if found is not None and (best is None or is_better(recipe.metric, found.value(recipe.metric), best)):
                best = found.value(recipe.metric)
                run.save_best(training, found)
            now = time.perf_counter()
            progress = Progress(step.number, progress.seconds, progress.tokens + step.tokens, best)
            if due or now - saved > SAVE_SECONDS:
                progress = replace(progress, seconds=progress.seconds + now - began)
                run.save(training, progress)
                began, saved = now, time.perf_counter()


def validate(training: Training) -> Score:
    """A look at fresh sequences of the training length, in the first test."""
    recipe = training.recipe
    condition = next(iter(recipe.conditions))
    rows, seed = recipe.validation_rows, VALIDATION_SEED
    return score(training.model, recipe, condition, recipe.length, rows=rows, seed=seed)


def _line(recipe: Recipe, step: Step, found: Score | None, speed: float) -> dict[str, float]:
    line = {
        "step": step.number,
        "loss": step.loss,
        "learning_rate": recipe.learning_rate_at(step.number - 1),
        "tokens_per_second": round(speed, 1),
    }
    if step.wrong is not None:
        line["error"] = step.error
    if found is not None:
        line |= {f"validation_{name}": found.value(name) for name in ("loss", "error", "exact")}
    return line


@contextmanager
def metrics_log(run: Run, tensorboard: bool) -> Iterator[Log]:
    """Where metrics of a step go: a file of lines, each written at once, and TensorBoard if asked for."""
    writer = None
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ValueError("tensorboard: not installed; pip install 'deadreckon[tensorboard]'") from error
        writer = SummaryWriter(run.path / "tensorboard", purge_step=run.progress().step + 1)
    with (run.path / "metrics.jsonl").open("a") as file:

        def log(step: int, values: dict[str, float]) -> None:
            file.write(spell_line(values))
            file.flush()
            if writer is not None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

        yield log
        os.fsync(file.fileno())
    if writer is not None:
        writer.close()


def score_run(
    run: Run,
    lengths: Sequence[int] = (),
    *,
    kind: str = "last",
    device: str = "cpu",
    console: Console | None = None,
) -> dict[tuple[str, int], Score]:
    """Scores of a checkpoint in every test at these lengths, or the recipe's; what is known is not computed again."""
    places = places_to_test(run.recipe, lengths)
    known = run.scores(kind)
    missing = [place for place in places if place not in known]
    if missing:
        console = console or Console()
        model = run.load(kind, device)
        with console.status(f"scoring {run.path}"):
            for condition, length in missing:
                run.add_scores([score(model, run.recipe, condition, length)], kind)
        known = run.scores(kind)
    return {place: known[place] for place in places}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without bars for files that load in no time."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def summary(run: Run, scores: dict[tuple[str, int], Score]) -> str:
    """A run in a line or two."""
    recipe, progress = run.recipe, run.progress()
    lines = [f"{run.path}: {progress.step} steps, {spell_seconds(progress.seconds)}, {progress.tokens:,} tokens"]
    for condition in dict.fromkeys(condition for condition, _ in scores):
        values = [
            f"{length}: {spell(recipe.metric, one.value(recipe.metric))}"
            for (of, length), one in scores.items()
            if of == condition
        ]
        lines.append(f"{recipe.metric}, {condition}, at length {', '.join(values)}")
    return "\n".join(lines)


def main() -> None:
    """`python -m deadreckon.lab.train`."""
    parser = argparse.ArgumentParser(description="Train one model; see `deadreckon train`.")
    parser.add_argument("recipe")
    parser.add_argument("--encoding", default="path-fox")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--change", nargs="*", default=[], help="fields of the recipe, such as steps=100")
    chosen = parser.parse_args()
    try:
        recipe = find_recipe(chosen.recipe, chosen.size, chosen.encoding, chosen.seed, tuple(chosen.change))
        run = train_run(recipe, chosen.out, device=chosen.device)
    except ValueError as error:
        parser.error(str(error))
    Console().print(summary(run, run.scores()), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
