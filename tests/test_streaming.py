"""Streaming: any split of a sequence gives the same outputs, for every encoding, through layers and `generate()`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import AWAKE, CLOSE, DEVICE, SCORES, TRANSPORTS, Case
from torch import Tensor
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.ops.attention import attend_next
from deadreckon.ops.streaming.fused import STREAM
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Segment, add_closed
from deadreckon.ops.streaming.stream import PYTORCH, attend_stream

VOCABULARY = 13
DRAWN = ("random-rotation", "random-rotation-values", "randomized")  # afresh in each forward pass
STEADY = [name for name in dr.ENCODINGS if name not in DRAWN]
SPLITS = ([300], [200, 100], [64] * 4 + [44], [7, 120, 1, 1, 1, 64, 106], [1, 1, 58, *[1] * 10, 230])


def in_pieces(case: Case, leaves: dict[str, Tensor], split: Sequence[int]) -> tuple[Tensor, Past]:
    past, outputs, start = Past(), [], 0
    for length in split:
        piece = {name: x[:, start : start + length] for name, x in leaves.items()}
        outputs.append(
            attend_next(
                piece["q"], piece["k"], piece["v"],
                transport=case.steps(piece), log_gate=piece.get("log_gate"), score=case.score, past=past,
            )
        )  # fmt: skip
        start += length
    return torch.cat(outputs, dim=1), past


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
@pytest.mark.parametrize("gate", [None, "learned"])
def test_any_split_gives_the_same(transport: str | None, gate: str | None, score: Any) -> None:
    case = Case(transport, gate, score, length=300, batch=2)
    leaves = case.inputs()
    expected = case.attend(leaves)
    for split in SPLITS:
        found, past = in_pieces(case, leaves, split)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        if "w" in leaves:  # the digits of a binary counter
            lengths = [segment.length for segment in past.segments]
            assert all(older > younger for older, younger in itertools.pairwise(lengths))


def test_few_segments_of_any_lengths() -> None:
    """Each a bit shorter than the last, as where all tails close when one of others is full: none would be joined."""
    segments = list[Segment]()
    for length in range(140, 20, -1):
        add_closed(segments, Segment({name: torch.zeros(1, length, 1) for name in ("k", "v")}))
    tokens = sum(segment.length for segment in segments)
    assert tokens == sum(range(21, 141)) and len(segments) <= tokens.bit_length() - 4  # digits of those of 21 or more
    classes = [segment.length.bit_length() for segment in segments]
    assert classes == sorted(set(classes), reverse=True)


def test_queries_cross_segments_that_were_merged() -> None:
    """Products of two segments, on the way to a third that is older; they do not fade. Also token by token."""
    case = Case("householder", length=534, batch=1, heads=1, group=1, beta=1.9)
    leaves = case.inputs()
    found, past = in_pieces(case, leaves, [64] * 8 + [20, 1, 1])
    assert [segment.length for segment in past.segments] == [256, 128, 64]
    torch.testing.assert_close(found, case.attend(leaves), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("transport", "gate"),
    [("householder", None), ("rotation of values and householder", "learned")],
)
@pytest.mark.usefixtures("short_walks", "few_programs")
def test_long_pieces_climb_by_kernels(transport: str, gate: str | None) -> None:
    case = Case(transport, gate, length=600, batch=1, heads=1)
    leaves = {name: x.to(DEVICE, torch.float32) for name, x in case.inputs().items()}
    expected = case.attend({name: x.double() for name, x in leaves.items()})
    past, outputs = Past(), []
    for start, end in ((0, 330), (330, 331), (331, 600)):
        piece = {name: x[:, start:end] for name, x in leaves.items()}
        factors = dr.Factors(case.steps(piece), piece.get("log_gate"))
        q, k, v = piece["q"], piece["k"], piece["v"]
        outputs.append(attend_stream(q, k, v, factors, case.width**-0.5, past, STREAM))
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kernels", [PYTORCH, STREAM], ids=["pytorch", "triton"])
@pytest.mark.parametrize(
    "case",
    [
        Case("householder", None, length=276, batch=1, heads=2, group=1),
        Case("householder", "learned per key head", length=276, batch=2, heads=1, group=3, forgetting=0.05),
        Case("rotation of values and householder", "learned", length=276, batch=1, heads=1, group=3, forgetting=0.05),
    ],
    ids=lambda case: f"{case.transport}-{case.gate}",
)
@pytest.mark.usefixtures("few_programs")
def test_single_tokens(case: Case, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across closings of segments, between longer pieces, after going back, and twice from one place."""
    for module in ("decode", "fused"):
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.ROOM", 128)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SHORTEST", 64)
    leaves = {name: x.to(DEVICE, torch.float32) for name, x in case.inputs().items()}
    expected = case.attend({name: x.double() for name, x in leaves.items()})
    past = Past()

    def attend(start: int, end: int, past: Past) -> None:
        piece = {name: x[:, start:end] for name, x in leaves.items()}
        factors = dr.Factors(case.steps(piece), piece.get("log_gate"))
        q, k, v = piece["q"], piece["k"], piece["v"]
        found = attend_stream(q, k, v, factors, case.width**-0.5, past, PYTORCH if end - start > 1 else kernels)
        torch.testing.assert_close(found.double(), expected[:, start:end], rtol=0, atol=CLOSE)

    singles = [(i, i + 1) for i in range(276)]
    for start, end in [(0, 253), *singles[253:260], (260, 264), *singles[264:270]]:
        attend(start, end, past)
    past.crop(4)
    for start, end in singles[266:270]:
        attend(start, end, past)
    other = past.fork()
    for start, end in singles[270:273]:
        attend(start, end, past)
        attend(start, end, other)
    assert [segment.length for segment in past.segments] == [128, 64]


