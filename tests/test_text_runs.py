"""The commands that train small language models alike, and compare them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deadreckon.lab import power_figures, rotation_table, text_pages, text_runs
from deadreckon.lab.text_runs import Plan, Results, Run
from deadreckon.lab.training import Training, make_model
from deadreckon.tasks.language import Corpus, Language, load_corpus, open_corpus, save_corpora


def story(number: int, words: int) -> str:
    picks = torch.randint(0, 20, (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return " ".join(f"word{pick}" for pick in picks)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    data = write_jsonl(folder / "a.jsonl", [story(number, 100) for number in range(8)])
    return load_corpus(data, vocabulary=280, cache=folder)


def test_comparisons_go_on_where_they_stopped(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(text_runs.SIZES, "tiny", (16, 1, 1))
    save_corpora(tmp_path, {"train": corpus, "valid": corpus})

    def give(module: ModuleType, *more: str) -> tuple[bool, dict[str, dict]]:
        save = tmp_path / f"{module.__name__}.json"
        given = ["x", "--data", str(tmp_path), "--size", "tiny", "--steps", "12", "--batch-tokens", "64"]
        monkeypatch.setattr(sys, "argv", [*given, "--tokens", "256", "--save", str(save), *more])
        done = module.main()
        return done, json.loads(save.read_text())["runs"] if save.exists() else {}

    table = ("--length", "16", "--lengths", "16,64")
    assert give(rotation_table, *table, "--encodings", "rope", "--minutes", "0") == (False, {})
    assert "give the command again for: rope at 16" in capsys.readouterr().out
    done, runs = give(rotation_table, *table, "--encodings", "rope")
    assert done and list(runs) == ["rope at 16"]
    assert [(score["length"], score["window"]) for score in runs["rope at 16"]["scores"]] == [
        (16, None), (64, None), (64, 16)
    ]  # fmt: skip
    assert [step for step, _ in runs["rope at 16"]["curve"]] == list(range(1, 13))
    capsys.readouterr()
    done, more = give(rotation_table, *table, "--encodings", "rope,alibi")
    assert done and list(more) == ["rope at 16", "alibi at 16"] and more["rope at 16"] == runs["rope at 16"]
    said = capsys.readouterr().out
    assert "rope at 16" not in said
    ratio = [score["perplexity"] for score in more["rope at 16"]["scores"]]
    assert f"| rope | {ratio[0]:.2f} | {ratio[1]:.2f} | {ratio[2]:.2f} | {ratio[1] / ratio[0]:.2f}× |" in said
    with pytest.raises(ValueError, match=r"save: expected results of the same settings, got other \['seed'\]"):
        give(rotation_table, *table, "--seed", "1")
    done, runs = give(
        power_figures, "--lengths", "8,16", "--powers", "2", "--encodings", "rope,sympow", "--bins", "4", "--packed"
    )
    assert done and list(runs) == ["rope at 8", "sympow p=2 at 8", "rope at 16", "sympow p=2 at 16"]
    assert [runs[name]["positions"][-1]["last"] for name in runs] == [32, 32, 64, 64]
    assert runs["sympow p=2 at 8"]["loss"] != runs["rope at 8"]["loss"]
    assert f"| sympow p=2 | 16 | {runs['sympow p=2 at 16']['loss']:.4f} |" in capsys.readouterr().out
    for module, expected in (
        (rotation_table, f"| RoPE | {ratio[0]:.2f} | {ratio[1]:.2f} |"),
        (power_figures, f"| sympow p = 2 | {runs['sympow p=2 at 8']['loss']:.4f} |"),
    ):
        page = tmp_path / f"{module.__name__}.md"
        text_pages.write([tmp_path / f"{module.__name__}.json"], page)
        assert ("| RoPE | 23.54 |" in page.read_text()) == (module is rotation_table)  # what the paper has
        assert expected in page.read_text() and page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="results: expected files of one comparison, got other settings"):
        text_pages.read([tmp_path / f"{module.__name__}.json" for module in (rotation_table, power_figures)])


def test_losses_within_and_beyond_the_context() -> None:
    positions = [{"first": 1, "last": 1, "loss": 9.0}, {"first": 2, "last": 4, "loss": 5.0}]
    positions += [{"first": 5, "last": 6, "loss": 3.0}, {"first": 7, "last": 12, "loss": 7.0}]
    run = {"encoding": "sympow", "options": [["p", 4]], "length": 4, "loss": 2.0, "positions": positions}
    assert power_figures.tabulate([run]).splitlines()[-1] == "| sympow p=4 | 4 | 2.0000 | 6.0000 | 6.0000 |"
    assert math.isnan(power_figures.mean_loss([]))


def test_runs_are_alike_but_for_their_encoding(corpus: Corpus) -> None:
    recipe = text_runs.recipe_of(Run("rope", 16), Plan("", "tiny", steps=10, batch_tokens=64))
    losses = [
        text_runs.train(Training(make_model(recipe, 280), Language(corpus), recipe), print, math.inf) for _ in range(2)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert text_runs.curve([1.0, 2.0, 3.0, 6.0, 7.0], 3) == [(2, 1.5), (4, 4.5), (5, 7.0)]
    rates = [recipe.learning_rate_at(step) for step in range(10)]
    assert max(rates) == rates[0] == recipe.learning_rate and 0.1 < rates[-1] / rates[0] < 0.15
    assert recipe.batch_size == 4
    with pytest.raises(ValueError, match=r"size: expected one of tiny, .*; got 'huge'"):
        Plan("", "huge")


def test_other_files_are_not_results(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="save: expected a file of results, or none, got"):
        Results.open(tmp_path / "a.json", {})


def test_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate(("train", "valid")):
        write_jsonl(tmp_path / f"{name}.jsonl", [story(number, 50)])
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "valid")]
    monkeypatch.setattr(
        sys, "argv", ["x", *files, "--save", str(tmp_path / "out"), "--vocabulary", "280", "--most", "60"]
    )
    assert text_runs.prepare()
    assert "60 tokens to train on" in capsys.readouterr().out
    assert Language(open_corpus(tmp_path / "out", "valid")).spell(
        open_corpus(tmp_path / "out", "valid").rows(20, 20)[0]
    ) in story(1, 50)


def test_commands_need_no_command_line_libraries() -> None:
    """They run on machines that have what a model needs, and no more."""
    modules = "deadreckon.lab.rotation_table, deadreckon.lab.power_figures"
    code = (
        f"import sys; [sys.modules.update({{name: None}}) for name in ('rich', 'tyro', 'matplotlib')]; import {modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
