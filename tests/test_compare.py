"""Comparisons, their pictures and pages, reports, and the command line."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import SMALL, quiet, run_cli, small
from worlds import prepared

from deadreckon.lab.evaluation import Score, places_to_test
from deadreckon.lab.pages import pictures
from deadreckon.lab.pages.compare import compare, print_comparison
from deadreckon.lab.pages.comparison import Comparison, alike, by_label, gather, learning, with_mean
from deadreckon.lab.pages.comparison import Test as Measured
from deadreckon.lab.pages.report import write_report
from deadreckon.lab.pages.tables import fitting
from deadreckon.lab.recipes import EXPERIMENTS, SIZES, Recipe, find_recipe
from deadreckon.lab.training import Progress, Run, Training, find_runs, parallel, score_run, train_run
from deadreckon.lab.training.scoring import counted


def test_compare_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "get_context", lambda _: prepared())  # new processes, but for seconds of imports
    changes, console = (*SMALL, "steps=4"), quiet()
    some = compare("flipflop", ("rope", "path"), changes=changes, runs=tmp_path / "2", jobs=2, console=console)
    assert "2 of 2" in console.file.getvalue()  # type: ignore[attr-defined]
    alone = compare("flipflop", ("rope", "path"), changes=changes, runs=tmp_path / "1", console=quiet())
    assert some == alone
    with pytest.raises(ValueError, match="jobs: expected 1 or more, got 0"):
        compare("flipflop", ("rope",), runs=tmp_path, jobs=0, console=quiet())


def test_the_first_seed_of_all_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(recipe: Recipe, path: Path, *rest: Any) -> Run:
        made.append((recipe.encoding, recipe.seed))
        return Run.create(path, recipe)

    monkeypatch.setattr(parallel, "make_run", make)
    wanted = {tmp_path / f"{name}-{seed}": small(name, seed) for name in ("rope", "path") for seed in (0, 1)}
    runs = parallel.make_runs(wanted, (), "cpu", 1, quiet())
    assert made == [("rope", 0), ("path", 0), ("rope", 1), ("path", 1)]
    assert [run.path for run in runs] == list(wanted)  # tables have the order that was asked for


def test_compare_uses_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = quiet()
    changes = (*SMALL, "steps=4")
    first = compare("flipflop", ("rope", "path"), seeds=2, changes=changes, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "trained at 16, mean ± standard deviation of 2 seeds" in said and "PaTH" in said
    [picture] = (tmp_path / "runs").glob("*/comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    values = first.values["rope"]["sparse", 32]
    runs_of_rope = [Run(picture.parent / f"rope-{seed}") for seed in (0, 1)]
    assert values == [run.scores()["sparse", 32].error for run in runs_of_rope]
    middle, spread = sum(values) / 2, abs(values[0] - values[1]) / math.sqrt(2)
    assert first.cell("rope", "sparse", 32) == f"{100 * middle:.1f} ± {100 * spread:.{2 if spread < 0.1 else 1}f}"
    monkeypatch.setattr(Training, "advance", lambda self: pytest.fail("trained again"))
    again = compare("flipflop", ("rope", "path"), seeds=2, changes=changes, console=quiet())
    assert again == first
    longer = compare("flipflop", ("path",), seeds=2, changes=changes, lengths=(16, 64), console=quiet())
    assert longer.lengths("dense") == [16, 64]
    assert longer.values["path"]["dense", 16] == first.values["path"]["dense", 16]
    page = tmp_path / "pages" / "page.md"
    again = compare("flipflop", ("rope", "path"), seeds=2, changes=changes, page=page, console=quiet())
    assert again == first
    said = page.read_text()
    assert f"| 32 | {first.cell('rope', 'sparse', 32)} | {first.cell('path', 'sparse', 32)} |" in said
    assert "| the paper's, trained at 512, 512 | 40.3 | 0.0001 |" in said and "seeds 0 to 1" in said
    assert (page.parent / re.findall(r"!\[.*\]\((.*)\)", said)[0]).exists()
    monkeypatch.setitem(sys.modules, "deadreckon.lab.pages.pictures", None)
    console = quiet()
    compare("flipflop", ("path",), changes=changes, console=console)
    assert "No picture:" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_comparison_that_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--finished shows what there is and trains nothing; the page says how far the others came.

    In place of many commands it has the one that asks for all.
    """
    changes = (*SMALL, "ends.reached=1", "ends.patience=7")
    words: dict[str, Any] = {"seeds": 2, "changes": changes, "runs": tmp_path, "sweep": ["heads=1,2"]}
    with pytest.raises(ValueError, match=r"finished: expected a finished run of this comparison in .*, got none"):
        compare("flipflop", ("rope", "path"), finished=True, **words)
    assert not list(tmp_path.iterdir())
    compare("flipflop", ("rope", "path"), **words | {"seeds": 1}, console=quiet())
    [folder] = tmp_path.iterdir()
    shutil.rmtree(folder / "path-heads=2-0")
    (folder / "rope-heads=2-0" / "last" / "progress.json").unlink()  # as if it had not come to its first checkpoint
    train_run(Run(folder / "path-heads=1-0").recipe.change(["seed=1"]), folder / "path-heads=1-1", console=quiet())
    environment = folder / "rope-heads=1-0" / "environment.json"
    [start] = json.loads(environment.read_text())
    environment.write_text(json.dumps([start | {"commit": "0123456789" * 4 + "+"}]))
    page, before = tmp_path / "page.md", sorted(folder.rglob("*"))
    found = compare("flipflop", ("rope", "path"), **words, finished=True, page=page, console=quiet())
    assert sorted(folder.rglob("*")) == before
    assert set(found.values) == {"rope heads=1", "path heads=1"}
    said = page.read_text()
    assert "mean ± standard deviation of up to 2 seeds" in said and "commit 012345678901+, " in said
    assert "; until an evaluation has error 1 or 7 in a row are no better than the best, at most 24 steps of 4" in said
    assert re.search(r"\| RoPE heads=2 \| 6, not finished: [\d.]+ \|  \|", said)
    assert re.search(r"\| PaTH heads=1 \| 6: [\d.]+ \| 6: [\d.]+ \|", said)
    assert "    deadreckon compare flipflop" not in said
    monkeypatch.setattr("deadreckon.lab.pages.compare.MANY", 0)
    compare("flipflop", ("rope", "path"), **words, finished=True, page=page, console=quiet())
    [command] = [line for line in page.read_text().splitlines() if line.startswith("    ")]
    asked = "deadreckon compare flipflop --seeds 2 --size tiny --encodings rope,path --sweep heads=1,2 --change"
    assert shlex.split(command) == [*asked.split(), *changes]


