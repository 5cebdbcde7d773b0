"""Sharpened attention, which stays as sharp beyond the training length as it was there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from small_runs import run_cli, small

import deadreckon as dr
from deadreckon.encodings.base import Context
from deadreckon.lab.evaluation import format_value
from deadreckon.lab.probe.attention import maps_of
from deadreckon.lab.recipes import Recipe, find_recipe
from deadreckon.lab.training import Run, make_model, score_model, train_run

ENCODINGS = ("path", "path-fox", "rope", "stickbreaking", "learned-rotation")


def make(encoding: str, beyond: int | None = 8, **changes: object) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, sharpen_beyond=beyond, **changes,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).double().eval()


def test_half_of_the_attention_stays_half() -> None:
    """Of a token whose logit leads by log n, among n others, at any n."""
    beyond = 64
    factors = Context(torch.arange(5000).unsqueeze(0)).sharpness(beyond)
    assert factors.shape == (1, 5000, 1, 1) and (factors[:, :beyond] == 1).all()
    for n in (64, 128, 1024, 5000):
        lead = math.log(beyond) * float(factors[0, n - 1])
        assert math.exp(lead) / (math.exp(lead) + n) == pytest.approx(0.5, abs=1e-6)


def test_it_is_queries_that_are_scaled() -> None:
    torch.manual_seed(0)
    layer = dr.AttentionLayer(32, n_heads=4, encoding="path", n_kv_heads=2, sharpen_beyond=8).double()
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    n = torch.arange(1, 31).double().clamp(min=8)
    factors = layer.encoding(x, Context.of(x))
    expected = dr.attend(
        q * (n.log() / math.log(8))[:, None, None], k, v, **factors._asdict(), scale=8**-0.5, impl="reference"
    )
    torch.testing.assert_close(layer(x), layer.o_proj(expected.flatten(-2)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_up_to_the_length_nothing_changes(encoding: str) -> None:
    model, plain = make(encoding), make(encoding, None)
    ids = torch.randint(0, 50, (2, 40))
    torch.testing.assert_close(model(ids[:, :8]).logits, plain(ids[:, :8]).logits, rtol=0, atol=0)
    assert (model(ids).logits - plain(ids).logits)[:, 8:].abs().amax() > 1e-3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_token_by_token_packed_and_padded_it_is_the_same(encoding: str) -> None:
    model, ids = make(encoding), torch.randint(0, 50, (2, 40))
    whole, cache, steps = model(ids).logits, None, []
    for piece in ids.split([13, 1, 1, 10, *[1] * 15], dim=1):
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-9)
    bounds = torch.tensor([0, 40, 80], dtype=torch.int32)
    packed = model(ids.reshape(1, 80), cu_seqlens=bounds).logits
    torch.testing.assert_close(packed.view(2, 40, -1), whole, rtol=0, atol=1e-9)
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[:, :5] = 0
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
    generated = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(generated[:, 5:], expected)


def test_powers_do_not_depend_on_it() -> None:
    """Their weights are divided by their sum, whatever the scale."""
    ids = torch.randint(0, 50, (1, 30))
    torch.testing.assert_close(make("sympow")(ids).logits, make("sympow", None)(ids).logits, rtol=0, atol=1e-9)


def test_models_that_were_trained_without(tmp_path: Path) -> None:
    make("path", None).float().save_pretrained(tmp_path)
    loaded = dr.DeadReckonForCausalLM.from_pretrained(tmp_path, sharpen_beyond=16)
    assert {layer.self_attn.sharpen_beyond for layer in loaded.model.layers} == {16}
    for share, beyond in ((0, None), (1, 128), (0.25, 32), (0.001, 2), (2, 256)):
        recipe = find_recipe("flipflop", "tiny", "path", changes=[f"sharpen={share}"])
        assert make_model(recipe, 8).config.sharpen_beyond == beyond
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    for before, now in ((True, 1.0), (False, 0.0)):  # as recipes were written once
        assert Recipe.from_dict(recipe.to_dict() | {"sharpen": before}).sharpen == now
    with pytest.raises(ValueError, match=r"sharpen: expected a number of 0 or more, got -0\.5"):
        recipe.change(["sharpen=-0.5"])


@pytest.mark.parametrize("value", [1, 0, -3, True, 1 << 70])
def test_lengths_that_cannot_be(value: object) -> None:
    with pytest.raises(ValueError, match="sharpen_beyond: expected an integer from 2 to"):
        dr.AttentionLayer(32, n_heads=4, sharpen_beyond=value)  # type: ignore[arg-type]


def test_trained_models_are_tested_sharpened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `deadreckon eval`, with other tests too, whose scores are not kept."""
    run = train_run(small("path", 0, "initial=0.3", "test_rows=64", "test_lengths=[16, 64]"), tmp_path / "run")
    kept = run.scores()
    words = ["eval", str(run.path), "--sharpen-beyond", "16", "--change", 'evaluators=["perplexity"]']
    assert run_cli(monkeypatch, *words) == 2
    assert "evaluators" in capsys.readouterr().err
    words[-1] = "test_rows=32"
    assert run_cli(monkeypatch, *words) == 0
    said = dict(re.findall(r"(\d+): ([\d.e-]+)%", capsys.readouterr().out.split("\n")[0]))
    recipe = run.recipe.change_tests(["test_rows=32"])
    plain, sharp = (score_model(run.path / "last", recipe, sharpen_beyond=beyond) for beyond in (None, 16))
    [within, beyond] = [place for place in plain if place[0] == "as trained"]
    assert plain[within] == sharp[within] and plain[beyond].loss != sharp[beyond].loss
    assert float(said["64"]) == pytest.approx(100 * sharp[beyond].value("error"), abs=0.1)
    assert run.scores() == kept and plain[beyond].rows == 32
    for change, message in (
        ("test_lengths=[16, -7]", "lengths: expected"),
        ("test_lengths=[16, 7]", "lengths: expected lengths that flip-flop (as trained) has, got 7"),
        ('evaluators=["error", "x"]', "evaluators"),
    ):
        assert run_cli(monkeypatch, "eval", str(run.path), "--change", change) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="change: expected a field of tests, test_… or evaluators, conditions, opt"):
        recipe.change_tests(["layers=3"])


