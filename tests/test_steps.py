"""CUDA graphs of decoding steps. Without a GPU a graph is a step that runs again, interpreted, on the same tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import AWAKE
from test_streaming import VOCABULARY, prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.models.graphs import Steps

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, test_steps_gpu.py has graphs")
pytestmark = ON_A_CPU
CLOSE = {"rtol": 0, "atol": 1e-4}
SMALL = {"positions": 12, "width": 8, "cursors": 2, "hidden": 5}
BY_KERNELS = "prism:kernels"  # whose cursors are moved by kernels, too, as they are on a GPU
OPTIONS = {
    **AWAKE, "sympow:4": {"p": 4}, "prism": SMALL, BY_KERNELS: SMALL, "prism:walking": {**SMALL, "copy": 0},
}  # fmt: skip  # as tests name them


class Rerun:
    """A fake CUDA graph."""

    captured = replayed = 0
    interrupted: Callable[[], None] | None = None  # called when a replay has run

    def __init__(self, step: Callable[[], Tensor]) -> None:
        Rerun.captured += 1
        self.step = step

    def replay(self) -> Tensor:
        Rerun.replayed += 1
        output = self.step()
        if Rerun.interrupted is not None:
            Rerun.interrupted()
        return output


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tails of 8 tokens, few programs, and steps that are graphs while grad mode is off."""
    monkeypatch.setattr("deadreckon.ops.streaming.fused.ROOM", 8)
    for module in ("decode", "routes"):
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.LEAF", 4)
    for module in ("kernels", "fused"):
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.CHUNK", 8)
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.STATE_PARTS", 3)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SHORTEST", 16)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.PROGRAMS", 1)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SPARE", 6)
    monkeypatch.setattr(
        "deadreckon.models.huggingface.wanted", lambda ids, model: not torch.is_grad_enabled() and not model.training
    )
    monkeypatch.setattr("deadreckon.models.huggingface.Steps", lambda *arguments: Steps(*arguments, Rerun))
    if hasattr(request.node, "callspec") and BY_KERNELS in request.node.callspec.params.values():
        for module in ("ops.cursors", "encodings.maps"):
            monkeypatch.setattr(f"deadreckon.{module}.has_kernels", lambda x: True)
    Rerun.captured, Rerun.replayed, Rerun.interrupted = 0, 0, None
    yield
    Rerun.interrupted = None


def make_model(encoding: str, layers: int = 1) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    name, options = encoding.split(":")[0], OPTIONS.get(encoding)
    config = dr.DeadReckonConfig(
        encoding=name, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, encoding_options=None if options is None else {name: options},
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).eval()


def kernel_model(encoding: str, layers: int = 1) -> dr.DeadReckonForCausalLM:
    """Whose single tokens are decoded by kernels."""
    model = make_model(encoding, layers)
    for layer in model.model.layers:
        attention: Any = layer.get_submodule("self_attn")
        advance, attention.impl = attention._advance, "blockwise"

        def by_kernels(x: Tensor, *rest: Any, advance: Any = advance, attention: Any = attention) -> Tensor:
            attention.impl = "triton" if x.shape[1] == 1 else "blockwise"  # the interpreter takes long for more
            return advance(x, *rest)

        attention._advance = by_kernels  # a hook would keep its steps from graphs
    return model


def decode(model: dr.DeadReckonForCausalLM, ids: Tensor, cache: DynamicCache, start: int, **keywords: Any) -> Tensor:
    """Logits of single tokens from `start` on."""
    found = [model(ids[:, t : t + 1], past_key_values=cache, **keywords).logits for t in range(start, ids.shape[1])]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(
    "encoding", ["path-fox", "learned-rotation-values", "stickbreaking", "sympow:4", "prism", BY_KERNELS]
)
@torch.no_grad()
def test_steps_give_what_one_pass_gives(encoding: str) -> None:
    """Across closings of tails; a second sequence in the same graph; then the first goes on."""
    model, ids = kernel_model(encoding, layers=2), prompts(1, 24)
    expected = model(ids).logits
    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    torch.testing.assert_close(decode(model, ids[:, :18], cache, 8), expected[:, 8:18], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (1, 9)  # the first step is eager
    model(ids[:, :5], past_key_values=other)
    torch.testing.assert_close(decode(model, ids[:, :7], other, 5), expected[:, 5:7], **CLOSE)
    torch.testing.assert_close(decode(model, ids[:, :20], cache, 18), expected[:, 18:20], **CLOSE)
    torch.testing.assert_close(model(ids[:, 20:22], past_key_values=cache).logits, expected[:, 20:22], **CLOSE)
    torch.testing.assert_close(decode(model, ids, cache, 22), expected[:, 22:], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (1, 15)


@torch.no_grad()
def test_steps_that_inference_mode_captured_serve_outside_too() -> None:
    """A sequence that began there, and another one in the same graph."""
    model, ids = kernel_model("selective-rope"), prompts(1, 12)
    expected = model(ids).logits
    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :5], past_key_values=cache)
        decode(model, ids[:, :8], cache, 5)
    torch.testing.assert_close(decode(model, ids, cache, 8), expected[:, 8:], **CLOSE)  # across a closing
    model(ids[:, :6], past_key_values=other)
    torch.testing.assert_close(decode(model, ids[:, :8], other, 6), expected[:, 6:8], **CLOSE)
    assert Rerun.captured == 1


