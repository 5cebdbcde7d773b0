"""The blockwise path on a CUDA device: every stock kernel, against the float64 definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, relative_errors, run

import deadreckon as dr
from deadreckon.ops.blockwise import dense, problem
from deadreckon.ops.streaming.past import StaticDecoder

EXACT = ("w", "beta", "angles", "log_gate")
CASES = [
    Case("householder", None, length=257),
    Case("householder", "learned", length=577),
    Case("householder", "learned per key head", length=300),
    Case(None, "learned", length=700),
    Case(None, "constant", length=257),
    Case("rotation of values", "learned", length=257),
    Case("rotation", None, length=257),
    Case("householder", "learned", "stick-breaking", length=257),
    Case("rotation", "learned", dr.Power(2), length=256),
    Case("householder", "learned", length=128, batch=1, heads=4, group=1),
]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_single_and_double_precision(case: Case) -> None:
    expected = run(case, impl="reference")
    for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        errors = relative_errors(run(case, dtype, "cuda", EXACT, impl="blockwise"), expected)
        assert all(error <= limit for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: Case, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the error that the definition makes in the same precision."""
    for module in (dense, problem):
        monkeypatch.setattr(module, "backend_for", lambda x: backend)
    expected = run(case, impl="reference")
    ours = relative_errors(run(case, dtype, "cuda", EXACT, impl="blockwise"), expected)
    plain = relative_errors(run(case, dtype, "cpu", EXACT, impl="reference"), expected)
    # In float16 the definition itself overflows where it takes powers: then there is nothing to compare with.
    assert all(ours[name] <= 2 * plain[name] for name in expected if math.isfinite(plain[name])), (ours, plain)


@pytest.mark.parametrize("name", [name for name in dr.ENCODINGS if not name.startswith("random")])
def test_layers_stream(name: str) -> None:
    torch.manual_seed(0)
    layer = dr.AttentionLayer(256, 4, name, n_kv_heads=2, vocab_size=9).cuda()
    x, ids = torch.randn(2, 900, 256, device="cuda"), torch.randint(0, 9, (2, 900), device="cuda")
    expected, state, outputs = layer(x, token_ids=ids).detach(), None, []
    for start, end in ((0, 130), (130, 131), (131, 800), (800, 801), (801, 900)):
        y, state = layer(x[:, start:end], token_ids=ids[:, start:end], state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("score", [dr.Power(4), "stick-breaking"], ids=str)
@pytest.mark.parametrize("gate", [None, "learned"])
def test_single_tokens_of_other_scores(score: Any, gate: str | None) -> None:
    """After 500, across the closing of a tail; fourth powers of 8 channels are folded by then, into float64.

    With a gate for each of the three queries of a key there are three states, worth 1247 tokens."""
    case = Case("rotation", gate, score, length=1700, heads=2, group=3, width=8, value_width=16, forgetting=0.01)
    leaves = {name: x.to("cuda", torch.float32) for name, x in case.inputs().items()}
    expected = case.attend({name: x.double() for name, x in leaves.items()}, impl="blockwise")
    past, found = dr.Past(), list[torch.Tensor]()
    for start, end in ((0, 500), *((t, t + 1) for t in range(500, 1700))):
        some = {name: x[:, start:end] for name, x in leaves.items()}
        rotation = dr.Rotation(some["angles"])
        q, k, v = (some[name] for name in "qkv")
        found.append(dr.attend_next(q, k, v, transport=rotation, log_gate=some.get("log_gate"), score=score, past=past))
    torch.testing.assert_close(torch.cat(found, dim=1).double(), expected, rtol=0, atol=1e-4)
    assert isinstance(past.decoder, StaticDecoder)
    assert (past.folded is not None) == isinstance(score, dr.Power)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wide_heads_take_memory_that_is_linear(dtype: torch.dtype) -> None:
    """Of one pass, and of a later piece: T × T logits of a head would take more than all that is allowed."""
    length, sizes = 4096, ((8, 480), (2, 480), (2, 64))
    q, k, v = (torch.randn(1, length, *size, device="cuda").to(dtype) for size in sizes)
    dr.attend(q[:, :64], k[:, :64], v[:, :64])
    past, found = dr.Past(), list[torch.Tensor]()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    whole = dr.attend(q, k, v)
    for start, end in ((0, 1000), (1000, length)):
        found.append(dr.attend_next(q[:, start:end], k[:, start:end], v[:, start:end], past=past))
    assert torch.cuda.max_memory_allocated() - before < 8 * length**2 * q.element_size()
    expected = dr.attend(q[:, :1100].double(), k[:, :1100].double(), v[:, :1100].double(), impl="blockwise")
    allowed = 2**-6 if dtype == torch.bfloat16 else 1e-5
    for output in (whole, torch.cat(found, dim=1)):
        torch.testing.assert_close(output[:, :1100].double(), expected, rtol=0, atol=allowed)


def test_single_tokens_with_wide_keys() -> None:
    """As PRISM's are: at most twice the error that one pass in PyTorch makes, whose weights are rounded, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, heads, width, device="cuda") for heads, width in ((8, 480), (2, 480), (2, 64)))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = dr.attend(q.double(), k.double(), v.double(), impl="blockwise")
    allowed = 2 * (dr.attend(q, k, v, impl="blockwise").double() - expected).abs().max().item()
    past, found = dr.Past(), list[torch.Tensor]()
    for start, end in ((0, 90), *((t, t + 1) for t in range(90, 700))):
        found.append(dr.attend_next(q[:, start:end], k[:, start:end], v[:, start:end], past=past))
    assert isinstance(past.decoder, StaticDecoder)
    torch.testing.assert_close(torch.cat(found, dim=1).double(), expected, rtol=0, atol=allowed)


def test_single_tokens_in_a_cuda_graph() -> None:
    """Until a segment is closed, every token is the same launches: recorded once, replayed with new inputs."""
    case = Case("householder", "learned", length=300, batch=2, heads=2, group=4, width=64, value_width=64)
    leaves = {name: x.to("cuda", torch.float32) for name, x in case.inputs().items()}
    expected = case.attend({name: x.double() for name, x in leaves.items()}, impl="blockwise")

    def piece(start: int, end: int) -> tuple[list[torch.Tensor], dr.Factors]:
        some = {name: x[:, start:end] for name, x in leaves.items()}
        factors = dr.Factors(dr.Householder(some["w"], some["beta"]), some["log_gate"])
        return [some["q"], some["k"], some["v"]], factors

    past = dr.Past()
    for start, end in ((0, 200), (200, 201)):
        (q, k, v), factors = piece(start, end)
        dr.attend_next(q, k, v, **factors._asdict(), past=past)
    decoder = past.decoder
    assert decoder is not None

    def flat(place: int) -> list[torch.Tensor]:
        some = (leaves[name][:, place] for name in ("q", "k", "v", "w", "beta", "log_gate"))
        shapes = ((4, 4, 64), (4, 64), (4, 64), (4, 64), (4,), (4, 4))
        return [x.reshape(shape).contiguous() for x, shape in zip(some, shapes, strict=True)]

    q, k, v, w, beta, gate = static = flat(201)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decoder.step(q, k, v, w, beta, gate, case.width**-0.5)
    for place in range(201, 230):
        for x, new in zip(static, flat(place), strict=True):
            x.copy_(new)
        graph.replay()
        torch.testing.assert_close(output.view(2, 8, 64).double(), expected[:, place], rtol=0, atol=1e-4)
