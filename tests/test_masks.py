"""Masked tokens are ignored wherever they are: with and without a KV cache, in prompts and in later pieces."""

from __future__ import annotations

import pytest
import torch
from test_streaming import STEADY, VOCABULARY, make_model
from torch import Tensor
from transformers import DynamicCache

import deadreckon as dr

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def drawn(length: int, masked: float) -> tuple[Tensor, Tensor]:
    """Three rows of tokens and a mask with holes: the first row begins and ends with some, the last has none."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (3, length), generator=generator)
    mask = (torch.rand(3, length, generator=generator) >= masked).long()
    mask[0, :2] = mask[0, -2:] = 0
    mask[1, 0] = mask[1, -1] = mask[2] = 1
    return ids, mask


def check_rows(model: dr.DeadReckonForCausalLM, logits: Tensor, ids: Tensor, mask: Tensor, start: int = 0) -> None:
    """Logits of tokens from `start` on are those of each row without its masked tokens, which have the last one's."""
    for row, real in enumerate(mask.bool()):
        seen = real[start:].cumsum(0)  # how many there are up to each
        assert not logits[row, seen == 0].any()
        if not real[start:].any():
            continue
        alone = model(ids[row : row + 1, real]).logits[0]
        expected = alone[len(alone) - int(seen[-1]) :]
        torch.testing.assert_close(logits[row, seen > 0], expected[seen[seen > 0] - 1], **CLOSE)


@pytest.mark.parametrize("encoding", STEADY)
@torch.no_grad()
def test_masked_tokens_are_left_out(encoding: str) -> None:
    """A prompt, single tokens, and a longer piece, the latter two with holes that rows do not share."""
    model = make_model(encoding)
    ids, mask = drawn(90, 0.2)
    mask[:, 70:73] = 1
    cache = DynamicCache(config=model.config)
    check_rows(model, model(ids, attention_mask=mask).logits, ids, mask)
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 73), (73, 74), (74, 90)):
        logits = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        check_rows(model, logits, ids[:, :end], mask[:, :end], start)
    assert cache.get_seq_length() == 90


@torch.no_grad()
def test_masks_that_are_added_are_refused() -> None:
    """They are zero where others are one."""
    model, (ids, mask) = make_model("fox"), drawn(12, 0.0)
    added = torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf)
    for cached in (False, True):
        with pytest.raises(ValueError, match="attention_mask: expected 1 for tokens and 0 for padding, got -inf"):
            model(ids, attention_mask=added, use_cache=cached)


@torch.no_grad()
def test_rows_may_begin_in_a_later_piece() -> None:
    model, (ids, mask) = make_model("path-fox"), drawn(30, 0.0)
    mask[0, :14] = 0
    cache = DynamicCache(config=model.config)
    for start, end in ((0, 7), (7, 20), (20, 30)):  # as chunked prefill cuts padding in two
        logits = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        check_rows(model, logits, ids[:, :end], mask[:, :end], start)
        if end < 30:  # the row's last two tokens are masked, and rows part
            assert isinstance(cache.layers[0].state, dr.LayerState)


@torch.no_grad()
def test_rows_that_parted_are_chosen_moved_and_cropped() -> None:
    model, (ids, mask) = make_model("path-fox"), drawn(40, 0.3)
    cache = DynamicCache(config=model.config)
    for start, end in ((0, 20), (20, 30), (30, 40)):
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
    cache.crop(-15)
    assert cache.get_seq_length() == 25
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    ids, mask = ids[[2, 0, 0]], mask[[2, 0, 0]]
    logits = model(ids[:, 25:], attention_mask=mask, past_key_values=cache).logits
    check_rows(model, logits, ids, mask, 25)
    with pytest.raises(ValueError, match="crop: expected 0 to 40 tokens, which have been, got 41"):
        cache.layers[0].crop(-41)
    cache.crop(-40)
    assert isinstance(cache.layers[0].state, dr.LayerState)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"prefill_chunk_size": 20}, {"use_cache": False}], ids=str)
def test_prompts_that_contain_the_padding_token(arguments: dict[str, int]) -> None:
    """From which `generate()` makes a mask with holes; one of them ends with it."""
    model, (ids, mask) = make_model("path-fox"), drawn(50, 0.2)
    ids = ids * mask  # the padding token is 0
    found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **arguments)
    for row, real in enumerate(mask.bool()):
        alone = model.generate(ids[row : row + 1, real], max_new_tokens=6, do_sample=False, pad_token_id=0, **arguments)
        assert torch.equal(found[row, 50:], alone[0, int(real.sum()) :])


def test_the_loss_is_that_of_real_tokens() -> None:
    """What follows a hole is predicted from what comes before it."""
    model, (ids, mask) = make_model("path-fox"), drawn(40, 0.2)
    ids, mask = ids[1:2], mask[1:2]
    mask[0, -5:] = 0
    found = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    alone = ids[mask.bool()].unsqueeze(0)
    torch.testing.assert_close(found, model(alone, labels=alone).loss)
