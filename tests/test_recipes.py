"""Recipes: every experiment trains, texts are found, changes are checked, schedules."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import quiet, run_cli
from transformers import AutoTokenizer

import deadreckon as dr
from deadreckon.lab.evaluation import places_to_test, score
from deadreckon.lab.recipes import EXPERIMENTS, SIZES, Recipe, find_recipe, parse_sweep
from deadreckon.lab.recipes.texts import read_language
from deadreckon.lab.training import Training, make_model, train_run
from deadreckon.lab.training.engine import model_for_tests


def test_recipes_go_to_json_and_back() -> None:
    for name, experiment in EXPERIMENTS.items():
        for size in SIZES:
            recipe = experiment.recipe(size)
            assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
            assert max(recipe.test_lengths) > recipe.length
            if recipe.task == "language":
                continue
            assert recipe.length in recipe.make_task(next(iter(recipe.conditions))).lengths
            assert len({length for _, length in places_to_test(recipe)}) == len(recipe.test_lengths), name
        assert set(experiment.encodings) <= set(dr.ENCODINGS)


def test_figure_2_is_three_commands() -> None:
    """A5 in both forms by layers, MQRAR by how far back: every encoding of the paper, every value."""
    encodings = ("rope", "stickbreaking", "fox", "path")
    for name, field in (("a5-grid", "layers"), ("a5-products-grid", "layers"), ("mqrar-grid", "options.back")):
        assert EXPERIMENTS[name].encodings == encodings
        for size in SIZES:
            runs = EXPERIMENTS[name].recipes(size, encodings, seeds=2)
            found = {(r.encoding, r.layers if field == "layers" else r.options["back"], r.seed) for r in runs.values()}
            assert len(runs) == 32 and found == set(itertools.product(encodings, (1, 2, 3, 4), (0, 1)))
            assert f"path-{field}=3-1" in runs
    rates = parse_sweep(("options.back=1", "learning_rate=1e-3,1e-2"), ("rope",))
    assert len(EXPERIMENTS["mqrar-grid"].recipes("paper", ("rope",), 1, (), rates)) == 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Changes that name two small texts."""
    folder, chance = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = "here there every where a bell rang and nobody came to see what it had to say"
    for name, count in (("train", 20), ("valid", 10)):
        documents = [{"text": " ".join(chance.choices(words.split(), k=150))} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEADRECKON_CACHE", str(folder / "cache"))
        data, held_out = folder / "train.jsonl", folder / "valid.jsonl"
        yield f"options.data={data}", f"options.held_out={held_out}", "options.vocabulary=300"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_recipes_train(name: str, texts: tuple[str, ...]) -> None:
    encoding = EXPERIMENTS[name].encodings[0]
    changes = texts if EXPERIMENTS[name].paper.task == "language" else ()
    recipe = replace(find_recipe(name, "tiny", encoding, 0, changes), batch_size=4)
    task = recipe.make_task()
    model = make_model(recipe, task.vocab_size)
    training = Training(model, task, recipe)
    assert math.isfinite(training.advance().loss)
    condition, length = list(recipe.conditions)[-1], max(recipe.test_lengths)
    assert 0 <= score(model_for_tests(model, recipe), recipe, condition, length, rows=2).value("error") <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("packed=1", "options.packed: expected true or false, got 1"),
        ("questions=2", "options.questions: expected a share of the rows, from 0 to 1, got 2"),
        ("questions=true", "options.questions: expected a share of the rows, from 0 to 1, got True"),
        ("tasks=passkey", r'options.tasks: expected names in brackets, such as \["passkey", "vt"\], got .passkey.'),
    ],
)
def test_options_of_texts_that_cannot_be(change: str, message: str, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=message):
        find_recipe("long-context", "tiny", "rope", 0, [*texts, f"options.{change}"]).make_task()


