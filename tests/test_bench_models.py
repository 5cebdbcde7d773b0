"""Benchmarks of whole models, from the command line: training steps, decoding, generation, and many processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, run_cli
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import deadreckon as dr
from deadreckon.lab.bench import decode, ranks, steps, text
from deadreckon.lab.bench.flags import Ranks
from deadreckon.lab.recipes import find_recipe


def test_steps_of_an_experiment_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "steps.md"
    words = ["bench", "steps", "--recipe", "addition", "--encodings", "sinusoidal,rope", "--rounds", "2", "--profile"]
    changes = ["--change", "width=16", "batch_size=3", "length=2", "curriculum.longest=2", "steps=60000"]
    assert run_cli(monkeypatch, *words, *changes, "--save", str(page)) == 0
    (row,), (other,) = rows_of(page.read_text(), "sinusoidal"), rows_of(page.read_text(), "rope")
    assert row[1] == other[1] == "0.01 M" and row[5] == row[7] == ""  # kernels and memory: on a GPU only
    assert 3 * 10 <= int(row[2]) <= 3 * 20  # two digits of both numbers, two steps of five, the sum, signs
    assert rows_of(page.read_text(), "aten::mm") and "sinusoidal: a step" in page.read_text()
    assert run_cli(monkeypatch, "bench", "steps", "--recipe", "nothing") == 2
    assert run_cli(monkeypatch, "bench", "steps", "--encodings", "nothing") == 2


def test_steps_of_different_lengths_count_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is the fastest; tokens per second, and the time of all steps, are of all that were timed."""
    times, asked = iter([(9.0, [10]), (2.0, [10, 10]), (3.0, [50])]), list[int]()
    monkeypatch.setattr(steps, "timed", lambda _, together, device: asked.append(together) or next(times))
    monkeypatch.setitem(steps.TOGETHER, "cpu", 2)
    recipe = find_recipe("addition", "tiny", "sinusoidal").change(["steps=60", "width=16", "batch_size=2"])
    _, tokens, first, step, _, speed, _, whole = steps.measure(recipe, "cpu", 3).cells
    assert asked == [1, 2, 1]
    assert (tokens, first, step, speed, whole) == ("50", "9.0 s", "1000.00 ms", "14", "1.7 min")