@pytest.mark.parametrize("metric", ["error", "exact", "perplexity"])
def test_pictures_show_everything(metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "rope": {("as trained", 8): [0.2, 0.3], ("as trained", 32): [0.4], ("sparse", 8): [0.9]},
        "path": {("as trained", 8): [0.01], ("sparse", 8): [0.5, 0.4]},
    }
    figures: list[Any] = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    comparison = Comparison("a title", replace(small(), evaluators=(metric,)), values)
    pictures.comparison_picture(comparison, tmp_path / "all.png")
    pictures.scores_svg(comparison, "sparse")
    panels = [axes for figure in figures for axes in figure.axes]
    assert len(panels) == 3
    for axes, condition in zip(panels, ("as trained", "sparse", "sparse"), strict=True):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        *curves, mark = axes.lines
        assert list(mark.get_xdata()) == [16, 16] and left < 16 < right
        for (name, row), curve in zip(values.items(), curves, strict=True):
            lengths, heights = curve.get_xdata(), curve.get_ydata()
            found = {length: some for (of, length), some in row.items() if of == condition}
            scale = 1 if metric == "perplexity" else 100
            assert list(lengths) == list(found), name
            assert list(heights) == pytest.approx([scale * sum(some) / len(some) for some in found.values()])
            assert all(left <= x <= right for x in lengths) and all(low <= y <= high for y in heights)


