"""Decoding kernels without Householder steps: single tokens with rotations and gates, over a segmented KV cache."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton.language as tl
from cases import CLOSE, DEVICE, Case
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.streaming.decode import renew
from deadreckon.ops.streaming.fused import STREAM, KernelDecoder, reason_against_next
from deadreckon.ops.streaming.kernels import Partial, _combine, look
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.routes import in_newest_frame
from deadreckon.ops.streaming.stream import PYTORCH, attend_stream
from deadreckon.ops.triton.attend import reason_against

TAIL = 8 if os.environ.get("TRITON_INTERPRET") == "1" else 16  # tokens: a GPU multiplies tiles of 16 rows or more
TOKENS = TAIL + 35


@pytest.fixture
def small_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that is full after TAIL tokens, and few programs: interpreted, each takes a millisecond."""
    monkeypatch.setattr("deadreckon.ops.streaming.fused.ROOM", TAIL)
    monkeypatch.setattr("deadreckon.ops.streaming.decode.LEAF", 4)
    for module in ("kernels", "fused"):
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.CHUNK", TAIL)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SHORTEST", 16)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.PROGRAMS", 1)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SPARE", 4)
    for module in ("kernels", "fused"):
        monkeypatch.setattr(f"deadreckon.ops.streaming.{module}.STATE_PARTS", 3)
    monkeypatch.setattr("deadreckon.ops.streaming.past.LEAF", TAIL)
    monkeypatch.setattr("deadreckon.ops.streaming.past.tokens_worth", lambda *_: 10)


class Stream:
    """A sequence that comes in pieces, by kernels, checked against the definition."""

    def __init__(self, case: Case) -> None:
        self.case, self.leaves = case, {name: x.float() for name, x in case.inputs().items()}
        if isinstance(case.score, dr.Power):  # longer and longer keys: the unit of states changes
            self.leaves["k"] = self.leaves["k"] * 2 ** (torch.arange(case.length) / 8)[:, None, None]
        self.leaves = {name: x.to(DEVICE) for name, x in self.leaves.items()}
        self.expect()

    def expect(self) -> None:
        leaves = {name: x.double() for name, x in self.leaves.items()}
        self.expected = self.case.attend(leaves, impl="reference")

    def attend(self, start: int, end: int, past: Past) -> None:
        batch, length = self.case.batch, self.case.length
        piece = {name: x[:, start:end] if x.dim() > 1 else x for name, x in self.leaves.items()}
        transport: Any = None
        if "angles" in piece:
            transport = dr.Rotation(piece["angles"], values=self.case.transport == "rotation of values")
        gate = piece.get("log_gate")
        if gate is not None and gate.dim() == 1:
            gate = gate.expand(batch, end - start, -1)
        factors = dr.Factors(transport, gate, self.case.score)
        q, k, v = piece["q"], piece["k"], piece["v"]
        first_by_kernels = reason_against(q, v, factors, packed=False) is None
        kernels = STREAM if start or first_by_kernels else PYTORCH
        found = attend_stream(q, k, v, factors, self.case.width**-0.5, past, kernels)
        torch.testing.assert_close(found.double(), self.expected[:, start:end], rtol=0, atol=CLOSE)
        assert past.length == end <= length


