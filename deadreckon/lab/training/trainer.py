"""Trains a run from its recipe, or resumes it, then scores it by length (`scoring.py`)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

import deadreckon as dr
from deadreckon.lab.environment import check_device, quiet_transformers
from deadreckon.lab.evaluation import Score, evaluate, places_to_test, score
from deadreckon.lab.files import format_line
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.checkpoints import Writer
from deadreckon.lab.training.display import Display, Gap
from deadreckon.lab.training.distillation import freeze
from deadreckon.lab.training.engine import Step, Training, config_for_tests, make_config, model_for_tests
from deadreckon.lab.training.ranks import Ranks
from deadreckon.lab.training.runs import Progress, Run, check_start
from deadreckon.lab.training.scoring import score_run

SAVE_SECONDS = 60.0  # the most that is lost when a run is killed; how often it is saved changes no result
VALIDATION_SEED = 4321

Log = Callable[[int, dict[str, float]], None]


def train_run(
    recipe: Recipe,
    out: Path,
    *,
    device: str = "cpu",
    console: Console | None = None,
    tensorboard: bool = False,
    ranks: Ranks | None = None,
    gap: Gap | None = None,
    longest: int = 0,
) -> Run:
    """Trains and scores a run, resuming from its last checkpoint. A finished run only gets missing scores.

    Args:
        out: the run's folder.
        tensorboard: also write TensorBoard metrics there.
        ranks: the processes that train together; all must call this, and the first writes.
        gap: to the teacher; it is shown, and updated by evaluations.
        longest: see :func:`score_run`.
    """
    ranks, gap = ranks or Ranks(), gap or Gap()
    console = ranks.console(console)
    check_device(device)
    check_recipe(recipe)
    if recipe.start and not (out / "last").exists():
        check_start(recipe)
    new = ranks.first and not (out / "recipe.json").exists()
    run = Run.create(out, recipe) if ranks.first else None
    ranks.same(None)  # others wait until it is there
    run = run or Run.create(out, recipe)
    with run.locked() if ranks.first else nullcontext(), quiet_transformers():
        gap.note(run.evaluated())
        if not ranks.same(run.finished):
            _train(run, new, device, console, tensorboard, ranks, gap)
        score_run(run, device=device, console=console, ranks=ranks, longest=longest)
        ranks.same(None)  # others wait until it is written
    return run


def check_recipe(recipe: Recipe, lengths: Sequence[int] = ()) -> None:
    """Raises ValueError for an invalid recipe or test length, as far as this can be told before anything is written."""
    task = recipe.make_task()
    for step in (0, recipe.steps - 1):
        task.sample(1, recipe.lengths_at(step), torch.Generator())
    places_to_test(recipe, lengths)
    if not recipe.start:
        config = make_config(recipe, task.vocab_size)
        configs = config_for_tests(config, recipe), config
        with torch.device("meta"):
            for one in configs:
                model = dr.DeadReckonForCausalLM(one)
        freeze(model, recipe.freeze)
    offered = [recipe.make_task(condition).lengths for condition in recipe.conditions]
    for length in recipe.test_lengths:
        if recipe.task != "language" and not any(length in one for one in offered):  # texts may be shorter
            raise ValueError(f"test_lengths: expected lengths that {recipe.task} has, got {length}")


def _train(run: Run, new: bool, device: str, console: Console, tensorboard: bool, ranks: Ranks, gap: Gap) -> None:
    recipe = run.recipe
    try:
        training, progress = run.restore(device, ranks)
    except ValueError:
        if new:  # a teacher that is none, say: the folder is left to a better recipe
            (run.path / "recipe.json").unlink()
        raise
    if ranks.first:
        _note_start(run, progress, device, console)
    began = saved = time.perf_counter()
    display = Display(console, str(run.path), recipe, gap, training.done)
    logging_to = metrics_log(run, tensorboard) if ranks.first else nullcontext(_unlogged)
    with display, logging_to as log, noticing_signals() as came, Writer(ranks) as writer:
        while training.done < recipe.steps and not progress.ended:
            step = training.advance()
            due = step.number % recipe.evaluate_every == 0 or step.number == recipe.steps
            logged = due or step.number % recipe.log_every == 0
            display.step(step, logged)
            validation = validate(run, training, gap) if due else None
            if logged:
                log(step.number, _line(recipe, step, validation, display.speed))
            progress = replace(progress, step=step.number, tokens=progress.tokens + step.tokens)
            if validation is not None:
                display.evaluated(validation)
                progress = progress.evaluated(recipe, validation.value(recipe.metric), validation.loss)
                if progress.kept:
                    run.save_best(training, validation, writer)
            now = time.perf_counter()
            # Ranks must agree on it and wait for each other: only where they wait for a step's loss anyway.
            late, ending = now - saved > SAVE_SECONDS, came[0] if came else 0
            late, ending = ranks.same((late, ending)) if logged or ranks.size == 1 else (False, 0)
            if due or late or ending:
                progress = replace(progress, seconds=progress.seconds + now - began)
                run.save(training, progress, writer)
                began, saved = now, time.perf_counter()
            if ending and training.done < recipe.steps and not progress.ended:
                writer.wait()
                how = "interrupted" if ending == signal.SIGINT else "terminated"
                console.print(f"{run.path} was {how} at step {training.done}, which is saved.", soft_wrap=True)
                raise KeyboardInterrupt if ending == signal.SIGINT else SystemExit(128 + ending)


@contextmanager
def noticing_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and Ctrl-C in a list, so that a run can save a checkpoint before it ends.

    A second Ctrl-C ends it at once. A process that ignores Ctrl-C, as workers of a pool do, still ignores it.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone has signals
        yield came
        return

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)

    watched = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, note) for one in watched}
    try:
        yield came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _unlogged(step: int, values: dict[str, float]) -> None:
    """The log of ranks that do not write."""


def _note_start(run: Run, progress: Progress, device: str, console: Console) -> None:
    run.cut_lines(progress.step)
    if progress.step:
        console.print(f"{run.path} resumes at step {progress.step}.", highlight=False, soft_wrap=True)
        before = run.starts()[-1]["threads"] if run.starts() else torch.get_num_threads()
        if before != torch.get_num_threads():
            console.print(
                f"There were {before} threads, now {torch.get_num_threads()}: results may differ by rounding."
            )
    run.note_start(device)


def validate(run: Run, training: Training, gap: Gap) -> Score:
    """Validation on fresh sequences of the training length; also all tests, if their scores during training are kept.

    All ranks must call this; they share the rows.
    """
    recipe, model, ranks = training.recipe, training.whole_model(), training.ranks
    if recipe.reporting != "last":
        tested, metrics = model_for_tests(model, recipe), ranks.same(run.metrics() if ranks.first else [])
        found = list(evaluate(tested, recipe, metrics, share=ranks.share))
        gap.note(found)
        if ranks.first:
            run.add_evaluation(training.done, found)
    condition = next(iter(recipe.conditions))
    rows, seed = recipe.validation_rows, VALIDATION_SEED
    validation = score(model, recipe, condition, recipe.length, rows=rows, seed=seed, share=ranks.share)
    if training.device.type == "cuda":
        torch.cuda.empty_cache()  # tests are long and wide, and others may share the GPU
    return validation


def _line(recipe: Recipe, step: Step, validation: Score | None, speed: float) -> dict[str, float]:
    line = {
        "step": step.number,
        "loss": step.loss,
        "learning_rate": recipe.learning_rate_at(step.number - 1),
        "tokens_per_second": round(speed, 1),
    }
    if step.wrong is not None:
        line["error"] = step.error
    if validation is not None:
        line |= {f"validation_{name}": validation.value(name) for name in ("loss", "error", "exact")}
    return line


@contextmanager
def metrics_log(run: Run, tensorboard: bool) -> Iterator[Log]:
    """Yields a function that logs a step's metrics: to metrics.jsonl, flushed at once, and to TensorBoard if asked."""
    writer = None
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ValueError("tensorboard: not installed; pip install 'deadreckon[tensorboard]'") from error
        writer = SummaryWriter(run.path / "tensorboard", purge_step=run.progress().step + 1)
    with (run.path / "metrics.jsonl").open("a") as file:

        def log(step: int, values: dict[str, float]) -> None:
            file.write(format_line(values))
            file.flush()
            if writer is not None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

        yield log
        os.fsync(file.fileno())
    if writer is not None:
        writer.close()