def test_a_grid_has_a_panel_and_a_table_for_each_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [f"{encoding} layers={layers}" for layers in (1, 2) for encoding in ("rope", "path")]
    values = {label: {("as trained", 8): [0.1 * number]} for number, label in enumerate(labels)}
    figures: list[Any] = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    grid = Comparison("a title", small(), values)
    pictures.comparison_picture(grid, tmp_path / "grid.png")
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == ["layers=1", "layers=2"]
    heights = [[float(curve.get_ydata()[0]) for curve in axes.lines[:-1]] for axes in panels]
    assert heights == [pytest.approx([0, 10]), pytest.approx([20, 30])]
    console = quiet()
    print_comparison(grid, console)
    assert console.file.getvalue().count("PaTH") == 2  # type: ignore[attr-defined]
    values["fox"] = values["rope layers=1"]
    for none in (labels[::2], [*labels, "fox"]):  # one encoding; one without layers
        part = Comparison("", small(), {label: values[label] for label in none})
        assert part.by_setting() == {"": part}
    part = Comparison("", small(), {label: values[label] for label in labels[1:]})  # a setting lacks an encoding
    assert [(setting, [*one.values]) for setting, one in part.by_setting().items()] == [
        ("layers=1", ["path", "rope"]), ("layers=2", ["path", "rope"])
    ]  # fmt: skip
    assert part.by_setting()["layers=1"].table("as trained")[1] == [["8", "10.0", ""]]


def test_labels_of_lengths_do_not_overlap() -> None:
    lengths = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40)
    assert pictures._apart(lengths, 20) == [2, 4, 6, 8, 10, 12, 16, 20, 30, 40]
    assert pictures._apart([512], 512) == [512] and pictures._apart((64, 128, 256), None) == [64, 128, 256]


def test_encodings_look_alike_in_all_pictures() -> None:
    found = pictures.looks(["nope", "path", "sympow p=2", "rope"])
    assert found["path"] == pictures.looks(["path-1", "nope-0"])["path-1"] and found["rope"][0] == pictures.COLOURS[0]
    grid = pictures.looks([f"path rank={rank}" for rank in range(50)] + ["rope"])  # none of which is simply PaTH
    of_prism = pictures.looks(["prism", "sinusoidal", "randomized", "rope"])  # RoPE's look is the baseline's here
    assert of_prism["prism"] == found["path"] and of_prism["sinusoidal"] == found["rope"]
    assert all(len({*one.values()}) == len(one) for one in (found, grid, of_prism))
    assert pictures.looks(["nope"], first=2) == {"nope": (pictures.COLOURS[2], pictures.MARKERS[2])}


def test_report_is_one_page(tmp_path: Path) -> None:
    compare("flipflop", ("rope", "path-fox"), changes=(*SMALL, "steps=4"), runs=tmp_path, console=quiet())
    train_run(find_recipe("copy", "tiny", "nope", 0, ("steps=2", "test_rows=3")), tmp_path / "c", console=quiet())
    begun = Run.create(tmp_path / "begun", small("alibi"))
    begun.note_start("cpu")
    page = tmp_path / "out" / "report.html"
    assert write_report([tmp_path], page) == 4
    text = page.read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "<script" not in text and not re.search(r'(src|href)=(?!"data:)', text)
    assert text.count("<h2>") == 3 and text.count("data:image/svg+xml;base64,") == 3 + 1 + 1 + 1
    assert "PaTH-FoX" in text and "0 of 24" in text and version("torch") in text and "&quot;heads&quot;: 2" in text
    score_of_path = next(run for run in find_runs([tmp_path]) if run.recipe.encoding == "path-fox").scores()
    assert f"<td>{100 * score_of_path['dense', 32].error:.1f}</td>" in text.replace(" class=best", "")
    with pytest.raises(ValueError, match=r"run: expected a folder with recipe\.json, or with such folders in it, got"):
        write_report([tmp_path / "nowhere"], page)


