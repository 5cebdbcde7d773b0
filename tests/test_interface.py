"""transformers' AttentionInterface: models of other libraries with our attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deadreckon as dr
from deadreckon.models.interface import SERVED, _attention

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NAMES = dr.register_attention()


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).eval()


def ids(rows: int = 2, length: int = 19) -> Tensor:
    return torch.randint(2, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def test_it_computes_what_the_model_did() -> None:
    ours, theirs, tokens = llama("deadreckon"), llama("eager"), ids()
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    for model in (ours, theirs):
        model(tokens, labels=tokens).loss.backward()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
    padded = torch.ones_like(tokens)
    padded[1, :5] = 0
    kept = padded.bool()
    expected = theirs(tokens, attention_mask=padded).logits[kept]
    torch.testing.assert_close(ours(tokens, attention_mask=padded).logits[kept], expected, atol=1e-5, rtol=1e-5)
    sampling = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": padded}
    assert torch.equal(ours.generate(tokens, **sampling), theirs.generate(tokens, **sampling))


@pytest.mark.parametrize("name", NAMES)
def test_a_kv_cache_changes_nothing(name: str) -> None:
    model, tokens = llama(name), ids()
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits
        kept = model(tokens[:, :12], attention_mask=mask[:, :12]).past_key_values
        several = model(tokens[:, 12:18], attention_mask=mask[:, :18], past_key_values=kept).logits
        one = model(tokens[:, 18:], attention_mask=mask, past_key_values=kept).logits
    torch.testing.assert_close(torch.cat([several, one], 1), whole[:, 12:], atol=1e-5, rtol=1e-5)
    assert name == "deadreckon" or not torch.allclose(whole, llama("deadreckon")(tokens, attention_mask=mask).logits)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_may_begin_in_padding_and_have_holes(name: str) -> None:
    """A query that is padding sees nothing: no NaN of it reaches a token. Distances count tokens, not padding."""
    model, tokens = llama(name).double(), ids()
    mask = torch.ones_like(tokens)
    mask[1, :5] = mask[0, 8:10] = 0
    pieces, kept = list[Tensor](), None
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits
        for start, end in ((0, 3), (3, 9), (9, 19)):
            found = model(tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=kept)
            pieces, kept = [*pieces, found.logits], found.past_key_values
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=1e-12, rtol=1e-12)
    sampling = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    in_pieces = model.generate(tokens, prefill_chunk_size=4, **sampling)
    assert torch.equal(in_pieces, model.generate(tokens, **sampling))


def test_scores_and_slopes_are_those_of_attend() -> None:
    q, k, v = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    q, k, v = (x.double() for x in (q, k, v))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    factors = {
        "deadreckon-alibi": {"log_gate": -torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])},
        "deadreckon-stickbreaking": {"score": "stick-breaking"},
        "deadreckon-power-2": {"score": dr.Power(2)},
    }
    for name, chosen in factors.items():
        found, _ = _attention(torch.nn.Module(), q, k, v, None, **SERVED[name])
        torch.testing.assert_close(found, dr.attend(*turned, impl="reference", **chosen))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names: expected some of deadreckon, .*got 'fox'.*convert_model"):
        dr.register_attention("fox")
    q = torch.randn(1, 2, 3, 8)
    for name, value in (("dropout", 0.1), ("is_causal", False), ("sliding_window", 2), ("softcap", 5.0)):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            _attention(torch.nn.Module(), q, q, q, None, **{name: value})
    assert dr.register_attention("deadreckon-alibi") == ("deadreckon-alibi",)
