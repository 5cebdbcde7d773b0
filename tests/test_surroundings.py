"""What captured decoding steps depend on, and what happens when it changes. A graph here is a step that runs again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_steps import CLOSE, ON_A_CPU, Rerun, as_on_a_gpu, decode, kernel_model
from test_streaming import prompts
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.models.streams import Streams
from deadreckon.models.surroundings import Surroundings, Watch, addresses, hooked

__all__ = ["as_on_a_gpu"]  # a fixture
pytestmark = ON_A_CPU


def test_tensors_of_tensors() -> None:
    """Have no address of their own."""
    a, b, c = torch.zeros(2), torch.ones(2), nn.Parameter(torch.ones(3))
    assert list(addresses([a, None, TwoTensor(a, b), c])) == [x.data_ptr() for x in (a, a, b, c)]


def test_what_a_watch_sees() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watch, before = Watch(model, "cpu"), Surroundings.of(model.modules(), "cpu")
    assert len(before.weights) == 7
    model[0].weight.data.mul_(2)
    assert watch.fine()
    handle = model[1].register_forward_pre_hook(lambda *_: None)
    assert not watch.fine()
    assert hooked(model.modules())
    handle.remove()
    assert watch.fine()
    with torch.autocast("cpu", torch.bfloat16):
        assert not watch.fine()
    model[1].running_mean = torch.zeros(2)
    assert watch.fine()  # one module in so many is looked at
    assert Surroundings.of(model.modules(), "cpu") != before
    model[0].weight.data = torch.zeros(2, 2)
    assert not watch.fine()


def started(model: dr.DeadReckonForCausalLM, ids: torch.Tensor, tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids[:, :tokens], past_key_values=cache)
    return cache


@torch.no_grad()
def test_weights_hooks_and_autocast_that_change_on_the_way() -> None:
    """Of a sequence that a graph holds: it goes on eagerly, or in another graph."""
    model, ids, heard = kernel_model("path-fox"), prompts(1, 24), list[int]()
    cache = started(model, ids, 5)
    decode(model, ids[:, :9], cache, 5)
    assert (Rerun.captured, Rerun.replayed) == (1, 3)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
    decode(model, ids[:, :12], cache, 9)
    assert (Rerun.replayed, len(heard)) == (3, 3)
    handle.remove()
    expected = model(ids).logits
    torch.testing.assert_close(decode(model, ids[:, :16], cache, 12), expected[:, 12:16], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (1, 7)
    for x in model.parameters():
        x.data = x.data.clone()
    torch.testing.assert_close(decode(model, ids[:, :20], cache, 16), expected[:, 16:20], **CLOSE)
    assert (Rerun.captured, Rerun.replayed) == (2, 9)  # two eager steps come first
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"q: expected dtype torch\.float32"):
        decode(model, ids[:, :21], cache, 20)


@torch.no_grad()
def test_adapters() -> None:
    """PEFT switches, turns off and merges them by flags and in place: graphs are kept for each."""
    peft = pytest.importorskip("peft")
    model, ids = kernel_model("fox"), prompts(1, 10)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["up_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(model, config, adapter_name="a")
    adapted.add_adapter("b", config)

    def check() -> int:
        expected = model(ids).logits
        cache = started(model, ids, 5)
        torch.testing.assert_close(decode(model, ids, cache, 5), expected[:, 5:], **CLOSE)
        return Rerun.captured

    assert [check(), check()] == [1, 1]
    adapted.set_adapter("b")
    assert [check(), check()] == [2, 2]
    with adapted.disable_adapter():
        assert check() == 3
    adapted.set_adapter("a")
    assert check() == 3
    adapted.merge_adapter()
    assert check() == 4
    cache = started(model, ids, 5)
    decode(model, ids[:, :8], cache, 5)
    replayed = Rerun.replayed
    adapted.unmerge_adapter()  # on the way
    decode(model, ids[:, :9], cache, 8)
    assert Rerun.replayed == replayed


@torch.no_grad()
def test_threads_take_turns() -> None:
    """One that comes while a step of another is under way waits until it has been counted."""
    model, ids = kernel_model("path-fox"), prompts(2, 16)
    expected = model(ids).logits
    caches = [started(model, ids[row : row + 1], 5) for row in (0, 1)]
    for row, cache in enumerate(caches):
        decode(model, ids[row : row + 1, :8], cache, 5)
    found = dict[int, torch.Tensor]()

    def other() -> None:
        with torch.no_grad():
            found[1] = decode(model, ids[1:, :12], caches[1], 8)

    thread = threading.Thread(target=other)

    def interrupted() -> None:
        Rerun.interrupted = None
        thread.start()
        thread.join(1)

    Rerun.interrupted = interrupted
    found[0] = decode(model, ids[:1, :12], caches[0], 8)
    thread.join()
    for row, logits in found.items():
        torch.testing.assert_close(logits[0], expected[row, 8:12], **CLOSE)


@torch.no_grad()
def test_a_capture_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kernel_model("path-fox", layers=2), prompts(1, 12)
    expected = model(ids).logits
    cache = started(model, ids, 5)
    decode(model, ids[:, :6], cache, 5)

    looks = list[int]()

    def looked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        looks.append(1)  # as in a capture, nothing happens on the device
        if len(looks) == 2:
            raise MemoryError("no more")
        return q.new_zeros(*q.shape[:2], v.shape[1])

    with monkeypatch.context() as patched:
        patched.setattr("deadreckon.ops.streaming.fused.look", looked)
        patched.setattr(Rerun, "__init__", lambda self, step: setattr(self, "first", step()))
        with pytest.raises(MemoryError, match="no more"):
            decode(model, ids[:, :7], cache, 6)
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    torch.testing.assert_close(decode(model, ids, cache, 6), expected[:, 6:], **CLOSE)


@torch.no_grad()
def test_streams_of_a_model_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, ids = kernel_model("path-fox"), prompts(1, 16)
    streams = Streams(model, 2, Rerun)
    streams.read([ids[0, :5].tolist()])
    for x in model.parameters():
        x.data = x.data.clone()
    expected = model(ids).logits

    def step(place: int) -> torch.Tensor:
        return streams.step(ids[0, place].repeat(2))[0]

    for place in (5, 6):
        torch.testing.assert_close(step(place), expected[0, place], **CLOSE)
    assert Rerun.captured == 2
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.clone()  # one that no sample shows
    streams.drop(streams.read([ids[0, :3].tolist()])[0][0])
    assert Rerun.captured == 3
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(RuntimeError, match="autocast: expected as it was when rows began"),
    ):
        step(7)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="model: expected no hooks while rows are decoded together"):
        step(7)
    assert Streams(model, 2, Rerun).graph is None
    handle.remove()
    torch.testing.assert_close(step(7), expected[0, 7], **CLOSE)
