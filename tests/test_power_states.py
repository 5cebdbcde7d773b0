"""Symmetric powers in streaming: states of constant size, over any pieces, forks and crops."""

from __future__ import annotations

import itertools
from time import process_time
from typing import Any

import pytest
import torch
from cases import AWAKE, Case
from power_cases import draw, error, next_piece, weak

import deadreckon as dr
from deadreckon.ops.blockwise.symmetric import dimension
from deadreckon.ops.streaming.fold import fold
from deadreckon.ops.streaming.past import Past

SYMPOWS = ("sympow", "sympow-gated", "conformal-sympow")


def make_layer(name: str, **options: Any) -> dr.AttentionLayer:
    torch.manual_seed(0)
    return dr.AttentionLayer(32, 4, name, n_kv_heads=2, qk_norm=True, encoding_options=AWAKE.get(name, {}) | options)


@pytest.mark.parametrize(("name", "p"), [*((name, 2) for name in SYMPOWS), ("sympow", 4)])
def test_streams_before_across_and_after_folding(name: str, p: int) -> None:
    """Random splits of 700 tokens, float32, to 1e-5 (heads of 8; with p = 4 keys are folded after 440)."""
    layer, x = make_layer(name, p=p), draw(2, 700, 32, seed=1).float()
    expected = layer(x).detach()
    generator = torch.Generator().manual_seed(1)
    folded = set()
    for pieces in (3, 20, 100):
        cuts = sorted({0, 700, *torch.randint(1, 700, (pieces,), generator=generator).tolist()})
        state, outputs = None, []
        for start, end in itertools.pairwise(cuts):
            y, state = layer(x[:, start:end], state=state)
            outputs.append(y)
            folded.add(state.past.folded is not None)
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-5)
    assert folded == {False, True}


def test_keys_are_kept_where_that_takes_less_room_and_where_it_is_asked_for() -> None:
    x = draw(1, 400, 32).float()
    fourth = make_layer("sympow", p=4)
    _, state = fourth(x, state=None)  # 330 · 9 · 8 bytes, as much as 372 tokens
    assert state.past.folded is None
    _, state = fourth(draw(1, 500, 32).float(), state=None)
    assert state.past.folded is not None
    layer = make_layer("sympow")
    layer.encoding.score = dr.Power(2, "attention")
    _, state = layer(x, state=None)
    assert state.past.folded is None
    state.crop(64)
    _, state = make_layer("sympow")(x, state=None)
    assert state.past.folded is not None


@pytest.mark.parametrize("name", SYMPOWS)
def test_decoding_costs_the_same_anywhere(name: str) -> None:
    """Memory and time of a token, after 400 and after 6000."""
    layer = make_layer(name)

    def decode(state: Any) -> tuple[int, float]:
        times, held = [], 0
        for _ in range(3):
            start = process_time()
            for _ in range(64):  # a leaf: one of them folds
                layer(x, state=state)
                held = max(held, state.bytes())
            times.append(process_time() - start)
        return held, min(times)

    x = draw(1, 1, 32).float()
    _, state = layer(draw(1, 400, 32).float(), state=None)
    early = decode(state)
    layer(draw(1, 6000, 32).float(), state=state)
    late = decode(state)
    assert late[0] <= 1.1 * early[0]
    assert late[1] < 1.7 * early[1]


@pytest.mark.parametrize("name", SYMPOWS)
def test_folded_states_fork_go_back_and_are_selected(name: str) -> None:
    layer, (x, y) = make_layer(name), draw(2, 3, 700, 32, seed=5).float()
    _, state = layer(x[:, :500], state=None)
    assert state.past.folded is not None
    assert 64 <= state.past.croppable < 128
    other, picked = state.fork(), state.select(torch.tensor([2, 0])).to("cpu")
    assert other.past.folded is state.past.folded  # shared until it changes
    assert 0 < picked.bytes() < state.bytes()
    state.crop(64)
    for some, new, seen in (
        (state, y[:, :200], x[:, :436]),
        (other, x[:, 500:], x[:, :500]),
        (picked, x[[2, 0], 500:], x[[2, 0], :500]),
    ):
        wanted = layer(torch.cat([seen, new], dim=1)).detach()[:, seen.shape[1] :]
        found = torch.cat([layer(part, state=some)[0] for part in new.split([1, 1, 150, 48], dim=1)], dim=1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="crop: expected at most"):
        state.crop(200)


