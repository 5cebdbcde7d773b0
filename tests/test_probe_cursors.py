"""Traces of PRISM's cursors and attention maps of any encoding, and the command that plots them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import run_cli
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.probe.attention import maps_of
from deadreckon.lab.probe.cursors import Pair, trace
from deadreckon.lab.probe.maps import read_maps


def test_traces_show_what_the_model_computes() -> None:
    """In each layer and head: where it looks follows from what it says, and gates and histograms are the pair's."""
    torch.manual_seed(0)
    small = {"positions": 9, "width": 6, "cursors": 3, "hidden": 5, "similarity": 5.0, "modules": [0, 2]}
    config = dr.DeadReckonConfig(
        encoding="prism", vocab_size=13, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, encoding_options={"prism": small},
    )  # fmt: skip
    model, tokens = dr.DeadReckonForCausalLM(config).eval(), torch.randint(0, 13, (1, 9))
    for layer in range(3):
        for head in range(4):
            found = trace(model, tokens, 4, Pair(layer, head, 1))
            attention = model.model.layers[layer].self_attn
            heard: list[Tensor] = []
            hooks = [
                attention.o_proj.register_forward_pre_hook(lambda _, given, heard=heard: heard.append(given[0])),
                attention.v_proj.register_forward_hook(lambda _, x, v, heard=heard: heard.append(v)),
            ]
            with torch.no_grad():
                model(tokens)
            for hook in hooks:
                hook.remove()
            v, output = heard[0].unflatten(-1, (2, -1)), heard[1].unflatten(-1, (4, -1))
            torch.testing.assert_close(found.attention @ v[0, :, head // 2], output[0, :, head], rtol=0, atol=1e-5)
            assert found.pair == (layer, head, 1)
            for side in ("query", "key"):
                assert found.gates[side].shape == (9, 4) and found.histograms[side].shape == (9, 9)
                torch.testing.assert_close(found.gates[side][:, 1:].sum(-1), torch.ones(9))
                assert torch.equal(found.histograms[side].argmax(-1), found.modes[side][:, 1])
    with torch.no_grad():
        model.model.layers[1].self_attn.encoding.alpha[2, 1] = -9.0
    chosen = trace(model, tokens, 4)
    assert chosen.pair == (1, 2, 1)
    with pytest.raises(ValueError, match="head: expected 0 to 3, got 4"):
        trace(model, tokens, 4, Pair(head=4))


@pytest.mark.parametrize("name", [name for name in dr.ENCODINGS if not name.endswith("values")])
def test_maps_are_the_attention_of_every_encoding(name: str) -> None:
    """What a layer gives is its values by these weights; and the key with the greatest is where a head looks most."""
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=name, vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model, tokens = dr.DeadReckonForCausalLM(config), torch.randint(0, 13, (1, 9))
    heard: list[Tensor] = []
    for part in model.model.layers:
        attention = part.get_submodule("self_attn")
        attention.v_proj.register_forward_hook(lambda _, x, v: heard.append(v))
        attention.o_proj.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    state = torch.get_rng_state()
    maps = maps_of(model, tokens)
    for layer in range(2):
        v, output = (x[0].unflatten(-1, (-1, 8)).transpose(0, 1) for x in heard[2 * layer : 2 * layer + 2])  # (H, T, E)
        torch.testing.assert_close(maps[layer] @ v.repeat_interleave(2, 0), output, rtol=0, atol=1e-4)
    torch.set_rng_state(state)
    (found,) = read_maps(model, tokens, 4, (1, 2))
    assert (found.layer, found.head) == (1, 2) and torch.equal(found.weights, maps[1, 2])
    answering = maps[1, 2, 3:8]  # the last of four that ask, and all that say more
    assert found.modes.tolist() == answering.argmax(-1).tolist()
    assert found.sure == pytest.approx(float(answering.amax(-1).mean()))
    assert [(one.layer, one.head) for one in read_maps(model, tokens, 4, (None, 3))] == [(0, 3), (1, 3)]
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        read_maps(model, tokens, 4, (2, None))


def test_attention_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = dr.DeadReckonConfig(
        encoding="randomized", vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    dr.DeadReckonForCausalLM(config).save_pretrained("model")
    assert run_cli(monkeypatch, "probe", "model", "--attention", "--question", "123") == 0
    assert capsys.readouterr().out.replace(" ", "").startswith("123=")
    assert Path("model/probe/attention.png").read_bytes().startswith(b"\x89PNG")
    assert run_cli(monkeypatch, "probe", "model", "--attention", "--question", "123=321", "--head", "2") == 2
    assert "head: expected 0 to 1, got 2" in capsys.readouterr().err


def test_cursors_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"positions": 20, "width": 6, "cursors": 3, "hidden": 5}  # untrained, it answers until there are no more
    for name, options in (("prism", {"prism": small}), ("nope", None)):
        config = dr.DeadReckonConfig(
            encoding=name, vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            encoding_options=options,
        )  # fmt: skip
        dr.DeadReckonForCausalLM(config).save_pretrained(name)
    assert run_cli(monkeypatch, "probe", "prism", "--cursors", "--question", "123", "--head", "1") == 0
    assert capsys.readouterr().out.replace(" ", "").startswith("123=")
    assert Path("prism/probe/cursors.png").read_bytes().startswith(b"\x89PNG")
    drawn: list[Path] = []
    monkeypatch.setattr("deadreckon.lab.probe.cursors.cursors_picture", lambda _, path: drawn.append(path))
    assert run_cli(monkeypatch, "probe", "prism", "--cursors", "--question", "123=321") == 0
    assert capsys.readouterr().out.splitlines()[0].replace(" ", "") == "123=321"  # read, not answered
    assert run_cli(monkeypatch, "probe", "prism", "--cursors", "--data", "copy", "--length", "7", "-o", "out") == 0
    said = capsys.readouterr().out.replace(" ", "")
    assert said[:7].isdecimal() and said[7] == "="
    assert drawn == [Path("prism/probe/cursors.png"), Path("out/cursors.png")]
    for words, message in (
        (["nope", "--cursors"], "model: expected one with the encoding prism, got"),
        (["nope", "--cursors", "--question", "1"], "model: expected one with the encoding prism, got"),
        (["prism", "--cursors", "--data", "flip-flop", "--length", "8"], "question: expected one in digits and words"),
        (["prism", "--cursors"], "data: expected texts or one of flip-flop"),
    ):
        assert run_cli(monkeypatch, "probe", *words) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    train = ["train", "reverse", "--encoding", "prism", "--out", "run", "--change", "steps=1", "length=3", "width=16"]
    rows = ("batch_size=2", "test_rows=2", "validation_rows=2", "test_lengths=[3]")
    assert run_cli(monkeypatch, *train, *rows, "train_positions=16", "test_positions=16") == 0
    capsys.readouterr()
    assert run_cli(monkeypatch, "probe", "run", "--cursors") == 0
    said = capsys.readouterr().out.replace(" ", "")
    assert said[:3].isdecimal() and said[3] == "="  # as long as in training
