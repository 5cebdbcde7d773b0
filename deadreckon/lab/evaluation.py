"""How models are scored: errors, exact answers and loss on fresh sequences, by length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import deadreckon as dr
from deadreckon.lab.recipe import Recipe
from deadreckon.tasks.task import NOT_SCORED, Task

TEST_SEED = 1234
BATCH_TOKENS = 2**15  # go through a model at a time
SOLVED = 0.9  # a word problem counts as solved where more rows than this are right throughout


@dataclass(frozen=True)
class Tally:
    """What a model made of some rows."""

    rows: int
    scored: int  # tokens
    wrong: int  # of these
    exact: int  # rows without an error
    loss: float  # nats, summed over scored tokens


@dataclass(frozen=True)
class Score:
    """What a model reached in one test at one length."""

    condition: str
    length: int
    error: float  # share of scored tokens predicted wrongly
    exact: float  # share of rows without an error
    loss: float  # nats for each scored token
    rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def value(self, metric: str) -> float:
        """By one of `METRICS`."""
        return float(getattr(self, metric))


def is_better(metric: str, one: float, other: float) -> bool:
    """Whether the first of two values is."""
    return one > other if metric == "exact" else one < other


def spell(metric: str, value: float) -> str:
    """A value for people: shares in per cent."""
    if metric != "perplexity":
        return f"{100 * value:.2f}%"
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"


def places_to_test(recipe: Recipe, lengths: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Every condition at every length, of those asked for or the recipe's own, of which some may not be on offer."""
    places = []
    for condition in recipe.conditions:
        offered = recipe.make_task(condition).lengths
        for length in sorted(set(lengths or recipe.test_lengths or (recipe.length,))):
            if length in offered:
                places.append((condition, length))
            elif lengths:
                raise ValueError(f"lengths: expected lengths that {recipe.task} ({condition}) has, got {length}")
    return places


def score(
    model: dr.DeadReckonForCausalLM,
    recipe: Recipe,
    condition: str,
    length: int,
    *,
    rows: int = 0,
    seed: int = TEST_SEED,
) -> Score:
    """Scores a model in a test of a recipe, on as many fresh rows as it says, or `rows`."""
    rows = rows or max(1, min(recipe.test_rows, recipe.test_tokens // length))
    tokens, labels = recipe.make_task(condition).sample(rows, length, torch.Generator().manual_seed(seed))
    device = next(model.parameters()).device
    with own_randomness(device, seed), autocast(device):
        found = tally(model, tokens, labels, max(1, BATCH_TOKENS // tokens.shape[1]))
    scored = max(found.scored, 1)
    return Score(condition, length, found.wrong / scored, found.exact / rows, found.loss / scored, rows)


@torch.no_grad()
def tally(model: dr.DeadReckonForCausalLM, tokens: Tensor, labels: Tensor, batch_size: int = 64) -> Tally:
    """Errors and loss on rows (count, width).

    Tokens are predicted from the right ones before them. Where labels are the tokens themselves, greedy decoding gives
    the very same rows: up to its first mistake it has read the same.
    """
    device = next(model.parameters()).device
    model.eval()
    wrong = exact = scored = 0
    loss = 0.0
    for some, expected in zip(tokens.split(batch_size), labels.split(batch_size), strict=True):
        errors, nats = _judge(model, some.to(device), expected.to(device))
        wrong += int(errors.sum())
        exact += int((errors == 0).sum())
        scored += int((expected[:, 1:] != NOT_SCORED).sum())
        loss += nats
    return Tally(len(tokens), scored, wrong, exact, loss)


def _judge(model: dr.DeadReckonForCausalLM, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Errors in each row, and the summed loss. Logits, which may be wide, are made for some tokens at a time."""
    hidden = model.model(tokens).last_hidden_state[:, :-1]
    errors = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
    loss = 0.0
    width = max(1, 2**14 // len(tokens))
    for some, expected in zip(hidden.split(width, 1), labels[:, 1:].split(width, 1), strict=True):
        logits = model.lm_head(some).float()
        errors += wrongly(logits, expected).sum(1)
        loss += float(cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=NOT_SCORED, reduction="sum"))
    return errors, loss


def wrongly(logits: Tensor, expected: Tensor) -> Tensor:
    """Which places are scored and predicted wrongly."""
    return (logits.argmax(-1) != expected) & (expected != NOT_SCORED)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Encodings that draw numbers draw the same ones each time, and disturb nobody else's."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 where a GPU has it; float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and torch.cuda.is_bf16_supported())


def error_rate(
    model: dr.DeadReckonForCausalLM,
    task: Task,
    *,
    length: int,
    count: int = 256,
    batch_size: int = 64,
    seed: int = TEST_SEED,
) -> float:
    """The share of scored tokens predicted wrongly, over `count` fresh sequences of one length."""
    generator = torch.Generator().manual_seed(seed)
    counts = [min(batch_size, count - start) for start in range(0, count, batch_size)]
    found = [tally(model, *task.sample(some, length, generator)) for some in counts]
    return sum(one.wrong for one in found) / sum(one.scored for one in found)


def exact_match(
    model: dr.DeadReckonForCausalLM,
    task: Task,
    length: int | range,
    *,
    count: int = 1000,
    batch_size: int = 100,
    seed: int = TEST_SEED,
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
    seed: int = TEST_SEED,
) -> dict[int, float]:
    """The share of rows answered exactly at each length, over `count` fresh ones each."""
    return {
        length: exact_match(model, task, length, count=count, batch_size=batch_size, seed=seed) for length in lengths
    }


def exact_match_on(model: dr.DeadReckonForCausalLM, tokens: Tensor, labels: Tensor, *, batch_size: int = 100) -> float:
    """The share of these rows (count, width) that are answered exactly."""
    return tally(model, tokens, labels, batch_size).exact / len(tokens)


def mean_of_best(evaluations: Sequence[float], best: int = 3) -> float:
    """The mean of the best of several evaluations, which is what the PRISM paper reports of those in one training."""
    if not 1 <= best <= len(evaluations):
        raise ValueError(f"evaluations: expected {best} or more, got {len(evaluations)}")
    return sum(sorted(evaluations)[-best:]) / best