@pytest.mark.parametrize(
    "case",
    [
        Case("rotation", "learned", batch=2, heads=1, group=3),
        Case("rotation per query head", "learned per key head", batch=1, heads=1, group=2),
        Case("rotation of values", "constant", batch=1, heads=2, group=1),
        Case("rotation", "learned", dr.Power(2), batch=1, heads=1, group=3),
        Case(None, None, dr.Power(2), batch=1, heads=2, group=1),
        Case("rotation", "learned", dr.Power(4), batch=2, heads=1, group=2, width=8),
        Case("rotation", None, "stick-breaking", batch=2, heads=1, group=3),
        Case(None, "learned", "stick-breaking", batch=1, heads=2, group=2),
    ],
    ids=lambda case: f"{case.transport}-{case.gate}-{case.score}",
)
@pytest.mark.usefixtures("small_tail")
def test_single_tokens(case: Case) -> None:
    """After a prompt, when the tail is closed, between longer pieces, after going back, and twice from one place."""
    past, stream = Past(), Stream(Case(**{**vars(case), "length": TOKENS}))
    stream.attend(0, 30, past)
    stream.attend(30, 31, past)
    stream.attend(31, 33, past)  # the tail joins the KV cache
    assert past.waiting is None
    for token in range(33, TOKENS):
        stream.attend(token, token + 1, past)
    kept = sum(segment.length for segment in past.segments)  # the tail was closed
    assert kept < 2 * TAIL and past.folded is not None if isinstance(case.score, dr.Power) else kept > 33
    past.crop(4)  # more than waits
    stream.attend(TOKENS - 4, TOKENS - 3, past)
    other = past.fork()
    stream.attend(TOKENS - 3, TOKENS - 2, past)
    stream.attend(TOKENS - 3, TOKENS - 2, other)
    stream.attend(TOKENS - 2, TOKENS - 1, past.select(torch.arange(case.batch)))
    stream.attend(TOKENS - 2, TOKENS, past)


@pytest.mark.usefixtures("small_tail")
def test_sixth_powers() -> None:
    """Of which the first piece is PyTorch's; all but a tail of it are folded."""
    case = Case(None, "learned per key head", dr.Power(6), length=TAIL + 14, batch=1, heads=1, group=2, width=8)
    past, stream = Past(), Stream(case)
    stream.attend(0, TAIL + 12, past)
    assert past.folded is not None
    for token in (TAIL + 12, TAIL + 13):
        stream.attend(token, token + 1, past)
    assert isinstance(past.decoder, KernelDecoder)


@pytest.mark.usefixtures("small_tail")
def test_wide_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 512 bytes: programs have half as many tokens of the tail, here two of them."""
    monkeypatch.setattr("deadreckon.ops.streaming.fused.ROOM", 2 * TAIL)
    monkeypatch.setattr("deadreckon.ops.streaming.kernels.CHUNK", 2 * TAIL)
    case = Case(None, "learned", length=2 * TAIL + 33, batch=1, heads=1, group=2, width=136)
    past, stream = Past(), Stream(case)
    stream.attend(0, 30, past)
    for token in range(30, case.length):
        stream.attend(token, token + 1, past)
    assert isinstance(past.decoder, KernelDecoder)
    assert past.decoder.partial.weight.shape[1] == past.decoder.programs + 2


@pytest.mark.usefixtures("small_tail")
def test_sticks_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail of three chunks, segments of several parts; logits of which one takes all, or that take nothing."""
    monkeypatch.setattr("deadreckon.ops.streaming.fused.ROOM", 3 * TAIL)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SHORTEST", 4)
    monkeypatch.setattr("deadreckon.ops.streaming.fused.PROGRAMS", 12)
    tokens = 5 * TAIL + 30
    past, stream = Past(), Stream(Case(None, None, "stick-breaking", length=tokens, batch=1, heads=1, group=2))
    stream.leaves["k"][:, 5::9] *= 300
    stream.expect()
    stream.attend(0, 30, past)
    for token in range(30, tokens):
        stream.attend(token, token + 1, past)
    assert isinstance(past.decoder, KernelDecoder)
    assert past.decoder.parts[0, :, 2].count_nonzero() > len(past.segments)


@pytest.mark.usefixtures("small_tail")
def test_sticks_of_one_long_part() -> None:
    """More keys than a program sees at a time, each of which takes a hundredth of what is left."""
    past, stream = Past(), Stream(Case(None, None, "stick-breaking", length=152, batch=1, heads=1, group=2))
    stream.leaves["q"][..., 0], stream.leaves["k"][..., 0] = 4, -5
    stream.expect()
    stream.attend(0, 150, past)
    for token in (150, 151):
        stream.attend(token, token + 1, past)