@pytest.mark.parametrize("encoding", ["path-fox", "selective-rope", "prism", BY_KERNELS])
@torch.no_grad()
def test_states_of_a_graph_are_forked_cropped_chosen_and_copied(encoding: str) -> None:
    model, ids = kernel_model(encoding), prompts(2, 18)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    decode(model, ids[:, :11], cache, 8)
    forked, copied = copy.copy(cache), copy.deepcopy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in forked.layers:
        layer.state = layer.state.fork()
    cache.crop(-2)
    torch.testing.assert_close(decode(model, ids[:, :12], cache, 9), expected[:, 9:12], **CLOSE)
    for branch in (forked, copied):
        torch.testing.assert_close(decode(model, ids[:, :13], branch, 11), expected[:, 11:13], **CLOSE)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = decode(model, ids[:, :14].flip(0), cache, 12)
    torch.testing.assert_close(swapped.flip(0), expected[:, 12:14], **CLOSE)
    assert cache.layers[0].state.past.decoder is not None  # which goes over to the rows that are chosen
    cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(decode(model, ids[:, :15], cache, 14), expected[:, 14:15], **CLOSE)
    cache.batch_select_indices(torch.tensor([0]))  # another batch size: another graph
    torch.testing.assert_close(decode(model, ids[:1, :18], cache, 15), expected[:1, 15:18], **CLOSE)
    assert Rerun.captured == 2


@pytest.mark.parametrize("encoding", ["path-fox", "rope-path", "selective-rope", BY_KERNELS])
@torch.no_grad()
def test_cropped_sequences_stay_in_their_graph(encoding: str) -> None:
    """As those of assisted decoding are, round by round: with all tokens that wait undone, too."""
    model, ids = kernel_model(encoding), prompts(1, 16)
    expected, cache = model(ids).logits, DynamicCache(config=model.config)
    model(ids[:, :12], past_key_values=cache)
    decode(model, ids[:, :15], cache, 12)
    before = Rerun.replayed
    for undone in (2, 7):  # along Householder routes four tokens of the prompt wait
        cache.crop(-undone)
        torch.testing.assert_close(
            decode(model, ids[:, :15], cache, 15 - undone), expected[:, 15 - undone : 15], **CLOSE
        )
    assert (Rerun.captured, Rerun.replayed - before) == (1, 9)


@pytest.mark.parametrize("encoding", ["path-fox", "stickbreaking", "prism", BY_KERNELS])
@torch.no_grad()
def test_masked_rows_are_decoded_by_graphs(encoding: str) -> None:
    model, ids = kernel_model(encoding), prompts(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[0, 6] = 0
    expected = [model(row[real].unsqueeze(0)).logits[:, -4:] for row, real in zip(ids, mask.bool(), strict=True)]
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
    found = [
        model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits for t in range(12, 16)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1), torch.cat(expected), **CLOSE)
    assert Rerun.replayed == 3


@torch.no_grad()
def test_room_that_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRISM's copy branch has room for 8 tokens, then for 16: another graph. A short sequence is in the first again."""
    monkeypatch.setattr("deadreckon.encodings.cursors.ROOM", {"cpu": 8})
    model, ids = kernel_model("prism", layers=2), prompts(1, 14)
    expected = model(ids).logits
    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=cache)
    torch.testing.assert_close(decode(model, ids[:, :12], cache, 4), expected[:, 4:12], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (2, 5)  # tokens 5 to 7 and, after two eager ones, 10 and 11
    model(ids[:, :4], past_key_values=other)
    torch.testing.assert_close(decode(model, ids[:, :6], other, 4), expected[:, 4:6], **CLOSE)
    torch.testing.assert_close(decode(model, ids[:, :13], cache, 12), expected[:, 12:13], **CLOSE)
    torch.testing.assert_close(decode(model, ids[:, :7], other, 6), expected[:, 6:7], **CLOSE)
    torch.testing.assert_close(decode(model, ids, cache, 13), expected[:, 13:], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (2, 10)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate(arguments: dict[str, int]) -> None:
    model, ids = kernel_model("path-fox"), prompts(1, 12)
    plain = make_model("path-fox").generate(ids, max_new_tokens=6, do_sample=False, **arguments)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, **arguments), plain)
    assert Rerun.replayed or "prompt_lookup_num_tokens" in arguments


