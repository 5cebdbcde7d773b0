"""Pasts and states: foreign pieces are rejected, interrupted pieces leave no trace, `crop` undoes what it promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.models.cache import StateLayer
from deadreckon.ops.streaming.decode import TokenDecoder
from deadreckon.ops.streaming.fused import KernelDecoder

DRAWN = ("random-rotation", "random-rotation-values", "randomized")  # afresh in each forward pass
STEADY = [name for name in dr.ENCODINGS if name not in DRAWN]
VOCABULARY = 13

# Pieces that do not belong to their past ------------------------------------------------------------------------------

B, T, HQ, H, D = 2, 5, 4, 2, 8


def piece(batch: int = B, heads: int = H, width: int = D, value_width: int = D, **more: Any) -> dict[str, Any]:
    q, k = torch.randn(batch, T, HQ, width), torch.randn(batch, T, heads, width)
    return {"q": q, "k": k, "v": torch.randn(batch, T, heads, value_width), **more}


def gate(heads: int = HQ) -> Tensor:
    return -torch.rand(B, T, heads)


def steps() -> dr.Householder:
    return dr.Householder(torch.randn(B, T, H, D), torch.rand(B, T, H))


def rotation(heads: int = 1, values: bool = False) -> dr.Rotation:
    return dr.Rotation(torch.randn(B, T, heads, D // 2), values)


def double(some: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in some.items()}


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no gates after gates": (piece(log_gate=gate()), piece(), "log_gate: expected gates of 4 heads, like.* got None"),
    "gates after none": (piece(), piece(log_gate=gate()), "log_gate: expected None, like.* got gates of 4 heads"),
    "gates of other heads": (piece(log_gate=gate()), piece(log_gate=gate(H)), "log_gate: expected gates of 4 heads"),
    "steps after none": (piece(), piece(transport=steps()), "transport: expected None, like.* got Householder"),
    "none after steps": (piece(transport=steps()), piece(), "transport: expected Householder, like.* got None"),
    "rotation after none": (piece(), piece(transport=rotation()), "transport: expected None, like.* got Rotation of 1"),
    "none after rotation": (piece(transport=rotation()), piece(), "transport: expected Rotation of 1 heads"),
    "steps after rotation": (piece(transport=rotation()), piece(transport=steps()), "transport: .* got Householder"),
    "values also": (piece(transport=rotation()), piece(transport=rotation(values=True)), "transport: .* values=True"),
    "more angles": (piece(transport=rotation()), piece(transport=rotation(H)), "transport: .* got Rotation of 2 heads"),
    "another score": (piece(), piece(score="stick-breaking"), "score: expected softmax, like.* got stick-breaking"),
    "another power": (piece(score=dr.Power(2)), piece(score=dr.Power(4)), r"score: expected Power\(2\).* Power\(4\)"),
    "another scale": (piece(), piece(scale=0.5), "scale: expected 0.35.*, like.* got 0.5"),
    "another dtype": (piece(), double(piece()), "q: expected dtype torch.float32, like.* got torch.float64"),
    "another batch": (piece(), piece(batch=1), "q: expected B = 2, like.* got 1"),
    "as many rows": (piece(batch=2), piece(batch=1, heads=4), "q: expected B = 2, like.* got 1"),
    "other heads": (piece(), piece(heads=4), "k: expected H = 2, like.* got 4"),
    "wider": (piece(), piece(width=16), "q: expected D = 8, like.* got 16"),
    "wider values": (piece(), piece(value_width=16), "v: expected E = 8, like.* got 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_pieces_belong_to_their_past(name: str) -> None:
    """A refusal changes nothing: the piece that belongs is then as if nothing had been."""
    first, other, message = OTHERS[name]
    past, undisturbed = dr.Past(), dr.Past()
    for each in (past, undisturbed):
        dr.attend_next(**first, past=each)
    with pytest.raises(ValueError, match=message):
        dr.attend_next(**other, past=past)
    assert past.length == T
    assert torch.equal(dr.attend_next(**first, past=past), dr.attend_next(**first, past=undisturbed))


def test_pieces_are_where_their_past_is() -> None:
    past = dr.Past()
    dr.attend_next(**piece(), past=past)
    with pytest.raises(ValueError, match=r"q: expected device meta, like the pieces before it in `past`, got cpu"):
        dr.attend_next(**piece(), past=past.to("meta"))


def test_forms_of_a_power_may_change() -> None:
    case = Case(score=dr.Power(2), length=20, batch=1)
    leaves, past = case.inputs(), dr.Past()
    outputs = []
    for number, form in enumerate(("auto", "attention", "chunked", "recurrent")):
        some = {name: x[:, 5 * number : 5 * number + 5] for name, x in leaves.items()}
        outputs.append(dr.attend_next(**some, score=dr.Power(2, form=form), past=past))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(outputs, dim=1), case.attend(leaves), rtol=0, atol=1e-11)


def trained(transport: dr.Rotation | dr.Householder) -> dict[str, Any]:
    name = "angles" if isinstance(transport, dr.Rotation) else "w"
    return piece(transport=replace(transport, **{name: getattr(transport, name).requires_grad_()}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (piece(past=None), "past: expected a Past, got NoneType"),
        (piece(past=dr.LayerState()), "past: expected a Past, got LayerState"),
        (piece(scale=float("nan")), "scale: expected a finite number or None, got nan"),
        (piece(scale=True), "scale: expected a finite number or None, got True"),
        (piece(scale="1"), "scale: expected a finite number or None, got '1'"),
        (piece(impl="reference"), "impl: expected 'auto', 'blockwise' or 'triton' for a piece .* got 'reference'"),
        (piece(impl="fast"), "impl: expected 'auto', 'blockwise' or 'triton' for a piece of a sequence, got 'fast'"),
        (piece(impl="triton", score="stick-breaking", log_gate=gate()), "'triton' needs neither .* steps nor gates"),
        (piece(impl="triton", width=12), "impl: 'triton' needs D a multiple of 8 up to 256, got 12"),
        (piece(log_gate=gate().requires_grad_()), "log_gate: expected no gradients to be required"),
        (trained(rotation()), "transport.angles: expected no gradients to be required"),
        (trained(steps()), "transport.w: expected no gradients to be required"),
        ({**piece(), "k": torch.randn(B, T, H, D, requires_grad=True)}, "k: expected no gradients to be required"),
    ],
)
def test_arguments_of_a_piece(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dr.attend_next(**{"past": dr.Past(), **arguments})


def test_gradients_may_be_required_where_none_are_computed() -> None:
    some = piece(log_gate=gate().requires_grad_())
    with torch.no_grad():
        assert dr.attend_next(**some, past=dr.Past()).shape == (B, T, HQ, D)


@pytest.mark.usefixtures("few_programs")
def test_implementations_are_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layer, too; a decoder of another implementation is not gone on with."""
    case = Case("householder", length=9, batch=1, heads=1, group=2)
    leaves, past = {name: x.float() for name, x in case.inputs().items()}, dr.Past()
    outputs = []
    for start, impl, kind in ((6, "blockwise", TokenDecoder), (7, "triton", KernelDecoder), (8, "auto", TokenDecoder)):
        for tokens in ([slice(0, 6)] if start == 6 else []) + [slice(start, start + 1)]:
            q, k, v, w, beta = (leaves[name][:, tokens] for name in ("q", "k", "v", "w", "beta"))
            outputs.append(dr.attend_next(q, k, v, transport=dr.Householder(w, beta), past=past, impl=impl))  # type: ignore[arg-type]
        assert isinstance(past.decoder, kind)
    torch.testing.assert_close(torch.cat(outputs, dim=1), case.attend(leaves), rtol=0, atol=1e-5)
    asked = []
    monkeypatch.setattr("deadreckon.models.layer.attend_next", lambda q, *_, impl, **__: asked.append(impl) or q)
    for impl in ("auto", "blockwise", "triton"):
        dr.AttentionLayer(16, 2, "path", impl=impl)(torch.randn(1, 3, 16), state=None)  # type: ignore[arg-type]
    assert asked == ["auto", "blockwise", "triton"]


