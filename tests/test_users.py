"""Uncommon uses of models: higher derivatives, vmap, hooks, resized vocabularies, device maps; what is rejected."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.encodings.base import Context

NORMS = ("input_layernorm", "post_attention_layernorm")  # of a layer


def make_model(encoding: str, layers: int = 2, **options: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=50, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
        initializer_range=0.2, encoding_options={encoding: options} if options else None,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).double().eval()


def draw_ids(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, dict[str, Any]] = {
    "gates": {"log_gate": -torch.rand(1, 20, 2).double()},
    "steps": {"transport": dr.Householder(torch.randn(1, 20, 2, 8).double(), torch.rand(1, 20, 2).double())},
    "sticks": {"score": "stick-breaking"},
    "powers": {"score": dr.Power(2)},
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives_that_operators_do_not_know(case: str) -> None:
    """Without a word they would be zero."""
    q, k, v, along = torch.randn(4, 1, 20, 2, 8).double().unbind()

    def attend(q: Tensor, impl: Any = "auto") -> Tensor:
        return dr.attend(q, k, v, impl=impl, **CASES[case])

    message = "impl: derivatives of torch.func and forward-mode ones need 'reference', got 'auto'"
    for transform in (
        lambda: torch.func.jvp(attend, (q,), (along,)),
        lambda: torch.func.grad(lambda q: attend(q).sum())(q),
        lambda: torch.vmap(torch.func.grad(lambda q: attend(q).sum()))(q.unsqueeze(0)),
        lambda: torch.func.grad(lambda q: torch.vmap(attend)(q.unsqueeze(0)).sum())(q),
    ):
        with pytest.raises(ValueError, match=message):
            transform()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(attend(q)).tangent is None  # of none there is none
        dual = forward_ad.make_dual(q, along)
        with pytest.raises(ValueError, match=message):
            attend(dual)
        with pytest.raises(ValueError, match="q: expected no forward-mode derivatives"):
            dr.attend_next(dual, k, v, past=dr.Past(), **CASES[case])
    torch.testing.assert_close(torch.vmap(attend)(torch.stack([q, along])), torch.stack([attend(q), attend(along)]))
    _, found = torch.func.jvp(lambda q: attend(q, "reference"), (q,), (along,))
    step = 1e-6 * along
    torch.testing.assert_close(found, (attend(q + step) - attend(q - step)) / 2e-6, rtol=1e-5, atol=1e-7)


def test_forward_mode_derivatives_of_compiled_attention() -> None:
    """Refused, too, where the compiler does not look into tensors; the definition has them."""
    q, k, v, along = torch.randn(4, 1, 20, 2, 8).unbind()

    def attend(impl: Any) -> Any:
        return torch.compile(lambda q: dr.attend(q, k, v, impl=impl, log_gate=-torch.ones(2)), backend="eager")

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, along)
        with pytest.raises(ValueError, match=r"impl: derivatives of torch\.func and forward-mode ones need"):
            attend("auto")(dual)
        assert forward_ad.unpack_dual(attend("reference")(dual)).tangent.norm() > 0


def test_second_derivatives_that_operators_do_not_know() -> None:
    """Nor these: of the loss without logits, and of filters by any but the definition."""
    model, ids = make_model("rope"), draw_ids(1, 12)
    weight = model.lm_head.weight
    for layer in model.model.layers:
        layer.get_submodule("self_attn").impl = "reference"  # type: ignore[assignment]
    assert torch.autograd.grad(model(ids, labels=ids).loss, weight, create_graph=True)[0].requires_grad
    with pytest.raises(RuntimeError, match="second derivatives need skip_logits=False; this computes first"):
        torch.autograd.grad(model(ids, labels=ids, skip_logits=True).loss, weight, create_graph=True)
    reset, move = torch.rand(1, 5, 2, requires_grad=True), torch.rand(1, 5, 2, 3).softmax(-1)
    for impl in ("auto", "blockwise", "reference"):
        h = dr.histogram_filter(reset, move, torch.full((2,), 1.5), positions=7, impl=impl)  # type: ignore[arg-type]
        if impl == "reference":
            assert torch.autograd.grad(h.square().sum(), reset, create_graph=True)[0].requires_grad
        else:
            with pytest.raises(RuntimeError, match="second derivatives need impl='reference'; this computes first"):
                torch.autograd.grad(h.square().sum(), reset, create_graph=True)


def test_inference_mode() -> None:
    """Tensors that are made in it do not count what is written to them: boundaries are read anew each time."""
    model, ids = make_model("path-fox"), draw_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    with torch.inference_mode():
        assert torch.equal(model(ids, attention_mask=mask.clone()).logits, expected)
        q, k, v = torch.randn(3, 1, 12, 2, 8).unbind()
        ends = torch.tensor([0, 4, 12], dtype=torch.int32)
        for middle in (4, 7):
            ends[1] = middle
            found = dr.attend(q, k, v, log_gate=-torch.ones(2), cu_seqlens=ends)
            alone = dr.attend(q[:, middle:], k[:, middle:], v[:, middle:], log_gate=-torch.ones(2))
            torch.testing.assert_close(found[:, middle:], alone)


@pytest.mark.parametrize("encoding", ["path-fox", "learned-rotation-values", "conformal-sympow", "stickbreaking"])
def test_derivatives_of_models(encoding: str) -> None:
    """Along one direction of all weights, forwards and backwards."""
    model, ids = make_model(encoding), draw_ids(1, 12)
    for layer in model.model.layers:
        layer.get_submodule("self_attn").impl = "reference"  # type: ignore[assignment]

    def score(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (ids,)).logits.log_softmax(-1)[..., 3].sum()

    weights = {name: x.detach() for name, x in model.named_parameters()}
    along = {name: torch.randn_like(x) for name, x in weights.items()}
    _, found = torch.func.jvp(score, (weights,), (along,))
    gradients = torch.func.grad(score)(weights)
    torch.testing.assert_close(found, sum((gradients[name] * x).sum() for name, x in along.items()))


def test_rows_of_plain_attention() -> None:
    """By vmap, of rotations, too."""
    q, k, v = torch.randn(3, 2, 1, 20, 2, 8).double().unbind()
    angles = torch.rand(1, 20, 2, 4).double()
    for transport in (None, dr.Rotation(angles)):
        mapped = torch.vmap(lambda *x, transport=transport: dr.attend(*x, transport=transport))(q, k, v)
        rows = [dr.attend(*x, transport=transport) for x in zip(q, k, v, strict=True)]
        torch.testing.assert_close(mapped, torch.stack(rows))


def test_no_gradients_beside_a_cache() -> None:
    """Some weights would have them, and others not."""
    model, ids = make_model("path-fox"), draw_ids(2, 9)
    for more in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
        for part, labels in ((model, {"labels": ids}), (model.model, {})):
            with pytest.raises(ValueError, match="use_cache: expected False, and no past_key_values, in training"):
                part.train()(ids, **labels, **more)
        with torch.no_grad():
            assert model(ids, labels=ids, **more).past_key_values is not None
        loss = model.eval()(ids, labels=ids, use_cache=True).loss
        assert not loss.requires_grad
        assert not model.model(ids, use_cache=True).last_hidden_state.requires_grad
        torch.testing.assert_close(loss, model(ids, labels=ids).loss.detach())
    model.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("encoding", ["fox", "rope", "path-fox", "conformal-sympow", "stickbreaking"])
@torch.no_grad()
def test_a_state_on_the_same_device_is_a_copy(encoding: str) -> None:
    torch.manual_seed(0)
    layer, x = dr.AttentionLayer(16, 2, encoding).double(), torch.randn(1, 60, 16).double()
    expected = layer(x)
    _, state = layer(x[:, :3], state=None)
    for token in range(3, 50):
        layer(x[:, token : token + 1], state=state)
    other = state.to("cpu")
    state.crop(20)
    layer(torch.randn(1, 20, 16).double(), state=state)  # which writes where those were
    torch.testing.assert_close(layer(x[:, 50:], state=other)[0], expected[:, 50:])


@pytest.mark.parametrize(("modules", "reentrant"), [([0], False), ([0, 1], True)])
def test_prism_computed_again(modules: list[int], reentrant: bool) -> None:
    model, ids = make_model("prism", modules=modules).train(), draw_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    again = copy.deepcopy(model)
    again.zero_grad()
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again(ids, labels=ids).loss.backward()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_prism_refuses_cursors_without_gradients() -> None:
    """Their gradients would be off, since the layers after them have them as constants."""
    model, ids = make_model("prism").train(), draw_ids(2, 20)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match=r"prism: expected cursors with gradients .* use_reentrant"):
        model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("encoding", ["learned-rotation", "learned-rotation-values", "path"])
@pytest.mark.parametrize("tokens", [70, 30])
@torch.no_grad()
def test_another_vocabulary(encoding: str, tokens: int, tmp_path: Path) -> None:
    """Tokens that were there give what they gave; what is saved can be loaded."""
    model, ids = make_model(encoding), draw_ids(2, 12) % 30
    expected = model(ids).logits[..., :30]
    model.resize_token_embeddings(tokens)
    torch.testing.assert_close(model(ids).logits[..., :30], expected)
    last = torch.full((1, 4), tokens - 1)
    model.save_pretrained(tmp_path)
    again = dr.DeadReckonForCausalLM.from_pretrained(tmp_path).double()
    torch.testing.assert_close(again(last).logits, model(last).logits)


@torch.no_grad()
def test_logits_of_some_places() -> None:
    model, ids = make_model("fox"), draw_ids(2, 9)
    expected = model(ids).logits
    for places in ([7], [0, 3, -1]):
        found = model(ids, logits_to_keep=torch.tensor(places)).logits
        torch.testing.assert_close(found, expected[:, places])
    with pytest.raises(ValueError, match="logits_to_keep: expected 0, all logits, beside labels"):
        model(ids, labels=ids, logits_to_keep=torch.tensor([7]))


@torch.no_grad()
def test_loss_of_packed_rows_with_empty_documents() -> None:
    model, ids = make_model("fox"), draw_ids(1, 20)
    expected = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 7, 20])).loss
    for bounds in ([0, 7, 20, 20], [0, 0, 7, 20], [0, 7, 7, 20, 20, 20]):
        torch.testing.assert_close(model(ids, labels=ids, cu_seqlens=torch.tensor(bounds)).loss, expected)


@torch.no_grad()
def test_hooks_of_attention() -> None:
    """They see and may change what a layer of attention gives, while a cache is in use, too."""
    model, ids = make_model("path-fox"), draw_ids(1, 9)
    seen = list[Tensor]()
    for layer in model.model.layers:
        layer.get_submodule("self_attn").register_forward_hook(lambda module, given, output: seen.append(output))
    plain = model(ids).logits
    cached = model(ids, use_cache=True).logits
    assert [x.shape for x in seen] == [(1, 9, 16)] * 4
    torch.testing.assert_close(plain, cached)
    model.model.layers[0].get_submodule("self_attn").register_forward_hook(lambda module, given, output: 0 * output)
    assert not torch.allclose(model(ids).logits, plain)


@torch.no_grad()
def test_hidden_states_of_all_layers() -> None:
    """What goes into each layer, and what the last norm gives: of padded rows as of rows alone."""
    model, ids = make_model("path-fox"), draw_ids(2, 9)
    seen = list[Tensor]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    found = model(ids, output_hidden_states=True)
    torch.testing.assert_close(list(found.hidden_states[:-1]), seen)
    torch.testing.assert_close(model.lm_head(found.hidden_states[-1]), found.logits)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    torch.testing.assert_close(model(ids).hidden_states, found.hidden_states)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded, alone = model(ids, attention_mask=mask).hidden_states, model(ids[:1, 4:]).hidden_states
    torch.testing.assert_close([x[:1, 4:] for x in padded], list(alone))
    with pytest.raises(ValueError, match="output_hidden_states: expected False beside a KV cache"):
        model(ids, use_cache=True)


def test_hidden_states_are_traced() -> None:
    model, ids = make_model("fox", layers=1), draw_ids(1, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, model(ids, output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("part", ["layers.1", "layers.1.self_attn"])
@torch.no_grad()
def test_layers_that_are_elsewhere(part: str, tmp_path: Path) -> None:
    """As accelerate places them: it copies arguments to where a layer is, but the state itself must move on."""
    pytest.importorskip("accelerate")
    model, ids = make_model("fox").float(), draw_ids(1, 6)
    model.save_pretrained(tmp_path)
    rest = ("embed_tokens", "norm", "layers.0", *(f"layers.1.{name}" for name in ("mlp", *NORMS) if "attn" in part))
    places = {"lm_head": "cpu", f"model.{part}": "disk"} | {f"model.{name}": "cpu" for name in rest}
    placed = dr.DeadReckonForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "disk")
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(placed.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert placed(ids, use_cache=True).past_key_values.get_seq_length() == 6


def test_a_context_on_another_device() -> None:
    """Where accelerate has placed a layer; what layers there share is there."""
    ids = draw_ids(1, 6)
    context = Context.of(torch.zeros(1, 6, 4), ids, torch.tensor([0, 2, 6]))
    assert context.to("cpu") is context
    moved = context.to("meta", non_blocking=True)
    assert moved.token_ids is not None and moved.cu_seqlens is not None
    assert {x.device.type for x in (moved.positions, moved.token_ids, moved.cu_seqlens)} == {"meta"}
    assert moved.positions.shape == context.positions.shape
    assert context.rope_angles(8, 100.0).device.type == "cpu"
    assert context.to("meta").rope_angles(8, 100.0) is moved.rope_angles(8, 100.0)
    assert moved.rope_angles(8, 100.0).device.type == "meta"


@torch.no_grad()
def test_what_the_configuration_asks_for() -> None:
    model, ids = make_model("fox"), draw_ids(1, 5)
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)
    assert not isinstance(model(ids, return_dict=True), tuple)
    model.config.output_attentions = True
    with pytest.raises(TypeError, match="output_attentions: expected None or False"):
        model(ids)


@torch.no_grad()
def test_cropping_into_a_prompt_with_padding() -> None:
    """Of rows that went on by different numbers of tokens: what was masked is not undone in place of what was not."""
    model, ids, new = make_model("rope"), draw_ids(2, 12), draw_ids(2, 3)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:10] = mask[1, 11] = 0
    cache = DynamicCache(config=model.config)
    model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
    model(ids[:, 10:], attention_mask=mask, past_key_values=cache)
    other = torch.cat([1 - mask, torch.ones_like(new)], dim=1)
    with pytest.raises(ValueError, match=r"attention_mask: expected the tokens masked .* got others in rows \[0, 1\]"):
        model(new, attention_mask=other, past_key_values=cache)
    cache.crop(-4)  # all columns that are left are real
    found = model(new, attention_mask=torch.ones(2, 11, dtype=torch.long), past_key_values=cache).logits
    torch.testing.assert_close(found, model(torch.cat([ids[:, :8], new], dim=1)).logits[:, 8:])