def make_layer(name: str) -> dr.AttentionLayer:
    torch.manual_seed(0)
    options = AWAKE.get(name)
    return dr.AttentionLayer(32, 4, name, n_kv_heads=2, qk_norm=True, vocab_size=VOCABULARY, encoding_options=options)


@pytest.mark.parametrize("name", STEADY)
def test_layers_stream(name: str) -> None:
    """float32, to 1e-5, over random splits of 300 tokens."""
    layer = make_layer(name)
    x, ids = torch.randn(2, 300, 32), torch.randint(0, VOCABULARY, (2, 300))
    expected = layer(x, token_ids=ids)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        cuts = sorted({0, 300, *torch.randint(1, 300, (12,), generator=generator).tolist()})
        state, outputs = None, []
        for start, end in itertools.pairwise(cuts):
            y, state = layer(x[:, start:end], token_ids=ids[:, start:end], state=state)
            outputs.append(y)
        assert state is not None
        assert state.length == 300
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected.detach(), rtol=0, atol=1e-5)


def test_states_are_checked() -> None:
    layer, x = make_layer("path-fox"), torch.randn(2, 5, 32)
    _, state = layer(x, state=None)
    with pytest.raises(ValueError, match="state: expected one of batch 1, like the layer and x, got 2"):
        layer(x[:1], state=state)
    with pytest.raises(ValueError, match="state: expected a LayerState or None, got dict"):
        layer(x, state={})  # type: ignore[call-overload]
    layer.impl = "reference"
    with pytest.raises(ValueError, match=r"impl: expected 'auto', 'blockwise' or 'triton' .* got 'reference'"):
        layer(x, state=state)
    assert state.length == 5
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences do not come in pieces"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 5]), state=None)


@pytest.mark.parametrize("name", ["path-fox", "rope", "selective-rope", "fox"])
def test_forks_share_what_is_behind(name: str) -> None:
    """Two continuations of 1100 tokens: the same as two sequences, without a copy of what they share."""
    layer = make_layer(name)
    prefix, ends = torch.randn(1, 1100, 32), torch.randn(2, 1, 70, 32)
    _, state = layer(prefix, state=None)
    other = state.fork()
    before = {x.data_ptr() for segment in state.past.segments for x in segment.storage.values()}
    for start, end in ((0, 1), (1, 70)):
        for branch, continuation in ((state, ends[0]), (other, ends[1])):
            y, _ = layer(continuation[:, start:end], state=branch)
            expected = layer(torch.cat([prefix, continuation], dim=1))[:, 1100 + start : 1100 + end]
            torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-5)
    kept = [{x.data_ptr() for s in branch.past.segments for x in s.storage.values()} for branch in (state, other)]
    assert before <= kept[0] & kept[1]
    fields = [x for segment in state.past.segments for x in segment.storage.values() if x.data_ptr() in kept[1]]
    assert sum(x.nbytes for x in fields) > 0.7 * state.bytes()  # keys and values; sums of gates are each one's


