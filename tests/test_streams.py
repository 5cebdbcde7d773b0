"""Sequences of different lengths, decoded together: each as it is alone."""

from __future__ import annotations

import pytest
import torch
from test_steps import CLOSE, Rerun, as_on_a_gpu, kernel_model, make_model
from test_streaming import prompts
from torch import Tensor
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.models.streams import Streams, fork

__all__ = ["as_on_a_gpu"]  # a fixture


def prefilled(model: dr.DeadReckonForCausalLM, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("encoding", ["path-fox", "selective-rope", "conformal-sympow", "stickbreaking"])
@torch.no_grad()
def test_rows_come_and_go(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in two rows: of one the tail is closed on the way, two share a prefix."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model = kernel_model(encoding) if encoding != "stickbreaking" else make_model(encoding)
    ids = prompts(3, 24)
    ids[2, :6] = ids[1, :6]
    expected = model(ids).logits
    streams = Streams(model, 2, Rerun)
    prefix = prefilled(model, ids[1:2, :6])
    caches = [prefilled(model, ids[:1, :12]), fork(prefix), fork(prefix)]
    at, rows = [12, 6, 6], {streams.admit(caches[0]): 0, streams.admit(caches[1]): 1}
    assert rows == {0: 0, 1: 1}
    with pytest.raises(ValueError, match="cache: expected a free row, all 2 are taken"):
        streams.admit(caches[2])
    for _ in range(7):
        tokens = torch.stack([ids[rows[row], at[rows[row]]] for row in (0, 1)])
        logits = streams.step(tokens)
        for row, sequence in rows.items():
            torch.testing.assert_close(logits[row], expected[sequence, at[sequence]], **CLOSE)
            at[sequence] += 1
        if at[1] == 9:
            streams.drop(1)
            rows[1] = 2
            assert streams.admit(caches[2]) == 1
    assert [cache.get_seq_length() for cache in caches] == at
    assert bool(Rerun.captured) == (encoding != "stickbreaking")


def test_bad_rows() -> None:
    model, ids = make_model("rope"), prompts(2, 5)
    with pytest.raises(ValueError, match="rows: expected an integer of 1 or more, got 0"):
        Streams(model, 0)
    streams = Streams(model, 2)
    with pytest.raises(ValueError, match="cache: expected that of one sequence"):
        streams.admit(prefilled(model, ids))
    with pytest.raises(ValueError, match="cache: expected that of one sequence"):
        streams.admit(DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="row: expected one that is taken, got 0"):
        streams.drop(0)
    with pytest.raises(ValueError, match=r"ids: expected \(2,\), one token a row, got \(3,\)"):
        streams.step(torch.zeros(3, dtype=torch.int64))
    assert streams.step(torch.zeros(2, dtype=torch.int64)).shape == (2, 13)
