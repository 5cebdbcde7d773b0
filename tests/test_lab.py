"""Tasks, training, the demonstration and the command line."""

from __future__ import annotations

import io
import re
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deadreckon.lab import arguments, cli
from deadreckon.lab.evaluation import score
from deadreckon.lab.pages import demo
from deadreckon.lab.pages.demo import demo_recipe, run_demo
from deadreckon.lab.recipes import Recipe
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
        machine.now += {1: 0.7, 2: 1.9}[threads[0]] * self.recipe.batch_size / 4
        if machine.now > 10:
            used.add(threads[0])
        return advance(self)

    monkeypatch.setattr(Training, "advance", slow)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    run_demo(Console(file=machine, width=120), ("rope", "nope"), replace(demo_recipe(60, 16), batch_size=4), None)
    when, estimate = next((now, line) for now, line in machine.lines if "About" in line)
    assert when < 10 and "About 1 min 24 s with 1 thread" in estimate
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
    run = tmp_path / "run"  # as training leaves it
    shutil.copytree(tmp_path, run / "last", ignore=shutil.ignore_patterns("run"))
    (run / "recipe.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", [*command[:2], str(run), *command[3:]])
    cli.main()
    assert capsys.readouterr().out.startswith("w 1 i 0 r")
    monkeypatch.setattr(sys, "argv", ["deadreckon", "generate", "nowhere", "--prompt", "w"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "model: expected a folder with config.json" in capsys.readouterr().err


def test_commands_are_as_one_types_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [arguments.__file__, "--only", "PaTH, FoX"])
    assert arguments.command() == "python -m deadreckon.lab.arguments --only 'PaTH, FoX'"
    monkeypatch.setattr("sys.argv", ["/some/where/bin/deadreckon", "bench"])
    assert arguments.command() == "deadreckon bench"
    monkeypatch.setattr("sys.argv", [str(Path(cli.__file__).parents[1] / "__main__.py"), "list"])
    assert arguments.command() == "python -m deadreckon list"
