"""PRISM's tasks: settings, results and pictures, and that copying goes beyond its lengths."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deadreckon as dr
from deadreckon.encodings.cursors import Cursors
from deadreckon.lab import prism as lab
from deadreckon.lab.evaluation import exact_match_by_length
from deadreckon.lab.probe.cursors_picture import show
from deadreckon.lab.training import train

TINY = "--width 32 --layers 2 --heads 2 --pe-width 16 --positions 32 --batch-size 4 --count 4 --evaluations 4 --steps 4"


def settings(*arguments: str, encoding: str = "prism") -> lab.Settings:
    return lab.settings_of(lab.parse(arguments), encoding)


def test_settings_are_the_papers() -> None:
    reverse = settings("--task", "reverse")
    assert reverse.options()["copy"] == 5 and reverse.options()["modules"] == [0] and reverse.width == 192
    assert reverse.curriculum().stages == ((250, 5), (250, 10), (500, 20), (500, 30)) and reverse.longest == 40
    assert settings("--task", "stack").options()["modules"] == [0, 3]
    assert settings("--task", "addition", "--pace", "1").curriculum().stages == ((5000, 5),)
    assert settings("--task", "copy", "--longest", "10").lengths == (5, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100)
    assert settings("--task", "copy", encoding="sinusoidal").options()["shift"] == 256
    assert settings("--task", "copy", "--lengths", "99").positions == 256 and settings(*TINY.split()).positions == 32
    assert settings("--task", "copy", "--lengths", "9").positions == 128  # 40 are trained on, 82 tokens
    far = settings("--task", "copy", "--longest", "10", "--lengths", "99")
    assert (far.near, far.positions) == (64, 256)  # 22 tokens in training, 200 in tests
    assert far.options(near=True) == {**far.options(), "positions": 64}
    scan = settings("--task", "scan")
    assert all(n in scan.make_task(n).lengths for n in scan.lengths)
    assert lab.best_by_length([{5: 0.2, 9: 0.1}, {5: 0.4, 9: 0.0}]) == pytest.approx({5: 0.3, 9: 0.05})
    best = lab.best_by_length([{5: share} for share in (0.2, 0.9, 0.5, 0.7)])
    assert best == pytest.approx({5: 0.7})
    grows = settings("--noise", "0.2", "1", "--steps", "1000")
    assert [grows.noise_at(n) for n in (0, 300, 450, 600, 1000)] == pytest.approx([0.2, 0.2, 0.6, 1, 1])
    assert settings("--noise", "2").noise_at(0) == 2 and settings().noise_at(5000) == 0
    for wrong in (["-1"], ["0", "1", "2"]):
        with pytest.raises(ValueError, match="noise: expected one or two numbers of 0 or more, got"):
            settings("--noise", *wrong)


def test_noise_grows_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each step adds to gates, seen where it is added; none in the evaluations between them."""
    seen: list[float] = []
    decide = Cursors._decide

    def look(self: Cursors, part: Any, hidden: Any) -> Any:
        if self.training:
            seen.append(float(self.noise))
        return decide(self, part, hidden)

    monkeypatch.setattr(Cursors, "_decide", look)
    chosen = settings("--task", "copy", "--lengths", "2", "--noise", "0", "1", *TINY.split())
    lab.run(replace(chosen, recipe=replace(chosen.recipe, steps=10)), "cpu", None)
    assert seen == pytest.approx([chosen.noise[1] * share for share in (0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1)])


def test_runs_leave_results_pictures_and_a_model_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["--task", "reverse", "--lengths", "2", "3", "--save", str(tmp_path), *TINY.split()])
    said = capsys.readouterr().out
    assert said.count("step") == 8 and "reverse sinusoidal: exact match" in said
    results = json.loads((tmp_path / "prism-0.json").read_text())
    assert [one["step"] for one in results["evaluations"]] == [1, 2, 3, 4] and set(results["best"]) == {"2", "3"}
    assert results["recipe"]["curriculum"]["longest"] == 40 and results["options"]["copy"] == 5
    page = (tmp_path / "lengths.md").read_text()
    assert "# reverse: exact match by length" in page and page.count("| 4 of 4 |") == 2
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    lab.main(["--show", str(tmp_path / "prism-0"), "--input", "123", "--layer", "1", "--head", "1"])
    assert capsys.readouterr().out.replace(" ", "").startswith("123=")
    assert (tmp_path / "prism-0" / "cursors.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="model: expected one with the encoding prism, got"):
        lab.main(["--show", str(tmp_path / "sinusoidal-0")])
    with pytest.raises(ValueError, match="draw: expected a folder with results"):
        lab.main(["--draw", str(tmp_path / "prism-0")])


def test_copying_is_learnt_and_goes_beyond_the_lengths_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on up to 5 digits; guessing 8 digits and the end would be right once in 10⁸."""
    arguments = "--longest 5 --steps 140 --batch-size 32 --learning-rate 3e-3 --similarity 10 --pace 0.001"
    sizes = "--width 64 --layers 1 --heads 2 --pe-width 32 --positions 32"
    chosen = settings(*arguments.split(), *sizes.split())
    model = chosen.model()
    list(train(model, chosen.make_task(), replace(chosen.recipe, curriculum=chosen.curriculum())))
    found = exact_match_by_length(model, chosen.make_task(), (5, 8), count=100)
    assert found[5] > 0.9 and found[8] > 0.3
    assert show(model, "31415", tmp_path / "cursors.png") == "31415=31415."
    model.save_pretrained(tmp_path / "saved")
    lab.main(["--score", str(tmp_path / "saved"), "--task", "copy", "--count", "100", "--lengths", "5", "8", "40"])
    scores = dict(re.findall(r"exact match at (\d+), of 100: ([\d.]+)%", capsys.readouterr().out))
    assert [float(scores[n]) for n in ("5", "8")] == pytest.approx([100 * found[n] for n in (5, 8)], abs=1)
    assert float(scores["40"]) <= float(scores["8"])
    config = dr.DeadReckonConfig(encoding="nope", vocab_size=5, hidden_size=16, num_hidden_layers=1)
    dr.DeadReckonForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="task: expected one of 5 tokens, as the model has, got 'copy'"):
        lab.main(["--score", str(tmp_path / "other"), "--task", "copy"])
    for action in ("--score", "--show"):
        with pytest.raises(ValueError, match=r"model: expected a folder with config\.json, as save_pretrained"):
            lab.main([action, str(tmp_path / "nowhere")])
