"""Runs on a text that changes, grows or is tested at more lengths: scores stay on the same tokens, or it raises."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet, run_cli
from test_text_experiments import story, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM

from deadreckon.lab.evaluation import Score
from deadreckon.lab.pages.compare import compare
from deadreckon.lab.pages.comparison import gather, paired_table
from deadreckon.lab.probe.source import Source
from deadreckon.lab.recipes import find_recipe
from deadreckon.lab.recipes.texts import _read, fast_tokenizer
from deadreckon.lab.training import Run, score_model, score_run, train_run

SIZES = (
    "layers=1", "width=16", "heads=1", "batch_size=4", "length=16", "evaluate_every=2", "validation_rows=2",
    "test_tokens=256", "steps=4", "test_lengths=[16]", "options.vocabulary=280",
)  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Changes of a recipe that learns from a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    _read.cache_clear()
    for name, first in (("train", 0), ("valid", 20)):
        write_jsonl(tmp_path / f"{name}.jsonl", [story(number, 100) for number in range(first, first + 8)])
    return *SIZES, "options.data=train.jsonl", "options.held_out=valid.jsonl"


def change() -> None:
    """Another text takes the place of what was learnt from."""
    write_jsonl(Path("train.jsonl"), [f"quite other words {number * 7919}" for number in range(200)])
    _read.cache_clear()  # as in another process


def figures(scores: dict[Any, Score]) -> dict[Any, tuple[float, int]]:
    return {place: (one.loss, one.longest) for place, one in scores.items()}


def trained(texts: tuple[str, ...], out: str, encoding: str = "rope", *more: str) -> Run:
    return train_run(find_recipe("rotations", "tiny", encoding, changes=(*texts, *more)), Path(out), console=quiet())


def test_a_run_keeps_its_tokenizer(texts: tuple[str, ...]) -> None:
    """Another one of as many tokens would be trained on the text as it is now."""
    run = trained(texts, "run")
    shutil.copytree("run", "copy")
    expected = score_run(run, (32,), console=quiet())
    tokens = fast_tokenizer("run/last").get_vocab()
    change()
    assert run.recipe.make_task().corpus.tokenizer.get_vocab() != tokens  # type: ignore[attr-defined]
    copy = Run(Path("copy"))
    assert copy.recipe_in_use.make_task().corpus.tokenizer.get_vocab() == tokens  # type: ignore[attr-defined]
    assert figures(score_run(copy, (32,), console=quiet())) == figures(expected)
    training, _ = copy.restore("cpu")
    assert training.task.corpus.tokenizer.get_vocab() == tokens  # type: ignore[attr-defined]


def test_other_texts_are_tested_in_the_same_tokens(
    texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or not at all."""
    trained(texts, "run", "rope", "options.vocabulary=262")  # which either text fills
    write_jsonl(Path("other.jsonl"), [f"quite other words {number * 7919}" for number in range(200)])
    words = ["eval", "run", "--change", "options.data=other.jsonl"]
    assert run_cli(monkeypatch, *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "options.data: expected a text in the tokens of the model, got others; --change options.tok" in said
    assert run_cli(monkeypatch, *words, "options.tokenizer=run/last") == 0
    assert run_cli(monkeypatch, "eval", "run", "--change", "test_tokens=128") == 0


def test_lengths_that_come_later_are_of_the_same_texts(texts: tuple[str, ...]) -> None:
    """Whatever was asked for before: rows are as long as the greatest length of all."""
    run = trained(texts, "run")
    shutil.copytree("run", "copy")
    at_once = score_run(run, (16, 32, 64), console=quiet())
    assert {one.longest for one in at_once.values()} == {64}
    copy = Run(Path("copy"))
    assert score_run(copy, (32,), console=quiet())["held out", 32].longest == 32
    score_run(copy, (64,), console=quiet())
    assert figures(copy.scores()) == figures(run.scores()) == figures(at_once)
    assert figures(score_run(copy, (16,), console=quiet())).items() <= figures(at_once).items()


@pytest.mark.parametrize("reporting", ["last", "every", "best-three"])
def test_figures_are_computed_again_once(
    reporting: str, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are kept while training, on texts of then."""
    run = trained(texts, "run", "rope", f"reporting={reporting}")
    score_run(run, (32,), console=quiet())
    assert {one.longest for one in run.scores().values()} == {32}
    monkeypatch.setattr(Run, "load", lambda *_: pytest.fail("computed again"))
    score_run(run, console=quiet())


def test_longer_rows_of_a_text_that_is_shorter_than_a_test(texts: tuple[str, ...]) -> None:
    run = trained(texts, "run", "rope", "test_lengths=[16,32,100000]")
    assert {length for _, length in run.scores()} == {16, 32}
    found = score_run(run, longest=200_000, console=quiet())
    assert {(length, one.longest) for (_, length), one in found.items()} == {(16, 200_000), (32, 200_000)}


def test_a_model_is_probed_without_the_text_it_was_tested_on(texts: tuple[str, ...]) -> None:
    run = trained(texts, "run")
    Path("valid.jsonl").unlink()
    _read.cache_clear()  # as in another process
    rows = Source(run.path).rows("", 2, 64, 0)
    assert rows.tokens.shape == (2, 64) and rows.trained == 16


def test_swept_lengths_are_scored_once(texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of other tests are on other texts, and stay there."""
    for _ in range(2):
        compare(
            "rotations", encodings=("rope",), size="tiny", changes=texts, sweep=("length=16,32",), runs=Path("runs"),
            console=quiet(),
        )  # fmt: skip
        monkeypatch.setattr(Run, "load", lambda *_: pytest.fail("computed again"))


def test_differences_are_of_the_same_texts(texts: tuple[str, ...]) -> None:
    runs = [trained(texts, f"runs/{encoding}", encoding) for encoding in ("rope", "fox")]
    comparison = gather("x", runs)
    assert paired_table(comparison, "held out")[2] != [["16", ""]]  # type: ignore[index]
    texts_of_fox = comparison.texts["fox"]["held out", 16]
    comparison.texts["fox"]["held out", 16] = [replace(one, longest=17) for one in texts_of_fox]
    assert paired_table(comparison, "held out")[2] == [["16", ""]]  # type: ignore[index]


def test_a_held_out_text_that_has_changed_is_not_paired(texts: tuple[str, ...]) -> None:
    """As long as before, of other words: RoPE's figures are of what it was. Those of earlier versions are believed."""
    rope = trained(texts, "runs/rope", "rope")
    write_jsonl(Path("valid.jsonl"), [story(number, 100) for number in range(30, 38)])
    _read.cache_clear()  # as in another process
    fox = trained(texts, "runs/fox", "fox")
    comparison = gather("x", [rope, fox])
    assert paired_table(comparison, "held out")[2] == [["16", ""]]  # type: ignore[index]
    before = comparison.texts["rope"]["held out", 16]
    comparison.texts["rope"]["held out", 16] = [replace(one, digest="") for one in before]
    assert paired_table(comparison, "held out")[2] != [["16", ""]]  # type: ignore[index]


def test_probes_read_the_texts_of_json_lines(texts: tuple[str, ...]) -> None:
    """And not their quotes and braces."""
    run = trained(texts, "run")
    tokens = Source(run.path).rows("valid.jsonl", 1, 32, 0).tokens[0].tolist()
    said = fast_tokenizer("run/last").decode(tokens)
    assert len(said) > 30 and story(20, 100).startswith(said)


def test_a_text_that_is_shorter_than_a_test(texts: tuple[str, ...]) -> None:
    """What it has is tested, to its last token but one, which is the last that anything can be said of."""
    run = trained(texts, "run", "rope", "test_lengths=[16, 100000]")
    assert {length for name, length in run.scores() if name == "held out"} == {16}
    tokens = len(run.recipe.make_task("held out").corpus.ids)  # type: ignore[attr-defined]
    assert ("held out", tokens - 1) in score_run(run, (tokens - 1,), console=quiet())
    with pytest.raises(ValueError, match=f"lengths: expected lengths that language .* has, got {tokens}"):
        score_run(run, (tokens,), console=quiet())


def test_models_may_have_more_tokens_than_the_text(texts: tuple[str, ...]) -> None:
    """As many checkpoints have, whose vocabularies are padded."""
    run = trained(texts, "run")
    expected = figures(score_run(run, (16,), console=quiet()))
    model = run.load()
    model.resize_token_embeddings(model.config.vocab_size + 7)
    with torch.no_grad():
        model.get_output_embeddings().weight[-7:] = 0
    model.save_pretrained("more")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.path / "last" / name, "more")
    recipe = replace(run.recipe, options=run.recipe.options | {"tokenizer": "more"})
    found = figures(score_model(Path("more"), recipe, (16,), console=quiet()))
    [place] = [place for place in found if place == ("held out", 16)]
    assert expected[place][0] < found[place][0] < expected[place][0] + 0.1  # seven more that could have been said


def test_nothing_is_cut_off(texts: tuple[str, ...]) -> None:
    assert trained(texts, "run", "rope", "clip=Infinity").finished


def test_more_seeds_encodings_and_lengths(texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a comparison: all of its cells are of the same texts in the end."""
    for encodings, seeds, lengths in (
        (("rope",), 1, (16, 32)),
        (("rope", "fox"), 2, (16, 32, 64)),
        (("nope",), 1, (16,)),
    ):
        compare(
            "rotations", encodings=encodings, seeds=seeds, size="tiny", lengths=lengths, changes=texts,
            runs=Path("runs"), console=quiet(), page=Path("page.md"),
        )  # fmt: skip
    runs = [Run(path.parent) for path in Path("runs").rglob("recipe.json")]
    assert len(runs) == 5
    found = {place: one.longest for run in runs for place, one in run.scores().items() if run.recipe.encoding != "nope"}
    assert set(found.values()) == {64}


def test_questions_in_any_recipe(texts: tuple[str, ...]) -> None:
    """Tests are of the text; lengths that have no room for questions are refused before anything is written."""
    asked = ("options.questions=0.5", 'options.tasks=["passkey"]', "length=320", "batch_size=2", "steps=2")
    run = trained(texts, "run", "rope", *asked)
    assert run.scores().keys() == {("held out", 16)}
    with pytest.raises(ValueError, match=r"lengths: expected at least \d+ tokens for passkey, got 64"):
        trained(texts, "other", "rope", *asked, 'evaluators=["perplexity", "long"]', "test_lengths=[64, 320]")
    with pytest.raises(ValueError, match=r"length: expected \d+ tokens or more, the shortest question's, got 64"):
        trained(texts, "other", "rope", *asked, "length=64")
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("clip=-1", "clip: expected a number above 0, got -1"),
        ("clip=0", "clip: expected a number above 0, got 0"),
        ("learning_rate=NaN", "learning_rate: expected a number above 0, got nan"),
        ("learning_rate=Infinity", "learning_rate: expected a number above 0, got inf"),
        ("weight_decay=-0.1", "weight_decay: expected a number of 0 or more, got -0.1"),
        ("initial=-1", "initial: expected a number of 0 or more, got -1"),
        ("betas=[0.9]", "betas: expected two numbers from 0 to below 1"),
        ("test_lengths=[0]", "test_lengths: expected 1 or more"),
        ('conditions={"a": 3}', "conditions: expected options by name"),
        ("options.packed=maybe", "options.packed: expected true or false, got 'maybe'"),
        ("heads=3", "heads: expected a divisor of width = 16, got 3"),
        ("options.vocabulary=12", "vocabulary: expected 257 or more"),
    ],
)
def test_bad_recipes_write_nothing(change: str, said: str, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=said):
        trained(texts, "run", "rope", change)
    assert not Path("run").exists()


@pytest.fixture
def llama(texts: tuple[str, ...]) -> Path:
    """A Llama with the tokenizer of a run."""
    run = trained(texts, "first")
    folder, size = Path("llama"), fast_tokenizer("first/last").get_vocab_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.path / "last" / name, folder)
    return folder


def test_models_of_others_are_converted_first(
    llama: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """from_pretrained would draw what they have not."""
    tokenizer = f"options.tokenizer={llama}"
    for words in (
        ["generate", str(llama), "--prompt", "word1"],
        ["eval", str(llama), "--recipe", "rotations", "--size", "tiny", "--change", *texts[-2:], tokenizer],
        ["probe", str(llama), "--data", "valid.jsonl"],
        ["train", "rotations", "--encoding", "rope", "--out", "run", "--change", *texts, f"start={llama}", tokenizer],
    ):
        assert run_cli(monkeypatch, *words) == 2
        assert "expected one of deadreckon's, got llama" in " ".join(capsys.readouterr().err.split())
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    assert run_cli(monkeypatch, "generate", "broken", "--prompt", "word1") == 2
    assert "model: expected JSON in 'broken/config.json'" in " ".join(capsys.readouterr().err.split())
    before = (llama / "config.json").read_text(), (llama / "model.safetensors").read_bytes()
    convert = ["convert", str(llama), "--data", "train.jsonl", "--held-out", "valid.jsonl", "--length", "16"]
    assert run_cli(monkeypatch, *convert, "--stages", "none", "--out", str(llama)) == 2
    assert "out: expected a new folder, or one of this conversion" in " ".join(capsys.readouterr().err.split())
    assert ((llama / "config.json").read_text(), (llama / "model.safetensors").read_bytes()) == before


@pytest.mark.parametrize(
    ("encoding", "more", "said"),
    [
        ("fox", ("options.tokenizer=first/last",), "start: expected a model with fox, got rope"),
        ("rope", ("options.vocabulary=262",), "start: expected a text in the tokens of its own tokenizer, got others"),
        ("rope", ("options.vocabulary=300",), r"start: expected a model of \d+ tokens at least"),
    ],
)
def test_starts_that_do_not_fit(encoding: str, more: Any, said: str, texts: tuple[str, ...]) -> None:
    trained(texts, "first")
    change()
    with pytest.raises(ValueError, match=said):
        trained(texts, "run", encoding, *more, "start=first/last")
    assert not Path("run").exists()


def test_flags_that_do_not_go_together(
    texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(texts, "run")
    for words, said in (
        (["--change", "steps=9"], "change: expected a field of tests, test_… or evaluators, conditions, options; got"),
        (["--size", "paper"], "size: expected with --recipe only, got 'paper'"),
        (["--rows", "-4"], "rows: expected with --suite only, got -4"),
        (["--tasks", "nonsense"], "tasks: expected with --suite only"),
        (["--suite", "long", "--change", "steps=1"], "change: expected none beside --suite, got"),
        (["--suite", "long", "--recipe", "code"], "recipe: expected none beside --suite, got 'code'"),
    ):
        assert run_cli(monkeypatch, "eval", "run", *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert run_cli(monkeypatch, "probe", "run", "--attention", "--question", "12345") == 2
    assert "run: expected a model of PRISM's tasks" in " ".join(capsys.readouterr().err.split())
    assert json.loads(Path("run/scores.json").read_text())


def test_texts_that_cannot_be_read(texts: tuple[str, ...]) -> None:
    Path("valid.jsonl").write_text('{"text": "a"}\n{"text": "x\\ud800y"}\n')
    with pytest.raises(ValueError, match=r"got half of a character at 1 in valid\.jsonl, line 2"):
        trained(texts, "run")
    write_jsonl(Path("valid.jsonl"), ["word1"])
    with pytest.raises(ValueError, match=r"test_lengths: expected some up to \d, as held out has, got \(16,\)"):
        trained(texts, "run")
    assert not Path("run").exists()
