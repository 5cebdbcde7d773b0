"""CUDA graphs of decoding steps give what the same steps give eagerly, and what one pass gives."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.encodings.cursors import ROOM
from deadreckon.models.streams import Streams

pytestmark = pytest.mark.gpu
GRAPHS = [
    "path-fox", "rope", "fox", "alibi", "nope", "selective-rope", "learned-rotation-values", "conformal-sympow",
    "stickbreaking", "sympow:4", "prism",
]  # fmt: skip
OPTIONS = {"sympow:4": {"p": 4}, "prism": {"positions": 64}}  # of encodings, by how they are named here


def make_model(encoding: str) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    name, options = encoding.split(":")[0], OPTIONS.get(encoding)
    config = dr.DeadReckonConfig(
        encoding=name, vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.05, encoding_options=None if options is None else {name: options},
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).eval().cuda()


@pytest.mark.parametrize("encoding", GRAPHS)
@torch.no_grad()
def test_steps_give_what_one_pass_gives(encoding: str) -> None:
    """Across a closing of tails, then of streams of different lengths, in float32: 1e-4 of the logits' range."""
    model, ids = make_model(encoding), torch.randint(1, 512, (2, 1000), device="cuda")
    expected = model(ids).logits
    close = {"rtol": 0, "atol": 1e-4 * float(expected.abs().max())}
    cache = DynamicCache(config=model.config)
    model(ids[:, :300], past_key_values=cache)
    found = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(300, 1000)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 300:], **close)
    assert model.model.steps is not None
    assert len(model.model.steps.captured) == 1
    streams, at = Streams(model, 4), (100, 17, 300)
    cache = DynamicCache(config=model.config)
    model(ids[:1, :100], past_key_values=cache)
    assert streams.admit(cache) == [0]
    rows, logits = streams.read([ids[1, :17].tolist(), ids[0, :300].tolist()])
    assert rows == [1, 2]
    torch.testing.assert_close(logits, torch.stack([expected[1, 16], expected[0, 299]]), **close)
    for step in range(20):
        logits = streams.step(torch.stack([ids[row % 2, start + step] for row, start in enumerate((*at, 0))]))
        for row, start in enumerate(at):
            torch.testing.assert_close(logits[row], expected[row % 2, start + step], **close)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 4}])
def test_generate(arguments: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("path-fox"), torch.randint(1, 512, (2, 60), device="cuda")
    ids = ids[:1] if "prompt_lookup_num_tokens" in arguments else ids
    mask = torch.ones_like(ids)
    if len(ids) == 2:
        mask[0, :20] = mask[0, 30] = 0
    found = []
    for graphs in ("0", "1"):
        monkeypatch.setenv("DEADRECKON_GRAPHS", graphs)
        torch.manual_seed(1)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=40, pad_token_id=0, **arguments))
        assert graphs == "1" or model.model.steps is None
    assert torch.equal(*found)


@torch.no_grad()
def test_room_that_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRISM's copy branch has room for 310 tokens, then for 620: another graph, and what it gives is the same."""
    monkeypatch.setitem(ROOM, "cuda", 310)
    model, ids = make_model("prism"), torch.randint(1, 512, (2, 330), device="cuda")
    expected, cache = model(ids).logits, DynamicCache(config=model.config)
    model(ids[:, :300], past_key_values=cache)
    found = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(300, 330)], dim=1)
    torch.testing.assert_close(found, expected[:, 300:], rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert model.model.steps is not None
    assert len(model.model.steps.captured) == 2


@pytest.mark.parametrize("encoding", ["path-fox", "stickbreaking", "sympow:4", "prism"])
@torch.no_grad()
def test_the_host_does_not_wait_for_steps(encoding: str) -> None:
    """Nor where a tail closes, that of PaTH-FoX at 320 tokens."""
    model, ids = make_model(encoding), torch.randint(1, 512, (2, 340), device="cuda")
    cache = DynamicCache(config=model.config)
    model(ids[:, :300], past_key_values=cache)
    for t in range(300, 304):
        model(ids[:, t : t + 1], past_key_values=cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(304, 340):
            model(ids[:, t : t + 1], past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("encoding", ["path-fox", "rope"])
@torch.no_grad()
def test_steps_that_outlive_autocast(encoding: str) -> None:
    """What autocast had cast is gone by the second time, and something else may be there, or nothing."""
    model, ids = make_model(encoding), torch.randint(1, 512, (2, 80), device="cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            expected, cache = model(ids).logits, DynamicCache(config=model.config)
            model(ids[:, :60], past_key_values=cache)
            found = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(60, 80)]
        # Halves are rounded at other places: by 2^-8 of what they are, in a few layers.
        close = {"rtol": 0, "atol": 0.03 * float(expected.abs().max())}
        torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 60:], **close)
        everywhere = [torch.full((1 << 16,), torch.nan, device="cuda") for _ in range(256)]
        del everywhere
        torch.cuda.empty_cache()
    assert model.model.steps is not None
    assert len(model.model.steps.captured) == 1
