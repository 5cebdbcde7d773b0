"""PRISM's cursors: the waves of their superpositions, and the network that moves them."""

from __future__ import annotations

import pytest
import torch

import deadreckon as dr
from deadreckon.encodings.cursors import Cursors
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.encodings.waves import waves


@pytest.mark.parametrize(("dtype", "channels"), [(torch.float32, 32), (torch.float64, 48)])
def test_waves_are_the_sinusoids_in_fewer_channels(dtype: torch.dtype, channels: int) -> None:
    """All inner products, of which the largest is 170, as exactly as sums of 340 products are rounded."""
    table = waves(64, 340, 10000.0, torch.device("cpu"), dtype)
    phase = torch.arange(64, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(170, dtype=torch.float64) / 170)
    full = torch.cat([phase.sin(), phase.cos()], dim=1)
    assert table.shape == (64, channels)
    assert waves(64, 340, 10000.0, torch.device("cpu"), dtype) is table
    with torch.inference_mode():
        assert not waves(5, 8, 100.0, torch.device("cpu"), dtype).is_inference()
    assert (table.double() @ table.double().T - full @ full.T).abs().max() < 170 * 340**0.5 * torch.finfo(dtype).eps


def test_recurrence_of_fixed_norm() -> None:
    recurrence = Recurrence(6, 5, norm=0.3)
    x, before = torch.randn(2, 7, 6), torch.zeros(2, 5)
    with torch.no_grad():
        recurrence.loudness.fill_(2)
        w = recurrence.weight_hh_l0.clone()
        plain = Recurrence(6, 5)
        plain.load_state_dict({name: x for name, x in recurrence.state_dict().items() if name != "loudness"})
        plain.weight_hh_l0.copy_(w * 2 * 0.3 / w.norm())
        expected = plain(x, before)
        for scale in (1, 50):
            recurrence.weight_hh_l0.copy_(scale * w)
            torch.testing.assert_close(recurrence(x, before), expected)
    recurrence(x, before).sum().backward()
    assert recurrence.loudness.grad is not None and recurrence.loudness.grad.abs() > 0
    recurrence.reset_parameters()
    assert recurrence.loudness == 1


def test_the_first_hidden_state() -> None:
    """It is a parameter only where it is asked for, and begins with zero, as it does again when all is drawn anew."""
    x, context = torch.randn(2, 5, 8), dr.Context.of(torch.randn(2, 5, 8))
    plain, learnt = (
        dr.AttentionLayer(8, 2, "prism", encoding_options={"start": s}).encoding.cursors for s in (False, True)
    )
    assert isinstance(plain, Cursors) and isinstance(learnt, Cursors)
    assert set(learnt.state_dict()) - set(plain.state_dict()) == {"recurrence.start"}
    plain.load_state_dict({name: value for name, value in learnt.state_dict().items() if name != "recurrence.start"})
    torch.testing.assert_close(learnt.read(x, context), plain.read(x, context), rtol=0, atol=0)
    start = learnt.recurrence.start
    assert start is not None
    torch.nn.init.normal_(start)
    assert not torch.allclose(learnt.read(x, context).reset.queries, plain.read(x, context).reset.queries)
    learnt.recurrence.reset_parameters()
    assert not start.any()
