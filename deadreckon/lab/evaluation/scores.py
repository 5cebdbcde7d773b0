"""Scores: error rate, exact match and loss on fresh sequences of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import deadreckon as dr
from deadreckon.lab.recipes import Recipe
from deadreckon.tasks.task import NOT_SCORED

TEST_SEED = 1234
BATCH_TOKENS = 2**15  # go through a model at a time
HEAD_TOKENS = 2**13  # whose logits are held at a time: all of a long row would be the greatest tensor there is
SHARES = ("error", "exact", "score")  # measures that are shown in per cent
GROWING = ("exact", "score")  # the more, the better
Place = tuple[str, int]  # a test, and a length in it
# Applies a function of row slices to `count` rows, and returns results (rows, ...) on the CPU; several processes may
# split the rows.
Share = Callable[[int, Callable[[slice], Tensor]], Tensor]


def alone(count: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Computes all rows in this process."""
    return compute(slice(0, count))


@dataclass(frozen=True)
class Tally:
    """Counts over the rows of a test."""

    rows: int
    scored: int  # tokens
    wrong: int  # of these
    exact: int  # rows without an error
    loss: float  # nats, summed over scored tokens

    @classmethod
    def of(cls, rows: Tensor) -> Tally:
        """Sums up the counts of each row, as `counts_by_row` gives them."""
        scored, wrong, loss = rows.sum(0).tolist()
        return cls(len(rows), int(scored), int(wrong), int((rows[:, 1] == 0).sum()), loss)


@dataclass(frozen=True)
class Score:
    """The result of one test at one length.

    `axis` says what `length` is: the length of test sequences ("length") or of training sequences ("training length"),
    or the end of a range of positions in a sequence ("position") or of training steps ("step").
    """

    condition: str
    length: int
    error: float | None  # share of scored tokens predicted wrongly, where that was counted
    exact: float | None  # share of rows without an error, likewise; or what a task gives for them on average
    loss: float  # nats per scored token
    rows: int
    measure: str = ""  # what tables show; by default the recipe's metric
    axis: str = "length"
    texts: Sequence[float] = ()  # losses on texts that are the same for all models, so that differences can be paired
    longest: int = 0  # the tokens of such a text, where there are any
    digest: str = ""  # of all their tokens; earlier versions kept none

    @property
    def place(self) -> Place:
        return self.condition, self.length

    @property
    def score(self) -> float | None:
        """The task's own score of a row, from 0 to 1, averaged over rows."""
        return self.exact

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # a double holds no more

    def value(self, measure: str) -> float:
        """The value of a measure: error, exact, score, loss, perplexity."""
        return float(getattr(self, measure))


def is_better(measure: str, one: float, other: float) -> bool:
    """Whether the first of two values is better; NaN is worse than any."""
    if math.isnan(one) or math.isnan(other):
        return not math.isnan(one) and math.isnan(other)
    return one > other if measure in GROWING else one < other


def mean_of_best(measure: str, evaluations: Sequence[float], best: int = 3) -> float:
    """The mean of the best few of several evaluations, or of all if there are fewer."""
    sign = -1 if measure in GROWING else 1
    chosen = sorted(evaluations, key=lambda value: (math.isnan(value), sign * value))[:best]
    return sum(chosen) / len(chosen)


def format_value(measure: str, value: float) -> str:
    """Formats a value with about three digits; shares in per cent, without the sign."""
    value = 100 * value if measure in SHARES else value
    if measure == "loss":
        return f"{value:.4f}"
    if 0 < value < 0.005:
        return f"{value:.1g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"


def score(
    model: dr.DeadReckonForCausalLM,
    recipe: Recipe,
    condition: str,
    length: int,
    *,
    rows: int = 0,
    seed: int = TEST_SEED,
    share: Share = alone,
) -> Score:
    """Scores a model in a test of a recipe, on `rows` fresh rows; by default as many as the recipe says.

    Args:
        share: splits rows among processes.
    """
    rows = rows or max(1, min(recipe.test_rows, recipe.test_tokens // length))
    tokens, labels = recipe.make_task(condition).sample(rows, length, torch.Generator().manual_seed(seed))
    device = next(model.parameters()).device

    def judged(part: slice) -> Tensor:
        with isolated_rng(device, seed + part.start), autocast(device, recipe.test_autocast):
            return counts_by_row(model, tokens[part], labels[part], max(1, BATCH_TOKENS // tokens.shape[1]))

    counts = Tally.of(share(rows, judged))
    scored = max(counts.scored, 1)
    return Score(condition, length, counts.wrong / scored, counts.exact / rows, counts.loss / scored, rows)


@torch.no_grad()
def counts_by_row(model: dr.DeadReckonForCausalLM, tokens: Tensor, labels: Tensor, batch_size: int) -> Tensor:
    """Counts for rows (count, width): scored tokens, wrong predictions, and loss (count, 3), on the CPU.

    With teacher forcing. Where labels are the tokens themselves, exact match is the same as with greedy decoding, which
    has the same context up to its first mistake.
    """
    device = next(model.parameters()).device
    model.eval()
    counts = []
    for batch, expected in zip(tokens.split(batch_size), labels[:, 1:].to(device).split(batch_size), strict=True):
        losses, errors = judge(model, model.model(batch.to(device)).last_hidden_state[:, :-1], expected)
        counts.append(torch.stack([x.double().sum(1) for x in (expected != NOT_SCORED, errors, losses)], dim=1).cpu())
    return torch.cat(counts)


def judge(model: dr.DeadReckonForCausalLM, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (B, T) of labels, zero where not scored, and whether each is predicted wrongly, from hidden (B, T, D)."""
    losses, errors = [], []
    parts = hidden.flatten(0, 1).split(HEAD_TOKENS), labels.flatten().split(HEAD_TOKENS)
    for part, expected in zip(*parts, strict=True):
        logits = model.lm_head(part).float()
        losses.append(cross_entropy(logits, expected, ignore_index=NOT_SCORED, reduction="none"))
        errors.append(is_wrong(logits, expected))
    return torch.cat(losses).view_as(labels), torch.cat(errors).view_as(labels)


def is_wrong(logits: Tensor, expected: Tensor) -> Tensor:
    """Which positions are scored and predicted wrongly."""
    return (logits.argmax(-1) != expected) & (expected != NOT_SCORED)


@contextmanager
def isolated_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds encodings that draw random numbers; restores the global generators afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def autocast(device: torch.device, enabled: bool = True) -> torch.autocast:
    """Autocast to bfloat16 on a GPU that supports it; float32 elsewhere."""
    on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled and on_gpu)
