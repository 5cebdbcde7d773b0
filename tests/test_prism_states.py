"""PRISM in pieces: its cache, and what of it a CUDA graph may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prism import VOCABULARY, cursors_of, make_layer, make_model
from torch import Tensor
from transformers import DynamicCache


@pytest.mark.parametrize(("tokens", "held"), [(1, 1 << 20), (3, 1 << 20), (3, 1)])
def test_an_interrupted_token_leaves_as_many_to_undo(tokens: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cursors are moved, at once or one by one, attention fails; then 64 tokens are undone, and the rest goes on."""
    monkeypatch.setattr("deadreckon.encodings.cursors.HELD", {"cpu": held})
    layer, x = make_layer(), torch.randn(1, 104, 8, dtype=torch.float64)
    expected, (_, state) = layer(x), layer(x[:, :100], state=None)

    def interrupt(*_: Any, **__: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("deadreckon.models.layer.attend_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            layer(x[:, 100 : 100 + tokens], state=state)
    state.crop(64)
    for start, end in ((36, 37), (37, 104)):
        found, state = layer(x[:, start:end], state=state)
        torch.testing.assert_close(found, expected[:, start:end], rtol=0, atol=1e-9)


def test_pieces_that_are_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all pairs of tokens would take too much room; of a batch with padding, too."""
    model, ids = make_model(start=True).eval().double(), torch.randint(1, VOCABULARY, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        monkeypatch.setattr("deadreckon.encodings.cursors.HELD", {"cpu": 1700})
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache).logits
        then = model(ids[:, 30:], attention_mask=mask, past_key_values=cache).logits
    found = torch.cat([first, then], dim=1)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-9)


@torch.no_grad()
def test_padding_of_several_pieces() -> None:
    """Of a row that begins in the second of them."""
    model, ids = make_model(start=True).eval().double(), torch.randint(1, VOCABULARY, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    expected, cache = model(ids, attention_mask=mask).logits, DynamicCache(config=model.config)
    found = [
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        for start, end in ((0, 1), (1, 4), (4, 9))
    ]
    torch.testing.assert_close(torch.cat(found, dim=1)[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-9)


def test_states_keep_so_many_histograms() -> None:
    layer = make_layer()
    _, state = layer(torch.randn(1, 100, 8, dtype=torch.float64), state=None)
    filters = cursors_of(layer).walking + cursors_of(layer).jumping
    assert state.recent["histogram"].shape == (1, 66, filters, 9)
    assert state.recent["hidden"].shape == (1, 66, 5) and state.recent["copy"].shape[2] == 128
    mass = torch.ones(1, 66, filters, dtype=torch.float64)
    mass[:, 34] = 0  # where the next token's will be: 100 = 66 + 34
    torch.testing.assert_close(state.recent["histogram"].sum(-1), mass)
