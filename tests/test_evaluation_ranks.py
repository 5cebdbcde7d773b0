"""Evaluation split among ranks gives the scores of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import small
from torch.distributed.device_mesh import init_device_mesh
from worlds import run_world

from deadreckon.lab.evaluation import Score, evaluate, evaluators
from deadreckon.lab.evaluation.long import Answer
from deadreckon.lab.recipes import find_recipe
from deadreckon.lab.training import Ranks, Run, make_model, train_run
from deadreckon.tasks.language import load_corpus, save_corpora

TRAINED = ("steps=2", "evaluate_every=1", "batch_size=4", "validation_rows=3", "test_rows=3", "reporting=best-three")


def on_text(folder: str) -> Any:
    """Five rows of 48 tokens, and as many questions."""
    return find_recipe(
        "rotations", "tiny", "path-fox",
        changes=(
            f"options.data={folder}", 'options.tasks=["passkey"]', "layers=1", "width=16", "heads=1", "length=16",
            "test_lengths=[16, 48]", "test_tokens=240", "test_rows=5",
            'evaluators=["perplexity", "perplexity-window", "loss-by-position", "training-loss", "long"]',
        ),
    )  # fmt: skip


def answers(model: Any, tokenizer: Any, tasks: Any, lengths: Any, rows: int, **keywords: Any) -> Iterator[list[Answer]]:
    """Replaces a model's answers: the score of a question depends on its number alone."""
    for name in tasks:
        for number in range(rows):
            if (name, lengths[0], number) not in keywords["known"]:
                yield [Answer(name, lengths[0], number, 1, None, [], "", (1 + number) ** 2 / lengths[0])]


def scores_of(folder: str, ranks: Ranks) -> dict[str, Any]:
    """Scores of untrained models, and how many rows they have read here."""
    read, found = [0], dict[str, Any]()
    for name, recipe in (
        ("text", on_text(folder)),
        ("flip-flop", small("path-fox", 0, "test_rows=5")),
        ("drawn", small("random-rotation", 0, "test_rows=5")),
    ):
        model = make_model(recipe, recipe.make_task().vocab_size)

        def count(module: Any, inputs: Any, read: list[int] = read) -> None:
            read[0] += len(inputs[0])

        model.model.register_forward_pre_hook(count)
        metrics = [{"step": recipe.steps, "loss": 1.0}]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluators, "ask", answers)
            patch.setattr(evaluators, "check_room", lambda *_: None)
            found[name] = list(evaluate(model, recipe, metrics, share=ranks.share))
    return found | {"read": read[0]}


def on_ranks(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    out = Path(folder, "run")
    train_run(small("path-fox", 0, *TRAINED), out, console=Console(quiet=True), ranks=Ranks(mesh, timeout=60))
    return scores_of(folder, Ranks(mesh, timeout=60))


def assert_close(found: list[Score], expected: list[Score]) -> None:
    """Sums of float32 losses in another order of rows: their rounding, 1e-7, a few times over."""
    for mine, its in zip(found, expected, strict=True):
        assert (mine.place, mine.rows, mine.measure, mine.axis) == (its.place, its.rows, its.measure, its.axis)
        assert (mine.error, mine.exact) == (its.error, its.exact)
        assert mine.loss == pytest.approx(its.loss, rel=1e-5, nan_ok=True)
        assert mine.texts == pytest.approx(its.texts, rel=1e-5)


def test_ranks_share_the_rows_of_tests(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    words = [" ".join(f"w{n}" for n in torch.randint(0, 20, (99,), generator=generator).tolist()) for _ in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    corpus = load_corpus(tmp_path / "a.jsonl", vocabulary=280, cache=tmp_path)
    save_corpora(tmp_path, {"train": corpus, "valid": corpus})
    ranks = run_world(2, on_ranks, str(tmp_path))
    expected = scores_of(str(tmp_path), Ranks())
    for found in ranks:
        assert_close(found["text"], expected["text"])
        assert_close(found["flip-flop"], expected["flip-flop"])
        assert [one.place for one in found["drawn"]] == [one.place for one in expected["drawn"]]
    assert ranks[0]["drawn"] == ranks[1]["drawn"]
    assert sum(found["read"] for found in ranks) == expected["read"]
    assert 0.35 < ranks[0]["read"] / expected["read"] < 0.5  # of five rows two, of single windows half
    suite = [one for one in expected["text"] if one.measure == "score"]
    assert [one.exact for one in suite] == [pytest.approx(11 / one.length) for one in suite] and len(suite) == 2
    run = Run(tmp_path / "run")
    one = train_run(small("path-fox", 0, *TRAINED), tmp_path / "one", console=Console(quiet=True))
    assert_close(list(run.scores().values()), list(one.scores().values()))
    for mine, its in zip(run.lines("evaluations"), one.lines("evaluations"), strict=True):
        assert_close([Score(**x) for x in mine["scores"]], [Score(**x) for x in its["scores"]])
    for mine, its in zip(run.metrics(), one.metrics(), strict=True):
        assert mine["validation_loss"] == pytest.approx(its["validation_loss"], rel=1e-4)