@pytest.mark.usefixtures("small_tail")
def test_weights_too_small_for_halves() -> None:
    """Queries all but at right angles to all keys: of squares of 1e-5 halves have nothing, and weights are relative."""
    tokens, width = TAIL + 6, 16
    k, v = (torch.randn(1, tokens, 1, width, device=DEVICE) for _ in range(2))
    k[..., 0], q = 0.0, torch.zeros_like(k)
    q[..., 0], q[..., 1] = 1.0, 1e-5
    q, k, v = q.half(), k.half(), v.half()
    expected = dr.attend(q.double(), k.double(), v.double(), score=dr.Power(2), impl="reference")
    past = Past()
    for start, end in ((0, tokens - 2), (tokens - 2, tokens - 1), (tokens - 1, tokens)):  # more than a tail has
        piece = (x[:, start:end] for x in (q, k, v))
        found = attend_stream(*piece, dr.Factors(None, None, dr.Power(2)), 1.0, past, STREAM)
    # One rounding of a weight, which counts twice in its sums, of a logit (squared) and of the result.
    torch.testing.assert_close(found.double(), expected[:, -1:], rtol=0, atol=8 * 2**-11 * float(v.abs().max()))


@pytest.mark.usefixtures("small_tail")
def test_many_segments() -> None:
    """More than the kernels were first made for: forks share a prefix each time."""
    past, stream = Past(), Stream(Case(None, "learned", length=40, batch=1, heads=1, group=1))
    start = 0
    for end in (3, 8, 12, 15, 19, 20, 22):
        stream.attend(start, end, past)
        past, start = past.fork(), end
    assert 2 * len(past.segments) > 6
    for token in range(start, 26):
        stream.attend(token, token + 1, past)


@pytest.mark.usefixtures("small_tail")
def test_a_decoder_is_not_loaded_with_more_segments_than_it_has_programs_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadreckon.ops.streaming.fused.SPARE", 1)  # two programs: for one segment
    start = 2 * TAIL + 4  # tokens that a full tail is not joined with
    past, stream = Past(), Stream(Case(None, "learned", length=start + TAIL + 2, batch=1, heads=1, group=1))
    stream.attend(0, start, past)
    for token in range(start, start + TAIL):
        stream.attend(token, token + 1, past)
    decoder: Any = past.decoder
    assert decoder.full
    stream.attend(start + TAIL, start + TAIL + 1, past)  # the tail becomes a second one
    assert past.decoder is not decoder
    stream.attend(start + TAIL + 1, start + TAIL + 2, past)


@pytest.mark.parametrize(
    ("width", "dtype", "factors", "reason"),
    [
        (480, torch.bfloat16, dr.Factors(), None),
        (480, torch.float32, dr.Factors(), "D a multiple of 8 up to 256 for a later piece, got 480"),
        (264, torch.bfloat16, dr.Factors(score=dr.Power(2)), "D a multiple of 8 up to 256 for a later piece, got 264"),
        (12, torch.float32, dr.Factors(), "D a multiple of 8 up to 256 for a later piece, got 12"),
        (16, torch.float64, dr.Factors(), "dtype float32, bfloat16 or float16, got torch.float64"),
        (16, torch.float32, dr.Factors(None, torch.zeros(1, 3, 2, device=DEVICE), "stick-breaking"), None),
        (16, torch.float32, dr.Factors(score=dr.Power(6)), None),
    ],
)
def test_later_pieces_that_kernels_take(
    width: int, dtype: torch.dtype, factors: dr.Factors, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, 3, 2, channels, device=DEVICE).to(dtype) for channels in (width, width, 16))
    assert reason_against_next(q, v, factors) == reason
    monkeypatch.setattr("deadreckon.ops.streaming.fused.cramped", lambda x: True)
    assert (reason_against_next(q, v, factors) is None) == (reason is None and width < 480)
    monkeypatch.undo()
    past = Past()
    dr.attend_next(q, k, v, **factors._asdict(), past=past, impl="blockwise")
    if reason is not None:
        with pytest.raises(ValueError, match=f"impl: 'triton' needs {reason}"):
            dr.attend_next(q, k, v, **factors._asdict(), past=past, impl="triton")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("small_tail")
