"""The probe on models: every encoding, known results for some, predictions, errors and the command."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import theory
import torch
from rich.console import Console
from small_runs import run_cli
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.probe import Findings, attention, mean_gates, run_probe
from deadreckon.lab.probe.probe import _losses_as_trained
from deadreckon.lab.probe.reach import measure_more
from deadreckon.lab.probe.report import _colour, print_findings
from deadreckon.lab.probe.source import Source
from deadreckon.lab.recipes import Recipe, find_recipe
from deadreckon.lab.training import Progress, Run, Training, make_model
from deadreckon.tasks import TASKS
from deadreckon.tasks.task import NOT_SCORED, PAD, VOCAB_SIZE


def small(encoding: str, **options: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    config = dr.DeadReckonConfig(encoding=encoding, initializer_range=0.3, **{**sizes, **options})
    return dr.DeadReckonForCausalLM(config)


def some_tokens(rows: int = 3, length: int = 128) -> Tensor:
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("encoding", dr.ENCODINGS)
def test_every_encoding(encoding: str, tmp_path: Path) -> None:
    model = small(encoding, num_key_value_heads=2)
    model.train()
    found = run_probe(model, some_tokens(), window=16, queries=8)
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    found.save(tmp_path / "probe.json")
    assert Findings.load(tmp_path / "probe.json") == found
    console = Console(file=io.StringIO(), width=200)
    print_findings(found, console)
    assert not found.undefined
    assert len(found.heads) == 4
    for head in found.heads:
        total = sum(head.mass.by_distance)
        assert total == pytest.approx(1, abs=1e-5) if encoding != "stickbreaking" else 0 < total <= 1 + 1e-5
        assert head.mass.far <= sum(head.mass.by_distance[5:]) + 1e-6  # bins from 16 on
        for bound in (head.mass.floor, head.mass.norm_floor):
            assert bound is None or bound <= head.mass.far + 1e-6
        assert head.mass.ceiling is None or head.mass.far <= head.mass.ceiling + 1e-6
        assert 0 <= head.values.plain <= 1 + 1e-6
        assert (head.mixing is None) == (head.transport == "none")
        assert head.window_from == "given"


def test_random_rotations_decay_as_they_are_drawn() -> None:
    model = small("random-rotation", head_dim=16)
    rows, length = 8, 512
    found = run_probe(model, some_tokens(rows, length), queries=4)
    for head in found.heads:
        assert head.mixing is not None
        assert head.mixing.pair_rates is not None
        for pair, rate in enumerate(head.mixing.pair_rates[:3]):  # slower ones do not turn in 256 tokens
            widest = 10_000 ** (-pair / 8)
            rho = theory.uniform_angles(widest)
            # log|mean of one step| has this deviation; longer routes only make a fit of the slope better
            deviation = math.sqrt((1 - rho**2) / (rows * length)) / rho
            assert abs(math.log(rate) - math.log(rho)) < 5 * deviation, (pair, rate, rho)
        assert head.mixing.mixed is not None
        assert head.mixing.mixed[0] == 0
        assert 0.1 < head.mixing.mixed[-1] < 0.6  # pairs of more than 0.1 rad or so of eight
        assert head.window_from == "assumed"  # the slowest pair takes ages


def test_path_at_the_start() -> None:
    model = small("path")
    tokens = some_tokens(4, 256)
    kept: list[dr.Householder] = []
    hook = model.model.layers[0].self_attn.encoding.register_forward_hook(lambda *call: kept.append(call[2].transport))
    found = run_probe(model, tokens, queries=4, routes=10**6)
    hook.remove()
    w, beta = kept[0].w[:, 1:].double(), kept[0].beta[:, 1:].double()
    for head in found.heads:
        mixing = head.mixing
        assert mixing is not None
        moment = torch.einsum("bt,btd,bte->de", beta[..., head.head], w[..., head.head, :], w[..., head.head, :])
        assert mixing.step == pytest.approx(theory.householder(moment / (4 * 255), beta=1.0), abs=1e-9)
        assert mixing.gap is not None
        assert all(after <= before for before, after in zip(mixing.size, mixing.size[1:], strict=False))
        assert mixing.size[-1] < 0.5  # β < 2 also shrinks
        assert mixing.window is None or head.window == mixing.window or head.window_from == "assumed"
        assert head.mass.norm_floor is not None


def test_no_transport_and_gates() -> None:
    nope, alibi = (run_probe(small(name), some_tokens(), queries=4) for name in ("nope", "alibi"))
    assert all(head.mixing is None and head.gates is None and head.values.carried is None for head in nope.heads)
    for head, slope in zip(alibi.heads, (2**-2, 2**-4, 2**-6, 2**-8), strict=True):
        expected = [math.exp(-slope * n) for n in alibi.lengths]
        assert head.gates == pytest.approx(expected, rel=1e-4)  # sums of float32 gates
        assert head.mass.norm_floor is None
    assert alibi.heads[0].range.tokens is None
    assert "gates bound" in alibi.heads[0].range.why
    gates = mean_gates(torch.tensor([0.5, 0.25]).log().expand(1, 9, 2), [1, 3])
    torch.testing.assert_close(gates, torch.tensor([[0.5, 0.25], [0.125, 1 / 64]], dtype=torch.float64))


def test_even_attention_is_diluted_by_half_at_twice_the_length() -> None:
    model = small("nope")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    found = run_probe(model, some_tokens(2, 256), trained=100, window=20, queries=64)
    for head in found.heads:
        assert head.range.tokens == pytest.approx(200, abs=1)
        assert head.scores.gap_weight == pytest.approx(0, abs=1e-4)
        assert head.mass.floor == pytest.approx(head.mass.far, rel=1e-5)
    assert found.predicted.tokens == pytest.approx(200, abs=1)


def test_prediction_looks_no_farther_than_training() -> None:
    found = run_probe(small("nope"), some_tokens(1, 256), trained=64, window=16, queries=1)
    for head in found.heads:
        bins = dict(zip(found.bins, head.mass.by_distance, strict=True))
        near, seen = sum(bins[start] for start in (0, 1, 2, 4, 8)), bins[16] + bins[32]  # to 15, to 63
        odds = seen / near / 48
        assert head.range.tokens == pytest.approx(theory.far_tokens_borne(odds, 48) + 16, rel=1e-5)
        assert head.mass.far > 1.5 * seen  # there is more
        assert head.mass.error is None


def test_rope_is_predicted_no_more_than_it_was_trained() -> None:
    tokens = some_tokens(2, 128)
    rope, turning, gated = (
        run_probe(small(name), tokens, trained=48, queries=4) for name in ("rope", "learned-rotation", "sympow-gated")
    )
    assert {head.range.tokens for head in rope.heads} == {48}
    assert rope.predicted.tokens == 48
    assert all(head.range.tokens is not None and head.range.tokens > 60 for head in turning.heads)
    assert all("by their length alone" not in head.range.why for head in gated.heads)  # gates may hide what is new


def test_equal_values_cancel_only_when_they_are_carried() -> None:
    quick = {"head_dim": 16, "encoding_options": {"random-rotation": {"base": 1.0}}}  # angles up to 1 in every pair
    model, rho = small("random-rotation", **quick), theory.uniform_angles(1.0)
    sharp = run_probe(model, torch.full((2, 512), 7), queries=16)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    found = run_probe(model, torch.full((2, 512), 7), queries=16)
    for even, chosen in zip(found.heads, sharp.heads, strict=True):  # Example 10: weights that follow the phases
        assert even.values.carried is not None
        assert chosen.values.carried is not None
        assert even.values.carried < chosen.values.carried
    for head in found.heads:
        assert head.values.plain == pytest.approx(1, abs=1e-5)
        assert head.values.carried is not None
        assert head.values.transport is not None
        assert head.window_from == "mixing"
        assert head.mixing is not None
        assert abs(head.mixing.rate - rho) < 4 * head.mixing.error
        assert head.window == theory.mixing_window(head.mixing.rate, 0.1)
        # The mean of 240 or more phasors of nested routes, by their correlation, root mean square; twice is allowed
        assert head.values.carried < 2 * math.sqrt((1 + rho**2) / (1 - rho**2) / 240)
        assert head.values.carried <= head.values.transport + 1e-5 <= 1 + 2e-5
        assert head.values.bound == 1
        assert head.drowned_carried is not None
        assert head.drowned is not None
        assert head.drowned_carried > head.drowned


def test_loss_is_set_beside_that_of_a_context_as_trained() -> None:
    model, tokens = small("rope"), some_tokens(3, 150)
    with torch.no_grad():
        short = _losses_as_trained(model, tokens, trained=40)
    assert short.shape == (3, 149)
    for token in (1, 39, 40, 59, 60, 110, 129, 130, 149):
        # pieces begin every 20 tokens, the last at 110, where 40 are left; each counts from its middle on
        start = max(0, (token - 20) // 20 * 20) if token < 130 else 110
        piece = tokens[:, start : token + 1]
        loss = torch.nn.functional.cross_entropy(model(piece).logits[:, -2], piece[:, -1], reduction="none")
        torch.testing.assert_close(short[:, token - 1], loss.double(), rtol=1e-4, atol=1e-5)
    found = run_probe(model, tokens, trained=40, queries=4)
    assert found.loss_more is not None
    for place, more in zip(found.places, found.loss_more, strict=True):
        assert (abs(more) < 1e-4) == (place < 40)
    assert run_probe(model, tokens, queries=4).loss_more is None
    assert measure_more([20, 40, 80, 160], [0.0, 0.0, 0.05, 0.3], [0.01] * 4, 40).tokens == 81
    assert measure_more([20, 40, 80, 160], [0.0, 0.0, 0.05, 0.3], [0.11] * 4, 40).tokens is None


def test_what_the_probe_does_not_reproduce_is_not_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = small("rope", num_hidden_layers=2)
    real = attention.logits_of
    monkeypatch.setattr(attention, "logits_of", lambda *given: 1.5 * real(*given))
    found = run_probe(model, some_tokens(), tmp_path)
    assert not found.heads
    assert set(found.undefined) == {"layer 0", "layer 1"}
    assert "off that of the rope layer" in found.undefined["layer 0"]
    assert found.predicted.why == "no layer could be probed"
    assert [path.name for path in tmp_path.iterdir()] == ["probe.json"]
    out = io.StringIO()
    print_findings(found, Console(file=out, width=200))
    assert "layer 1: not defined: the probe's weights give an output" in out.getvalue()


def test_half_precision_is_probed() -> None:
    found = run_probe(small("path-fox").to(torch.bfloat16), some_tokens(), queries=4)
    assert len(found.heads) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.zeros(4, 16, dtype=torch.long)}, r"tokens: expected a row of 32 or more, got \(4, 16\)"),
        ({"tokens": torch.zeros(64)}, r"tokens: expected integers \(B, T\), got torch.float32 \(64,\)"),
        ({"tokens": torch.full((1, 64), 20)}, "tokens: expected numbers from 0 to 19, .* got 20 to 20"),
        ({"labels": torch.zeros(1, 64)}, r"labels: expected \(B, T\) = \(3, 128\), got \(1, 64\)"),
        ({"trained": 1}, "trained: expected a length of 4 or more, got 1"),
        ({"window": 65}, "window: expected between 1 and T / 2 = 64, got 65"),
        ({"tolerance": 1.0}, "tolerance: expected a number between 0 and 1, got 1.0"),
        ({"routes": 0}, "routes: expected 1 or more, got 0"),
        ({"labels": torch.full((3, 128), 20)}, "labels: expected numbers from 0 to 19, .* and -100, got others"),
        ({"queries": 0}, "queries: expected 1 or more, got 0"),
        ({"keep": 0.0}, "keep: expected a share between 0 and 1, got 0.0"),
        ({"model": torch.nn.Linear(1, 1)}, "model: expected a DeadReckonForCausalLM, got Linear"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    given = {"model": small("nope"), "tokens": some_tokens(), **options}
    with pytest.raises(ValueError, match=message):
        run_probe(**given)


@pytest.mark.parametrize(("encoding", "value"), [("path", math.nan), ("rope", math.nan), ("path", math.inf)])
def test_numbers_that_are_none(encoding: str, value: float) -> None:
    model = small(encoding)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = value
    with pytest.raises(ValueError, match="model: expected numbers in every layer, got some that are infinite or none"):
        run_probe(model, some_tokens())


def test_rows_are_as_long_as_all_are(tmp_path: Path) -> None:
    """Without padding; the model has as many positions as it reads; the trained length is that of the longest rows."""
    recipe = find_recipe("copy", "tiny", "prism", changes=("steps=1", "length=8", "test_lengths=[8]", "test_rows=2"))
    Run.create(tmp_path, recipe).save(Training(make_model(recipe, VOCAB_SIZE), recipe.make_task(), recipe), Progress(1))
    source = Source(tmp_path, length=200)
    assert source.model.config.encoding_options["prism"]["positions"] >= source.rows("", 2, 200, 0).tokens.shape[1]
    assert source.rows("", 2, 8, 0).trained == source.rows("", 2, 8, 1).trained == recipe.longest_row(8)
    for data, length in (("addition", 8), ("multiplication", 8)):
        tokens, labels, _ = source.rows(data, 16, length, 0)
        assert labels is not None and tokens.shape == labels.shape and not (tokens == PAD).any()
        assert (labels[:, -1] != NOT_SCORED).any()
    assert len(source.question("addition", 0, 0)) < 40


def test_a_range_may_not_have_been_measured() -> None:
    labels = torch.full_like(some_tokens(), NOT_SCORED)
    labels[:, -1] = 1
    for given, said in ((labels, "measured range: not measured (no loss"), (None, "measured range: not reached (up")):
        console = Console(file=io.StringIO(), width=200)
        print_findings(run_probe(small("alibi"), some_tokens(), labels=given, trained=64, queries=4), console)
        assert said in console.file.getvalue()  # type: ignore[attr-defined]


def test_queries_are_those_that_answer() -> None:
    model, rows = make_model(Recipe(encoding="path"), 5), torch.randint(0, 5, (2, 64))
    labels = torch.full_like(rows, -100)
    labels[:, 40], labels[:, 20], labels[0, 50] = 1, 1, 1  # in both rows; in the first half; in one row
    answering = run_probe(model, rows, labels=labels, queries=9)
    assert answering.about["queries"] == 1
    moved = rows.clone()
    moved[:, 40:] = (rows[:, 40:] + 1) % 5  # what comes after the query at 39 does not matter
    again = run_probe(model, moved, labels=labels, queries=9)
    assert [head.mass.far for head in again.heads] == pytest.approx([head.mass.far for head in answering.heads])
    labels[1, 40] = -100
    assert run_probe(model, rows, labels=labels, queries=9).about["queries"] == 9  # none answers in every row


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(Recipe(encoding="path"), 5).save_pretrained(tmp_path / "model")
    command = ["probe", str(tmp_path / "model"), "--data", "flip-flop", "--length", "64", "--trained", "32"]
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        run_cli(monkeypatch, *command, "--rows", "2", "--queries", "9", "--window", "16", "-o", f"{tmp_path}/out") == 0
    )
    text = capsys.readouterr().out
    _, labels = TASKS["flip-flop"]().sample(2, 64, torch.Generator().manual_seed(0))
    scored = int((labels[:, 33:] != -100).all(0).sum())  # the last token, and others by chance
    assert f"2 × 64 tokens, {min(scored, 9)} queries a row" in text
    assert "predicted range:" in text
    assert (tmp_path / "out" / "probe.png").read_bytes().startswith(b"\x89PNG")
    found = Findings.load(tmp_path / "out" / "probe.json")
    assert found.about["trained"] == 32
    assert {(head.window, head.window_from) for head in found.heads} == {(16, "given")}
    for data, message in (
        ("nothing.txt", "data: expected texts or one of flip-flop"),
        (__file__, "a tokenizer beside the model in"),
    ):
        assert run_cli(monkeypatch, *command[:3], data) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate("wri01")}, unk_token="w"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    novel = tmp_path / "novel.txt"
    novel.write_text("w 1 i 0 r 1 " * 50)
    source = Source(tmp_path / "model")
    rows, labels, trained = source.rows(str(novel), 3, 64, 0)
    assert labels is trained is None
    assert rows[:, :3].tolist() == [[0, 4, 2], [1, 4, 0], [2, 3, 1]]  # from words 0, 100 and 200 on
    with pytest.raises(ValueError, match=r"data: expected 9 × 64 tokens or more in .*, got 300"):
        source.rows(str(novel), 9, 64, 0)
    assert run_cli(monkeypatch, "probe", str(tmp_path), "--data", "flip-flop") == 2
    assert "run: expected a folder with recipe.json" in capsys.readouterr().err
    assert run_cli(monkeypatch, *command, "--rows", "0") == 2
    assert "rows: expected 1 or more, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [range(1), range(3, 10), range(24)], ids=len)
def test_every_layer_has_a_colour_of_its_own(layers: range) -> None:
    findings: Any = SimpleNamespace(heads=[SimpleNamespace(layer=layer) for layer in layers for _ in range(2)])
    assert len({_colour(findings, layer) for layer in layers}) == len(layers)