# Interrupted pieces ---------------------------------------------------------------------------------------------------


def make_layer(name: str) -> dr.AttentionLayer:
    torch.manual_seed(0)
    return dr.AttentionLayer(16, 2, name, n_kv_heads=1, vocab_size=VOCABULARY).double()


class Interrupt(TorchDispatchMode):
    """Raises before the operation of some number."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.count, self.at = 0, at

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.at:
            raise KeyboardInterrupt
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", STEADY)
def test_interrupted_pieces_leave_no_trace(name: str) -> None:
    """Wherever an exception comes, the piece can be given again."""
    layer = make_layer(name)
    x, ids = torch.randn(1, 140, 16, dtype=torch.float64), torch.randint(0, VOCABULARY, (1, 140))
    expected, state = layer(x, token_ids=ids).detach(), dr.LayerState()
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 137), (137, 140)):
        some = {"x": x[:, start:end], "token_ids": ids[:, start:end]}
        layer(**some, state=deepcopy(state))  # tables are computed once
        undisturbed = deepcopy(state)
        with Interrupt(None) as whole:
            layer(**some, state=undisturbed)
        for at in {0, whole.count - 1, *range(start % 7, whole.count, max(1, whole.count // 4))}:
            disturbed = deepcopy(state)
            with pytest.raises(KeyboardInterrupt), Interrupt(at):
                layer(**some, state=disturbed)
            assert disturbed.length == start
            y, _ = layer(**some, state=disturbed)
            torch.testing.assert_close(y, expected[:, start:end], rtol=0, atol=1e-11)
        state = undisturbed


@pytest.mark.usefixtures("few_programs")
def test_interrupted_kernels_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that decode write in place: what they have written is not gone on with."""
    case = Case("householder", "learned", length=9, batch=1, heads=1, group=1, width=8, value_width=8)
    leaves, past = {name: x.float() for name, x in case.inputs().items()}, dr.Past()
    from deadreckon.ops.streaming import fused

    def attend(start: int, end: int) -> Tensor:
        q, k, v, w, beta, log_gate = (leaves[name][:, start:end] for name in ("q", "k", "v", "w", "beta", "log_gate"))
        return dr.attend_next(q, k, v, transport=dr.Householder(w, beta), log_gate=log_gate, past=past, impl="triton")

    look = fused.look

    def look_and_fail(*arguments: Any) -> None:
        look(*arguments)
        raise KeyboardInterrupt

    outputs = [attend(0, 7), attend(7, 8)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fused, "look", look_and_fail)
        attend(8, 9)
    outputs.append(attend(8, 9))
    torch.testing.assert_close(torch.cat(outputs, dim=1), case.attend(leaves), rtol=0, atol=1e-5)


