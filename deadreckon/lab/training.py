"""A small training loop: a generator of steps, so that whoever runs it decides what to show and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.tasks.curriculum import Curriculum
from deadreckon.tasks.task import NOT_SCORED, Task


def check_device(name: str) -> None:
    """Says so if there is no such device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: expected one that is here, got {name!r} ({str(error).splitlines()[0]})") from error


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


def train(
    model: dr.DeadReckonForCausalLM, task: Task, recipe: Recipe, curriculum: Curriculum | None = None
) -> Iterator[Step]:
    """Trains in place, a step for each item that is asked for. Equal seeds see equal data.

    Lengths are the recipe's, or those of the curriculum if there is one.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(dr.parameter_groups(model, recipe.learning_rate, recipe.weight_decay))
    for step in range(recipe.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * recipe.learning_rate_at(step) / recipe.learning_rate
        length = recipe.length if curriculum is None else curriculum.lengths_at(step)
        tokens, labels = (x.to(device) for x in task.sample(recipe.batch_size, length, generator))
        output = model(tokens, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        wrong, scored = count_errors(output.logits, labels)
        yield Step(step + 1, output.loss.item(), wrong / max(scored, 1))


def count_errors(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many scored tokens are predicted wrongly, and how many are scored."""
    wrong = _wrong(logits, labels)
    return int(wrong.sum()), int((labels[:, 1:] != NOT_SCORED).sum())


def count_exact(logits: Tensor, labels: Tensor) -> int:
    """How many rows have every scored token predicted rightly.

    Tokens are predicted from the right ones before them. Where labels are the tokens themselves, greedy decoding gives
    the very same rows: up to its first mistake it has read the same.
    """
    return int((~_wrong(logits, labels)).all(1).sum())


def _wrong(logits: Tensor, labels: Tensor) -> Tensor:
    """Which places, from the second on, are scored and predicted wrongly."""
    expected = labels[:, 1:]
    return (logits[:, :-1].argmax(-1) != expected) & (expected != NOT_SCORED)


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


def exact_match(
    model: dr.DeadReckonForCausalLM,
    task: Task,
    length: int | range,
    *,
    count: int = 1000,
    batch_size: int = 100,
    seed: int = 1234,
) -> float:
    """The share of rows answered exactly, over `count` fresh ones of one length or of a range."""
    tokens, labels = task.sample(count, length, torch.Generator().manual_seed(seed))
    return exact_match_on(model, tokens, labels, batch_size=batch_size)


def exact_match_by_length(
    model: dr.DeadReckonForCausalLM,
    task: Task,
    lengths: Iterable[int],
    *,
    count: int = 1000,
    batch_size: int = 100,
    seed: int = 1234,
) -> dict[int, float]:
    """The share of rows answered exactly at each length, over `count` fresh ones each."""
    return {
        length: exact_match(model, task, length, count=count, batch_size=batch_size, seed=seed) for length in lengths
    }


@torch.no_grad()
def exact_match_on(model: dr.DeadReckonForCausalLM, tokens: Tensor, labels: Tensor, *, batch_size: int = 100) -> float:
    """The share of these rows (count, width) that are answered exactly."""
    device = next(model.parameters()).device
    model.eval()
    exact = 0
    for some, scored in zip(tokens.split(batch_size), labels.split(batch_size), strict=True):
        exact += count_exact(model(some.to(device)).logits, scored.to(device))
    return exact / len(tokens)


def mean_of_best(evaluations: Sequence[float], best: int = 3) -> float:
    """The mean of the best of several evaluations, which is what the PRISM paper reports of those in one training."""
    if not 1 <= best <= len(evaluations):
        raise ValueError(f"evaluations: expected {best} or more, got {len(evaluations)}")
    return sum(sorted(evaluations)[-best:]) / best