@pytest.mark.parametrize("name", STEADY)
def test_states_go_back(name: str) -> None:
    """By any number of tokens up to 64, within a piece or over several: what follows is as if they had not been."""
    layer = make_layer(name)
    x, ids = torch.randn(2, 400, 32), torch.randint(0, VOCABULARY, (2, 400))
    for split, back in (([150], 64), ([100, 30, 1, 1, 1], 5), ([200, 1, 63], 64), ([3, 2], 4), ([70], 70), ([128], 1)):
        state, start = None, 0
        for length in split:
            _, state = layer(x[:, start : start + length], token_ids=ids[:, start : start + length], state=state)
            start += length
        other = state.fork()
        state.crop(back)
        assert state.length == start - back
        kept = [torch.cat([part[:, : start - back], part[:, -90:]], dim=1) for part in (x, ids)]
        expected = layer(kept[0], token_ids=kept[1]).detach()[:, start - back :]
        outputs = [
            layer(x[:, -90 + a : b or None], token_ids=ids[:, -90 + a : b or None], state=state)[0]
            for a, b in ((0, -89), (1, -20), (70, 0))
        ]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-5)
        whole = layer(x[:, : start + 5], token_ids=ids[:, : start + 5]).detach()[:, start:]
        y, _ = layer(x[:, start : start + 5], token_ids=ids[:, start : start + 5], state=other)
        torch.testing.assert_close(y, whole, rtol=0, atol=1e-5)


def test_going_back_leaves_others_alone() -> None:
    """Neither a state on the same device nor what a caller gave is written to."""
    layer, (x, y, z) = make_layer("rope"), torch.randn(3, 1, 70, 32)
    _, state = layer(x, state=None)
    other = state.to("cpu")
    state.crop(5)
    layer(y, state=state)
    expected = layer(torch.cat([x, z], dim=1)).detach()[:, 70:]
    torch.testing.assert_close(layer(z, state=other)[0], expected, rtol=0, atol=1e-5)
    past, keys = Past(), torch.randn(1, 30, 1, 8)
    given = keys.clone()
    attend_next(keys, keys, keys, past=past)
    past.crop(10)
    attend_next(*torch.randn(3, 1, 4, 1, 8), past=past)
    assert torch.equal(keys, given)


def test_how_far_states_go_back() -> None:
    x = torch.randn(1, 300, 32)
    _, state = make_layer("path")(x, state=None)
    with pytest.raises(ValueError, match="crop: expected at most 64 tokens, got 65"):
        state.crop(65)
    state.crop(40)
    with pytest.raises(ValueError, match="crop: expected at most 24 tokens, got 25"):
        state.crop(25)
    with pytest.raises(ValueError, match="crop: expected 0 to 260 tokens"):
        state.crop(301)
    assert state.length == 260
    state.crop(260)
    assert state.length == state.bytes() == 0


# Through Hugging Face -------------------------------------------------------------------------------------------------


def make_model(encoding: str) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, encoding_options={encoding: AWAKE.get(encoding, {})},
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).eval()


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("encoding", STEADY)
def test_generation_is_the_same_with_and_without_a_cache(encoding: str) -> None:
    model, ids = make_model(encoding), prompts(2, 61)
    for arguments in ({}, {"num_beams": 3}):
        cached, plain = (
            model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use_cache, **arguments)
            for use_cache in (True, False)
        )
        assert torch.equal(cached, plain)


@pytest.mark.parametrize("encoding", STEADY)
def test_left_padded_rows_generate_what_they_generate_alone(encoding: str) -> None:
    model, ids = make_model(encoding), prompts(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    both = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    alone = model.generate(ids[:1, 40:], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(both[0, 40:], alone[0])
    assert torch.equal(both[1], model.generate(ids[1:], max_new_tokens=5, do_sample=False, pad_token_id=0)[0])


def test_chunked_prefill_and_sampling() -> None:
    model, ids = make_model("path-fox"), prompts(2, 100)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, prefill_chunk_size=33), whole)
    torch.manual_seed(1)
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=2)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=2), sampled)


