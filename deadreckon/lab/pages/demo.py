"""`deadreckon demo`: three small transformers learn to remember one bit. One of them can."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar

import deadreckon as dr
from deadreckon.lab.evaluation import score
from deadreckon.lab.pages.tables import terminal
from deadreckon.lab.recipes import Recipe, find_recipe, title_of
from deadreckon.lab.training import Step, Training, make_model, train
from deadreckon.lab.training.display import format_seconds
from deadreckon.tasks.flipflop import FlipFlop

MEASURED_STEPS, MEASURED_SECONDS = 4, 1.0  # at most, with each number of threads
QUIET_SECONDS = 4.0  # between lines where there is no terminal
TESTS = (("as trained", 1), ("sparse", 1), ("dense", 1), ("as trained", 4))  # conditions, and times the length


@dataclass
class Contestant:
    """One model in training, and its test errors."""

    title: str
    model: dr.DeadReckonForCausalLM
    steps: list[Step] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # one a test

    def recent(self, span: int = 20) -> tuple[float, float]:
        """Loss and error, averaged over the last steps."""
        last = self.steps[-span:]
        return fmean(step.loss for step in last), fmean(step.error for step in last)


def demo_recipe(steps: int = 500, length: int = 128, seed: int = 0) -> Recipe:
    """The tiny flip-flop recipe with these settings."""
    return replace(find_recipe("flipflop"), steps=steps, length=length, seed=seed)


def run_demo(
    console: Console, encodings: tuple[str, ...], recipe: Recipe, picture: Path | None, device: str = "cpu"
) -> list[Contestant]:
    """Trains the encodings side by side on the same data, then evaluates, prints and plots them."""
    console.print(
        f"[bold]Flip-flop[/]: remember the last written bit. {len(encodings)} transformers of 1 layer, 2 heads and "
        f"width 64, {recipe.steps} steps of {recipe.batch_size} × {recipe.length} tokens, seed {recipe.seed}."
    )
    began, threads = time.perf_counter(), torch.get_num_threads()
    models = [make_model(replace(recipe, encoding=name), FlipFlop().vocab_size).to(device) for name in encodings]
    contestants = [Contestant(title_of(name), model) for name, model in zip(encodings, models, strict=True)]
    torch.set_num_threads(measure_threads(contestants, recipe, console))
    try:
        _train(console, contestants, recipe, began)
        for one in contestants:
            scores = [score(one.model, recipe, name, times * recipe.length) for name, times in TESTS]
            one.errors = [result.value("error") for result in scores]
            console.print(f"{one.title} is tested, {time.perf_counter() - began:.0f} s", highlight=False)
    finally:
        torch.set_num_threads(threads)
    headings = ["encoding", *(name if times == 1 else f"{times}× length" for name, times in TESTS)]
    rows = [[one.title, *(f"[{_colour(error)}]{100 * error:.2f}%[/]" for error in one.errors)] for one in contestants]
    console.print(terminal(headings, rows, title=f"Read-bit error, trained at length {recipe.length}"))
    if picture is not None:
        _draw(contestants, recipe, picture)
        console.print(f"Picture: {picture}")
    console.print(f"{time.perf_counter() - began:.0f} s on {device}, torch {torch.__version__}.")
    return contestants


def measure_threads(contestants: list[Contestant], recipe: Recipe, console: Console) -> int:
    """Chooses one thread or two, whichever is faster, and prints estimates of the training time.

    A tiny model gains little from a second thread, and waits for it if other processes use the machine. The trial steps
    are taken by copies of the models on a quarter of a batch, so that they take seconds on a slow machine, too.
    """
    part = max(1, recipe.batch_size // 4)
    small = replace(recipe, batch_size=part)
    copies = [Training(deepcopy(contestant.model), FlipFlop(), small) for contestant in contestants]
    before, fastest = torch.get_num_threads(), dict[int, float]()
    for threads in sorted({1, min(2, before)}):
        torch.set_num_threads(threads)
        began, seconds = time.perf_counter(), list[float]()
        while len(seconds) < MEASURED_STEPS and time.perf_counter() - began < MEASURED_SECONDS:
            start = time.perf_counter()
            for training in copies:
                training.advance()
            seconds.append(time.perf_counter() - start)
        fastest[threads] = recipe.steps * min(seconds) * recipe.batch_size / part
        words = f"{threads} thread{'s' * (threads > 1)}"
        console.print(f"About {format_seconds(fastest[threads])} with {words}, by the first steps.", highlight=False)
    torch.set_num_threads(before)
    return min(fastest, key=lambda threads: fastest[threads])


def _train(console: Console, contestants: list[Contestant], recipe: Recipe, began: float) -> None:
    """Takes all steps, with a live table on a terminal and a line every few seconds elsewhere."""
    trained = [(contestant, train(contestant.model, FlipFlop(), recipe)) for contestant in contestants]
    first = said = time.perf_counter()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for number in range(1, recipe.steps + 1):
            for contestant, steps in trained:
                contestant.steps.append(next(steps))
            now = time.perf_counter()
            left = format_seconds((now - first) / number * (recipe.steps - number))
            title = f"step {number}/{recipe.steps}, {now - began:.0f} s, {left} left"
            bar, recent = ProgressBar(recipe.steps, number, width=30), [one.recent() for one in contestants]
            if console.is_terminal:
                figures = [[f"{loss:.3f}", f"{100 * error:.1f}%"] for loss, error in recent]
                rows: Any = [[one.title, bar, *cells] for one, cells in zip(contestants, figures, strict=True)]
                live.update(terminal(("encoding", "", "loss", "read-bit error"), rows, 2, title))
            elif now - said > QUIET_SECONDS or number == recipe.steps:
                said = now
                losses = [f"{one.title} {loss:.3f}" for one, (loss, _) in zip(contestants, recent, strict=True)]
                console.print(f"{title}: loss {', '.join(losses)}", highlight=False)


def _colour(error: float) -> str:
    return "green" if error <= 0.001 else "red"


def _draw(contestants: list[Contestant], recipe: Recipe, picture: Path) -> None:
    from deadreckon.lab.pages.pictures import flipflop_picture

    learning = {one.title: [step.error for step in one.steps] for one in contestants}
    ignored = [100 * recipe.conditions[name].get("ignore", 0.8) for name, _ in TESTS]
    names = [
        f"{name}\n{share:.0f}% ignored\n{times * recipe.length} tokens"
        for (name, times), share in zip(TESTS, ignored, strict=True)
    ]
    step = f"training step ({recipe.batch_size} × {recipe.length} tokens)"
    flipflop_picture(learning, {one.title: one.errors for one in contestants}, names, step, picture)
