"""Training batches, prefetched: a thread draws the next batch during a step, since finding and tokenising its text may
take as long as the step on a GPU.

Batches are the same as without prefetching: one generator, one batch after the other. A checkpoint keeps the state of
the generator before the batch that is being drawn, which no step has seen.
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from deadreckon.lab.recipes import Recipe
from deadreckon.tasks.task import Batch, Task, draw

THREAD = "batches"
PATIENCE = 5.0  # seconds that a process which ends waits for a batch


class Batches:
    """Draws the batches of a recipe.

    Args:
        task: the source of the data. Tests may draw from it meanwhile.
        recipe: equal recipes see equal batches.
        parts: number of parts of each batch.
    """

    def __init__(self, task: Task, recipe: Recipe, parts: int) -> None:
        self.task, self.recipe, self.parts = task, recipe, parts
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.next: tuple[Tensor, Future[list[Batch]]] | None = None  # the generator before it, and what is being drawn

    def take(self, step: int) -> list[Batch]:
        """The batch of a step, counted from 0. Steps must be taken in order, from wherever `state` was set."""
        self.next = self.next or self._begin(step)
        batch = self.next[1].result()
        self.next = self._begin(step + 1) if step + 1 < self.recipe.steps else None
        return batch

    def _begin(self, step: int) -> tuple[Tensor, Future[list[Batch]]]:
        before, drawn = self.generator.get_state(), Future[list[Batch]]()
        # A daemon thread, not an executor's: a process that is told to end waits for it only a moment (`_finish`).
        arguments = self.recipe.lengths_at(step), drawn
        threading.Thread(target=self._draw, args=arguments, name=THREAD, daemon=True).start()
        return before, drawn

    def _draw(self, lengths: int | range, drawn: Future[list[Batch]]) -> None:
        try:
            drawn.set_result(draw(self.task, self.recipe.batch_size, lengths, self.generator, self.parts))
        except BaseException as error:  # is raised where the batch is taken
            drawn.set_exception(error)

    @property
    def state(self) -> Tensor:
        """The generator's state after the last batch that was taken."""
        return self.next[0] if self.next else self.generator.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        if self.next:
            wait([self.next[1]])
        self.next = None
        self.generator.set_state(state)


@atexit.register
def _finish() -> None:
    """Waits a moment for batches that are being drawn: torch aborts a process that stops its threads in mid-draw."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(PATIENCE)
