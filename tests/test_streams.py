"""Batched decoding of sequences of different lengths: each gives what it gives alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_steps import CLOSE, ON_A_CPU, Rerun, as_on_a_gpu, kernel_model, make_model
from test_streaming import prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.models.graphs import CudaGraph
from deadreckon.models.layer import RESET
from deadreckon.models.streams import Streams, fork
from deadreckon.ops.streaming.fused import KernelDecoder
from deadreckon.ops.streaming.past import Past

__all__ = ["as_on_a_gpu"]  # a fixture
pytestmark = ON_A_CPU


def prefilled(model: dr.DeadReckonForCausalLM, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    "encoding", ["path-fox", "selective-rope", "conformal-sympow", "stickbreaking", "prism:walking"]
)
@torch.no_grad()
def test_rows_come_and_go(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in two rows: of one the tail is closed on the way, two share a prefix."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, ids = kernel_model(encoding), prompts(3, 24)
    ids[2, :6] = ids[1, :6]
    expected = model(ids).logits
    streams = Streams(model, 2, Rerun)
    prefix = prefilled(model, ids[1:2, :6])
    caches = [prefilled(model, ids[:1, :12]), fork(prefix), fork(prefix)]
    at, rows = [12, 6, 6], {0: 0, 1: 1}
    assert [streams.admit(caches[row]) for row in rows] == [[0], [1]]
    with pytest.raises(ValueError, match="cache: expected 1 free rows of 2, got 0"):
        streams.admit(caches[2])
    for _ in range(7):
        tokens = torch.stack([ids[rows[row], at[rows[row]]] for row in (0, 1)])
        logits = streams.step(tokens)
        for row, sequence in rows.items():
            torch.testing.assert_close(logits[row], expected[sequence, at[sequence]], **CLOSE)
            at[sequence] += 1
        if at[1] == 9:
            streams.take(1)
            rows[1] = 2
            assert streams.admit(caches[2]) == [1]
    for row in rows:
        streams.take(row)
    assert [cache.get_seq_length() for cache in caches] == at
    assert Rerun.captured == 1


@pytest.mark.parametrize(
    "encoding",
    ["path-fox", "path", "rope", "alibi", "sympow", "conformal-sympow", "stickbreaking", "sympow:4", "prism:walking"],
)
@torch.no_grad()
def test_prompts_that_are_read_together(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1, 19 and 7 tokens: padding is in no row's past, nor is there a gate for it. Powers fold."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    if "sympow" in encoding:
        monkeypatch.setattr("deadreckon.ops.streaming.past.LEAF", 8)
        monkeypatch.setattr("deadreckon.ops.streaming.past.tokens_worth", lambda *_: 10)
    model, ids, at = kernel_model(encoding), prompts(3, 24), [1, 19, 7]
    expected = model(ids).logits
    streams = Streams(model, 4, Rerun)
    assert streams.admit(prefilled(model, ids[2:, :2])) == [0]
    rows, logits = streams.read([ids[number, :length].tolist() for number, length in enumerate(at)])
    assert rows == [1, 2, 3]
    for number, length in enumerate(at):
        torch.testing.assert_close(logits[number], expected[number, length - 1], **CLOSE)
    tokens = ids[:, 0].new_zeros(4)
    for step in range(5):
        tokens[1:] = torch.stack([ids[number, length + step] for number, length in enumerate(at)])
        tokens[0] = ids[2, 2 + step]
        logits = streams.step(tokens)
        torch.testing.assert_close(logits[0], expected[2, 2 + step], **CLOSE)
        for number, length in enumerate(at):
            torch.testing.assert_close(logits[1 + number], expected[number, length + step], **CLOSE)
    caches = [streams.take(row) for row in range(4)]
    assert [cache.get_seq_length() for cache in caches] == [7, 6, 24, 12]
    assert len({cache.layers[0].state.past.signature for cache in caches}) == 1
    again = model(ids[2:, 12:15], past_key_values=caches[3]).logits  # a sequence goes on where it was dropped
    torch.testing.assert_close(again[0], expected[2, 12:15], **CLOSE)


@pytest.mark.parametrize(
    ("encoding", "room", "steps"),
    [("path", 8, 9), ("path", 16, 26), ("path-fox", 16, 12), ("conformal-sympow", 16, 17), ("stickbreaking", 16, 17)],
)
@torch.no_grad()
def test_tails_that_close_together(encoding: str, room: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that came together, with padding or without, or alone, when one of their tails is full.

    A short tail closes them at different times, and twice. A row that comes later closes with rows that have older
    segments and a shorter tail.

    Their logits are at most twice as far from float64 as those of a pass over each row alone in float32.
    """
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.ROOM", room)
    closed, close, at = list[list[list[int]]](), KernelDecoder.close, [9, 9, 9, 21, 3, 14]

    def recorded(self: KernelDecoder, pasts: Sequence[Past], rows: Sequence[Sequence[int]]) -> bool:
        closed.append([list(of_past) for of_past in rows])
        return close(self, pasts, rows)

    monkeypatch.setattr(KernelDecoder, "close", recorded)
    model, ids = kernel_model(encoding), prompts(6, 48)
    exact = make_model(encoding).double()(ids).logits
    allowed = 2 * float((model(ids).logits - exact).abs().max())
    streams, close_to = Streams(model, 6, Rerun), {"rtol": 0, "atol": allowed, "check_dtype": False}
    streams.read([x[:9].tolist() for x in ids[:3]])
    streams.read([ids[3, :21].tolist(), ids[4, :3].tolist()])
    streams.read([ids[5, :14].tolist()])
    for step in range(steps):
        if step == 1:
            streams.drop(1)
        if step == 13:
            streams.read([ids[1, :9].tolist()])
            at[1] = 9 - step
        logits = streams.step(torch.stack([x[start + step] for x, start in zip(ids, at, strict=True)]))
        for row in (0, 2, 3, 4, 5) if step < 13 else range(6):
            torch.testing.assert_close(logits[row], exact[row, at[row] + step], **close_to)
    together = [[0, 2], [3]]
    first = [[[5]], together, [[4]], [[5]], together] if room == 8 else [[*together, [4], [5]]]
    assert closed == first + [[[0, 2], [1], [3], [4], [5]]] * (steps > 20)
    again = model(ids[2:3, 9 + steps :], past_key_values=streams.take(2)).logits
    torch.testing.assert_close(again[0], exact[2, 9 + steps :], **close_to)


