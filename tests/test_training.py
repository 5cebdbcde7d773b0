"""Curricula and learning-rate schedules, the best checkpoint, and scoring of models on tasks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import quiet, small
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from deadreckon.lab.evaluation.scores import Score, Tally, counts_by_row, is_better, mean_of_best, score
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training import Run, Training, make_model, train, train_run
from deadreckon.lab.training.display import Gap
from deadreckon.tasks import TASKS, task
from deadreckon.tasks.copy import Copy
from deadreckon.tasks.curriculum import PRISM_CURRICULA, Curriculum, prism_curriculum
from deadreckon.tasks.language import Corpus, Language
from deadreckon.tasks.task import NOT_SCORED
from deadreckon.tasks.tokens import end_of, fit_tokenizer


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_curricula() -> None:
    grown = PRISM_CURRICULA["reverse"]
    for step, longest in {
        0: 5, 4_999: 5, 5_000: 10, 9_999: 10, 10_000: 20, 19_999: 20, 20_000: 30, 29_999: 30, 30_000: 40, 149_999: 40
    }.items():  # fmt: skip
        assert grown.lengths_at(step) == range(1, longest + 1)
    assert prism_curriculum(5) == Curriculum(5)
    assert prism_curriculum(10) == Curriculum(10, ((5_000, 5),))
    assert prism_curriculum(45).stages[-1] == (10_000, 40) and prism_curriculum(45).longest == 45
    assert PRISM_CURRICULA["scan"] == Curriculum(22, ((5_000, 5), (5_000, 10)))
    assert set(PRISM_CURRICULA) == set(TASKS) - {"flip-flop", "a5-products", "a5-identity", "mqrar"}
    with pytest.raises(ValueError, match="longest: expected 3 or more, got 2"):
        Curriculum(2, shortest=3)
    with pytest.raises(ValueError, match="shortest: expected 1 or more, got 0"):
        Curriculum(2, shortest=0)
    with pytest.raises(ValueError, match="stages: expected 1 or more steps, 1 or longer, got 0 steps of 5"):
        Curriculum(9, ((0, 5),))


def test_training_follows_a_curriculum() -> None:
    asked = []

    class Watched(Copy):
        def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            asked.append(length)
            return super().sample(count, length, generator)

    recipe = Recipe(encoding="path", steps=4, batch_size=4, curriculum=Curriculum(7, ((1, 2), (2, 4))))
    list(train(make_model(recipe, 64), Watched(), recipe))
    assert asked == [range(1, 3), range(1, 5), range(1, 5), range(1, 8)]


def test_training_follows_the_schedule() -> None:
    """Every step, and every group from its own rate, as α's in PRISM."""
    recipe = small("prism", 0, "steps=4", "warmup=2", "learning_rate=0.01")
    training = Training(make_model(recipe, 5), recipe.make_task(), recipe)
    for step in range(4):
        training.advance()
        rates = [group["lr"] for group in training.optimizer.param_groups]
        assert rates == pytest.approx([recipe.learning_rate_at(step, peak) for peak in (0.01, 0.03)])


@pytest.mark.parametrize(("evaluator", "step"), [("error", 12), ("exact", 18)])
def test_the_best_checkpoint_is_that_of_the_best_evaluation(
    evaluator: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them, where several are as good."""
    shares = {6: 0.5, 12: 0.2, 18: 0.7, 24: 0.2}

    def validate(run: Run, training: Training, gap: Gap) -> Score:
        return Score("as trained", 16, shares[training.done], shares[training.done], 1.0, 4)

    monkeypatch.setattr(sys.modules["deadreckon.lab.training.trainer"], "validate", validate)
    recipe = small("nope", 0, "test_lengths=[8]", f'evaluators=["{evaluator}"]')
    run = train_run(recipe, tmp_path, console=quiet())
    assert json.loads((tmp_path / "best" / "score.json").read_text())["step"] == step
    assert run.progress().best == shares[step]


def tally(model: torch.nn.Module, tokens: Tensor, labels: Tensor, batch_size: int = 64) -> Tally:
    return Tally.of(counts_by_row(model, tokens, labels, batch_size))  # type: ignore[arg-type]


class Peeks(torch.nn.Module):
    """Predicts the next token by looking ahead; wrong at the end of rows that begin with a given token."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong, self.device = wrong, torch.nn.Parameter(torch.zeros(1))
        self.lm_head = torch.nn.Identity()

    def model(self, tokens: Tensor) -> BaseModelOutputWithPast:
        coming = tokens.roll(-1, 1)
        coming = torch.where((tokens[:, :1] == self.wrong) & (coming == task.END), task.PAD, coming)
        logits = 9 * torch.nn.functional.one_hot(coming, task.VOCAB_SIZE).float()
        return BaseModelOutputWithPast(last_hidden_state=logits)


def test_exact_match_counts_whole_rows_and_the_end() -> None:
    model, lengths = Peeks(wrong=3), (2, 5, 9)
    recipe = Recipe(task="copy")
    for length in lengths:
        tokens, labels = Copy().sample(500, length, seed(7))
        expected = 1 - float((tokens[:, 0] == 3).float().mean())
        assert expected < 1
        assert score(model, recipe, "as trained", length, rows=500, seed=7).exact == pytest.approx(expected)
        assert tally(model, tokens, labels, 100).exact / 500 == pytest.approx(expected)
    assert tally(Peeks(wrong=task.EQUALS), *Copy().sample(1000, range(1, 20), seed())).exact == 1000
    tokens = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 0, 2]])  # and so it will be said, but in the second row
    labels = torch.tensor([[NOT_SCORED, 1, 2], [NOT_SCORED, 1, 2], [NOT_SCORED, NOT_SCORED, 2]])
    found = tally(model, tokens, labels, batch_size=2)
    assert (found.rows, found.scored, found.wrong, found.exact) == (3, 5, 1, 2)
    right = -torch.log_softmax(9 * torch.eye(task.VOCAB_SIZE)[0], 0)
    assert found.loss == pytest.approx(float(4 * right[0] + right[1]))


