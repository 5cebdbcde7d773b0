"""Experiments on text: perplexity by length, with and without a window; loss by position; sweeps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small_runs import quiet, run_cli

from deadreckon.lab.evaluation.evaluators import evaluate, mean_loss
from deadreckon.lab.evaluation.perplexity import PositionScore, Reader, loss_by_position, perplexity_by_length
from deadreckon.lab.pages.compare import compare
from deadreckon.lab.pages.comparison import paired_difference
from deadreckon.lab.recipes import EXPERIMENTS, find_recipe
from deadreckon.lab.recipes.experiment import parse_sweep
from deadreckon.lab.recipes.texts import read_language
from deadreckon.lab.training import Run, Training, make_model, score_run, train_run
from deadreckon.tasks.language import Corpus, load_corpus, open_corpus, save_corpora


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


@pytest.fixture(scope="module")
def changes(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of the tiny recipes: a folder of tokens, and a second for a model."""
    folder = tmp_path_factory.mktemp("tokens")
    save_corpora(folder, {"train": corpus, "valid": corpus})
    return (
        f"options.data={folder}", "layers=1", "width=16", "heads=1", "steps=12", "batch_size=4", "length=16",
        "evaluate_every=6", "validation_rows=2", "test_tokens=256",
    )  # fmt: skip


