"""Tasks, training, the demonstration and the command line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deadreckon.lab import cli
from deadreckon.lab.bench import peak_bytes, run_bench
from deadreckon.lab.demo import make_model, run_demo
from deadreckon.lab.drift import in_place_drift, model_drift
from deadreckon.lab.training import Recipe, error_rate, train
from deadreckon.tasks.flipflop import NOT_SCORED, FlipFlop, spell


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_flipflop_reads_what_was_written_last(ignore: float) -> None:
    tokens, labels = FlipFlop(ignore).sample(40, 64, seed())
    for row, scored in zip(tokens, labels, strict=True):
        symbols, memory = spell(row).split(), None
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
    with pytest.raises(ValueError, match="length: expected an even number"):
        FlipFlop().sample(1, 7, seed())
    with pytest.raises(ValueError, match="ignore: expected a probability"):
        FlipFlop(1.2)


def test_training_learns_and_repeats() -> None:
    recipe = Recipe(steps=30, batch_size=16, length=32, seed=3)
    first, second = (list(train(make_model("path", 5, 3), FlipFlop(), recipe)) for _ in range(2))
    assert [step.loss for step in first] == [step.loss for step in second]
    assert sum(step.loss for step in first[-5:]) < 0.8 * sum(step.loss for step in first[:5])
    with pytest.raises(ValueError, match="steps: expected 1 or more"):
        Recipe(steps=0)


def test_error_rate_of_a_guess_is_a_half() -> None:
    model = make_model("nope", 5, 0)
    model.lm_head = torch.nn.Linear(64, 5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.tensor([0.0, 0, 0, 1, 0]))  # always says "0"
    assert abs(error_rate(model, FlipFlop(), length=32, count=400) - 0.5) < 0.05


def test_demo_shows_a_table_and_a_picture(tmp_path: Path) -> None:
    out = io.StringIO()
    picture = tmp_path / "new" / "flipflop.png"
    contestants = run_demo(
        Console(file=out, width=120), ("rope", "path"), Recipe(steps=4, batch_size=4, length=16), picture
    )
    assert "4× length" in out.getvalue()
    assert all(len(c.errors) == 4 and len(c.steps) == 4 for c in contestants)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_list_names_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["deadreckon", "list"])
    monkeypatch.setenv("COLUMNS", "160")
    cli.main()
    text = capsys.readouterr().out
    assert "conformal-sympow" in text
    assert '"auto" picks blockwise' in text


def test_command_line_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["deadreckon", "demo", "--encodings", "rotary"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "encoding: expected one of nope" in capsys.readouterr().err


def test_bench_prints_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_bench("cpu", (64,), 1, 2, 16, 1, tmp_path / "bench.md")
    assert {"PaTH", "PaTH-FoX", "FoX", "rotation", "Power(2)", "SDPA, causal"} <= set(found[64])
    text = (tmp_path / "bench.md").read_text()
    assert text.count("| 64 |") == len(found[64])
    assert "torch 2" in text
    with pytest.raises(ValueError, match="device: expected one that is here"):
        run_bench("cuda", (64,), 1, 2, 16, 1, None)


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
    make_model("path", 5, 0).save_pretrained(tmp_path)
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
