"""The batches of a training. While a step is taken the next batch is drawn in another thread: finding and tokenising
what a model reads may take as long as a GPU takes to learn it.

What is drawn is the same as without: one generator, one batch after the other. What a checkpoint keeps is the generator
as it was before the batch that is being drawn, which no step has seen.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from deadreckon.lab.recipes import Recipe
from deadreckon.tasks.task import Batch, Task, draw


class Batches:
    """What a recipe's steps learn from.

    Args:
        task: where it comes from. Tests may draw from it meanwhile.
        recipe: equal recipes see equal batches.
        parts: of each batch.
    """

    def __init__(self, task: Task, recipe: Recipe, parts: int) -> None:
        self.task, self.recipe, self.parts = task, recipe, parts
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.thread = ThreadPoolExecutor(1, "batches")
        self.next: tuple[Tensor, Future[list[Batch]]] | None = None  # the generator before it, and what is being drawn

    def take(self, step: int) -> list[Batch]:
        """The batch of a step, counted from 0. Steps are taken in their order, from wherever `state` was set."""
        _, drawn = self.next or self._begin(step)
        batch = drawn.result()
        self.next = self._begin(step + 1) if step + 1 < self.recipe.steps else None
        return batch

    def _begin(self, step: int) -> tuple[Tensor, Future[list[Batch]]]:
        size, lengths = self.recipe.batch_size, self.recipe.lengths_at(step)
        before = self.generator.get_state()
        return before, self.thread.submit(draw, self.task, size, lengths, self.generator, self.parts)

    @property
    def state(self) -> Tensor:
        """The generator's, after the last batch that was taken."""
        return self.next[0] if self.next else self.generator.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        if self.next:
            wait([self.next[1]])
        self.next = None
        self.generator.set_state(state)
