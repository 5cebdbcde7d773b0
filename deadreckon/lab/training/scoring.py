"""Scores of runs and of saved models by length; those that a run has are not computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import deadreckon as dr
from deadreckon.lab.arguments import check_output
from deadreckon.lab.environment import check_device, check_model, quiet_transformers
from deadreckon.lab.evaluation import SHARES, Place, Score, evaluate, format_value, places_to_test
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.texts import fast_tokenizer, same_tokens, text_of
from deadreckon.lab.training.display import Countdown, format_seconds
from deadreckon.lab.training.ranks import Ranks
from deadreckon.lab.training.runs import Run, load_for_tests


def score_run(
    run: Run,
    lengths: Sequence[int] = (),
    *,
    kind: str = "last",
    device: str = "cpu",
    console: Console | None = None,
    ranks: Ranks | None = None,
    longest: int = 0,
    sharpen_beyond: int | None = None,
) -> dict[Place, Score]:
    """Scores of a checkpoint in every test at these lengths, or the recipe's; known ones are not computed again.

    Except those on other texts: the rows for perplexity are as long as the greatest length that was ever asked for.

    Args:
        ranks: the processes that share the rows; all must call this, and the first writes.
        longest: minimum length of these rows in tokens, if other runs are scored on longer ones.
        sharpen_beyond: score the checkpoint with attention kept as sharp beyond this many tokens.
    """
    ranks = ranks or Ranks()
    recipe = run.recipe_in_use
    kept = (run.scores(kind, sharpen_beyond), run.metrics(), run.longest) if ranks.first else ({}, [], 0)
    known, metrics, before = ranks.same(kept)
    longest = max([longest, before, *lengths, *recipe.test_lengths])
    if other := {place for place, one in known.items() if one.longest not in (0, longest)}:
        known = {place: one for place, one in known.items() if place not in other}
        more = {length for _, length in other} - {length for _, length in places_to_test(recipe, lengths)}
        lengths = sorted({*(lengths or recipe.test_lengths), *more}) if more else lengths
    places = places_to_test(recipe, lengths)
    if missing := {place for place in places if place not in known}:
        model = run.load(kind, device, lengths, sharpen_beyond)
        found = evaluate(model, recipe, metrics, lengths, set(known), ranks.share, longest)
        for one in counted(found, missing, str(run.path), ranks.console(console)):
            known[one.place] = one
            if ranks.first:
                run.add_scores([one], kind, sharpen_beyond)
    return {place: known[place] for place in places if place in known}


def score_model(
    folder: Path,
    recipe: Recipe,
    lengths: Sequence[int] = (),
    device: str = "cpu",
    console: Console | None = None,
    sharpen_beyond: int | None = None,
    metrics: Sequence[dict[str, float]] = (),
) -> dict[Place, Score]:
    """Scores of any saved model in the tests of a recipe; evaluators of training itself need its `metrics`."""
    check_model(folder)
    encoding = dr.DeadReckonConfig.from_pretrained(folder).encoding
    recipe = replace(recipe, encoding=encoding or recipe.encoding)
    model = load_for_tests(folder, recipe, device, lengths, sharpen_beyond)
    task = recipe.make_task()
    known, needed = model.config.vocab_size, task.vocab_size
    if known < needed or (known > needed and recipe.task != "language"):  # of which models may have more than is used
        raise ValueError(f"recipe: expected a task of {known} tokens, as the model has, got {recipe.task}, of {needed}")
    told = recipe.task == "language" and (folder / "tokenizer.json").exists()
    if told and not same_tokens(fast_tokenizer(str(folder)), text_of(task).corpus.tokenizer):
        advice = f"--change options.tokenizer={folder}"
        raise ValueError(f"options.data: expected a text in the tokens of the model, got others; {advice}")
    found, wanted = evaluate(model, recipe, metrics, lengths), set(places_to_test(recipe, lengths))
    if not wanted:
        raise ValueError("lengths: expected some that the recipe's tests have, got none")
    scores = {one.place: one for one in counted(found, wanted, str(folder), console or Console())}
    if not scores:
        raise ValueError(f"evaluators: expected some that tell of a saved model, got {', '.join(recipe.evaluators)}")
    return scores


def score_folder(
    folder: Path,
    lengths: Sequence[int] = (),
    *,
    recipe: Recipe | None = None,
    changes: Sequence[str] = (),
    kind: str = "last",
    device: str = "cpu",
    console: Console | None = None,
    sharpen_beyond: int | None = None,
) -> str:
    """Scores by length, in a few lines: of a run, which keeps them; or of any saved model in the tests of a recipe.

    Args:
        recipe: whose tests they are; by default the folder is a run, and they are its own.
        changes: of the tests; such scores are not kept.
        kind: the checkpoint of a run.
    """
    check_device(device)
    if recipe is None and not changes:
        check_output("run", folder)  # where scores are kept
    with quiet_transformers():
        if recipe is None and not changes:
            run = Run(folder)
            scores = score_run(run, lengths, kind=kind, device=device, console=console, sharpen_beyond=sharpen_beyond)
            return summary(run, scores)
        metrics: Sequence[dict[str, float]] = ()
        if recipe is not None:
            tests = recipe.change_tests(changes, ("length",))  # that it was trained at
        else:
            run = Run(folder)
            tests, metrics, folder = run.recipe_in_use.change_tests(changes), run.metrics(), run.checkpoint(kind)
            if any(one.startswith("test_lengths") for one in changes):  # all of them, or none
                lengths = lengths or tests.test_lengths
        scores = score_model(folder, tests, lengths, device, console, sharpen_beyond, metrics)
        return "\n".join(list_scores(tests, scores))


def counted(scores: Iterator[Score], wanted: Set[Place], title: str, console: Console) -> Iterator[Score]:
    """Shows the progress of scoring. There may be more scores than those of the wanted places."""
    countdown = Countdown(console, len(wanted))
    with console.status(f"scoring {title}") as status:
        for one in scores:
            if one.place in wanted:
                status.update(countdown.advance(1, f"{title}: {one.condition} at {one.axis} {one.length}", "scores"))
            yield one


def summary(run: Run, scores: dict[Place, Score]) -> str:
    """The progress and scores of a run, in a few lines."""
    progress = run.progress()
    head = f"{run.path}: {progress.step} steps, {format_seconds(progress.seconds)}, {progress.tokens:,} tokens"
    return "\n".join([head, *list_scores(run.recipe, scores)])


def list_scores(recipe: Recipe, scores: dict[Place, Score]) -> list[str]:
    """A line of text for each test."""
    lines: dict[str, list[str]] = {}
    for one in scores.values():
        measure = one.measure or recipe.metric
        unit = "%" if measure in SHARES else ""
        place = f"{measure}, {one.condition}, at {one.axis} "
        lines.setdefault(place, []).append(f"{one.length}: {format_value(measure, one.value(measure))}{unit}")
    return [place + ", ".join(values) for place, values in lines.items()]