def test_steps_of_a_sweep_are_one_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = list[int]()
    found = steps.Timed([""] * 8, lambda: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(steps, "measure", lambda recipe, *_: layers.append(recipe.layers) or found)
    page = tmp_path / "steps.md"
    words = ["bench", "steps", "--recipe", "a5-grid", "--encodings", "rope", "--save", str(page)]
    assert run_cli(monkeypatch, *words) == 0 and layers == [1, 2, 3, 4]
    assert "rope-layers=3" in page.read_text()


def test_steps_that_fail_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(steps, "measure", fails)
    page = tmp_path / "steps.md"
    assert run_cli(monkeypatch, "bench", "steps", "--encodings", "rope,path", "--save", str(page)) == 0
    assert "rope (failed: RuntimeError: out of memory)" in page.read_text()


def test_steps_are_the_last_of_the_recipe() -> None:
    """Where rows are longest; and all of them if there are fewer than are timed."""
    recipe = find_recipe("addition", "tiny", "sinusoidal").change(["steps=60", "width=16", "batch_size=2"])
    assert steps.measure(recipe, "cpu", 2).step().number == 60
    assert steps.measure(recipe.change(["steps=3"]), "cpu", 2).step().number == 4


def test_steps_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all lengths that are timed have been seen before."""
    taken, advance = list[tuple[int, int, int]](), steps.Training.advance

    def watched(training: steps.Training) -> Any:
        step = advance(training)
        taken.append((step.number, step.tokens, int(training.batches.state.sum())))
        return step

    monkeypatch.setattr(steps.Training, "advance", watched)
    monkeypatch.setitem(steps.REHEARSALS, "cpu", 2)
    recipe = find_recipe("addition", "tiny", "sinusoidal").change(["steps=60", "width=16", "batch_size=2"])
    steps.measure(recipe, "cpu", 4)
    assert [number for number, _, _ in taken] == [55, *3 * [56, 57, 58, 59]]
    assert taken[1:5] == taken[5:9] == taken[9:] and len({tokens for _, tokens, _ in taken}) > 1


def test_decoding_is_timed_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STEPS", 8)
    page = tmp_path / "decode.md"
    assert run_cli(monkeypatch, "bench", "decode", "--caches", "100", "--batches", "2", "--save", str(page)) == 0
    rows = rows_of(page.read_text(), "100", "2")
    assert [row[0] for row in rows] == ["PaTH", "PaTH-FoX"]
    assert all(0 < float(row[-1]) < 1e-5 for row in rows)  # float32


def test_training_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "text.md"
    words = [
        "bench",
        "text",
        "--sizes",
        "1x64",
        "--batch",
        "2x40",
        "--vocab",
        "50",
        "--rounds",
        "1",
        "--save",
        str(page),
    ]
    monkeypatch.setattr(text, "make_model", without_fox(text.make_model))
    assert run_cli(monkeypatch, *words, "--encodings", "rope,fox,path", "--recompute", "--head-dim", "32") == 0
    llama, rope, failed, path, recomputed = rows_of(page.read_text(), "1x64")
    assert llama[6] == "1.00" and llama[2] == rope[2] and float(path[6]) > 0
    assert recomputed[1] == "path with recompute, eager" and recomputed[2] == path[2] and float(recomputed[6]) > 0
    assert failed[1] == "fox, eager (failed: MemoryError: fox)"
    assert run_cli(monkeypatch, *words, "--encodings", "rotary") == 2
    assert "encoding: expected one of nope" in capsys.readouterr().err
    for head_dim, error in (("0", "1 or more, got 0"), ("48", "a divisor of the width 64, got 48")):
        assert run_cli(monkeypatch, *words, "--head-dim", head_dim) == 2
        assert f"head_dim: expected {error}" in capsys.readouterr().err


def test_training_steps_are_shown_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "text.md"
    words = ["bench", "text", "--sizes", "1x64", "--batch", "2x40", "--vocab", "50", "--rounds", "1", "--profile"]
    assert run_cli(monkeypatch, *words, "--encodings", "nope", "--qk-norm", "--save", str(page)) == 0
    top, section = page.read_text().split("1x64, nope, eager: a step:")  # ours alone
    assert "QK-norm in ours" in top
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[4:]]
    assert rows[-1][0] == "all" and float(rows[-1][1].removesuffix(" ms")) > 0
    assert any(name.startswith("aten::") for name, *_ in rows)


def test_a_profile_that_fails_leaves_what_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any, device: str) -> None:
        raise RuntimeError("no profiler")

    monkeypatch.setattr("deadreckon.lab.bench.text.parts_of", fails)
    page = tmp_path / "text.md"
    words = ["bench", "text", "--sizes", "1x64", "--batch", "2x40", "--vocab", "50", "--rounds", "1", "--profile"]
    assert run_cli(monkeypatch, *words, "--encodings", "nope", "--save", str(page)) == 0
    assert len(rows_of(page.read_text(), "1x64")) == 2
    assert "failed: RuntimeError: no profiler" in page.read_text()


def without_fox(make: Any) -> Any:
    def some(name: str, *sizes: Any, **more: Any) -> torch.nn.Module:
        if name == "fox":
            raise MemoryError(name)
        return make(name, *sizes, **more)

    return some


def test_training_steps_train() -> None:
    """Llama's model and ours are of one size, and a step makes the loss less."""
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    counts = []
    for name in (text.LLAMA, "rope"):
        model = text.make_model(name, 1, 64, 50, 40, "cpu")
        counts.append(sum(x.numel() for x in model.parameters()))
        before = model(input_ids=tokens, labels=tokens).loss.item()
        text.training_step(model, tokens, compiled=False)()
        assert model(input_ids=tokens, labels=tokens).loss.item() < before
    assert counts[0] == counts[1]
    assert isinstance(model, dr.DeadReckonForCausalLM)


def test_training_steps_must_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, a compiler may leave out what is to be timed."""
    model = text.make_model("rope", 1, 64, 16, 16, "cpu")
    monkeypatch.setattr("deadreckon.models.huggingface.linear_cross_entropy", lambda *inputs: 0 * inputs[0].sum())
    with pytest.raises(RuntimeError, match="expected gradients with a norm above 0, got 0"):
        text.training_step(model, torch.zeros(1, 16, dtype=torch.long), compiled=False)()


def test_generation_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "generation.md"
    names = "nope,stickbreaking,prism,sympow"
    words = ("--encodings", names, "--power", "4", "--size", "1x32", "--prompts", "1x5", "2x3", "--tokens", "2")
    assert run_cli(monkeypatch, "bench", "decode", *words, "--save", str(page)) == 0
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if " ms |" in line]
    assert [row[0] for row in rows] == ["Hugging Face Llama", *names.split(",")]
    assert "powers of 4" in page.read_text()
    assert all(len(row) == 5 for row in rows)
    assert run_cli(monkeypatch, "bench", "decode", "--encodings", "nope", "--tokens", "0") != 0


@pytest.mark.integration
def test_steps_on_several_processes_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "ranks.md"
    words = ("--encodings", "nope", "--size", "1x32", "--batch", "2x16", "--rounds", "1", "--processes", "1", "2")
    assert run_cli(monkeypatch, "bench", "ranks", *words, "--save", str(page)) == 0
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if " ms |" in line]
    assert [row[0] for row in rows] == ["nope, alone", "nope, cp=2", "nope, dp=2"]
    assert all(float(row[-1]) < 1e-5 for row in rows)  # the loss of one process
    assert run_cli(monkeypatch, "bench", "ranks", "--batch", "3x16", "--processes", "2") == 2


def test_a_mesh_of_one_rank_is_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "one.md"
    words = ("--encodings", "nope,path", "--size", "2x32", "--head-dim", "16", "--batch", "2x16", "--rounds", "2")
    assert run_cli(monkeypatch, "bench", "ranks", "--processes", "1", *words, "--save", str(page)) == 0
    text = page.read_text()
    assert "--processes 1" in text and "2 turns of 4 steps each" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if " ms |" in line]
    assert [row[0] for row in rows] == [f"{name}, {kind}" for name in ("nope", "path") for kind in ranks.KINDS]
    both = dict[str, float]()  # product of the two times, by encoding and model
    for row in rows:
        least, middle = (float(cell.removesuffix(" ms")) for cell in row[1:3])
        both[row[0]] = least * (2 * middle - least)
        assert 0 < least <= middle
        assert float(row[3].replace(",", "")) == pytest.approx(32e3 / middle, rel=0.01)
        low, high = map(float, row[6].split(" – "))
        assert low <= float(row[5]) <= high
        plain = both[f"{row[0].split(',')[0]}, plain"]
        assert low * high == pytest.approx(plain / both[row[0]], rel=0.02)  # whichever turn was which
        # Sharding changes the order of no sum but the norm's that clips: rounding, through 12 steps of rate 1e-4.
        assert float(row[-1]) < 1e-5
    assert run_cli(monkeypatch, "bench", "ranks", "--size", "2x32", "--head-dim", "24") == 2


def test_a_runner_is_sharded_only_by_force(tmp_path: Path) -> None:
    flags = Ranks(size="1x32", head_dim=16, batch="2x16", vocab=50)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    ranks._join(flags, tmp_path / "meeting")
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        models = {kind: ranks._on(mesh, kind, ranks._model(flags, "rope")) for kind in ranks.KINDS}
        sharded = [kind for kind, model in models.items() if isinstance(model, FSDPModule)]
        assert sharded == [ranks.SHARDED]
        losses = {kind: model(tokens, labels=tokens).loss.item() for kind, model in models.items()}
        assert len(set(losses.values())) == 1
    finally:
        torch.distributed.destroy_process_group()