@pytest.mark.parametrize("packed", ["true", "false"])
def test_a_text_is_learnt(packed: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    changes = (
        *texts, f"options.packed={packed}", "steps=40", "evaluate_every=20", "accumulate=2", "batch_size=4", "width=32",
        "learning_rate=0.02", "warmup=5", "length=64", "test_lengths=[32, 256]", "test_rows=4",
    )  # fmt: skip
    run = train_run(find_recipe("rotations", "tiny", "rope", 0, changes), tmp_path, console=quiet())
    losses = [line["loss"] for line in run.metrics()]
    assert losses[-1] < losses[0] - 1 and "error" not in run.metrics()[0]
    found = run.scores()["held out", 256]
    assert found.perplexity == pytest.approx(math.exp(found.loss)) and 1 < found.perplexity < 100
    assert AutoTokenizer.from_pretrained(tmp_path / "last")("a bell rang").input_ids


def test_texts_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{")
    for words, said in {
        "options.vocabulary=300": "options.data: expected a text to learn from; --change options.data=FILE",
        "options.data=bad.jsonl": "options.held_out: expected a text to test on, got none",
        "options.data=none.jsonl options.held_out=x": "data: expected a file, a folder or hf:NAME, got 'none.jsonl'",
        "options.data=bad.jsonl options.held_out=x": "bad.jsonl",
    }.items():
        assert run_cli(monkeypatch, "train", "rotations", "--out", "x", "--change", *words.split()) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("x").exists()
    with pytest.raises(ValueError, match="part: expected one of train, valid, test; got 'some'"):
        read_language("bad.jsonl", "bad.jsonl", part="some")


def test_recipes_are_changed_and_checked() -> None:
    recipe = find_recipe("flipflop", "paper", "fox", 7)
    assert (recipe.encoding, recipe.seed, recipe.length, recipe.steps) == ("fox", 7, 512, 10_000)
    changed = recipe.change(("steps=7", "learning_rate=1", "options.ignore=0.5", "betas=[0.8, 0.9]", "schedule=cosine"))
    assert changed.differences(recipe)[0] == "options {'ignore': 0.5}, not {}"
    assert recipe.change(["encoding_options.path.rank=8"]).differences(recipe) == []  # it is FoX's
    assert recipe.change(["encoding_options.fox.bias=1.0"]).differences(recipe) == [
        "encoding_options {'bias': 1.0}, not {}"
    ]
    assert (changed.steps, changed.learning_rate, changed.betas, changed.schedule) == (7, 1.0, (0.8, 0.9), "cosine")
    assert changed.make_task() == type(recipe.make_task())(ignore=0.5)  # type: ignore[call-arg]
    assert changed.change(("curriculum.longest=9",)).lengths_at(0) == range(1, 10)
    for change, said in {
        "steps": "change: expected field=value, such as steps=100, got 'steps'",
        "pace=3": "recipe: expected names of its fields, task, options, length,",
        "stepz=3": "; got stepz",
        "steps=many": "steps: expected int, got 'many'",
        "steps=0": "steps: expected 1 or more, got 0",
        "steps.more=1": "change: expected a field of the recipe, got 'steps.more'",
        'evaluators=["error", "exact"]': "evaluators: expected each once, and one of error, exact, perplexity, whose "
        "scores have the same place; got error, exact",
        "curriculum.stages=[]": "curriculum: expected Curriculum | None, got {'stages': []}",
        "tied=1": "tied: expected bool, got 1",
        "accumulate=5": "accumulate: expected a divisor of batch_size = 16, got 5",
        "schedule=slow": "schedule: expected one of linear, cosine, constant; got 'slow'",
        'evaluators=["fun"]': "evaluators: expected one of error, exact, perplexity, perplexity-window,",
        "ends.never=1": "ends: expected reached or patience, got 'never'",
        "ends.patience=0.5": "ends.patience: expected a whole number of evaluations, 1 or more, got 0.5",
        "ends.reached=soon": "ends.reached: expected a number, got 'soon'",
        "reporting=first": "reporting: expected one of last, every, best-three; got 'first'",
        "encoding_options.rank=8": "encoding_options: expected options by encoding, such as",
        "schedules.gamma=[[0, 1]]": "length, noise, angle_factor, new_factor, got",
        "schedules.noise=[[0.5, 1], [0.2, 2]]": "schedules.noise: expected points [share of the steps, value",
        "floor=2": "learning_rate, warmup, floor: expected above 0, 0 or more and a share, got 0.003, 50, 2.0",
        "conditions={}": "conditions: expected one or more, got none",
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            recipe.change((change,))
    with pytest.raises(ValueError, match=r"options: expected keywords of flip-flop, got \{'colour': 1\}"):
        recipe.change(("options.colour=1",)).make_task()
    with pytest.raises(ValueError, match="task: expected one of flip-flop, addition,"):
        recipe.change(("task=chess",)).make_task()
    with pytest.raises(ValueError, match="condition: expected one of as trained, sparse, dense; got 'hot'"):
        recipe.make_task("hot")


def test_schedules() -> None:
    base = Recipe(steps=100, warmup=10, learning_rate=2.0)
    rates = {
        name: [replace(base, schedule=name, floor=floor).learning_rate_at(step) for step in (0, 9, 50, 100)]
        for name, floor in (("linear", 0.0), ("cosine", 0.1), ("constant", 0.0))
    }
    assert rates["linear"] == pytest.approx([0.2, 1.82, 1.0, 0.0])
    assert rates["cosine"][2:] == pytest.approx([2 * (0.1 + 0.9 * 0.5), 0.2])
    assert rates["constant"] == pytest.approx([0.2, 2.0, 2.0, 2.0])
    assert replace(base, warmup=0, schedule="constant").learning_rate_at(0) == 2.0
    points = {"learning_rate": [[0, 0], [0.5, 1], [1, 0.5]], "length": [[0.2, 10], [0.4, 20]]}
    free = replace(base, schedules=points)
    assert [free.learning_rate_at(step) for step in (0, 25, 50, 75)] == pytest.approx([0, 1, 2, 1.5])
    assert free.learning_rate_at(25, peak=0.4) == pytest.approx(0.2)
    assert [free.lengths_at(step) for step in (0, 20, 30, 40, 99)] == [10, 10, 15, 20, 20]
