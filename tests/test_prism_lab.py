"""PRISM's experiments: recipes that are the paper's, the best evaluations reported, copying beyond training lengths."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import quiet, run_cli

import deadreckon as dr
from deadreckon.encodings.cursors import Cursors
from deadreckon.lab.pages.compare import compare
from deadreckon.lab.pages.comparison import alike
from deadreckon.lab.pages.report import write_report
from deadreckon.lab.probe.cursors import show
from deadreckon.lab.recipes import EXPERIMENTS, SIZES, find_recipe
from deadreckon.lab.recipes.prism import PRISM
from deadreckon.lab.training import Run, Training, make_model, score_model, train, train_run
from deadreckon.lab.training.engine import config_for_tests, model_for_tests

TINY = (
    "width=32", "heads=2", "encoding_options.prism.width=16", "batch_size=4", "test_rows=4", "validation_rows=2",
    "steps=4", "evaluate_every=1",
)  # fmt: skip


def test_recipes_are_the_papers() -> None:
    reverse = find_recipe("reverse", "paper", "prism")
    assert (reverse.width, reverse.layers, reverse.heads, reverse.tied) == (192, 5, 8, True)
    assert reverse.initial == pytest.approx(192**-0.5)
    assert (reverse.steps, reverse.batch_size, reverse.learning_rate) == (150_000, 100, 9e-5)
    assert reverse.betas[1] == 0.98 and reverse.weight_decay == 0.01
    assert reverse.test_rows == 1000 and reverse.reporting == "best-three" and reverse.evaluators == ("exact",)
    options = reverse.options_in_training()
    assert options["copy"] == 5 and "modules" not in options
    assert options["similarity"] == 20 and options["width"] == 340
    assert find_recipe("reverse", "small", "prism").curriculum.stages == ((250, 5), (250, 10), (500, 20), (500, 30))  # type: ignore[union-attr]
    assert reverse.length == 40
    for name in ("stack", "odds-first"):
        assert find_recipe(name, "paper", "prism").options_in_training()["modules"] == [0, 3]
    assert find_recipe("addition", "paper", "prism").curriculum.stages == ((5000, 5),)  # type: ignore[union-attr]
    assert find_recipe("copy-10", "small", "prism").test_lengths == (5, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100)
    for name in EXPERIMENTS:  # the last stage of every curriculum is reached in four fifths of the steps
        for size in SIZES:
            recipe = find_recipe(name, size)
            stages = recipe.curriculum.stages if recipe.curriculum else ()
            assert sum(steps for steps, _ in stages) <= recipe.steps * 0.8, (name, size)
    baseline = find_recipe("copy", "paper", "sinusoidal")
    assert find_recipe("copy", "paper", "prism").options_in_training()["copy"] == 0
    assert baseline.width == 512 and baseline.options_in_training()["shift"] == 256
    assert baseline.options_in_training()["gain"] == pytest.approx(2**0.5 * baseline.initial)


@pytest.mark.parametrize("name", PRISM)
def test_recipes_of_figures_are_prisms(name: str) -> None:
    """Sections 6.0.1 and 6.1 to 6.4 of the paper, for every figure; none of our own improvements."""
    recipe, baseline = (find_recipe(name, "paper", encoding) for encoding in ("prism", "sinusoidal"))
    assert (recipe.width, baseline.width) == (192, 512)
    for one in (recipe, baseline):
        assert (one.layers, one.heads, one.tied) == (5, 8, True)
        assert (one.steps, one.batch_size, one.learning_rate, one.betas) == (150_000, 100, 9e-5, (0.9, 0.98))
        assert (one.test_rows, one.evaluate_every, one.reporting) == (1000, 1000, "best-three")
        assert one.evaluators == ("exact",) and not one.schedules
    options = recipe.encoding_options["prism"]
    assert options["width"] == 340
    assert options["copy"] == (5 if recipe.task in ("reverse", "scan", "dynamic-copy") else 0)
    assert options.get("modules", [0]) == ([0, 3] if recipe.task in ("odds-first", "stack") else [0])
    assert options.keys() <= {"width", "copy", "modules", "positions", "similarity"}  # all else is the default
    defaults = {name: one.default for name, one in inspect.signature(dr.ENCODINGS["prism"]).parameters.items()}
    expected = {"gamma": 2.0, "noise": 0.0, "norm": None, "start": False, "orthogonality": 1e-3, "cursors": 4}
    assert {name: defaults[name] for name in expected} == expected
    assert baseline.encoding_options["sinusoidal"]["shift"] == "test_positions"


def test_positions_while_training_and_testing() -> None:
    far = find_recipe("copy-10", "small", "prism", changes=("test_lengths=[99]",))
    assert far.options_in_training()["positions"] == 32  # 22 tokens in training, 200 in tests
    assert far.options_in_tests() == {"positions": 256} and far.options_in_tests((150,)) == {"positions": 320}
    options = far.options_in_training()
    config = dr.DeadReckonConfig(encoding="prism", encoding_options={"prism": options})
    assert config_for_tests(config, far).encoding_options == {"prism": options | {"positions": 256}}
    near = find_recipe("copy", "small", "prism", changes=("test_lengths=[9]",))
    assert near.options_in_tests() == {"positions": 128}  # 40 are trained on, 82 tokens
    fixed = replace(far, train_positions=32, test_positions=48)
    assert fixed.options_in_training()["positions"] == 32 and fixed.options_in_tests() == {"positions": 48}
    assert replace(far, encoding="rope").options_in_tests() == {}
    scan = find_recipe("scan", "small", "prism")
    assert scan.options_in_tests()["positions"] >= scan.options_in_training()["positions"]


def test_noise_grows_in_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What each step adds to gates, seen where it is added; none in the evaluations between them."""
    seen: list[float] = []
    decide = Cursors._decide

    def look(self: Cursors, part: Any, hidden: Any) -> Any:
        if self.training:
            seen.append(float(self.noise))
        return decide(self, part, hidden)

    monkeypatch.setattr(Cursors, "_decide", look)
    changes = (*TINY, "steps=10", "test_lengths=[9]", "schedules.noise=[[0.3, 0], [0.6, 1]]")
    train_run(find_recipe("copy", "tiny", "prism", changes=changes), tmp_path, console=quiet())
    assert seen == pytest.approx([0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1])
    constant = find_recipe("copy", "tiny", "prism", changes=("schedules.noise=[[0, 2]]",))
    assert constant.scheduled_at(0) == constant.scheduled_at(599) == {"noise": 2}
    grows = find_recipe("copy", "tiny", "prism", changes=("steps=1000", "schedules.noise=[[0.3, 0.2], [0.6, 1]]"))
    values = [grows.scheduled_at(step)["noise"] for step in (0, 300, 450, 600, 999)]
    assert values == pytest.approx([0.2, 0.2, 0.6, 1, 1])
    assert replace(grows, encoding="rope").scheduled_at(500) == {}


