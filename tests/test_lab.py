"""Tasks, training, the demonstration and the command line."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deadreckon.lab import bench, cases, cli, environment, filters, powers
from deadreckon.lab.bench import Figures, peak_bytes, run_bench
from deadreckon.lab.cases import Shape
from deadreckon.lab.drift import in_place_drift, model_drift
from deadreckon.lab.evaluation import score
from deadreckon.lab.pages import demo
from deadreckon.lab.pages.demo import demo_recipe, run_demo
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.rivals import RIVALS, Inputs, Method, sdpa
from deadreckon.lab.training import Step, Training, make_model, train
from deadreckon.tasks.flipflop import FlipFlop
from deadreckon.tasks.task import NOT_SCORED


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_flipflop_reads_what_was_written_last(ignore: float) -> None:
    tokens, labels = FlipFlop(ignore).sample(40, 64, seed())
    for row, scored in zip(tokens, labels, strict=True):
        symbols, memory = FlipFlop().spell(row).split(), None
        assert symbols[0] == "w"
        assert symbols[-2] == "r"
        for place in range(0, 64, 2):
            instruction, bit = symbols[place : place + 2]
            memory = bit if instruction == "w" else memory
            assert bit == memory or instruction == "i"
            assert scored[place] == NOT_SCORED
            assert (scored[place + 1] == row[place + 1]) if instruction == "r" else scored[place + 1] == NOT_SCORED


def test_flipflop_draws_as_asked() -> None:
    tokens, _ = FlipFlop(0.6).sample(400, 200, seed())
    shares = torch.bincount(tokens[:, 2:-2:2].flatten(), minlength=3) / tokens[:, 2:-2:2].numel()
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.2, 0.6]), rtol=0, atol=0.01)
    assert torch.equal(FlipFlop().sample(3, 20, seed(5))[0], FlipFlop().sample(3, 20, seed(5))[0])
    with pytest.raises(ValueError, match="length: expected 4 or more in steps of 2, got 7"):
        FlipFlop().sample(1, 7, seed())
    with pytest.raises(ValueError, match="ignore: expected a probability"):
        FlipFlop(1.2)


def test_training_learns_and_repeats() -> None:
    recipe = Recipe(encoding="path", steps=30, batch_size=16, length=32, seed=3)
    first, second = (list(train(make_model(recipe, 5), FlipFlop(), recipe)) for _ in range(2))
    assert [step.loss for step in first] == [step.loss for step in second]
    assert sum(step.loss for step in first[-5:]) < 0.8 * sum(step.loss for step in first[:5])
    with pytest.raises(ValueError, match="steps: expected 1 or more"):
        Recipe(steps=0)


def test_error_rate_of_a_guess_is_a_half() -> None:
    model = make_model(Recipe(encoding="nope"), 5)
    model.lm_head = torch.nn.Linear(64, 5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.tensor([0.0, 0, 0, 1, 0]))  # always says "0"
    assert abs(score(model, Recipe(), "as trained", 32, rows=400).value("error") - 0.5) < 0.05


def test_demo_shows_a_table_and_a_picture(tmp_path: Path) -> None:
    out = io.StringIO()
    picture = tmp_path / "new" / "flipflop.png"
    contestants = run_demo(
        Console(file=out, width=120), ("rope", "path"), replace(demo_recipe(steps=4, length=16), batch_size=4), picture
    )
    assert "4× length" in out.getvalue()
    assert all(len(c.errors) == 4 and len(c.steps) == 4 for c in contestants)
    assert picture.read_bytes().startswith(b"\x89PNG")


class SlowMachine(io.StringIO):
    """A file that knows when its lines were written, on a clock that only steps of training move on."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.lines = 0.0, list[tuple[float, str]]()

    def write(self, text: str) -> int:
        self.lines += [(self.now, line) for line in text.splitlines() if line.strip()]
        return super().write(text)


