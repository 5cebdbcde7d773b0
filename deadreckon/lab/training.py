"""A small training loop: a generator of steps, so that whoever runs it decides what to show and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import deadreckon as dr


def check_device(name: str) -> None:
    """Says so if there is no such device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: expected one that is here, got {name!r} ({str(error).splitlines()[0]})") from error


class Task(Protocol):
    """What a task must offer to be trained on and scored."""

    @property
    def vocab_size(self) -> int: ...

    def sample(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens (count, length) and labels alike, −100 where nothing is scored."""


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW, a linear warm-up, then a linear decay to zero."""

    steps: int = 500
    batch_size: int = 32
    length: int = 128
    learning_rate: float = 8e-3
    weight_decay: float = 0.1
    warmup: int = 30
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


@dataclass(frozen=True)
class Step:
    """What one step showed, on data the model had not seen."""

    number: int
    loss: float
    error: float  # share of scored tokens that were predicted wrongly


def train(model: dr.DeadReckonForCausalLM, task: Task, recipe: Recipe) -> Iterator[Step]:
    """Trains in place, a step for each item that is asked for. Equal seeds see equal data."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    for step in range(recipe.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        tokens, labels = (x.to(device) for x in task.sample(recipe.batch_size, recipe.length, generator))
        output = model(tokens, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        wrong, scored = count_errors(output.logits, labels)
        yield Step(step + 1, output.loss.item(), wrong / max(scored, 1))


def count_errors(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many scored tokens are predicted wrongly, and how many are scored."""
    expected = labels[:, 1:]
    scored = expected != -100
    wrong = (logits[:, :-1].argmax(-1) != expected) & scored
    return int(wrong.sum()), int(scored.sum())


@torch.no_grad()
def error_rate(
    model: dr.DeadReckonForCausalLM,
    task: Task,
    *,
    length: int,
    count: int = 256,
    batch_size: int = 64,
    seed: int = 1234,
) -> float:
    """The share of scored tokens predicted wrongly, over `count` fresh sequences of one length."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    wrong = scored = 0
    for start in range(0, count, batch_size):
        tokens, labels = task.sample(min(batch_size, count - start), length, generator)
        some_wrong, some_scored = count_errors(model(tokens.to(device)).logits, labels.to(device))
        wrong, scored = wrong + some_wrong, scored + some_scored
    return wrong / scored