def test_rotations_become_a_page(
    changes: tuple[str, ...], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perplexity over the same tokens at every length, and with a window, is that of the functions themselves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["rotations", "--change", *changes, "test_lengths=[16, 64]", "--page", "page.md"]
    assert run_cli(monkeypatch, "compare", *words, "--encodings", "rope") == 0
    [run] = (Run(path.parent) for path in Path("runs").rglob("recipe.json"))
    model = run.load()
    whole = perplexity_by_length(Reader(model), corpus, (16, 64), tokens=256)
    windowed = perplexity_by_length(Reader(model), corpus, (64,), tokens=256, window=16)
    expected = {("held out", 16): whole[0], ("held out", 64): whole[1], ("held out, window of 16", 64): windowed[0]}
    assert run.scores().keys() == expected.keys()
    for place, score in run.scores().items():
        assert score.perplexity == pytest.approx(expected[place].perplexity, rel=1e-5)
    assert expected["held out, window of 16", 64].perplexity != expected["held out", 64].perplexity
    for score in evaluate(model, replace(run.recipe, test_piece=5)):  # in pieces, through the cache
        assert score.perplexity == pytest.approx(run.scores()[score.place].perplexity, rel=1e-4)
    page = Path("page.md").read_text()
    assert (
        f"| 64 | {expected['held out', 64].perplexity:.1f} |" in page
        and "| the paper's, trained at 512, 512 | 23.5 |" in page
    )
    assert (
        "| the paper's, trained at 512, 65536 | 905.2 |" in page
        and "Perplexity by length, held out, window of 16, trained" in page
    )
    metrics = run.metrics()
    monkeypatch.setattr(Training, "advance", lambda self: pytest.fail("trained again"))
    assert run_cli(monkeypatch, "compare", *words, "--encodings", "rope") == 0
    assert run.metrics() == metrics
    assert run_cli(monkeypatch, "eval", str(run.path), "--lengths", "32") == 0
    assert run.scores()["held out", 32].rows == 8  # the same 256 tokens as at 16 and 64


def test_models_are_scored_on_the_same_texts_sharpened(changes: tuple[str, ...], tmp_path: Path) -> None:
    """Also if they are asked for longer ones later, sharpened or not."""
    changes = (*changes, "test_lengths=[16]", 'evaluators=["perplexity"]', "initial=0.3")
    run = train_run(find_recipe("rotations", "tiny", "rope", changes=changes), tmp_path, console=quiet())
    for lengths, beyond in (([16], 8), ([16, 64], None), ([16], 8), ([16, 32, 128], 8), ([16], None)):
        score_run(run, lengths, sharpen_beyond=beyond, console=quiet())
    plain, sharp = run.scores(), run.scores(sharpen_beyond=8)
    assert {one.longest for one in (*plain.values(), *sharp.values())} == {run.longest} == {128}
    assert {length for _, length in plain} == {16, 64} and {length for _, length in sharp} == {16, 32, 128}
    one, other = (scores["held out", 16] for scores in (plain, sharp))
    assert one.rows == other.rows and len(one.texts) == len(other.texts) and one.loss != other.loss


def test_code_is_compared_on_the_same_tokens(changes: tuple[str, ...], corpus: Corpus, tmp_path: Path) -> None:
    """Differences are paired text by text, over the losses of the models that were trained."""
    save_corpora(tmp_path / "tokens", {"train": corpus, "test": corpus})
    changes = (
        *changes,
        f"options.data={tmp_path / 'tokens'}",
        "test_lengths=[16, 64]",
        "options.packed=true",
        "steps=3",
    )
    page = tmp_path / "page.md"
    found = compare("code", ("fox", "rope"), changes=changes, seeds=2, runs=tmp_path, page=page, console=quiet())
    runs = {path.parent.name: Run(path.parent) for path in tmp_path.rglob("recipe.json")}
    losses = {
        name: Reader(run.load()).losses(corpus.rows(64, 256)).double().mean(1) for name, run in runs.items()
    }  # of four texts each
    differences = (losses["fox-0"] + losses["fox-1"] - losses["rope-0"] - losses["rope-1"]) / 2
    fox, rope = ([one.texts for one in found.texts[name]["held out", 64]] for name in ("fox", "rope"))
    mean, error = paired_difference(fox, rope)
    assert mean == pytest.approx(float(differences.mean()), abs=1e-6)
    assert error == pytest.approx(float(differences.std()) / 2, abs=1e-6)
    assert found.pictured == ["held out", "held out, window of 16", "held out, by position"]
    text = page.read_text()
    assert "Loss less that of RoPE on the same tokens, held out, nats ± standard error between 4 texts:" in text
    assert f"| 64 | {mean:+.4f} ± {error:.4f} |" in text and "held out, window of 16, nats ±" in text
    assert "| PaTH |" not in text and re.search(r"\| FoX \| 192 \| [\d,]+ \| \d+\.\d \|", text)


def test_one_text_has_no_standard_error(changes: tuple[str, ...], corpus: Corpus, tmp_path: Path) -> None:
    changes = (*changes, "test_lengths=[64]", "test_tokens=64", "steps=1")
    page = tmp_path / "page.md"
    compare("rotations", ("alibi", "rope"), changes=changes, runs=tmp_path, page=page, console=quiet())
    text = page.read_text()
    assert "Loss less that of RoPE on the same tokens, held out, nats, on one text:" in text and "nan" not in text
    assert re.search(r"\n\| 64 \| [+-]\d\.\d{4} \|\n", text)


def test_powers_sweep_training_lengths_and_powers(changes: tuple[str, ...], corpus: Corpus, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    changes = (*changes, "options.packed=true", "test_lengths=[64]")
    found = compare(
        "powers", ("rope", "sympow"), changes=changes, sweep=("length=8,16", "p=2,4"), runs=tmp_path, page=page,
        console=quiet(),
    )  # fmt: skip
    assert list(found.values) == ["rope", "sympow p=2", "sympow p=4"]
    folders = {path.parent.name for path in tmp_path.rglob("recipe.json")}
    lengths = {name: Run(next(tmp_path.rglob(name))).recipe for name in folders}
    assert {(r.length, r.batch_size, r.test_lengths) for r in lengths.values()} == {(8, 8, (32,)), (16, 4, (64,))}
    assert folders == {f"rope-length={n}-0" for n in (8, 16)} | {
        f"sympow-length={n}-p={p}-0" for n in (8, 16) for p in (2, 4)
    }
    run = Run(next(tmp_path.rglob("sympow-length=8-p=2-0")))
    bins = loss_by_position(Reader(run.load()), corpus, 32, 32, tokens=256)
    scores = found.values["sympow p=2"]
    for name, chosen in (
        ("within the training length", [one for one in bins if one.last <= 8]),
        ("beyond it", [one for one in bins if one.first > 8]),
    ):
        assert scores[f"held out, {name}", 8] == [pytest.approx(mean_loss(chosen), rel=1e-5)]
    for one in bins:
        assert scores["held out, by position, trained at 8", one.last] == [pytest.approx(one.loss, rel=1e-5)]
    late = [line["loss"] for line in run.metrics() if line["step"] > 10.8]
    assert scores["last tenth of training", 8] == [pytest.approx(sum(late) / len(late))]
    assert scores["last tenth of training", 16] != scores["last tenth of training", 8]
    text = page.read_text()
    assert "| training length | RoPE | sympow p=2 | sympow p=4 |" in text and "held out, by position" not in text
    assert f"| 8 | {found.cell('rope', 'last tenth of training', 8)} |" in text
    [picture] = tmp_path.rglob("comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_powers_experiment_is_what_its_page_was() -> None:
    recipes = EXPERIMENTS["powers"].recipes("small", EXPERIMENTS["powers"].encodings, 1)
    assert len(recipes) == 21  # 3 training lengths, 3 encodings with 2 powers, and RoPE
    assert {(r.length, r.batch_size * r.length, max(r.test_lengths)) for r in recipes.values()} == {
        (n, 2**15, 4 * n) for n in (256, 1024, 4096)
    }
    with pytest.raises(ValueError, match="sweep: expected values of a field of the recipe or an option, such as"):
        parse_sweep(("q=1,2",), ("sympow",))
    with pytest.raises(ValueError, match="length: expected one training length, got a curriculum"):
        find_recipe("copy").at_length(9)


def test_paper_sizes_have_the_papers_protocols() -> None:
    """Rotations: table 4 of their paper. Powers: section 4 of Kumar et al. 2025, and 524 288 tokens at every length."""
    rotations = find_recipe("rotations", "paper", "learned-rotation")
    assert (rotations.layers, rotations.width, rotations.heads, rotations.tied) == (16, 768, 8, False)
    assert (rotations.length * rotations.batch_size, rotations.steps) == (16_384, 200_000)
    assert (rotations.warmup, rotations.weight_decay, rotations.options["vocabulary"]) == (0, 0.1, 32_000)
    powers = EXPERIMENTS["powers"].recipes("paper", EXPERIMENTS["powers"].encodings, 1)
    assert len(powers) == 35  # 5 training lengths, 3 encodings with 2 powers, and RoPE
    for recipe in powers.values():
        assert recipe.length * recipe.batch_size == 524_288
        assert (recipe.layers, recipe.width, recipe.heads, recipe.tied) == (12, 768, 12, True)
        assert (recipe.learning_rate, recipe.schedule, recipe.warmup) == (6e-4, "constant", 0)
        assert (recipe.betas, recipe.weight_decay) == ((0.9, 0.999), 0.0)  # Adam
    for recipe in (rotations, powers["conformal-sympow-length=4096-p=2-0"]):
        with torch.device("meta"):
            model = make_model(recipe, 32_000)
        assert isinstance(model.model.layers[0].input_layernorm, torch.nn.LayerNorm)
        assert model.config.hidden_act.startswith("gelu") and not model.config.gated_mlp


def test_sweeps_of_options_leave_other_encodings_alone() -> None:
    """`initial` is an option of PaTH and a field of the recipe: beside PaTH it is the option."""
    sweep = parse_sweep(("initial=0.01,0.02", "activation=silu", "learning_rate=1e-3"), ("rope", "path"))
    runs = EXPERIMENTS["code"].recipes("small", ("rope", "path"), 1, (), sweep)
    assert set(runs) == {"rope-learning_rate=0.001-0"} | {
        f"path-initial={value}-activation=silu-learning_rate=0.001-0" for value in (0.01, 0.02)
    }
    assert {recipe.initial for recipe in runs.values()} == {0.02}
    options = [recipe.options_in_training() for name, recipe in runs.items() if name.startswith("path")]
    assert options == [{"initial": value, "beta": 0.1, "activation": "silu"} for value in (0.01, 0.02)]
    fields = parse_sweep(("initial=0.01", "qk_norm=true"), ("rope",))
    recipe = EXPERIMENTS["code"].recipes("tiny", ("rope",), 1, (), fields)["rope-initial=0.01-qk_norm=True-0"]
    config = make_model(recipe, 300).config
    assert (config.initializer_range, config.qk_norm) == (0.01, True)


def test_losses_within_and_beyond_are_means_over_positions() -> None:
    bins = [PositionScore(1, 1, 9.0), PositionScore(2, 4, 5.0)]
    assert mean_loss(bins) == 6.0
    assert mean_loss([PositionScore(5, 6, 3.0), PositionScore(7, 12, 7.0)]) == 6.0


def test_a_run_is_alike_each_time(changes: tuple[str, ...], tmp_path: Path) -> None:
    recipe = find_recipe("rotations", "tiny", "rope", changes=(*changes, "test_lengths=[16]", "warmup=1"))
    first, second = (train_run(recipe, tmp_path / name, console=quiet()) for name in ("a", "b"))
    assert [line["loss"] for line in first.metrics()] == [line["loss"] for line in second.metrics()]
    rates = [recipe.learning_rate_at(step) for step in range(12)]
    assert max(rates) == rates[0] == recipe.learning_rate and 0.1 < rates[-1] / rates[0] < 0.15


def test_a_compiled_model_trains_alike(changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step is one graph, the loss in chunks too."""
    recipe = find_recipe("rotations", "tiny", "rope", changes=changes)
    task, losses = recipe.make_task(), []
    whole = partial(torch.compile, backend="eager", fullgraph=True)  # traced by Dynamo, not generated
    monkeypatch.setattr(torch, "compile", whole)
    for switch in ("0", "1"):
        monkeypatch.setenv("DEADRECKON_COMPILE", switch)
        training = Training(make_model(recipe, task.vocab_size), task, recipe)
        assert (training.forward is training.model) == (switch == "0")
        losses.append([training.advance().loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_other_tasks_have_no_perplexity_by_length(tmp_path: Path) -> None:
    recipe = find_recipe("flipflop", "tiny", "rope", changes=("steps=1", 'evaluators=["perplexity"]', "length=16"))
    with pytest.raises(ValueError, match="evaluators: expected error or exact for flip-flop"):
        train_run(recipe, tmp_path / "x", console=quiet())
    assert not (tmp_path / "x").exists()


def test_folders_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the training text, and a tokenizer, are all that another machine needs."""
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [story(n, 50)]) for n, name in enumerate(("train", "valid"))]
    train = load_corpus(files[0], vocabulary=280)
    valid = load_corpus(files[1], tokenizer=train.tokenizer)
    save_corpora(tmp_path / "out", {"train": train, "valid": valid}, {"train": 60})
    assert len(open_corpus(tmp_path / "out", "train").ids) == 60
    task = read_language(str(tmp_path / "out"), part="valid")
    assert task.spell(task.corpus.rows(20, 20)[0]) in story(1, 50)
