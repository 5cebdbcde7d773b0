"""`deadreckon bench steps`: training steps of an experiment, and an estimate of how long all of them take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from deadreckon.lab.arguments import names_in
from deadreckon.lab.bench.flags import Steps
from deadreckon.lab.bench.page import PARTS, Page, Row, explain, milliseconds, parts_of
from deadreckon.lab.bench.timing import empty_cache, kernel_seconds, summary
from deadreckon.lab.recipes import Recipe, find_experiment
from deadreckon.lab.training import Step, Training, make_model

REHEARSALS = {"cpu": 0, "cuda": 2}  # on a GPU the first step of a length compiles kernels, the second is captured
TOGETHER = {"cpu": 1, "cuda": 10}  # steps between waits for the GPU: training does not wait for each, either
HEADINGS = ["", "parameters", "tokens", "first step", "step", "kernels", "tokens/s", "peak memory", "all steps"]


class Timed(NamedTuple):
    """Steps of one recipe."""

    cells: Row  # of its row
    step: Callable[[], Step]  # one more


def timed(work: Callable[[], Step], steps: int, device: str) -> tuple[float, list[int]]:
    """Seconds of these steps by the clock, host and GPU together, and the tokens of each."""
    began = time.perf_counter()
    tokens = [work().tokens for _ in range(steps)]
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, tokens


def measure(recipe: Recipe, device: str, rounds: int) -> Timed:
    """Times the last steps of a recipe, of a model that is not trained."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    task = recipe.make_task()
    training = Training(make_model(recipe, task.vocab_size).to(device), task, recipe)
    training.done = max(0, recipe.steps - (1 + rounds + 1))
    first, _ = timed(training.advance, 1, device)
    began, batches = training.done, training.batches.state
    for _ in range(REHEARSALS[device]):
        for _ in range(rounds):
            training.advance()
        training.done, training.batches.state = began, batches
    taken, tokens = list[float](), list[int]()
    while len(tokens) < rounds:
        seconds, some = timed(training.advance, min(TOGETHER[device], rounds - len(tokens)), device)
        taken += [seconds / len(some)] * len(some)
        tokens += some
    kernels, memory = "", ""
    if device == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        training.done, training.batches.state = began, batches
        kernels = milliseconds(kernel_seconds(training.advance, rounds))
    step = summary(taken, device)
    count = sum(x.numel() for x in training.model.parameters())
    cells = [
        f"{count / 1e6:.2f} M", f"{max(tokens):,}", f"{first:.1f} s", milliseconds(step), kernels,
        f"{sum(tokens) / sum(taken):,.0f}", memory, f"{sum(taken) / rounds * recipe.steps / 60:.1f} min",
    ]  # fmt: skip
    return Timed(cells, training.advance)


def run(flags: Steps) -> None:
    """Times each encoding's steps, with all settings that the experiment sweeps."""
    experiment = find_experiment(flags.recipe)
    encodings = names_in([flags.encodings]) or experiment.encodings
    runs = experiment.recipes(flags.size, encodings, 1, flags.change)
    recipes = {name.removesuffix("-0"): recipe for name, recipe in runs.items()}
    page, profiles = Page(flags, "Training steps of experiments", ("triton", "transformers")), dict[str, list[Row]]()
    one = next(iter(recipes.values()))
    steps = f"{one.steps} steps of {one.batch_size} rows, without evaluations; the last ones are timed"
    page.note(f"{flags.recipe}, {flags.size}: {steps}")

    def rows() -> Iterator[Row]:
        for name, recipe in recipes.items():
            try:
                found = measure(recipe, flags.device, flags.rounds)
            except RuntimeError as error:  # a table is worth more than a line of it
                yield [f"{name} ({explain(error)})", *[""] * (len(HEADINGS) - 1)]
                continue
            yield [name, *found.cells]
            if flags.profile:
                profiles[f"{name}: a step"] = parts_of(found.step, flags.device)
            del found
            gc.collect()  # a model and its optimizer are in circles
            empty_cache(flags.device)

    page.table(HEADINGS, rows())
    for title, parts in profiles.items():
        page.table(PARTS, parts, title)