def test_mean_of_best() -> None:
    assert mean_of_best("exact", [0.2, 0.9, 0.5, 0.7]) == pytest.approx(0.7)
    assert mean_of_best("error", [0.2, 0.9, 0.5, 0.7]) == pytest.approx(1.4 / 3)
    assert mean_of_best("exact", [0.2, 0.9], best=1) == 0.9
    assert mean_of_best("exact", [0.2, 0.4]) == pytest.approx(0.3)


@pytest.mark.parametrize("values", [(5.0, math.nan, 2.0, 1.0, 3.0), (math.nan, 1.0, 2.0, 3.0, 5.0)])
def test_what_is_not_a_number_is_the_worst(values: tuple[float, ...]) -> None:
    """Wherever it stands."""
    assert mean_of_best("loss", values) == 2 and mean_of_best("exact", values) == pytest.approx(10 / 3)
    assert math.isnan(mean_of_best("loss", [math.nan, 1.0]))
    for measure in ("loss", "exact"):
        assert is_better(measure, 5.0, math.nan)
        assert not is_better(measure, math.nan, 5.0) and not is_better(measure, math.nan, math.nan)


def test_the_mean_of_the_best_three_is_reported(tmp_path: Path) -> None:
    """For each length on its own, whatever the last evaluation was."""
    run = Run.create(tmp_path, small("path", 0, "reporting=best-three", 'evaluators=["exact"]'))
    for step, exact in enumerate((0.2, 0.9, 0.5, 0.7, 0.1)):
        run.add_evaluation(step, [Score("dense", length, 0.5, exact / length, 1.0, 4) for length in (1, 2)])
    assert [run.reported()["dense", length].exact for length in (1, 2)] == pytest.approx([0.7, 0.35])


def test_exact_match_is_greedy_decoding() -> None:
    """A model that does not know the order of digits gets some rows right."""
    recipe = Recipe(encoding="nope", steps=120, batch_size=64, length=3, seed=2)
    model, one = make_model(recipe, 64), Copy()
    list(train(model, one, recipe))
    tokens, labels = one.sample(100, 3, seed(5))
    decoded = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False)
    matched = (decoded == tokens).all(1).float().tolist()
    assert 3 < sum(matched) < 97
    assert [tally(model, *pair).exact for pair in zip(tokens.split(1), labels.split(1), strict=True)] == matched


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", ["rope", "path", "path-fox", "prism", "random-rotation", "sinusoidal"])
def test_graphs_train_as_launches_do(encoding: str) -> None:
    """Two shapes of batches, of which the first comes back; what is drawn at random is the same too."""
    prism = {"positions": 32, "width": 8, "hidden": 8, "start": True}
    options = {"prism": prism, "sinusoidal": {"shift": 16}}
    curriculum = Curriculum(9, ((4, 3), (4, 9), (2, 3)), shortest=3)
    recipe = Recipe(encoding=encoding, encoding_options=options, steps=12, batch_size=64, curriculum=curriculum)
    losses = []
    for graphs in (False, True):
        training = Training(make_model(recipe, task.VOCAB_SIZE).to("cuda"), Copy(), recipe, graphs)
        losses.append([training.advance().loss for _ in range(recipe.steps)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.gpu
def test_what_was_remembered_goes_on_with_graphs() -> None:
    recipe = Recipe(encoding="path-fox", steps=8, batch_size=32, length=9)
    training = Training(make_model(recipe, task.VOCAB_SIZE).to("cuda"), Copy(), recipe)
    for _ in range(4):
        training.advance()
    model = make_model(recipe, task.VOCAB_SIZE).to("cuda")
    model.load_state_dict(training.model.state_dict())
    again = Training(model, Copy(), recipe)
    again.remember({name: x.cpu() for name, x in training.memory().items()}, training.done)
    losses = [[one.advance().loss for _ in range(4)] for one in (training, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_graphs_train_on_text_as_launches_do(packed: bool, accumulate: int) -> None:
    """The loss in chunks is captured too, batches come from pinned memory and in parts; packed ones are launched either
    way.
    """
    documents = [" ".join(f"word{(7 * n + k * k) % 31}" for k in range(60)) for n in range(40)]
    tokenizer = fit_tokenizer(documents, 300, "words")
    ids = np.array([i for text in documents for i in (*tokenizer.encode(text).ids, end_of(tokenizer))], np.uint16)
    text = Language(Corpus(ids, tokenizer), packed)
    recipe = Recipe(
        task="language", encoding="path-fox", steps=12, batch_size=16, accumulate=accumulate, length=64, tied=True
    )
    losses = []
    for graphs in (False, True):
        training = Training(make_model(recipe, text.vocab_size).to("cuda"), text, recipe, graphs)
        losses.append([training.advance().loss for _ in range(recipe.steps)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < losses[1][0] - 0.5