def test_only_seeds_are_averaged(tmp_path: Path) -> None:
    """Runs with other options are other rows; two runs of one seed are one sample."""
    found = []
    for name, encoding, change, scored in (
        ("a", "path", "encoding_options.path.rank=4", 0.1), ("b", "path", "encoding_options.path.rank=8", 0.5),
        ("c", "rope", "steps=1", 0.2), ("d", "rope", "steps=1", 0.2),
    ):  # fmt: skip
        run = Run.create(tmp_path / name, small(encoding, 0, "steps=1", change))
        training, _ = run.restore("cpu")
        training.advance()
        run.save(training, Progress(1))
        run.add_scores([Score("sparse", 16, scored, 1 - scored, 1.0, 4)])
        found.append(run)
    comparison = gather("", found)
    assert {name: row["sparse", 16] for name, row in comparison.values.items()} == {
        "path rank=4": [0.1], "path rank=8": [0.5], "rope": [0.2]
    }  # fmt: skip
    assert comparison.describe("sparse").endswith(", one seed") and comparison.cell("rope", "sparse", 16) == "20.0"
    write_report([tmp_path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "±" not in text and "PaTH rank=4" in text and "PaTH rank=8" in text


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_what_runs_have_in_common_is_a_recipe(name: str, size: str) -> None:
    """Whatever the number of heads; widths that encodings have of their own are not a difference."""
    recipe = find_recipe(name, size)
    wider, longer = replace(recipe, width=2 * recipe.width), replace(recipe, steps=recipe.steps + 1)
    assert alike(recipe) == alike(wider) != alike(longer)


def test_labels_name_what_differs(tmp_path: Path) -> None:
    """A field of the model and an option of PRISM have one name; a sweep over lengths changes batches too."""
    sizes = ("16", "32")
    recipes = {f"{n}": small("prism", 0, "encoding_options.prism.width=8", f"width={n}") for n in sizes}
    recipes |= {f"p{n}": small("prism", 0, f"encoding_options.prism.width={n}") for n in sizes}
    recipes |= {f"b{n}": small("rope", 0, f"batch_size={n}") for n in sizes}
    recipes |= {f"l{n}": small("nope").at_length(n) for n in (8, 16)}
    recipes |= {f"i{n}": small("fox", 0, f"options.ignore=0.{n}") for n in (5, 6)}
    labels = by_label(Run.create(tmp_path / name, recipe) for name, recipe in recipes.items())
    assert {label: [run.path.name for run in runs] for label, runs in labels.items()} == {
        "prism width=16 prism.width=8": ["16"], "prism width=32 prism.width=8": ["32"],
        "prism width=16 prism.width=16": ["p16"], "prism width=16 prism.width=32": ["p32"],
        "rope batch_size=16": ["b16"], "rope batch_size=32": ["b32"], "nope": ["l8", "l16"],
        "fox ignore=0.5": ["i5"], "fox ignore=0.6": ["i6"],
    }  # fmt: skip


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    change = ["--change", *SMALL, "steps=2"]
    assert (
        run_cli(monkeypatch, "train", "flipflop", "--encoding", "rope", "--seed", "1", "--out", "runs/x", *change) == 0
    )
    assert "error, sparse, at length 8: " in capsys.readouterr().out
    assert run_cli(monkeypatch, "eval", "runs/x", "--lengths", "16,64", "--checkpoint", "best") == 0
    assert re.search(r"error, dense, at length 16: [\d.]+%, 64: [\d.]+%\n", capsys.readouterr().out)
    assert set(score_run(Run(Path("runs/x")), (16, 64), kind="best")) == set(places_to_test(small(), (16, 64)))
    assert run_cli(monkeypatch, "probe", "runs/x", "--rows", "2", "--length", "64") == 0
    assert "predicted range: " in capsys.readouterr().out and Path("runs/x/probe/probe.png").exists()
    words = ["flipflop", "--encodings", "rope,nope", "--lengths", "8,16"]
    assert run_cli(monkeypatch, "compare", *words, "--picture", "a.png", *change) == 0
    assert "Picture: a.png" in capsys.readouterr().out and Path("a.png").exists()
    assert run_cli(monkeypatch, "report", "runs", "-o", "r.html") == 0
    assert capsys.readouterr().out.startswith("r.html: 3 runs, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train chess --out x", "recipe: expected one of flipflop, flipflop-beyond,"),
        ("train flipflop --encoding rotary --out x", "encoding: expected one of nope,"),
        ("train flipflop --out x --device tpu", "device: expected one that is here, got 'tpu'"),
        ("compare chess", "recipe: expected one of flipflop, flipflop-beyond,"),
        ("compare flipflop --encodings rope,rotary", "got 'rotary'"),
        ("compare flipflop --finished --out x", "expected a finished run of this comparison in x/flipflop-tiny"),
        ("probe nowhere", "run: expected a folder with recipe.json"),
        ("compare flipflop --encodings rope --seeds 0", "seeds: expected 1 or more, got 0"),
        ("compare flipflop --encodings rope --lengths 8,long", "lengths: expected whole numbers above 0"),
        ("eval nowhere", "run: expected a folder with recipe.json, as train writes it, got 'nowhere'"),
        ("report nowhere", "run: expected a folder with recipe.json, or with such folders in it, got 'nowhere'"),
        ("report", "runs: expected one or more folders, got none"),
    ],
)
def test_command_line_names_what_is_wrong(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, *words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_scores_that_were_not_asked_for_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses by position are many, and one place says that all are there."""
    monkeypatch.setattr("deadreckon.lab.training.display.QUIET", -1)
    console = quiet()
    scores = [Score("by position", length, None, None, 1.0, 1, "loss", "position") for length in (1, 2, 4)]
    assert list(counted(iter(scores), {("by position", 4), ("x", 1)}, "run", console)) == scores
    [said] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said.startswith("run: by position at position 4: 1/2 scores, ")


def test_lengths_that_a_task_does_not_have(tmp_path: Path) -> None:
    run = train_run(small("rope", 0, "steps=1"), tmp_path, console=quiet())
    with pytest.raises(ValueError, match=r"lengths: expected lengths that flip-flop \(as trained\) has, got 7"):
        score_run(run, (7,))
    shutil.rmtree(tmp_path / "best")
    with pytest.raises(ValueError, match="has no best checkpoint yet"):
        run.load("best")


def test_commands_of_pages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What README and results say to run can be run: every `deadreckon compare` gets as far as its runs.

    Those that show finished runs make none: see below.
    """
    made: list[int] = []
    monkeypatch.setattr("deadreckon.lab.pages.compare.check_device", lambda device: None)

    class MadeError(Exception):
        pass

    def make(wanted: dict[Path, Any], *rest: Any) -> None:
        made.append(len(wanted))
        raise MadeError

    monkeypatch.setattr("deadreckon.lab.pages.compare.make_runs", make)
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *(root / "results").glob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    commands = [line[line.index("deadreckon compare ") :] for line in lines if "    deadreckon compare " in line]
    commands = [command for command in commands if "--finished" not in command]
    for command in commands:
        words = shlex.split(command.replace("mqrar-N", "mqrar-2").replace("NAME", "path"))[1:]
        with pytest.raises(MadeError):
            run_cli(monkeypatch, *words)
    assert len(commands) > 12 and sum(made) > 50
    assert not [line for line in lines if "python -m deadreckon." in line]


def test_training_is_a_curve(tmp_path: Path) -> None:
    """Means of at most forty stretches of steps, where the loss of training is asked for; drawn, no table."""
    recipe = replace(find_recipe("powers", "tiny", "sympow", 0, ()), test_lengths=(64,))
    run = Run.create(tmp_path / "run", recipe)
    lines = [{"step": step, "loss": None if step == 3 else float(step)} for step in range(1, 91)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = learning(run)
    assert [(one.length, one.loss, one.rows) for one in curve[:2]] == [(3, 1.5, 2), (6, 5.0, 3)]  # of three steps
    assert (curve[-1].length, curve[-1].loss, len(curve)) == (90, 89.0, 30)
    others = Run.create(tmp_path / "other", replace(recipe, evaluators=("loss-by-position",)))
    (others.path / "metrics.jsonl").write_text((run.path / "metrics.jsonl").read_text())
    assert not learning(others)
    assert not learning(Run.create(tmp_path / "new", recipe))
    values = {one.place: [one.loss] for one in [*curve, Score("end", 64, None, None, 1.0, 1)]}
    lost = values | {curve[-1].place: [math.inf]}  # which has no place in a picture
    tests = {"training": Measured("loss", "step", 64), "end": Measured("loss", "training length", None)}
    comparison = Comparison("curves", recipe, {"rope": values, "fox": lost}, tests)
    assert comparison.tabulated == ["end"] and comparison.pictured == ["training"]
    pictures.comparison_picture(comparison, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize(("width", "lies"), [(200, False), (60, True), (10, True)])
def test_tables_that_are_too_wide_lie_down(width: int, lies: bool) -> None:
    console = Console(quiet=True, width=width)
    headings = ["length", *(f"encoding {n}" for n in range(9))]
    rows = [["16", *"123456789"], ["[bold]32[/]", *"abcdefghi"]]
    found = fitting(headings, rows, console)
    assert [column.header for column in found.columns] == (["length", "16", "[bold]32[/]"] if lies else headings)
    assert found.row_count == (9 if lies else 2)


def test_suites_have_a_mean() -> None:
    """Of all tasks, where all were scored; a single task has none."""
    one, other = (Score(name, 10, None, value, 0.0, 4, "score") for name, value in (("vt", 0.25), ("cwe", 0.75)))
    scores = [Score("held out", 10, None, None, 1.0, 4, "perplexity"), one, other, replace(one, length=20)]
    assert with_mean(scores) == [*scores, replace(one, condition="mean of 2 tasks", exact=0.5)]
    assert with_mean([one, replace(one, length=20)]) == [one, replace(one, length=20)]


@pytest.mark.parametrize(
    ("page", "last", "tables"),
    [
        ("books", 65_536, 4),
        ("code", 65_536, 4),
        ("code-encodings", 65_536, 4),
        ("long-context", 32_768, 16),
        ("rotations-text", 65_536, 4),
        ("rotations-learned", 65_536, 4),
        ("a5-grid", 40, 4),
        ("a5-products-grid", 40, 4),
        ("mqrar", 3072, 4),
        ("mqrar-tiny-deep", 256, 2),
        ("prism-copy-40", 100, 1),
        ("prism-reverse-40", 100, 1),
        ("prism-addition-long", 40, 1),
        ("prism-multiplication", 16, 1),
        ("prism-scan", 48, 1),
        ("prism-dynamic-copy", 20, 1),
        ("prism-dynamic-copy-5", 10, 1),
        ("prism-odds-first", 100, 1),
        ("prism-stack", 100, 1),
        ("powers-text", 4096, 3),
        ("flipflop-beyond-paper", 8192, 6),
        ("flipflop-beta", 2048, 3),
    ],
)
def test_pages_come_of_records(
    page: str, last: int, tables: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What runs have left in `results/records` gives the tables of their pages."""
    results = Path(__file__).parents[1] / "results"
    text = (results / f"{page}.md").read_text()
    [command] = [line for line in text.splitlines() if "--finished" in line]
    words = shlex.split(command)[1:]
    words[words.index("--runs") + 1], words[words.index("--page") + 1] = str(results / "records"), "page.md"
    monkeypatch.chdir(tmp_path)
    if page != "powers-text":  # which has panels of all kinds; to draw the others takes as long as all else here
        monkeypatch.setattr(pictures, "comparison_picture", lambda *_: None)
    run_cli(monkeypatch, *words, "--picture", "picture.png")
    made = Path("page.md").read_text().splitlines()
    assert sum(line.startswith(f"| {last}") for line in made) == tables
    assert not [line for line in made if line.startswith("|") and line not in text.splitlines()]


def test_all_but_the_command_line_works_without_tyro() -> None:
    code = (
        "import sys; sys.modules['tyro'] = sys.modules['matplotlib'] = None; "
        "from deadreckon.lab.pages import compare, report, demo; from deadreckon.lab import training; print('fine')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert found.stdout == "fine\n", found.stderr