def test_runs_are_compared_with_themselves_sharpened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `deadreckon compare`, without training anew; what is scored so is kept beside the run's own scores."""
    changes = ["initial=0.3", "test_rows=64", "test_lengths=[16, 64]", "steps=2", "length=16", "test_tokens=4096"]
    of = ["flipflop", "--encodings", "rope,path", "--change", *changes, "--runs", str(tmp_path)]
    assert run_cli(monkeypatch, "compare", *of) == 0
    [run] = [Run(path) for path in tmp_path.glob("*/path-0")]
    plain, weights = run.scores(), (run.path / "last" / "model.safetensors").stat().st_mtime_ns
    assert run.scores(sharpen_beyond=16) == {}
    assert run_cli(monkeypatch, "compare", *of, "--sharpen-beyond", "1") == 2
    assert "sharpen_beyond: expected an integer from 2" in capsys.readouterr().err
    assert run_cli(monkeypatch, "compare", *of, "--sharpen-beyond", "16", "--finished") == 2
    assert "expected runs that were scored sharpened beyond 16" in " ".join(capsys.readouterr().err.split())
    page = tmp_path / "page.md"
    assert run_cli(monkeypatch, "compare", *of, "--sharpen-beyond", "16", "--page", str(page)) == 0
    assert run.scores() == plain and weights == (run.path / "last" / "model.safetensors").stat().st_mtime_ns
    sharp = run.scores(sharpen_beyond=16)
    assert sharp.keys() == plain.keys() and run.scores(sharpen_beyond=17) == {}
    losses = {length: [scores["as trained", length].loss for scores in (plain, sharp)] for length in (16, 64)}
    assert losses[16][0] == losses[16][1] and losses[64][0] != losses[64][1]
    expected = score_model(run.path / "last", run.recipe, sharpen_beyond=16)
    assert {place: one.loss for place, one in sharp.items()} == {place: one.loss for place, one in expected.items()}
    text = page.read_text()
    assert "| length | RoPE | RoPE sharpened | PaTH | PaTH sharpened |" in text
    cell = format_value("error", sharp["as trained", 64].value("error"))
    assert next(line for line in text.splitlines() if line.startswith("| 64")).split(" | ")[-1] == f"{cell} |"
    run_cli(monkeypatch, "eval", str(run.path), "--sharpen-beyond", "16")  # known, so that nothing is loaded
    assert run.scores(sharpen_beyond=16) == sharp


def test_tasks_count_in_tokens() -> None:
    """A sum of 8 digits takes more of them."""
    recipe = find_recipe("addition", "tiny", "path", changes=["sharpen=1"])
    width = recipe.make_task().sample(100, 8, torch.Generator().manual_seed(0))[0].shape[1]
    assert make_model(recipe, 64).config.sharpen_beyond == width > 60


def test_a_model_that_training_starts_with_is_sharpened(tmp_path: Path) -> None:
    first = train_run(small("path", 0, "steps=2"), tmp_path / "first")
    run = train_run(small("path", 0, "steps=2", f"start={first.path / 'last'}", "sharpen=1"), tmp_path / "run")
    assert first.load().config.sharpen_beyond is None and run.load().config.sharpen_beyond == 16


@pytest.mark.parametrize("encoding", ["rope", "path-fox"])
def test_the_probe_sees_it(encoding: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (1, 40))
    sharp, plain = (maps_of(make(encoding, beyond), ids) for beyond in (8, None))
    assert torch.equal(sharp[0, :, :8], plain[0, :, :8]) and not torch.allclose(sharp[0, :, 20:], plain[0, :, 20:])
    model = make(encoding)
    layer = model.model.layers[0].self_attn
    seen = {}
    layer.register_forward_hook(lambda _, inputs, output: seen.update(output=output))
    layer.v_proj.register_forward_hook(lambda _, inputs, output: seen.update(v=output))
    model(ids)
    values = seen["v"].unflatten(-1, (2, 8)).repeat_interleave(2, dim=2)
    output = torch.einsum("hij,bjhd->bihd", sharp[0].double(), values.double()).flatten(-2)
    found = seen["output"][0] if isinstance(seen["output"], tuple) else seen["output"]
    torch.testing.assert_close(layer.o_proj(output), found, atol=1e-6, rtol=1e-6)
