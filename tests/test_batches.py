"""Prefetched batches are the same as batches drawn one after the other."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import wait
from threading import Event, Timer, get_ident

import pytest
import torch
from torch import Tensor

from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.batches import Batches
from deadreckon.tasks.copy import Copy
from deadreckon.tasks.curriculum import Curriculum
from deadreckon.tasks.task import draw

RECIPE = Recipe(steps=5, batch_size=4, seed=3, curriculum=Curriculum(7, ((1, 2), (2, 4))))


class Watched(Copy):
    """Notes what is asked for, and draws once it is allowed to."""

    def __init__(self, fails: int | None = None) -> None:
        self.asked: list[int | range] = []
        self.threads: set[int] = set()
        self.fails, self.second, self.allowed = fails, Event(), Event()
        self.allowed.set()

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        self.asked.append(length)
        self.threads.add(get_ident())
        if len(self.asked) == 2:
            self.second.set()
        if not self.allowed.wait(20):
            raise TimeoutError
        if len(self.asked) - 1 == self.fails:
            raise ValueError("length: there is none")
        return super().sample(count, length, generator)


def expected() -> list[Tensor]:
    generator = torch.Generator().manual_seed(RECIPE.seed)
    return [draw(Copy(), 4, RECIPE.lengths_at(step), generator, 2)[1].tokens for step in range(RECIPE.steps)]


def test_they_are_those_of_one_generator() -> None:
    task = Watched()
    batches = Batches(task, RECIPE, 2)
    for step, tokens in enumerate(expected()):
        assert torch.equal(batches.take(step)[1].tokens, tokens)
    assert batches.next is None  # none beyond the last
    assert task.asked == [RECIPE.lengths_at(step) for step in range(RECIPE.steps)]
    assert get_ident() not in task.threads


def test_the_next_is_drawn_meanwhile() -> None:
    task = Watched()
    Batches(task, RECIPE, 2).take(0)
    assert task.second.wait(20)  # nobody has asked for it


@pytest.mark.parametrize("drawn", [False, True])
def test_a_state_is_that_of_batches_taken(drawn: bool) -> None:
    """Whether the next is drawn already, or waits."""
    task, wanted = Watched(), expected()
    batches = Batches(task, RECIPE, 2)
    first = batches.state
    batches.take(0)
    wait([batches.next[1]])  # type: ignore[index]
    if not drawn:
        task.allowed.clear()
    batches.take(1)
    if drawn:
        wait([batches.next[1]])  # type: ignore[index]
    else:
        Timer(0.2, task.allowed.set).start()
    resumed = Batches(Copy(), RECIPE, 2)
    resumed.state = batches.state
    batches.state = first
    for step, tokens in enumerate(wanted[:2]):
        assert torch.equal(batches.take(step)[1].tokens, tokens)
    for step in 2, 3, 4:
        assert torch.equal(resumed.take(step)[1].tokens, wanted[step])


def test_what_goes_wrong_is_said_at_its_step() -> None:
    batches = Batches(Watched(fails=2), RECIPE, 2)
    batches.take(0)
    batches.take(1)
    with pytest.raises(ValueError, match="there is none"):
        batches.take(2)


SLOW = """
import time
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.batches import Batches
from deadreckon.tasks.copy import Copy

class Slow(Copy):
    def sample(self, *arguments):
        time.sleep(0.5)
        drawn = super().sample(*arguments)
        print("drawn", flush=True)
        return drawn

Batches(Slow(), Recipe(length=4, steps=5, batch_size=4), 1).take(0)
"""


def test_a_process_that_ends_waits_for_what_is_drawn() -> None:
    """If its thread is stopped in a function of torch's, torch aborts the process."""
    found = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stdout) == (0, 2 * "drawn\n"), found.stderr
