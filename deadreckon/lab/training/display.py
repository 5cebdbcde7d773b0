"""Progress display of training and scoring: a live line on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from statistics import mean
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from deadreckon.lab.evaluation import Place, Score, format_value
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.engine import Step

RECENT = 100  # steps that speed is measured over
LOSSES = {"next-token": "loss", "align": "error of attention", "distil": "KL to the teacher"}  # by objective
QUIET = 10.0  # seconds between lines where there is no terminal


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Countdown:
    """Counts towards a known total, and estimates the remaining time.

    Args:
        done: the count at the start.
    """

    def __init__(self, console: Console, wanted: int, done: int = 0) -> None:
        self.console, self.wanted, self.done = console, wanted, done
        self.known, self.began = done, time.perf_counter()
        self.printed = self.began

    def advance(self, count: int, where: str, things: str) -> str:
        """Adds to the count; returns the text of a terminal's status line, elsewhere printed every few seconds."""
        self.done += count
        now = time.perf_counter()
        left = (now - self.began) / (self.done - self.known) * (self.wanted - self.done)
        words = f"{where}: {self.done}/{self.wanted} {things}, {format_seconds(left)} left at this pace"
        if not self.console.is_terminal and now - self.printed > QUIET:
            self.printed = now
            self.console.print(words, highlight=False, soft_wrap=True)
        return words


class Gap:
    """A student's loss minus its teacher's on the same texts, from the latest evaluation that has it.

    Args:
        teacher: its scores, where the student will be scored; none if there is no teacher.
    """

    def __init__(self, teacher: Iterable[Score] = ()) -> None:
        self.expected: dict[Place, Score] = {one.place: one for one in teacher}
        self.known: dict[Place, str] = {}  # in words

    def note(self, scores: Iterable[Score]) -> None:
        """Updates the gap from an evaluation of the student."""
        for one in scores:
            expected = self.expected.get(one.place)
            if expected is not None and len(one.texts) == len(expected.texts) > 0:
                nats = mean(one.texts) - mean(expected.texts)
                self.known[one.place] = f"{nats:+.4f} nats at {one.axis} {one.length}"

    @property
    def words(self) -> str:
        """The gap as text; empty if unknown. With several tests it says which."""
        several = len({condition for condition, _ in self.expected}) > 1
        gaps = [f"{gap}{f' ({condition})' * several}" for (condition, _), gap in self.known.items()]
        return f"gap to the teacher {', '.join(gaps)}" if gaps else ""


class Display:
    """Shows steps, loss, tokens per second and the remaining time.

    Args:
        title: of the run.
        gap: to the teacher, shown once it is known.
        done: steps taken before.
    """

    def __init__(self, console: Console, title: str, recipe: Recipe, gap: Gap, done: int = 0) -> None:
        self.console, self.title, self.recipe = console, title, recipe
        self.gap, self.done = gap, done
        self.loss: float | None = None
        self.score: Score | None = None
        self.printed = time.perf_counter()
        self.recent = deque([(self.printed, 0)], maxlen=RECENT)  # when steps ended, and the tokens up to then
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def step(self, step: Step, logged: bool) -> None:
        """Records a step. Its loss is read, which synchronises with the device, only where it is logged anyway."""
        self.done = step.number
        now = time.perf_counter()
        self.recent.append((now, self.recent[-1][1] + step.tokens))
        if logged:
            # An exponential moving average: the loss of single steps is noisy.
            self.loss = step.loss if self.loss is None else 0.95 * self.loss + 0.05 * step.loss
        if not self.console.is_terminal and (now - self.printed > QUIET or self.done == self.recipe.steps):
            self.printed = now
            self.console.print(f"{self.title}: {self._words()}", highlight=False, soft_wrap=True)

    def evaluated(self, score: Score) -> None:
        """Records an evaluation."""
        self.score = score

    @property
    def speed(self) -> float:
        """Recent tokens per second."""
        (began, before), (now, after) = self.recent[0], self.recent[-1]
        return (after - before) / max(now - began, 1e-9)

    def _words(self) -> str:
        words = [f"step {self.done}/{self.recipe.steps}"]
        if self.loss is not None:
            words.append(f"{LOSSES[self.recipe.objective]} {self.loss:.4g}")
        if self.score is not None:
            metric = self.recipe.metric
            words.append(f"{metric} {format_value(metric, self.score.value(metric))}")
        if self.gap.words:
            words.append(self.gap.words)
        words.append(f"{self.speed:,.0f} tokens/s")
        if taken := len(self.recent) - 1:
            pace = (self.recent[-1][0] - self.recent[0][0]) / taken
            words.append(f"{format_seconds(pace * (self.recipe.steps - self.done))} left")
        return ", ".join(words)

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self.title, ProgressBar(total=self.recipe.steps, completed=self.done, width=20), self._words())
        return grid
