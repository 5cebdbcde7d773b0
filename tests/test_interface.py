"""transformers' AttentionInterface: models of other libraries with our attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import deadreckon as dr
from deadreckon.models.interface import SERVED, _attention, _documents

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


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_packed_documents_do_not_see_each_other(given: str) -> None:
    """As `DataCollatorWithFlattening` packs them."""
    model, tokens = llama("deadreckon"), ids(1)
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=given != "position_ids")(
        [{"input_ids": part.tolist()} for part in tokens[0].split([5, 6, 8])]
    )
    assert given in packed
    if given != "position_ids":  # these alone
        del packed["position_ids"]
    found = model(**packed, use_cache=False).logits
    if given != "position_ids":
        assert not torch.allclose(found, model(tokens).logits)
        packed["position_ids"] = torch.arange(19)[None]
    expected = [model(part, position_ids=places).logits for part, places in zip(
        tokens.split([5, 6, 8], 1), packed["position_ids"].split([5, 6, 8], 1), strict=True
    )]  # fmt: skip
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_documents(name: str) -> None:
    """Llama 4's, in rows with padding, whole and by its cache, which drops what chunks do not see."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 6}
    model = Llama4ForCausalLM(Llama4TextConfig(**SIZES, **sizes, pad_token_id=0)).eval().double()
    tokens, mask = ids(), torch.ones(2, 19, dtype=torch.long)
    mask[1, :5] = 0
    sampling = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits, model.generate(tokens, **sampling)
        model.set_attn_implementation(name)
        found = model(tokens, attention_mask=mask).logits, model.generate(tokens, **sampling)
        again = model.generate(tokens, use_cache=False, **sampling)
    assert torch.equal(found[1], again)
    if name == "deadreckon":
        torch.testing.assert_close(found[0][mask > 0], expected[0][mask > 0], atol=1e-6, rtol=1e-6)
        assert torch.equal(found[1], expected[1])


def test_other_masks_and_caches_are_refused() -> None:
    """Not computed as if there were none."""
    model, tokens = llama("deadreckon"), ids()
    with pytest.raises(ValueError, match=r"past_key_values: expected a cache .* got one of 30 places for 19 tokens"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=30))
    with pytest.raises(ValueError, match=r"attention_mask: expected one for each token.*\(2, 19\).*\(2, 1, 19, 19\)"):
        model(tokens, attention_mask=torch.zeros(2, 1, 19, 19))
    several = torch.arange(19).expand(2, -1)
    for function in (  # a window, a hole, later tokens, not oneself, another document
        lambda row, head, query, key: (key <= query) & (key > query - 4),
        lambda row, head, query, key: (key <= query) & (key != several[row, query] - 3),
        lambda row, head, query, key: key <= query + 1,
        lambda row, head, query, key: key < query,
        lambda row, head, query, key: (key <= query) & ((query % 5 > 0) | (key == query)),
    ):
        with pytest.raises(ValueError, match="attention_mask: expected a causal mask"):
            _documents(2, 19, 19, mask_function=function)
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4, attn_implementation="deadreckon"))
    with pytest.raises(ValueError, match="attention_mask: expected a causal mask"):
        mistral(tokens)


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