def test_demo_says_how_long_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one model takes 0.7 s with one thread, 1.9 s with two: 60 steps of two models, 84 s."""
    machine, advance, threads, used = SlowMachine(), Training.advance, [2], set[int]()

    def slow(self: Training) -> Step:
        machine.now += {1: 0.7, 2: 1.9}[threads[0]]
        if machine.now > 10:
            used.add(threads[0])
        return advance(self)

    monkeypatch.setattr(Training, "advance", slow)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    run_demo(Console(file=machine, width=120), ("rope", "nope"), replace(demo_recipe(60, 16), batch_size=4), None)
    when, estimate = next((now, line) for now, line in machine.lines if "About" in line)
    assert when < 10 and "About 1 min 24 s on cpu with 1 thread" in estimate
    assert used == {1} and threads == [2]  # as before
    times = [now for now, _ in machine.lines]
    assert max(after - before for before, after in pairwise(times)) <= demo.QUIET_SECONDS + 2 * 1.9
    assert re.search(r"step \d+/60, \d+ s, .* left: loss RoPE ", machine.getvalue())


def test_list_names_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["deadreckon", "list"])
    monkeypatch.setenv("COLUMNS", "160")
    cli.main()
    text = capsys.readouterr().out
    assert "conformal-sympow" in text and "mqrar-4" in text and "figure 10" in text
    assert '"auto" picks triton on CUDA' in text


def test_command_line_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["deadreckon", "demo", "--encodings", "rotary"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "encoding: expected one of nope" in capsys.readouterr().err


def test_bench_prints_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = (Shape(1, 64, 2, 16), Shape(2, 70, 1, 16))
    found = run_bench("cpu", shapes, rounds=1, save=tmp_path / "bench.md")
    assert list(found) == list(shapes)
    assert {"PaTH", "PaTH-FoX", "FoX", "RoPE", "rotation", "Power(2)", "causal SDPA"} <= set(found[shapes[0]])
    text = (tmp_path / "bench.md").read_text()
    assert text.count("| 2x70x1x16 |") == len(found[shapes[1]])
    assert "torch 2" in text and "--shapes 1x64x2x16 2x70x1x16 --rounds 1" in text
    with pytest.raises(ValueError, match="device: expected one that is here"):
        run_bench("cuda", shapes)
    monkeypatch.setattr(sys, "argv", ["deadreckon", "bench", "--lengths", "40", "--rounds", "1", "--only", "pow(2)"])
    with pytest.raises(SystemExit):
        cli.main()
    error = " ".join(capsys.readouterr().err.split())
    assert "only: expected names among causal SDPA, RoPE," in error and error.endswith("got pow(2)")


def test_filters_are_checked_then_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "filters.md"
    monkeypatch.setattr(sys, "argv", ["filters", "--size", "2x9x2x6x4", "--rounds", "1", "--save", str(page)])
    filters.main()
    text = page.read_text()
    assert text.startswith("# Histogram filters on ")
    assert "python -m deadreckon.lab.filters --device cpu --size 2x9x2x6x4 --rounds 1" in text
    assert text.count("| loop of scatter_add |") == text.count("| PyTorch |") == 2
    assert text.count("| C |") == 2 * filters.serves("native", "cpu")
    fits = filters.measure

    def small(size: filters.Size, *rest: Any) -> tuple[float, float]:
        if size.batch > 1:
            raise torch.OutOfMemoryError
        return fits(size, *rest)

    monkeypatch.setattr(filters, "measure", small)
    assert filters.scaled(filters.Size(2, 9, 2, 6, 4), None, "reference", 1, "cpu")[2] == ", scaled up from batch 1"
    monkeypatch.setattr(
        filters, "run", lambda gates, table, grad, impl: [x + (impl != "reference") for x in (grad, *gates)]
    )
    with pytest.raises(RuntimeError, match=r"PyTorch is off by .* nothing was timed"):
        filters.main()


def test_bench_parses_shapes() -> None:
    assert Shape.parse("32x4096X8x64") == Shape(32, 4096, 8, 64)
    assert str(Shape(32, 4096, 8, 64)) == "32x4096x8x64"
    for text in ("32x4096x8", "32x4096x8x64x2", "32xTx8x64", "0x1x1x2", "", "-1x1x1x2"):
        with pytest.raises(ValueError, match="shapes: expected BxTxHxD, such as 32x4096x32x64, got"):
            Shape.parse(text)


def test_bench_names_what_is_wrong_with_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(x: Inputs) -> torch.Tensor:
        raise NotImplementedError("no [kernel] | here\nand more")

    def fail_later(x: Inputs) -> torch.Tensor:
        if x["q"].shape[1] == 40:  # not where it is checked
            raise MemoryError("too long")
        return sdpa(x)

    rivals = {
        "SDPA": Method(sdpa, "attention"),
        "ungated": Method(sdpa, "FoX"),
        "fla FoX": Method(lambda x: cases.attend("FoX", "blockwise", x), "FoX"),
        "broken": Method(fail, "PaTH"),
        "short": Method(fail_later, "attention"),
        "absent": Method(fail, "attention", "no_such_package"),
    }
    monkeypatch.setitem(RIVALS, "cpu", rivals)
    monkeypatch.setenv("COLUMNS", "200")
    shape = Shape(1, 40, 2, 16)
    found = run_bench("cpu", (shape,), rounds=1, save=tmp_path / "bench.md")[shape]
    assert found["broken"] == "failed: NotImplementedError: no [kernel] | here"
    assert found["short"] == "failed: MemoryError: too long"
    assert "absent" not in found
    text = (tmp_path / "bench.md").read_text()
    rows = {row[2]: row for row in (line.split("|") for line in text.splitlines() if line.startswith("| 1x40x2x16"))}
    names = {name.strip(): [cell.strip() for cell in row[3:-1]] for name, row in rows.items()}
    assert names["SDPA"][2::3] == ["1.00", "1.00", "1.00"]
    assert [bool(cell) for cell in names["FoX"][3::3]] == [True, True, True]  # beside fla's
    assert [bool(cell) for cell in names["PaTH"][3::3]] == [False, False, False]
    assert "✗" in names["ungated"][0] and "✗" not in names["fla FoX"][0]
    assert "broken (failed: NotImplementedError: no [kernel] \\| here)" in text
    assert "failed: MemoryError: too long" in capsys.readouterr().out


def test_bench_times_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 40, 2, 16)
    assert list(run_bench("cpu", (shape,), rounds=1, only="path, FOX")[shape]) == ["causal SDPA", "FoX", "PaTH"]
    monkeypatch.setattr(bench, "attend", lambda kind, impl, x: cases.attend("FoX", impl, x))
    with pytest.raises(RuntimeError, match="nothing was timed: PaTH at D = 16: output off by"):
        run_bench("cpu", (shape,), rounds=1, only="PaTH")


def test_bench_shows_where_the_time_goes(tmp_path: Path) -> None:
    page, shape = tmp_path / "bench.md", Shape(1, 40, 2, 16)
    run_bench("cpu", (shape,), rounds=1, only="PaTH", save=page, profile=True)
    _, section = page.read_text().split("PaTH, 1x40x2x16: forward and backward:")  # ours alone
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[4:]]
    assert '--only "PaTH" --profile' in page.read_text() and any(name.startswith("aten::") for name, *_ in rows)
    times = [float(time.removesuffix(" ms")) for _, time, *_ in rows]
    assert rows[-1][0] == "all" and times[:-1] == sorted(times[:-1], reverse=True)
    assert 0 < sum(times[:-1]) <= 1.01 * times[-1] + 0.005 * len(times)
    assert all(int(count) > 0 for *_, count in rows[:-1])


def test_bench_checks_in_several_processes() -> None:
    methods = bench.line_up("cpu", "PaTH") | {"wrong": Method(sdpa, "FoX")}
    alone, together = (bench.check_all(methods, (16,), "cpu", workers) for workers in (1, 2))
    assert list(alone[16]) == list(together[16])
    for name, error in alone[16].items():
        assert together[16][name] == pytest.approx(error, rel=0.5)
    assert together[16]["wrong"] > 1 > together[16]["PaTH"]


@pytest.mark.gpu
def test_bench_on_cuda() -> None:
    shape = Shape(1, 300, 2, 64)
    found = run_bench("cuda", (shape,), rounds=2, only="cuDNN,FlashAttention-2,RoPE,PaTH")[shape]
    assert len(found) == 5
    assert all(isinstance(figures, Figures) and figures.forward < figures.both for figures in found.values())


def test_peak_bytes_sees_what_is_held() -> None:
    def hold() -> None:
        first = torch.zeros(1 << 20)
        second = torch.zeros(1 << 20)
        del first, second
        torch.zeros(1 << 18)

    assert 8 << 20 <= peak_bytes(hold) < 9 << 20


def test_generate_prints_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate("wri01")}, unk_token="w"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make_model(Recipe(encoding="path"), 5).save_pretrained(tmp_path)
    command = ["deadreckon", "generate", str(tmp_path), "--prompt", "w 1 i 0 r", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        cli.main()
    assert "expected a tokenizer beside the model" in capsys.readouterr().err.replace("\n", " ")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w").save_pretrained(tmp_path)
    cli.main()
    text = capsys.readouterr().out
    assert text.startswith("w 1 i 0 r")
    assert "6 tokens after 5" in text
    monkeypatch.setattr(sys, "argv", ["deadreckon", "generate", "nowhere", "--prompt", "w"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "model: expected a folder with config.json" in capsys.readouterr().err


def test_drift_tells_the_two_ways_apart() -> None:
    console = Console(file=io.StringIO())
    once, streamed = model_drift(70, 8, "cpu", console)
    assert 0 < streamed < 1.5 * once < 0.05
    rounded, in_place = in_place_drift(200, 8, "cpu", console)
    assert in_place > 2 * rounded > 0


def test_commands_are_as_one_types_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [bench.__file__, "--only", "PaTH, FoX"])
    assert environment.command() == "python -m deadreckon.lab.bench --only 'PaTH, FoX'"
    monkeypatch.setattr("sys.argv", ["/some/where/bin/deadreckon", "bench"])
    assert environment.command() == "deadreckon bench"
    monkeypatch.setattr("sys.argv", [str(Path(cli.__file__).parents[1] / "__main__.py"), "list"])
    assert environment.command() == "python -m deadreckon list"


@pytest.mark.parametrize("more", [["--forms"], []])
def test_powers(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "powers.md"
    words = ["powers", "--width", "8", "--heads", "1", "--rounds", "1", "--lengths", "64", "128", "--save", str(page)]
    monkeypatch.setattr("sys.argv", [*words, *more])
    powers.main()
    assert "64 |" in capsys.readouterr().out
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 4 and ("attention" in lines[0]) == bool(more)
    assert ("1.78" in lines[2]) == bool(more)  # of 36 dimensions
