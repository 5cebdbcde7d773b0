"""Trains several runs, one after the other or in parallel processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

import torch
from rich.console import Console

from deadreckon.lab.environment import quiet_transformers
from deadreckon.lab.memory import keep_freed_memory
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.runs import Run
from deadreckon.lab.training.scoring import score_run
from deadreckon.lab.training.trainer import check_recipe, train_run


def make_runs(
    wanted: dict[Path, Recipe], lengths: Sequence[int], device: str, jobs: int, console: Console,
    sharpen_beyond: int | None = None,
) -> list[Run]:  # fmt: skip
    """Trains and scores what is missing of the runs of these folders, `jobs` at a time; see `make_run`.

    Seed 0 of all recipes comes first, then seed 1: an interrupted comparison has all its cells, with fewer seeds.
    """
    ordered = sorted(wanted.items(), key=lambda one: one[1].seed)
    for _, recipe in ordered:
        if recipe.seed == 0:
            check_recipe(recipe, lengths)
    longest = {path: longest_row(recipe, wanted, lengths) for path, recipe in ordered}
    if min(jobs, len(wanted)) == 1:
        for path, recipe in ordered:
            make_run(recipe, path, lengths, device, console, longest[path], sharpen_beyond)
        return [Run(path) for path in wanted]
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(device, threads)) as pool:
        pending = {
            pool.submit(_make_quietly, recipe, path, lengths, device, longest[path], sharpen_beyond): path
            for path, recipe in ordered
        }
        failed = list[BaseException]()
        try:
            for number, done in enumerate(as_completed(pending), 1):
                said = f"{number} of {len(wanted)}"
                if error := done.exception():  # others go on
                    failed.append(error)
                    said = f"{said}, failed: {error}"
                console.print(f"{pending[done]}: {said}", highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()  # by SIGTERM: it saves its run first
            raise
    if failed:
        raise failed[0]
    return [Run(path) for path in wanted]


def make_run(
    recipe: Recipe, path: Path, lengths: Sequence[int], device: str, console: Console, longest: int = 0,
    sharpen_beyond: int | None = None,
) -> Run:  # fmt: skip
    """Trains and scores one run, on texts of at least `longest` tokens; also sharpened, if asked for."""
    run = train_run(recipe, path, device=device, console=console, longest=longest)
    with quiet_transformers():
        for beyond in dict.fromkeys((None, sharpen_beyond)):
            score_run(run, lengths, device=device, console=console, longest=longest, sharpen_beyond=beyond)
    return run


def longest_row(recipe: Recipe, wanted: dict[Path, Recipe], lengths: Sequence[int]) -> int:
    """Row length of the texts to compare on: the greatest of `lengths` and of those that runs with these tests had."""
    alike = [path for path, other in wanted.items() if other.test_lengths == recipe.test_lengths]
    there = [Run(path) for path in alike if (path / "recipe.json").exists()]
    return max([0, *lengths, *(run.longest for run in there)])


def _make_quietly(
    recipe: Recipe, path: Path, lengths: Sequence[int], device: str, longest: int, sharpen_beyond: int | None
) -> None:
    try:
        make_run(recipe, path, lengths, device, Console(quiet=True), longest, sharpen_beyond)
    except SystemExit as terminated:
        os._exit(int(terminated.code or 0))  # not on to the next run


def _begin(device: str, threads: int) -> None:
    """Initialises a worker process, which exits when its parent does."""
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    # Not the default: a library may put back the handler that it found while a run had one, as seen on a GPU. Python
    # ignores a SIGTERM that reaches it without a handler, and the parent would wait for this worker forever.
    signal.signal(signal.SIGTERM, _leave)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def _leave(number: int, frame: object) -> None:
    os._exit(128 + number)