def test_a_comparison_reports_the_best_three(tmp_path: Path) -> None:
    page, console = tmp_path / "page.md", quiet()
    changes = (*TINY, "test_lengths=[2, 9]")
    found = compare("reverse", ("prism", "sinusoidal"), changes=changes, runs=tmp_path, page=page, console=console)
    [path] = tmp_path.rglob("prism-0")
    run = Run(path)
    lines = run.lines("evaluations")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for length in (2, 9):
        shares = [one["exact"] for line in lines for one in line["scores"] if one["length"] == length]
        assert len(shares) == 4
        assert found.values["prism"]["as trained", length] == [pytest.approx(sum(sorted(shares)[1:]) / 3)]
    assert run.scores()["as trained", 9].exact == lines[-1]["scores"][-1]["exact"]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Exact match in % by length, as trained, trained at 8, one seed; for each seed the mean of the three" in said
    assert "| length | PRISM | sinusoidal |" in page.read_text() and run.starts()[0]["command"] in page.read_text()
    write_report([tmp_path], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text().count("<h2>") == 1
    assert len({str(alike(find_recipe("copy", "small", name))) for name in ("prism", "sinusoidal")}) == 1
    with pytest.raises(ValueError, match=r"lengths: expected some of 2, 9, where this recipe evaluates while training"):
        compare("reverse", ("prism",), changes=changes, lengths=(3,), runs=tmp_path, console=quiet())


def test_the_best_three_survive_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = find_recipe("copy", "tiny", "prism", 1, (*TINY, "steps=6", "evaluate_every=2", "test_lengths=[9]"))
    whole = train_run(recipe, tmp_path / "whole", console=quiet())
    advance, left = Training.advance, [0]

    def interrupted(self: Training) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Training, "advance", interrupted)
    for steps in (2, 4):  # within the first stretch, and after an evaluation that was saved
        left[0] = steps
        with pytest.raises(KeyboardInterrupt):
            train_run(recipe, tmp_path / "torn", console=quiet())
    torn = train_run(recipe, tmp_path / "torn", console=quiet())
    assert torn.lines("evaluations") == whole.lines("evaluations") and torn.reported() == whole.reported()


def test_copying_is_learnt_and_goes_beyond_the_lengths_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on up to 5 digits; guessing 8 digits and the end would be right once in 10⁸."""
    monkeypatch.setenv("COLUMNS", "200")
    changes = (
        "layers=1", "length=5", "steps=140", "batch_size=32", "train_positions=32", "test_positions=32",
        'curriculum={"longest": 5}', "warmup=100", "test_lengths=[5, 8]", "test_rows=100",
    )  # fmt: skip
    recipe = find_recipe("copy", "tiny", "prism", 0, changes)
    model = make_model(recipe, 64)
    list(train(model, recipe.make_task(), recipe))
    model.save_pretrained(tmp_path / "saved")
    scores = score_model(tmp_path / "saved", recipe)
    found = {length: score.value("exact") for (_, length), score in scores.items()}
    assert found[5] > 0.9 and found[8] > 0.3
    assert show(model_for_tests(model, recipe), "31415", tmp_path / "cursors.png") == "31415=31415."
    saved = str(tmp_path / "saved")
    words = ["eval", saved, "--recipe", "copy", "--lengths", "5,8,40", "--change", "test_rows=100"]
    assert run_cli(monkeypatch, *words) == 0
    said = dict(re.findall(r"(\d+): ([\d.e-]+)%", capsys.readouterr().out))
    assert [float(said[n]) for n in ("5", "8")] == pytest.approx([100 * found[n] for n in (5, 8)], abs=1)
    assert float(said["40"]) <= float(said["8"])
    config = dr.DeadReckonConfig(encoding="nope", vocab_size=5, hidden_size=16, num_hidden_layers=1)
    dr.DeadReckonForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="recipe: expected a task of 5 tokens, as the model has, got copy, of 64"):
        score_model(tmp_path / "other", find_recipe("copy"))
    with pytest.raises(ValueError, match=r"model: expected a folder with config\.json, as save_pretrained"):
        score_model(tmp_path / "nowhere", find_recipe("copy"))