class Count(TorchDispatchMode):
    """Counts operations, except views."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not function.is_view
        return function(*args, **(kwargs or {}))


class Still:
    """A fake CUDA graph, whose replay counts as no operation."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.output = step()

    def replay(self) -> Tensor:
        return self.output


@pytest.mark.parametrize("encoding", ["path-fox", "conformal-sympow"])
@torch.no_grad()
def test_operations_of_closing_tails(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many for four rows that came together as for two. Of others each joins, looks at and folds its segments."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, most = kernel_model(encoding), {"path-fox": 20, "conformal-sympow": 50}[encoding]

    def operations(rows: int, together: bool) -> int:
        """Of the step that closes tails, beyond those of other steps."""
        streams, took = Streams(model, rows, Still), list[int]()
        for group in [[[1] * 9] * rows] if together else [[[1] * 9]] * rows:
            streams.read(group)
        for _ in range(10):
            with Count() as count:
                streams.step(torch.zeros(rows, dtype=torch.int64))
            took.append(count.operations)
        return max(took) - min(took)

    assert operations(4, together=True) == operations(2, together=True) > 0
    of_a_row = (operations(4, together=False) - operations(2, together=False)) / 2
    assert of_a_row <= most


@pytest.mark.parametrize("kind", ["none", "gates", "rotation", "steps", "steps and gates", "squares"])
@pytest.mark.parametrize("masked", [5, 150, 198])
@torch.no_grad()
def test_a_past_without_its_padding(kind: str, masked: int) -> None:
    """Then it goes on as if that had never been: past segments that join, states that fold, tokens that wait."""
    torch.manual_seed(0)
    length, end = 200, 420
    q, k, v, w = (torch.randn(1, end, 2, 4, dtype=torch.float64) for _ in range(4))
    beta, gates = 2 * torch.rand(1, end, 2, dtype=torch.float64), -torch.rand(1, end, 2, dtype=torch.float64)
    w, angles = w / w.norm(dim=-1, keepdim=True), torch.rand(1, end, 2, 2, dtype=torch.float64)
    gated, score = kind in ("gates", "steps and gates", "squares"), dr.Power(2) if kind == "squares" else "softmax"

    def attend(past: dr.Past, start: int, stop: int, gate: Tensor | None) -> Tensor:
        piece = slice(start, stop)
        transport: dr.Rotation | dr.Householder | None = None
        if kind.startswith("steps"):
            transport = dr.Householder(w[:, piece], beta[:, piece])
        elif kind == "rotation":
            transport = dr.Rotation(angles[:, piece])
        gate = None if gate is None else gate[:, piece]
        inputs = (x[:, piece] for x in (q, k, v))
        return dr.attend_next(*inputs, transport=transport, log_gate=gate, score=score, past=past)

    alone, padded, real = dr.Past(), dr.Past(), gates if gated else None
    closed = gates.clone() if gated else torch.zeros_like(gates)
    closed[:, masked] = RESET
    attend(alone, masked, length, real)
    attend(padded, 0, length, closed)
    found = padded.without_first(masked, gated)
    assert (found.length, found.signature) == (alone.length, alone.signature)
    for start, stop in [
        (length, length + 1),
        (length + 1, length + 90),
        *((t, t + 1) for t in range(length + 90, end)),
    ]:
        torch.testing.assert_close(attend(found, start, stop, real), attend(alone, start, stop, real))


@torch.no_grad()
def test_one_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """That has no padding itself, and a tail that is full: no gate is left, and free rows look at nothing."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, ids = kernel_model("rope"), prompts(2, 24)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    model(ids[:, :9], mask, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1]))
    streams = Streams(model, 3, Rerun)
    assert streams.admit(cache) == [0]
    assert streams.step_of_all is not None
    assert streams.step_of_all.residents[0].decoder.parts[1:].eq(0).all()  # type: ignore[attr-defined]
    for t in range(9, 20):
        torch.testing.assert_close(streams.step(ids[1, t].expand(3))[0], expected[1, t], **CLOSE)
    again = model(ids[1:, 20:], past_key_values=streams.take(0)).logits
    torch.testing.assert_close(again[0], expected[1, 20:], **CLOSE)


@torch.no_grad()
def test_a_first_sequence_whose_tail_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed before a step is captured, not in it."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, ids = kernel_model("conformal-sympow"), prompts(1, 24)
    expected, cache = model(ids).logits, prefilled(model, ids[:, :5])
    for t in range(5, 13):
        model(ids[:, t : t + 1], past_key_values=cache)
    streams = Streams(model, 2, Rerun)
    streams.admit(cache)
    for t in range(13, 18):
        torch.testing.assert_close(streams.step(ids[0, t].expand(2))[0], expected[0, t], **CLOSE)


@pytest.mark.parametrize(
    ("encoding", "undone"),
    [("path-fox", 2), ("path-fox", 4), ("path", 4), ("rope-path-fox", 4), ("selective-rope", 5), ("fox", 9)],
)
@torch.no_grad()
def test_a_cropped_sequence(encoding: str, undone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens, of which the last four wait along Householder routes: some of them undone, or all.

    The first to come, by which the step is captured, and one that comes after a whole one.
    """
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model, ids = kernel_model(encoding), prompts(2, 24)
    expected, streams, caches = model(ids).logits, Streams(model, 3, Rerun), list[DynamicCache]()
    for number, tokens in enumerate((undone, 0, undone)):
        caches.append(prefilled(model, ids[number % 2 : number % 2 + 1, :12]))
        for layer in caches[-1].layers:
            layer.state.crop(tokens)
        assert streams.admit(caches[-1]) == [number]
    at = [12 - undone, 12, 12 - undone]
    for _ in range(7):  # across closings
        logits = streams.step(torch.stack([ids[number % 2, place] for number, place in enumerate(at)]))
        for number, place in enumerate(at):
            torch.testing.assert_close(logits[number], expected[number % 2, place], **CLOSE)
        at = [place + 1 for place in at]
    for number, place in enumerate(at):
        again = model(ids[number % 2 : number % 2 + 1, place : place + 2], past_key_values=streams.take(number)).logits
        torch.testing.assert_close(again[0], expected[number % 2, place : place + 2], **CLOSE)


@pytest.mark.parametrize("encoding", ["path-fox", "rope", "sympow", "prism"])
@torch.no_grad()
def test_steps_that_are_no_kernels(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels do not take a model's sizes, or where recent inputs become more: rows are decoded one by one."""
    monkeypatch.setattr("deadreckon.models.huggingface.wanted", lambda *_: False)
    model = kernel_model(encoding) if encoding == "prism" else make_model(encoding)
    ids, at = prompts(2, 16), [12, 6]
    expected, streams = model(ids).logits, Streams(model, 2, Rerun)
    for number, place in enumerate(at):
        assert streams.admit(prefilled(model, ids[number : number + 1, :place])) == [number]
    for step in range(3):
        places = [place + step for place in at]
        logits = streams.step(torch.stack([ids[number, place] for number, place in enumerate(places)]))
        for number, place in enumerate(places):
            torch.testing.assert_close(logits[number], expected[number, place], **CLOSE)
    assert Rerun.captured == 0


def test_streams_heed_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), model=torch.nn.Linear(1, 1))
    for value, graph in (("1", CudaGraph), ("0", None)):
        monkeypatch.setenv("DEADRECKON_GRAPHS", value)
        assert Streams(model, 1).graph is graph


def test_bad_rows() -> None:
    model = make_model("rope")
    with pytest.raises(ValueError, match="rows: expected an integer of 1 or more, got 0"):
        Streams(model, 0)
    streams = Streams(model, 2)
    with pytest.raises(ValueError, match="cache: expected that of sequences after their first piece"):
        streams.admit(DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="cache: expected 3 free rows of 2, got 2"):
        streams.read([[1], [2, 3], [4]])
    for bad in ([], [[1], []]):
        with pytest.raises(ValueError, match="prompts: expected one or more, of at least one token each"):
            streams.read(bad)
    with pytest.raises(ValueError, match="row: expected one that is taken, got 0"):
        streams.drop(0)
    with pytest.raises(ValueError, match=r"ids: expected \(2,\), one token a row, got \(3,\)"):
        streams.step(torch.zeros(3, dtype=torch.int64))
    assert streams.step(torch.zeros(2, dtype=torch.int64)).shape == (2, 13)
