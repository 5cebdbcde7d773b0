"""Prefill by kernels: its output is `attend`'s, and filling the cache costs a few launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import DEVICE, Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deadreckon as dr
from deadreckon.ops.streaming.fused import STREAM
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.stream import PYTORCH, attend_stream
from deadreckon.ops.triton.attend import reason_against
from deadreckon.ops.triton.kernel import Kernel

CASES = [
    Case("householder", None, length=1),
    Case("householder", "learned", length=64),
    Case("householder", "learned per key head", length=127, group=1),
    Case("householder", None, length=128, batch=1, beta=1.0),
    Case("householder", "learned", length=270, batch=1, heads=1),  # what waits begins before the last block
    Case("householder", "constant", length=330, batch=1, heads=1),
    Case("householder", "learned", length=575, batch=1, heads=1, group=1),  # 7 leaves are closed
]


Piece = tuple[Tensor, Tensor, Tensor, dr.Factors]


def pieces(case: Case, *cuts: int) -> Iterator[Piece]:
    """In float32, as `attend_stream` takes them; all at once if there are no cuts."""
    leaves = {name: x.to(DEVICE, torch.float32) for name, x in case.inputs().items()}
    if case.gate == "constant":
        leaves["log_gate"] = leaves["log_gate"].expand(case.batch, case.length, -1)
    start = 0
    for end in (*cuts, case.length):
        some = {name: x[:, start:end] for name, x in leaves.items()}
        yield some["q"], some["k"], some["v"], dr.Factors(case.steps(some), some.get("log_gate"), case.score)
        start = end


def stream(piece: Piece, past: Past, kernels: Any = STREAM) -> Tensor:
    return attend_stream(*piece, piece[0].shape[3] ** -0.5, past, kernels)


@torch.no_grad()
def forward(piece: Piece) -> Tensor:
    q, k, v, factors = piece
    return dr.attend(q, k, v, **factors._asdict(), impl="triton")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("short_walks")
def test_householder_routes(case: Case) -> None:
    """The output to the last bit; what is kept is what PyTorch keeps."""
    past, expected, (piece,) = Past(), Past(), pieces(case)
    assert torch.equal(stream(piece, past), forward(piece))
    stream(piece, expected, PYTORCH)
    assert len(past.segments) == len(expected.segments) == (case.length >= 128)
    for found, segment in zip(past.segments, expected.segments, strict=True):
        for x, y in zip(found.tensors(), segment.tensors(), strict=True):
            assert x.is_contiguous()
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-5)
    assert past.waiting is not None
    assert expected.waiting is not None
    for name, x in expected.waiting.fields().items():
        assert torch.equal(past.waiting[name], x)


@pytest.mark.parametrize(("length", "gate"), [(1, None), (70, "learned"), (200, None)])
def test_wide_keys(length: int, gate: str | None) -> None:
    """Of halves: weights are rounded once, and so are the outputs, which are no larger than values."""
    leaves = Case(None, gate, length=length, batch=1, width=264).inputs()
    log_gate = leaves["log_gate"].to(DEVICE, torch.float32) if gate else None
    q, k, v = (leaves[name].to(DEVICE, torch.float16) for name in "qkv")
    expected = dr.attend(q.double(), k.double(), v.double(), log_gate=log_gate, impl="reference")
    found = dr.attend_next(q, k, v, log_gate=log_gate, past=Past(), impl="triton")
    allowed = 2 * torch.finfo(torch.float16).eps * float(v.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 264}, None),
        ({"width": 520}, "D a multiple of 8 up to 512, got 520"),
        ({"value_width": 136}, "D a multiple of 8 up to 256, got 264"),
        ({"dtype": torch.float32}, "D a multiple of 8 up to 256, got 264"),
        ({"factors": dr.Factors(log_gate=torch.zeros(1, 3, 2, device=DEVICE))}, None),
        ({"factors": dr.Factors(score="stick-breaking")}, "D a multiple of 8 up to 256, got 264"),
        (
            {"factors": dr.Factors(dr.Rotation(torch.zeros(1, 3, 2, 132, device=DEVICE)))},
            "D a multiple of 8 up to 256, got 264",
        ),
        ({"cramped": True}, "D a multiple of 8 up to 256, got 264"),
    ],
)
def test_wide_keys_that_kernels_take(
    change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "width": 264,
        "value_width": 16,
        "dtype": torch.bfloat16,
        "factors": dr.Factors(),
        **change,
    }
    monkeypatch.setattr("deadreckon.ops.triton.attend.cramped", lambda x: "cramped" in change)
    q, v = (torch.zeros(1, 3, 2, given[name], dtype=given["dtype"], device=DEVICE) for name in ("width", "value_width"))
    assert reason_against(q, v, given["factors"], packed=False) == reason


@pytest.mark.parametrize("transport", [None, "rotation", "rotation of values", "rotation per query head"])
@pytest.mark.parametrize("gate", [None, "learned"])
@pytest.mark.usefixtures("few_programs")
def test_other_transports(transport: str | None, gate: str | None) -> None:
    case = Case(transport, gate, length=200, batch=1)
    past, (first, *later) = Past(), pieces(case, 130, 131)
    outputs = [stream(first, past)]
    assert torch.equal(outputs[0], forward(first))
    outputs += [stream(piece, past) for piece in later]
    expected = case.attend({name: x.to(DEVICE) for name, x in case.inputs().items()}, impl="reference")
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("short_walks", "few_programs")
def test_going_on() -> None:
    """By single tokens, by a few and by many."""
    case, past, outputs = Case("householder", "learned", length=500, batch=1, heads=1), Past(), []
    for piece in pieces(case, 270, 271, 272, 277, 400, 401, 402):
        outputs.append(stream(piece, past))
    expected = case.attend({name: x.to(DEVICE) for name, x in case.inputs().items()})
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, rtol=0, atol=1e-5)


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy, but for the few inside operators of ours, which it does not see."""

    count = 0
    free = (
        "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select", "slice",
        "split", "squeeze", "transpose", "unsqueeze", "view",
    )  # fmt: skip

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.__name__.split(".")[0] not in self.free and function.namespace == "aten"
        return function(*args, **(kwargs or {}))


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Of PyTorch's operations and of Triton's kernels, within."""
    launch = Kernel.launch
    mode = Launches()

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before = mode.count
        result = launch(self, *arguments, **keywords)
        mode.count = before + 1  # whatever an interpreter does
        return result

    with monkeypatch.context() as patch, mode:
        patch.setattr(Kernel, "launch", counted)
        yield mode


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Case("householder", None, length=575, batch=1, heads=1, group=1), 20),
        (Case("householder", "learned", length=575, batch=1, heads=1, group=1), 30),
        (Case("rotation", None, length=200, batch=1), 3),
        (Case(None, "learned", length=200, batch=1), 6),
    ],
    ids=str,
)
def test_few_launches(case: Case, most: int, short_walks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond those of the forward pass."""
    (piece,) = pieces(case)
    with launches(monkeypatch) as alone:
        forward(piece)
    with launches(monkeypatch) as kept:
        stream(piece, Past())
    assert 0 < alone.count < kept.count <= alone.count + most
