"""`deadreckon demo`: three small transformers learn to remember one bit. One of them can."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

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
    """One encoding in training, and its errors in the tests."""

    encoding: str
    model: dr.DeadReckonForCausalLM
    steps: list[Step] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # one a test

    @property
    def title(self) -> str:
        return title_of(self.encoding)

    def recent(self, span: int = 20) -> tuple[float, float]:
        """Loss and error, averaged over the last steps."""
        last = self.steps[-span:]
        return sum(step.loss for step in last) / len(last), sum(step.error for step in last) / len(last)


def demo_recipe(steps: int = 500, length: int = 128, seed: int = 0) -> Recipe:
    """The tiny flip-flop, of these sizes."""
    return replace(find_recipe("flipflop"), steps=steps, length=length, seed=seed)


def run_demo(
    console: Console, encodings: tuple[str, ...], recipe: Recipe, picture: Path | None, device: str = "cpu"
) -> list[Contestant]:
    """Trains the encodings side by side on the same data, then scores, tabulates and draws them."""
    console.print(
        f"[bold]Flip-flop[/]: remember the last written bit. {len(encodings)} transformers of 1 layer, 2 heads and "
        f"width 64, {recipe.steps} steps of {recipe.batch_size} × {recipe.length} tokens, seed {recipe.seed}."
    )
    began, threads = time.perf_counter(), torch.get_num_threads()
    contestants = [
        Contestant(name, make_model(replace(recipe, encoding=name), FlipFlop().vocab_size).to(device))
        for name in encodings
    ]
    torch.set_num_threads(measure_threads(contestants, recipe, console))
    try:
        _train(console, contestants, recipe, began)
        with console.status("scoring on fresh sequences"):
            for contestant in contestants:
                scores = [score(contestant.model, recipe, name, times * recipe.length) for name, times in TESTS]
                contestant.errors = [one.value("error") for one in scores]
                _say(console, f"{contestant.title} is tested, {time.perf_counter() - began:.0f} s")
    finally:
        torch.set_num_threads(threads)
    console.print(_results(contestants, recipe))
    if picture is not None:
        from deadreckon.lab.pages.pictures import flipflop_picture

        learning = {contestant.title: [step.error for step in contestant.steps] for contestant in contestants}
        tested = {contestant.title: contestant.errors for contestant in contestants}
        names = [
            f"{name}\n{100 * recipe.conditions[name].get('ignore', 0.8):.0f}% ignored\n{times * recipe.length} tokens"
            for name, times in TESTS
        ]
        step = f"training step ({recipe.batch_size} × {recipe.length} tokens)"
        flipflop_picture(learning, tested, names, step, picture)
        console.print(f"Picture: {picture}")
    console.print(f"{time.perf_counter() - began:.0f} s on {device}, torch {torch.__version__}.")
    return contestants


def measure_threads(contestants: list[Contestant], recipe: Recipe, console: Console) -> int:
    """One thread or two, whichever is faster; prints how long training will take with either.

    A tiny model gains little from a second thread and, where others use the machine, waits for it. The steps are taken
    by copies of the models, on a quarter of a batch, so that a slow machine has its answer in seconds, too.
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
    """All steps, with a live table on a terminal and a line every few seconds elsewhere."""
    trained = [(contestant, train(contestant.model, FlipFlop(), recipe)) for contestant in contestants]
    first = said = time.perf_counter()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for number in range(1, recipe.steps + 1):
            for contestant, steps in trained:
                contestant.steps.append(next(steps))
            now = time.perf_counter()
            live.update(_progress(contestants, recipe, now - first))
            if now - said > QUIET_SECONDS or number == recipe.steps:
                said = now
                left = format_seconds((now - first) / number * (recipe.steps - number))
                losses = ", ".join(f"{c.title} {c.recent()[0]:.3f}" for c in contestants)
                _say(console, f"step {number}/{recipe.steps}, {now - began:.0f} s, {left} left: loss {losses}")


def _say(console: Console, line: str) -> None:
    """A line where there is no live table."""
    if not console.is_terminal:
        console.print(line, highlight=False)


def _progress(contestants: list[Contestant], recipe: Recipe, seconds: float) -> Table:
    done = len(contestants[-1].steps)
    left = seconds / done * (recipe.steps - done)
    rows = list[list[RenderableType]]()
    for contestant in contestants:
        loss, error = contestant.recent()
        bar = ProgressBar(total=recipe.steps, completed=len(contestant.steps), width=30)
        rows.append([contestant.title, bar, f"{loss:.3f}", f"{100 * error:.1f}%"])
    title = f"step {done}/{recipe.steps}, {seconds:.0f} s, {left:.0f} s left"
    return terminal(("encoding", "", "loss", "read-bit error"), rows, 2, title)


def _results(contestants: list[Contestant], recipe: Recipe) -> Table:
    headings = ["encoding", *(name if times == 1 else f"{times}× length" for name, times in TESTS)]
    rows = [
        [one.title, *(f"[{'green' if error <= 0.001 else 'red'}]{100 * error:.2f}%[/]" for error in one.errors)]
        for one in contestants
    ]
    return terminal(headings, rows, title=f"Read-bit error, trained at length {recipe.length}")