def make_model(encoding: str) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).eval()


@pytest.mark.parametrize("encoding", ["path-fox", "rope", "prism"])
@torch.no_grad()
def test_all_layers_of_a_model_move_on_or_none(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(encoding), torch.randint(1, VOCABULARY, (1, 12))
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(model.model.layers[1].mlp, "forward", fail)
        model(ids[:, 8:], past_key_values=cache)
    output = model(ids[:, 8:], past_key_values=cache)
    torch.testing.assert_close(output.logits, model(ids).logits[:, 8:], rtol=0, atol=1e-4)


# Going back -----------------------------------------------------------------------------------------------------------

Rewrite = Callable[[dr.LayerState], dr.LayerState]
REWRITES: list[Rewrite] = [
    lambda state: state,
    lambda state: state.fork(),
    lambda state: state.to("cpu"),
    lambda state: state.select(torch.tensor([0])),
]


@pytest.mark.parametrize(
    "name", ["path-fox", "rope", "fox", "selective-rope", "sympow-gated", "stickbreaking", "prism"]
)
def test_crop_keeps_its_word(name: str) -> None:
    """After any history: back to any of the last 64 tokens of the sequence at its longest, and right from there."""
    layer, history = make_layer(name), random.Random(0)
    pool = torch.randn(1, 4000, 16, dtype=torch.float64)
    for _ in range(2):
        state, tokens, longest, drawn = dr.LayerState(), pool[:, :0], 0, 0
        for _ in range(30):
            added = history.choice([1, 1, 1, 2, 5, 30, 64, 90])
            piece = pool[:, drawn : drawn + added]
            y, state = layer(piece, state=state)
            tokens, drawn = torch.cat([tokens, piece], dim=1), drawn + added
            longest = max(longest, state.length)
            promised = min(state.length, 64 - (longest - state.length))
            assert state.croppable >= min(promised, state.length - 1)  # all can always be undone
            state = history.choice(REWRITES)(state)
            undone = history.choice([0, 0, 1, history.randint(0, promised), promised])
            state.crop(min(undone, state.length))
            tokens = tokens[:, : state.length]
            longest = longest if state.length else 0
        y, state = layer(pool[:, -3:], state=state)
        expected = layer(torch.cat([tokens, pool[:, -3:]], dim=1)).detach()[:, -3:]
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


def test_an_interrupted_piece_leaves_its_past_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a layer, which has a draft of its own: phases have moved on by then, the KV cache has not."""
    past = dr.Past()
    dr.attend_next(**piece(transport=rotation()), past=past)
    before = dict(vars(past))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deadreckon.ops.streaming.stream.extend_cache", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dr.attend_next(**piece(transport=rotation()), past=past)
    assert all(vars(past)[name] is value for name, value in before.items())


@pytest.mark.parametrize("name", ["path", "rope"])
def test_what_crop_cannot_undo_is_said(name: str) -> None:
    """Tokens that were undone count: 200 + 5 − 5 + 2 can go back to 205 − 64."""
    layer, x = make_layer(name), torch.randn(1, 207, 16, dtype=torch.float64)
    _, state = layer(x[:, :200], state=None)
    for number in range(5):
        layer(x[:, 200 + number : 201 + number], state=state)
    state.crop(5)
    layer(x[:, 205:], state=state)
    held = state.croppable
    assert held >= 61
    with pytest.raises(ValueError, match=f"crop: expected at most {held} tokens, got {held + 1}"):
        state.crop(held + 1)
    assert state.length == 202
    state.crop(held)
    y, _ = layer(x[:, -1:], state=state)
    expected = layer(torch.cat([x[:, : 202 - held], x[:, -1:]], dim=1)).detach()[:, -1:]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


def test_a_cache_crops_by_a_tensor() -> None:
    """As transformers 5.17 does it after drafted tokens were refused."""
    layer = StateLayer()
    _, layer.state = make_layer("path")(torch.randn(1, 9, 16, dtype=torch.float64), state=None)
    layer.crop(torch.tensor(0))
    layer.crop(torch.tensor(-3))
    assert layer.get_seq_length() == 6
    for wrong, text in (
        (-1.5, "a whole number of 0 or less, got -1.5"),
        (torch.tensor(2), "a number of 0 or less, got 2"),
    ):
        with pytest.raises(ValueError, match=f"crop: expected {text}"):
            layer.crop(wrong)
    assert layer.get_seq_length() == 6


def test_a_past_crops_by_itself() -> None:
    past, first = dr.Past(), piece(transport=rotation())
    dr.attend_next(**first, past=past)
    for wrong in (-1, T + 1, 1.0, True):
        with pytest.raises(ValueError, match=f"crop: expected 0 to {T} tokens, which have been, got {wrong}"):
            past.crop(wrong)  # type: ignore[arg-type]
    past.crop(T)
    assert past == dr.Past()
    dr.attend_next(**piece(batch=1), past=past)  # anything may begin it


def test_a_route_goes_on_where_all_tokens_that_waited_were_undone() -> None:
    """128 tokens, of which 64 are closed, and the same ones again, one by one, of several heads."""
    torch.manual_seed(0)
    q, k, v, w = torch.randn(4, 2, 128, 3, 8, dtype=torch.float64).unbind()
    w, beta, gate = w / w.norm(dim=-1, keepdim=True), torch.rand(2, 128, 3).double(), -torch.rand(2, 128, 3).double()

    def attend(past: dr.Past, tokens: slice) -> Tensor:
        steps = dr.Householder(w[:, tokens], beta[:, tokens])
        parts = {"transport": steps, "log_gate": gate[:, tokens], "past": past}
        return dr.attend_next(q[:, tokens], k[:, tokens], v[:, tokens], **parts)

    past = dr.Past()
    expected = attend(past, slice(128))
    assert past.croppable == 64
    past.crop(64)
    for t in range(64, 67):
        torch.testing.assert_close(attend(past, slice(t, t + 1)), expected[:, t : t + 1])


@pytest.mark.parametrize("name", STEADY)
def test_states_hold_no_view_of_a_whole_prefill(name: str) -> None:
    """A short view keeps the whole storage behind it alive. Nor of a piece that comes later."""
    layer, state = make_layer(name), None
    x, ids = torch.randn(2, 1000, 16, dtype=torch.float64), torch.randint(0, VOCABULARY, (2, 1000))
    for piece in (slice(600), slice(600, 1000)):
        _, state = layer(x[:, piece], token_ids=ids[:, piece], state=state)
        storages = (tensor.untyped_storage() for tensor in (*state.past.tensors(), *state.recent.values()))
        assert sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) <= state.bytes()


# Other places and layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEADY)
def test_states_move_whole(name: str) -> None:
    """Every tensor of them, phases of all rows at once too; their dtype stays."""
    layer = make_layer(name)
    for batch in (1, 2):
        x, ids = torch.randn(batch, 200, 16, dtype=torch.float64), torch.randint(0, VOCABULARY, (batch, 200))
        _, state = layer(x, token_ids=ids, state=None)
        moved = state.to("meta")
        assert {y.device.type for y in (*moved.past.tensors(), *moved.recent.values())} == {"meta"}
        with pytest.raises(ValueError, match="state: expected one of device cpu, like the layer and x, got meta"):
            layer(x[:, :1], token_ids=ids[:, :1], state=moved)
    with pytest.raises(ValueError, match=r"device: expected a torch\.device or its name, got torch\.float32"):
        state.to(torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state: expected one of dtype torch\.float32, like .* got torch\.float64"):
        layer.float()(x[:, :1].float(), token_ids=ids[:, :1], state=state)


def test_states_belong_to_a_layer() -> None:
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    _, state = make_layer("path")(x, state=None)
    with pytest.raises(ValueError, match=r"state: expected one of encoding SelectiveRoPE, like .* got PaTH"):
        make_layer("selective-rope")(x, state=state)
    with pytest.raises(ValueError, match=r"state: expected one of sizes Sizes\(.*n_heads=4"):
        dr.AttentionLayer(16, 4, "path").double()(x, state=state)
    with pytest.raises(ValueError, match=r"rows: expected a tensor of integers of one dimension, got shape \(1,\)"):
        state.select(torch.tensor([True]))
    with pytest.raises(ValueError, match=r"rows: expected numbers from 0 to 0, got \[0, 1\]"):
        state.select(torch.tensor([0, 1]))


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(ValueError, match=message):
        yield


@torch.no_grad()
def test_masks_go_on_as_they_began() -> None:
    model, ids = make_model("sinusoidal"), torch.randint(1, VOCABULARY, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    padded, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=padded)
    model(ids[:, :6], past_key_values=plain)
    with refused("attention_mask: expected that of past and new tokens, some of them masked, got None"):
        model(ids[:, 6:], past_key_values=padded)
    with refused(r"as many masked tokens a row as past_key_values has left out, \[0, 0\].* got \[2, 0\]"):
        model(ids[:, 6:], attention_mask=mask, past_key_values=plain)
    expected = model(ids[1:]).logits[:, 6:]
    both = model(ids[:, 6:7], attention_mask=mask[:, :7], past_key_values=padded).logits
    torch.testing.assert_close(both[1:], expected[:, :1], rtol=0, atol=1e-4)
    padded.batch_select_indices(torch.tensor([1]))  # the row without padding
    alone = model(ids[1:, 7:], attention_mask=mask[1:], past_key_values=padded).logits
    torch.testing.assert_close(alone, expected[:, 1:], rtol=0, atol=1e-4)