def test_interrupted_steps_leave_no_trace(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tail was full: what a decoder writes over is no longer the past's."""
    past, stream = Past(), Stream(Case(None, "learned", length=60, batch=1, heads=1, group=2))
    stream.attend(0, 20, past)
    for token in range(20, TAIL + 20):
        stream.attend(token, token + 1, past)
    assert past.decoder is not None
    assert past.decoder.full

    def broken(*arguments: Any) -> Tensor:
        if when == "after":  # the kernels have run
            look(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("deadreckon.ops.streaming.fused.look", broken)
        with pytest.raises(KeyboardInterrupt):
            stream.attend(TAIL + 20, TAIL + 21, past)
    for token in range(TAIL + 20, TAIL + 23):
        stream.attend(token, token + 1, past)


@pytest.mark.parametrize("score", ["softmax", dr.Power(2)], ids=str)
@pytest.mark.usefixtures("small_tail")
def test_a_piece_after_the_tail_was_closed(score: Any) -> None:
    """Then no token waits there."""
    past, stream = Past(), Stream(Case(None, "learned", score, length=TAIL + 16, batch=1, heads=1, group=2))
    stream.attend(0, 12, past)
    for token in range(12, TAIL + 12):
        stream.attend(token, token + 1, past)
    renew(past)
    assert past.waiting is not None
    assert past.waiting.length == 0
    stream.attend(TAIL + 12, TAIL + 16, past)


@pytest.mark.usefixtures("small_tail")
def test_decoders_stay_where_they_are() -> None:
    """As a CUDA graph needs it: the same tensors whatever is closed or loaded."""
    past, stream = Past(), Stream(Case(None, "learned", length=40, batch=1, heads=1, group=2))
    stream.attend(0, 20, past)
    stream.attend(20, 21, past)
    decoder: Any = past.decoder
    held = [x for x in (*decoder.last, *decoder.partial, decoder.segments, decoder.parts) if x is not None]
    for token in range(21, TAIL + 23):
        stream.attend(token, token + 1, past)
    assert past.decoder is decoder
    after = [x for x in (*decoder.last, *decoder.partial, decoder.segments, decoder.parts) if x is not None]
    assert all(x is y for x, y in zip(held, after, strict=True))
    for name, x in decoder.waiting.storage.items():
        assert x.data_ptr() == getattr(decoder.last, name).data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 65, 300])
def test_keys_in_the_newest_frame(tokens: int, dtype: torch.dtype) -> None:
    """Against step after step in float64; no step makes anything longer, so that errors add up."""
    k, v, w = (torch.randn(3, tokens, 16, dtype=dtype) for _ in range(3))
    w, beta = torch.nn.functional.normalize(w, dim=-1), 2 * torch.rand(3, tokens, dtype=dtype)
    keys, product = in_newest_frame({"k": k, "v": v, "w": w, "beta": beta})
    expected, steps = k.double(), torch.eye(16, dtype=torch.float64).repeat(3, 1, 1)
    for t in range(tokens):
        along = w[:, t].double().unsqueeze(1)
        step = torch.eye(16, dtype=torch.float64) - beta[:, t].double()[:, None, None] * along.mT @ along
        expected = torch.cat([expected[:, :t] @ step, expected[:, t:]], dim=1)
        steps = steps @ step
    allowed = 4 * (tokens + 1) * torch.finfo(dtype).eps
    if tokens:
        torch.testing.assert_close(keys.double(), expected, rtol=0, atol=allowed * k.norm(dim=-1).max().item())
    torch.testing.assert_close(product.double(), steps, rtol=0, atol=allowed)


def test_partial_results_of_many_programs_add_up() -> None:
    """More of them than a program combines at a time, the greatest logits among the last."""
    heads, parts, group, width = 2, 70, 3, 16
    out = torch.randn(heads, parts, group, width, device=DEVICE)
    weight, greatest = torch.rand(2, heads, parts, group, device=DEVICE)
    greatest = 4 * greatest + torch.linspace(0, 6, parts, device=DEVICE)[:, None]
    tokens, y = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.empty(heads, group, width, device=DEVICE)
    _combine[(heads, group, 2)](
        y, Partial(out, weight, greatest), tokens, heads, parts, parts, 1,
        G=group, POWER=0, STICKS=False, E=width, BE=width // 2, BLOCK=32, TYPE=tl.float32,
    )  # fmt: skip
    share = torch.exp2(greatest.double()).unsqueeze(-1)
    expected = (share * out).sum(1) / (share * weight.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert int(tokens) == 1