@pytest.mark.parametrize("p", [2, 4])
def test_later_pieces_may_be_of_other_magnitudes(p: int) -> None:
    """Keys 1e12 times longer than those of the first pieces, then as short again; and queries of any length."""
    case = Case("rotation", "learned", dr.Power(p), length=900, batch=1, width=6, value_width=6)
    leaves = weak(case.inputs())
    leaves["k"][:, :200] *= 1e-6
    leaves["k"][:, 600:700] *= 1e6
    leaves["log_gate"][:, 700] = -50.0  # or nothing of what follows would count beside them
    expected = case.attend(leaves, impl="reference")
    past, outputs, start = Past(), [], 0
    for length in (150, 40, 1, 1, 208, 100, 1, 199, 100, 100):
        piece = {name: x[:, start : start + length].float() for name, x in leaves.items()}
        outputs.append(next_piece(case, piece | {"q": 1e9 * piece["q"]}, past))
        start += length
    assert past.folded is not None
    found = torch.cat(outputs, dim=1)
    for part in (slice(0, 200), slice(200, 600), slice(600, 700), slice(700, 900)):
        assert error(found[:, part], expected[:, part]) < 1e-4


@pytest.mark.parametrize("encoding", SYMPOWS)
def test_generation_is_the_same_with_and_without_a_cache(encoding: str) -> None:
    """Greedy and with beams, a padded row beside a whole one; keys are folded on the way."""
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = dr.DeadReckonForCausalLM(config).eval()
    ids = torch.randint(1, 13, (2, 100), generator=torch.Generator().manual_seed(2))
    for arguments in ({"max_new_tokens": 40}, {"max_new_tokens": 10, "num_beams": 3}):
        results = [
            model.generate(ids, do_sample=False, use_cache=cache, return_dict_in_generate=True, **arguments)
            for cache in (True, False)
        ]
        assert torch.equal(results[0].sequences, results[1].sequences)
        layers = results[0].past_key_values.layers
        assert all(layer.state.past.folded is not None for layer in layers)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    both = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    alone = model.generate(ids[:1, 40:], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(both[0, 40:], alone[0])


def test_gates_and_paces_cost_what_the_paper_says() -> None:
    """Kumar et al. 2025, appendix A.5: of 124M parameters, gates are another 0.09%, paces beside them 0.18%."""

    def parameters(encoding: str) -> int:  # of 12 attention layers as GPT-2 has them
        with torch.device("meta"):
            layer = dr.AttentionLayer(768, 12, encoding)
        return 12 * sum(parameter.numel() for parameter in layer.parameters())

    plain, gated, conformal = map(parameters, SYMPOWS)
    assert [round(100 * (more - plain) / 124e6, 2) for more in (gated, conformal)] == [0.09, 0.18]


@pytest.mark.parametrize("name", SYMPOWS)
def test_forms_of_a_layer_agree(name: str) -> None:
    """The option `form` changes how powers are computed, and whether a stream keeps its keys."""
    x, seen = draw(1, 300, 32, seed=2).float(), []
    for form in ("attention", "chunked"):
        y, state = make_layer(name, form=form)(x, state=None)
        seen.append((y.detach(), state.past.folded is None))
    (quadratic, kept), (linear, folded) = seen
    assert (quadratic - linear).abs().max() < 1e-5 * quadratic.abs().max()
    assert kept and not folded
    with pytest.raises(ValueError, match="form: expected 'auto'"):
        make_layer(name, form="linear")


@pytest.mark.parametrize(("p", "megabytes"), [(2, 38.9), (4, 14_348.5)])
def test_states_are_as_large_as_the_paper_says(p: int, megabytes: float) -> None:
    """Section 4.1: 39 MB and 14 GB for 12 layers of 12 heads of 64, in bfloat16."""
    k = draw(12, 1, 8).float()
    assert fold(None, k, k, None, k[:, :1, :1], p).state.shape == (12, dimension(8, p), 1, 9)
    assert round(12 * 12 * dimension(64, p) * (64 + 1) * 2 / 1e6, 1) == megabytes
