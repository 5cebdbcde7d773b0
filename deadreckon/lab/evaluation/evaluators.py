"""Evaluators by name: what a recipe can measure of a trained model, each at any lengths.

error, exact        tokens predicted wrongly, rows answered exactly, on fresh sequences of the task
perplexity          by context length, over the same tokens at every length
perplexity-window   the same with a sliding window of the training length
loss-by-position    by position in the context, up to the greatest test length; and its mean within the training length
                    and beyond
training-loss       the mean over the last tenth of training
long                the long-context suite, a test for each of its tasks, answered by generation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.evaluation.long import ask
from deadreckon.lab.evaluation.perplexity import PositionScore, Reader, loss_by_position, perplexity_by_length
from deadreckon.lab.evaluation.scores import Place, Score, Share, alone, score
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.texts import read_long_tasks, text_of
from deadreckon.tasks.language import Corpus
from deadreckon.tasks.long.question import LongTask, check_room
from deadreckon.tasks.tokens import for_transformers

TRAINING_LOSS = "last tenth of training"
BINS = 32  # of positions
SUITE_OPTIONS = ("tasks", "babi", "books")
SUITE_BATCH = 1 << 18  # tokens of prompts read at a time


class Subject(NamedTuple):
    """One evaluation: the model, the test of a recipe, and where to score."""

    model: dr.DeadReckonForCausalLM | None  # None if no evaluator needs it
    recipe: Recipe
    metrics: Sequence[dict[str, Any]]  # lines of its training
    condition: str
    places: Sequence[Place]
    share: Share = alone  # who computes which rows
    longest: int = 0  # texts have so many tokens at least

    @property
    def lengths(self) -> list[int]:
        return [length for _, length in self.places]

    @property
    def reader(self) -> Reader:
        assert self.model is not None
        return Reader(self.model, self.recipe.test_piece or None, share=self.share)


class Evaluator(NamedTuple):
    """An evaluator: where it gives scores, (recipe, condition, lengths) to places, and how they are computed."""

    places: Callable[[Recipe, str, Sequence[int]], list[Place]]
    scores: Callable[[Subject], Iterator[Score]]


def evaluate(
    model: dr.DeadReckonForCausalLM,
    recipe: Recipe,
    metrics: Sequence[dict[str, Any]] = (),
    lengths: Sequence[int] = (),
    known: Sequence[Place] | set[Place] = (),
    share: Share = alone,
    longest: int = 0,
) -> Iterator[Score]:
    """Scores of all evaluators of a recipe in all its tests, except known ones; at `lengths`, or those of the recipe.

    Perplexity is over the same text at every length: its rows are as long as the greatest of these lengths, the
    recipe's, and `longest`. If several ranks share the rows, all must call this with the same arguments, and all get
    every score.
    """
    for name in recipe.evaluators:
        evaluator = EVALUATORS[name]
        for condition in recipe.conditions:
            missing = [place for place in evaluator.places(recipe, condition, lengths) if place not in known]
            if missing:
                yield from evaluator.scores(Subject(model, recipe, metrics, condition, missing, share, longest))


def places_to_test(recipe: Recipe, lengths: Sequence[int] = ()) -> list[Place]:
    """The places, each a test and a length, that `evaluate` scores."""
    evaluators = [EVALUATORS[name] for name in recipe.evaluators]
    places = [p for e in evaluators for condition in recipe.conditions for p in e.places(recipe, condition, lengths)]
    return list(dict.fromkeys(places))


def _offered(recipe: Recipe, condition: str, lengths: Sequence[int]) -> list[Place]:
    """The lengths asked for, all of which the task must have in this condition; or those of the recipe that it has."""
    offered = _lengths(recipe, condition)
    places = []
    for length in sorted(set(lengths or recipe.test_lengths or (recipe.length,))):
        if length in offered:
            places.append((condition, length))
        elif lengths:
            raise ValueError(f"lengths: expected lengths that {recipe.task} ({condition}) has, got {length}")
    return places


def _lengths(recipe: Recipe, condition: str) -> Sequence[int]:
    """Lengths of the task; of a text all but the last, since predicting a row takes one more token."""
    lengths = recipe.make_task(condition).lengths
    return lengths[:-1] if recipe.task == "language" else lengths


def _sampled(subject: Subject) -> Iterator[Score]:
    assert subject.model is not None
    for length in subject.lengths:
        yield score(subject.model, subject.recipe, subject.condition, length, share=subject.share)


def _on_text(recipe: Recipe, condition: str, lengths: Sequence[int]) -> list[Place]:
    if recipe.task != "language":
        raise ValueError(f"evaluators: expected error or exact for {recipe.task}, got {', '.join(recipe.evaluators)}")
    places = _offered(recipe, condition, lengths)
    if not places:
        has = max(_lengths(recipe, condition), default=0)
        raise ValueError(f"test_lengths: expected some up to {has}, as {condition} has, got {recipe.test_lengths}")
    return places


def _corpus(subject: Subject, longest: int) -> tuple[Corpus, bool]:
    """The text of a test, and whether its rows must cross document boundaries, because no document is long enough."""
    corpus = text_of(subject.recipe.make_task(subject.condition)).corpus
    spans = corpus.documents
    return corpus, int((spans[:, 1] - spans[:, 0]).max()) <= longest


def _window(recipe: Recipe, condition: str) -> str:
    return f"{condition}, window of {recipe.length}"


def _perplexity(subject: Subject, window: int | None = None) -> Iterator[Score]:
    recipe = subject.recipe
    asked = max([*subject.lengths, *recipe.test_lengths, subject.longest])
    longest = min(asked, _lengths(recipe, subject.condition)[-1])  # of a text that is shorter, as long as it is
    corpus, across = _corpus(subject, longest)
    name = subject.condition if window is None else _window(recipe, subject.condition)
    for one in perplexity_by_length(
        subject.reader, corpus, subject.lengths, tokens=recipe.test_tokens, window=window, across=across,
        longest=longest,
    ):  # fmt: skip
        rows = one.tokens // one.length
        found = Score(name, one.length, None, None, one.loss, rows, "perplexity")
        yield replace(found, texts=one.texts, longest=asked, digest=one.digest)


def _longer(recipe: Recipe, condition: str, lengths: Sequence[int]) -> list[Place]:
    places = _on_text(recipe, condition, lengths)
    return [(_window(recipe, condition), length) for _, length in places if length > recipe.length]


def _position_places(recipe: Recipe, condition: str, lengths: Sequence[int]) -> list[Place]:
    _, longest = _on_text(recipe, condition, lengths)[-1]
    return [(f"{condition}, by position", longest)]


def _positions(subject: Subject) -> Iterator[Score]:
    recipe, longest = subject.recipe, max(subject.lengths)
    corpus, across = _corpus(subject, longest)
    tokens = recipe.test_tokens
    bins = loss_by_position(subject.reader, corpus, longest, min(BINS, longest), tokens=tokens, across=across)
    rows = max(1, tokens // longest)
    for name, chosen in (  # positions in a bin on both sides of the border count on neither
        ("within the training length", [one for one in bins if one.last <= recipe.length]),
        ("beyond it", [one for one in bins if one.first > recipe.length]),
    ):
        if chosen:
            loss = mean_loss(chosen)
            yield Score(
                f"{subject.condition}, {name}", recipe.length, None, None, loss, rows, "loss", "training length"
            )
    for one in bins:  # the last of them last: it says that all are there
        name = f"{subject.condition}, by position"
        yield Score(name, one.last, None, None, one.loss, rows, "loss", "position")


def mean_loss(bins: Sequence[PositionScore]) -> float:
    """Mean loss over all positions of these bins."""
    counts = [one.last - one.first + 1 for one in bins]
    return sum(count * one.loss for count, one in zip(counts, bins, strict=True)) / sum(counts)


def _training_loss(subject: Subject) -> Iterator[Score]:
    recipe = subject.recipe
    last = max((line["step"] for line in subject.metrics), default=0)  # before `steps` where training ended early
    losses = [line["loss"] for line in subject.metrics if line["step"] > 0.9 * last and line["loss"] is not None]
    if losses:
        loss = sum(losses) / len(losses)
        yield Score(TRAINING_LOSS, recipe.length, None, None, loss, len(losses), "loss", "training length")


def _suite(recipe: Recipe) -> dict[str, LongTask]:
    """The tasks of the long-context suite, with the data that the recipe names."""
    return read_long_tasks(**{name: recipe.options[name] for name in SUITE_OPTIONS if name in recipe.options})


def _suite_places(recipe: Recipe, condition: str, lengths: Sequence[int]) -> list[Place]:
    places, suite = _on_text(recipe, condition, lengths), _suite(recipe)
    tokenizer = text_of(recipe.make_task(condition)).corpus.tokenizer
    check_room(suite, min(length for _, length in places), lambda text: len(tokenizer.encode(text).ids))
    return [(name, length) for name in suite for _, length in places]


def _suite_scores(subject: Subject) -> Iterator[Score]:
    assert subject.model is not None
    recipe, suite = subject.recipe, _suite(subject.recipe)
    tokenizer = for_transformers(_corpus(subject, max(subject.lengths))[0].tokenizer)
    for name, length in subject.places:
        rows = max(1, min(recipe.test_rows, recipe.test_tokens // length))

        def answered(part: slice, name: str = name, length: int = length) -> Tensor:
            others = [(name, length, number) for number in range(part.start)]
            batches = ask(
                subject.model, tokenizer, {name: suite[name]}, (length,), part.stop, known=others,
                batch_tokens=SUITE_BATCH,
            )  # fmt: skip
            return torch.tensor([answer.score for batch in batches for answer in batch], dtype=torch.float64)

        right = float(subject.share(rows, answered).mean())
        yield Score(name, length, None, right, math.nan, rows, "score")


EVALUATORS = {
    "error": Evaluator(_offered, _sampled),
    "exact": Evaluator(_offered, _sampled),
    "perplexity": Evaluator(_on_text, _perplexity),
    "perplexity-window": Evaluator(_longer, lambda subject: _perplexity(subject, subject.recipe.length)),
    "loss-by-position": Evaluator(_position_places, _positions),
    "training-loss": Evaluator(lambda recipe, condition, lengths: [(TRAINING_LOSS, recipe.length)], _training_loss),
    "long": Evaluator(_suite_places, _suite_scores),
}