@pytest.mark.parametrize("encoding", ["path-fox", "rope", "sympow-gated", "prism"])
def test_assisted_decoding_gives_the_same(encoding: str) -> None:
    """A smaller model proposes, the cache goes back where it was wrong."""
    model, ids = make_model(encoding), prompts(1, 70)
    torch.manual_seed(7)
    assistant = dr.DeadReckonForCausalLM(model.config).eval()  # of other weights: often wrong
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    for helper in (assistant, model):
        found = model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=helper)
        assert torch.equal(found, expected)
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=5), expected)


@pytest.mark.parametrize("encoding", STEADY)
def test_saved_models_continue_alike(encoding: str, tmp_path: Path) -> None:
    model, ids = make_model(encoding), prompts(1, 70)
    model.save_pretrained(tmp_path)
    again = dr.DeadReckonForCausalLM.from_pretrained(tmp_path).eval()
    continued = [some.generate(ids, max_new_tokens=4, do_sample=False) for some in (model, again)]
    assert torch.equal(*continued)


def test_a_cache_goes_on_where_it_was() -> None:
    model, ids = make_model("path-fox"), prompts(2, 90)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    for start, end in ((0, 1), (1, 65), (65, 90)):
        output = model(ids[:, start:end], past_key_values=cache)
        torch.testing.assert_close(output.logits, expected[:, start:end], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 90
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, False]))
    more = prompts(2, 3)
    torch.testing.assert_close(
        model(more, past_key_values=cache).logits,
        model(torch.cat([ids, more], dim=1)).logits[:, 90:], rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    cache.reorder_cache(torch.tensor([1, 0]))  # as a beam search does
    whole = torch.cat([ids.flip(0), more.flip(0), more[:, :1]], dim=1)
    last = model(more[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(last, model(whole).logits[:, 93:], rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_cache_leaves_inference_mode() -> None:
    model, ids = make_model("path-fox"), prompts(1, 12)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for start, end in ((0, 6), (6, 7), (7, 8)):
            model(ids[:, start:end], past_key_values=cache)
    found = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(8, 12)], dim=1)
    torch.testing.assert_close(found, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-4)


def test_offloaded_caches() -> None:
    """Which states are not: they are what they are elsewhere."""
    try:
        torch.Stream()
    except RuntimeError:  # torch 2.11, built for GPUs, where there is none
        pytest.skip("transformers asks for a stream, and this PyTorch has none")
    model, ids = make_model("rope"), prompts(1, 6)
    offloaded = model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="offloaded")
    assert torch.equal(offloaded, model.generate(ids, max_new_tokens=2, do_sample=False))


def test_caches_are_checked() -> None:
    model, ids = make_model("rope"), prompts(1, 6)
    with pytest.raises(ValueError, match="past_key_values: expected DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation: expected None, 'dynamic' or 'offloaded', got 'static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(
        ValueError, match=r"attention_mask: expected \(B, past and new tokens\) = \(1, 6\), got \(1, 5\)"
    ):
        model(ids, attention_mask=torch.ones(1, 5), use_cache=True)
    with pytest.raises(ValueError, match="randomized: positions are drawn afresh"):
        make_model("randomized").generate(ids, max_new_tokens=2)
    assert make_model("randomized").generate(ids, max_new_tokens=2, use_cache=False).shape == (1, 8)
    assert make_model("random-rotation").generate(ids, max_new_tokens=2).shape == (1, 8)


@pytest.mark.parametrize("name", ["path-fox", "rope", "fox"])
def test_states_take_little_more_than_keys_and_values(name: str) -> None:
    """However a sequence came: 1.1 times what 2000 tokens of keys and values take, and a fixed rest."""
    layer = make_layer(name)
    x = torch.randn(1, 2000, 32)
    for split in ([2000], [1600] + [1] * 400, [400] * 5):
        state, start = None, 0
        for length in split:
            _, state = layer(x[:, start : start + length], state=state)
            start += length
        needed = 2000 * 2 * 2 * 8 * 4  # k and v, two heads of 8, float32
        sums = (
            2000 * 4 * (4 if name == "path-fox" else 8) if name.endswith("fox") else 0
        )  # one number for each query head
        rest = 192 * 2 * 8 * 32 + 66 * 256 + 10 * 2 * 8 * 8 * 4  # tokens that wait, recent inputs, products of segments
        assert state.bytes() <= 1.1 * (needed + sums) + rest