def test_compiled_models_are_decoded_by_graphs() -> None:
    """A compiler, which the host's counts would make anew at every token, leaves cached steps alone."""
    model, ids = kernel_model("rope"), prompts(1, 12)
    plain = make_model("rope").generate(ids, max_new_tokens=6, do_sample=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), plain)
    assert Rerun.replayed == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the head: of a prompt, and of a token


def test_an_assistant_is_decoded_by_a_graph() -> None:
    """Its cache is cropped round by round, and it goes on in the graph; the model's answers are its own."""
    model, assistant, ids = make_model("path-fox"), kernel_model("path-fox"), prompts(1, 12)
    with torch.no_grad():
        assistant.lm_head.weight += 0.3 * torch.randn_like(assistant.lm_head.weight)  # so that it is wrong at times
    assistant.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    Rerun.captured = Rerun.replayed = 0
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=assistant), plain)
    assert Rerun.captured == 1
    assert Rerun.replayed > 4


@torch.no_grad()
def test_new_weights_are_captured_anew() -> None:
    """Those that change in place are not."""
    model, ids = kernel_model("rope"), prompts(1, 9)
    for captured in (1, 1, 2):
        expected = model(ids).logits
        cache = DynamicCache(config=model.config)
        model(ids[:, :6], past_key_values=cache)
        torch.testing.assert_close(decode(model, ids, cache, 6), expected[:, 6:], **CLOSE)
        assert Rerun.captured == captured
        weight = model.model.layers[0].self_attn.q_proj.weight
        if captured == 1 and Rerun.replayed < 3:
            weight.mul_(2)
        else:
            model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(weight * 2)
    assert len(model.model.steps.captured) == 1


class Casts(TorchDispatchMode):
    """Counts how often a tensor is cast."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.address, self.count = x.data_ptr(), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.address
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_graphs_cast_weights_themselves() -> None:
    """Autocast's copies of the weights are gone when the caller leaves it, and a graph stays."""
    model, ids = kernel_model("nope"), prompts(1, 9)
    with torch.autocast("cpu", torch.float16):
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], past_key_values=cache)
        decode(model, ids[:, :6], cache, 5)
        with Casts(model.model.layers[0].self_attn.q_proj.weight) as casts:
            decode(model, ids, cache, 6)
    assert (Rerun.captured, Rerun.replayed, casts.count) == (1, 3, 3)


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_interrupted_replays_leave_no_trace(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kernel_model("path-fox"), prompts(1, 14)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    decode(model, ids[:, :11], cache, 8)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "after":
            patch.setattr(Rerun, "interrupted", staticmethod(interrupt))
        else:
            patch.setattr(Rerun, "replay", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 11:12], past_key_values=cache)
    assert cache.get_seq_length() == 11
    torch.testing.assert_close(decode(model, ids, cache, 11), expected[:, 11:], **CLOSE)


@torch.no_grad()
def test_a_cache_that_is_no_more_launches_nothing() -> None:
    """Garbage may be collected while another graph is captured: a kernel launched then would become a part of it."""
    model, ids, launched = kernel_model("fox"), prompts(1, 14), list[str]()
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], past_key_values=cache)
    decode(model, ids, cache, 12)
    [step] = model.model.steps.captured.values()
    decoder: Any = step.residents[0].decoder
    assert decoder.tails[0].segments

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            launched.append(str(function))
            return function(*args, **(kwargs or {}))

    with Launches():
        del cache
        gc.collect()
    assert not decoder.tails[0].segments
    assert not launched


@torch.no_grad()
def test_what_is_not_a_graph() -> None:
    """Hooks, steps that are no kernels, and copies of a model, which begin anew."""
    model, ids = kernel_model("rope"), prompts(1, 9)
    cache = DynamicCache(config=model.config)
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    model(ids[:, :5], past_key_values=cache)
    decode(model, ids, cache, 5)
    handle.remove()
    assert Rerun.captured == 0
    prism = make_model("prism")
    cache = DynamicCache(config=prism.config)
    prism(ids[:, :5], past_key_values=cache)
    decode(prism, ids, cache, 5)
    assert Rerun.captured == 0
    assert model.model.steps is not None
    assert copy.deepcopy(model).model.steps is None


@torch.no_grad()
def test_steps_that_draw() -> None:
    """Angles that are drawn afresh are drawn for the tokens of a step."""
    model, ids = kernel_model("random-rotation"), prompts(1, 12)
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], past_key_values=cache)
    for t in range(6, 12):
        assert model(ids[:, t : t + 1], past_key_values=cache).logits.isfinite().all()
    assert Rerun.replayed
