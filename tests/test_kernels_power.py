"""Symmetric power kernels against the definition in float64. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import deadreckon.ops.triton.power.operator
from deadreckon.ops.triton.power import chunks as power
from deadreckon.ops.triton.power import write
from deadreckon.ops.triton.power.operator import PowerState, attend_power, power_backward, power_forward
from deadreckon.ops.triton.tiles import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks_and_poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of two tiles; memory that nobody has written to is NaN."""
    for width in power.CHUNK:
        monkeypatch.setitem(power.CHUNK, width, 128)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _chunks_of_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in power.CHUNK:
        monkeypatch.setitem(power.CHUNK, width, 64)


def draw(
    batch: int, length: int, heads: int, group: int, width: int, value_width: int, gate: float | None = 0.1
) -> list[Tensor]:
    """q, k, v, a gradient of o and, unless none, log gates down to −gate."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads * group, width), (heads, width), (heads, value_width), (heads * group, value_width))
    tensors = [torch.randn(batch, length, *s, generator=generator) for s in shapes]
    if gate is not None:
        tensors.append(-gate * torch.rand(batch, length, heads, generator=generator))
    return [x.to(DEVICE) for x in tensors]


def by_definition(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, p: int = 2) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k) ** p
    if log_gate is not None:
        sums = log_gate.repeat_interleave(q.shape[2] // log_gate.shape[2], dim=2).cumsum(1).transpose(1, 2)
        weights = weights * (sums.unsqueeze(3) - sums.unsqueeze(2)).tril().exp()
    weights = weights.tril()
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhe->bihe", weights / torch.where(total > 0, total, 1), v)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, p: int = 2) -> Tensor:
    return attend_power(q, k, v, log_gate, 0.3, p)[0]


def as_attention(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, p: int = 2) -> Tensor:
    return attend_power(q, k, v, log_gate, 0.3, p, "attention")[0]


def gradients(attend, tensors: list[Tensor], p: int = 2) -> list[Tensor]:
    """o, dq, dk, dv and, with gates, theirs."""
    q, k, v, grad, *gates = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates)]
    out = attend(*leaves, p=p)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
    return [float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in zip(found, expected, strict=True)]


def check(
    tensors: list[Tensor], p: int = 2, forward: float = 1e-5, backward: float = 1e-4, attend=by_kernel
) -> None:  # fmt: skip
    expected = gradients(by_definition, [x.double() for x in tensors], p)
    out, *grads = distances(gradients(attend, tensors, p), expected)
    assert out <= forward
    assert max(grads) <= backward, grads


@pytest.mark.parametrize(
    ("sizes", "gate"),
    [
        ((1, 50, 2, 1, 16, 24), 0.1),
        ((2, 129, 1, 1, 24, 16), None),
        ((1, 200, 1, 2, 16, 40), 0.05),
        ((1, 260, 1, 1, 8, 8), 3.0),
    ],
)
def test_definition(sizes: tuple[int, ...], gate: float | None) -> None:
    check(draw(*sizes, gate))


@pytest.mark.usefixtures("_chunks_of_one_tile")
def test_wide_heads() -> None:
    check(draw(1, 70, 1, 1, 72, 72, 0.02))


@pytest.mark.usefixtures("_chunks_of_one_tile")
@pytest.mark.parametrize(("sizes", "gate"), [((1, 65, 1, 2, 8, 16), 0.1), ((1, 66, 1, 1, 8, 8), None)])
def test_fourth_powers(sizes: tuple[int, ...], gate: float | None) -> None:
    check(draw(*sizes, gate), p=4)


@pytest.mark.parametrize(
    ("sizes", "gate", "p"),
    [
        ((1, 50, 2, 1, 64, 24), 0.1, 4),
        ((2, 129, 1, 1, 128, 16), None, 2),
        ((1, 129, 1, 2, 16, 40), None, 4),
        ((1, 200, 1, 2, 16, 40), 3.0, 2),
        ((1, 200, 1, 1, 128, 64), 0.05, 4),
        ((1, 330, 1, 1, 64, 8), 0.02, 2),
    ],
)
def test_attention(sizes: tuple[int, ...], gate: float | None, p: int) -> None:
    check(draw(*sizes, gate), p, attend=as_attention)


@pytest.mark.parametrize(("length", "p", "limit"), [(140, 2, 1e-4), (100, 2, 0.0), (100, 4, 0.0)])
def test_forms_agree(length: int, p: int, limit: float) -> None:
    """To the last bit where the sequence is no longer than a chunk."""
    tensors = draw(1, length, 1, 1, 8, 8, 1.0)
    assert max(distances(gradients(as_attention, tensors, p), gradients(by_kernel, tensors, p))) <= limit


def test_gates_that_grow() -> None:
    q, k, v, grad, _ = draw(1, 130, 1, 1, 8, 8)
    gates = torch.where(torch.arange(130, device=DEVICE) % 2 == 0, -40.0, 39.0).view(1, 130, 1)
    check([q, k, v, grad, gates], attend=as_attention)


@pytest.mark.parametrize("attend", [by_kernel, as_attention])
def test_a_token_alone_has_all_the_weight(attend) -> None:
    q, k, v, grad, gates = draw(1, 1, 1, 2, 16, 16)
    out, grad_q, grad_k, grad_v, grad_gate = gradients(attend, [q, k, v, grad, gates])
    torch.testing.assert_close(out, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(grad_v, grad.sum(2, keepdim=True))
    assert max(x.abs().max() for x in (grad_q, grad_k, grad_gate)) <= 1e-5


def test_gates_of_queries_heads() -> None:
    q, k, v, grad, _ = draw(1, 150, 1, 2, 8, 8)
    generator = torch.Generator().manual_seed(0)
    check([q, k, v, grad, -torch.rand(1, 150, 2, generator=generator).to(DEVICE) / 5])


@pytest.mark.parametrize("attend", [by_kernel, as_attention])
def test_shut_gates(attend) -> None:
    """A gate of zero hides all that lies before it, and whole chunks."""
    q, k, v, grad, gates = draw(1, 300, 1, 1, 8, 8)
    gates[:, [20, 128, 290]] = -torch.inf
    out, *grads = gradients(attend, [q, k, v, grad, gates])
    pieces = [(0, 20), (20, 128), (128, 290), (290, 300)]
    parts = [
        gradients(by_definition, [x[:, a:b].double() for x in (q, k, v, grad)] + [gates[:, a:b].double().clamp(min=-1)])
        for a, b in pieces
    ]
    expected = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
    assert distances([out], expected[:1])[0] <= 1e-5
    assert max(distances(grads[:3], expected[1:4])) <= 1e-4
    assert distances(grads[3:], expected[4:])[0] <= 1e-4


@pytest.mark.usefixtures("_chunks_of_one_tile")
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    """Chunks are gathered one after another, or in parts that are put together."""
    monkeypatch.setattr(write, "PROGRAMS", segments)
    monkeypatch.setitem(power.SINGLE, "write", {64: Tiling(1, 64, 4, 1)})
    check(draw(1, 150, 1, 1, 16, 8))


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pairs of blocks a program, not all of which there are; tiles of other shapes."""
    monkeypatch.setitem(power.SINGLE, "write", {64: Tiling(4, 32, 4, 1)})
    for which in ("read", "gradient", "forward", "queries", "keys"):
        monkeypatch.setitem(power.SINGLE, which, {64: Tiling(128, 64, 4, 1)})
    check(draw(1, 290, 1, 1, 16, 16))


@pytest.mark.parametrize(("p", "group", "cut"), [(2, 2, 137), (2, 1, 1), (4, 1, 60)])
def test_states(p: int, group: int, cut: int) -> None:
    """Two pieces are one; what is left of the first is not lost though its keys are in another measure."""
    q, k, v, grad, gates = draw(1, 200, 1, group, 8, 16)
    k[:, cut:] *= 1e-3
    pieces = (slice(0, cut), slice(cut, None))
    last: list[PowerState | None] = [None]

    def in_pieces(*tensors: Tensor, p: int) -> Tensor:
        outputs, state = [], None
        for piece in pieces:
            out, state = attend_power(*(x[:, piece] for x in tensors), 1.0, p, state=state, final=True)
            outputs.append(out)
        last[0] = state
        return torch.cat(outputs, 1)

    expected = gradients(by_definition, [x.double() for x in (q, k, v, grad, gates)], p)
    out, *grads = distances(gradients(in_pieces, [q, k, v, grad, gates], p), expected)
    assert out <= 1e-5 and max(grads) <= 1e-4, grads
    _, whole = attend_power(q, k, v, gates, 1.0, p, final=True)
    assert last[0] is not None and whole is not None
    assert max(distances([x.detach() for x in last[0]], list(whole))) <= 1e-5


def test_what_a_state_is() -> None:
    """Σ γ k_a k_b and Σ γ k_a k_b v, once for each two blocks of 8 channels."""
    _, k, v, _, gates = draw(1, 150, 1, 1, 24, 8)
    _, state = attend_power(k, k, v, gates, 1.0, 2, final=True)
    assert state is not None
    left = (gates.double().sum(1, keepdim=True) - gates.double().cumsum(1)).exp()[..., None]
    squares = torch.einsum("nthx,nthy->nthxy", k.double() * left, k.double())
    torch.testing.assert_close(state.moments, squares.sum(1).float())
    full = torch.einsum("nthxy,nthe->nhxye", squares, v.double()).float()
    pairs = [(0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (2, 0)]
    rows = [full[:, :, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8].flatten(2, 3) for i, j in pairs]
    torch.testing.assert_close(state.values, torch.cat(rows, 2), atol=1e-5, rtol=1e-5)


def test_gradients_of_states() -> None:
    """Those of the first state and from the last, against a loop in float64."""
    q, k, v, grad, gates = draw(1, 140, 1, 1, 8, 8)
    generator = torch.Generator().manual_seed(1)
    values, grad_values = (torch.randn(1, 1, 64, 8, generator=generator).to(DEVICE) for _ in range(2))
    root, grad_moments = (torch.randn(1, 1, 8, 8, generator=generator).to(DEVICE) for _ in range(2))

    def by_kernel(q, k, v, gates, values, moments):
        out, state = attend_power(q, k, v, gates, 1.0, 2, state=PowerState(values, moments), final=True)
        return out, state.values, state.moments

    def by_loop(q, k, v, gates, values, moments):
        outputs = []
        for i in range(q.shape[1]):
            square = torch.einsum("nhx,nhy->nhxy", k[:, i], k[:, i])
            decay = gates[:, i].exp()[..., None, None]
            values = decay * values + square.flatten(2).unsqueeze(3) * v[:, i].unsqueeze(2)
            moments = decay * moments + square
            query = torch.einsum("nhx,nhy->nhxy", q[:, i], q[:, i]).flatten(2)
            total = torch.einsum("bhf,bhf->bh", query, moments.flatten(2))
            outputs.append(torch.einsum("bhf,bhfe->bhe", query, values) / total.unsqueeze(2))
        return torch.stack(outputs, 1), values, moments

    squares = values.unflatten(2, (8, 8))
    leaves = [q, k, v, gates, (squares + squares.transpose(2, 3)).flatten(2, 3), root @ root.mT]
    found, expected = [], []
    for attend, results, dtype in ((by_kernel, found, torch.float32), (by_loop, expected, torch.float64)):
        inputs = [x.to(dtype).detach().requires_grad_() for x in leaves]
        outputs = attend(*inputs)
        grads = [x.to(dtype) for x in (grad, grad_values, grad_moments)]
        results.extend([*(x.detach() for x in outputs), *torch.autograd.grad(outputs, inputs, grads)])
    squares = expected[7].unflatten(2, (8, 8))  # the loop may use both orders of two channels differently
    expected[7] = ((squares + squares.transpose(2, 3)) / 2).flatten(2, 3)
    expected[8] = (expected[8] + expected[8].mT) / 2
    assert max(distances(found[:3], expected[:3])) <= 1e-5
    assert max(distances(found[3:], expected[3:])) <= 1e-4, distances(found[3:], expected[3:])


@pytest.mark.parametrize(
    ("query", "key", "p", "attend"),
    [
        (1e10, 1e12, 2, by_kernel),
        (1e-12, 1e-10, 2, by_kernel),
        (1e20, 1e34, 4, as_attention),
        (1e-20, 1e-30, 4, as_attention),
    ],
)
def test_lengths_do_not_overflow(query: float, key: float, p: int, attend) -> None:
    q, k, v, grad, gates = draw(1, 140, 1, 1, 8, 8)
    expected = gradients(attend, [q, k, v, grad, gates], p)
    q, k = (x * 2.0 ** round(math.log2(by)) for x, by in ((q, query), (k, key)))
    found = gradients(attend, [q, k, v, grad, gates], p)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
    assert all(x.isfinite().all() for x in found)


def test_rows_without_weight_are_zero() -> None:
    q, k, v, grad, gates = draw(1, 140, 1, 1, 8, 8)
    q[:, 130], k[:, :3] = 0, 0
    check([q, k, v, grad, gates])
    out, grad_q, *_ = gradients(by_kernel, [q, k, v, grad, gates])
    assert not out[:, [0, 1, 2, 130]].any() and not grad_q[:, [0, 1, 2, 130]].any()


@pytest.mark.parametrize("small", [1e-9, 1.5e-10, 1e-11])
def test_a_long_key_among_short_ones(small: float) -> None:
    """Weights that are hardly numbers, or not any more."""
    q, k, v, grad, gates = draw(1, 70, 1, 1, 8, 8)
    k[:, :60] *= small
    assert all(x.isfinite().all() for x in gradients(as_attention, [q, k, v, grad, gates], 4))


def test_float16() -> None:
    tensors = [x.half() for x in draw(1, 200, 1, 1, 16, 16)]
    check(tensors, forward=1e-3, backward=1e-3)


@pytest.mark.parametrize(
    ("p", "gate", "attend"),
    [(2, 0.02, by_kernel), (2, None, by_kernel), (4, 0.1, by_kernel), (4, 0.1, as_attention)],
)
def test_halves(monkeypatch: pytest.MonkeyPatch, p: int, gate: float | None, attend) -> None:
    """float16 stands in for bfloat16, which the interpreter lacks: at most twice as far off as the definition in it."""
    monkeypatch.setattr(deadreckon.ops.triton.power.operator, "_working_dtype", lambda dtype: dtype)
    tensors = [x.half() for x in draw(1, 200, 1, 1, 8 if p == 4 else 16, 8, gate)]
    expected = gradients(by_definition, [x.double() for x in tensors], p)
    found = distances(gradients(attend, tensors, p), expected)
    allowed = distances(gradients(by_definition, tensors, p), expected)
    assert all(x <= 2 * y for x, y in zip(found, allowed, strict=True)), (found, allowed)


@pytest.mark.usefixtures("_chunks_of_one_tile")
def test_strides() -> None:
    q, k, v, grad, gates = draw(2, 70, 2, 1, 8, 8)
    expected = gradients(by_kernel, [q, k, v, grad, gates])
    both = torch.cat([k, v], dim=-1)
    q, grad, gates = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, grad, gates))
    found = gradients(by_kernel, [q, both[..., :8], torch.stack([v, v], -1)[..., 0], grad, gates])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.usefixtures("_chunks_of_one_tile")
@pytest.mark.parametrize("attend", [by_kernel, as_attention])
def test_twice_the_same_bits(attend) -> None:
    tensors = draw(1, 70, 1, 2, 8, 8)
    assert all(torch.equal(x, y) for x, y in zip(*(gradients(attend, tensors) for _ in range(2)), strict=True))


@pytest.mark.usefixtures("_chunks_of_one_tile")
@pytest.mark.parametrize("length", [20, 70])
def test_operators(length: int) -> None:
    q, k, v, grad, gates = draw(1, length, 1, 1, 8, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, gates)]
    some = ("test_schema", "test_autograd_registration", "test_faketensor")  # compiled below
    for chunk in (0, 64):
        torch.library.opcheck(
            torch.ops.deadreckon.power, (*leaves, None, None, 2, chunk, length > chunk > 0, False), test_utils=some
        )
    torch.library.opcheck(
        torch.ops.deadreckon.power, (*leaves[:3], None, None, None, 2, 64, True, True), test_utils=some
    )
    out, values, moments, *kept = (x.detach() for x in power_forward(*leaves, None, None, 2, 64, length > 64, True))
    tensors = [x.detach() for x in leaves]
    backward = (grad, None, None, *tensors, out, *kept, 2, 64, False)
    torch.library.opcheck(torch.ops.deadreckon.power_backward, backward, test_utils=some)
    results = power_backward(grad, values, moments, *tensors, out, *kept, 2, 64, False)
    assert [x.shape for x in results[:4]] == [x.shape for x in tensors] and not len(results[4])


@pytest.mark.usefixtures("_chunks_of_one_tile")
@pytest.mark.parametrize("attend", [by_kernel, as_attention])
def test_compiles(attend) -> None:
    tensors = draw(1, 70, 1, 1, 8, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = gradients(compiled, tensors), gradients(attend, tensors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_nan_comes_out() -> None:
    q, k, v, _, gates = draw(1, 140, 1, 1, 8, 8)
    q[:, 130] = torch.nan
    out = by_kernel(q, k, v, gates)
    assert out[:, 130].isnan().all() and out[:, :130].isfinite().all() and out[:, 131:].isfinite().all()


def test_what_it_cannot_do() -> None:
    q, k, v, _ = draw(1, 4, 1, 1, 40, 8, None)
    with pytest.raises(ValueError, match=r"p: .*got 3"):
        attend_power(q, k, v, None, 1.0, 3)
    with pytest.raises(ValueError, match=r"k: .*up to 32 .*got 40"):
        attend_power(q, k, v, None, 1.0, 4)
    with pytest.raises(ValueError, match=r"k: .*up to 128 .*got 160"):
        attend_power(q.repeat(1, 1, 1, 4), k.repeat(1, 1, 1, 4), v, None, 1.0, 4, "attention")
    with pytest.raises(ValueError, match=r"v: .*got 12"):
        attend_power(q, k, torch.cat([v, v[..., :4]], -1), None, 1.0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "gate", "p", "attend"),
    [
        ((1, 1500, 2, 2, 64, 64), 0.02, 2, by_kernel),
        ((1, 1500, 1, 1, 128, 128), 0.02, 2, by_kernel),
        ((1, 1500, 2, 1, 64, 64), None, 2, by_kernel),
        ((1, 700, 1, 1, 32, 32), 0.1, 4, by_kernel),
        ((1, 1500, 2, 2, 64, 64), 0.02, 2, as_attention),
        ((1, 1500, 2, 2, 64, 64), 0.02, 4, as_attention),
        ((1, 1500, 1, 1, 128, 96), None, 4, as_attention),
    ],
)
def test_bfloat16_on_a_gpu(sizes: tuple[int, ...], gate: float | None, p: int, attend) -> None:
    """At most twice as far from float64 as the definition in bfloat16 is."""
    tensors = draw(*sizes, gate)
    tensors = [x.bfloat16() for x in tensors[:4]] + tensors[4:]
    expected = gradients(by_definition, [x.double() for x in tensors], p)
    found = distances(gradients(attend, tensors, p), expected)
    allowed = distances(gradients(by_definition, [x.bfloat16() for x in tensors], p), expected)
    assert all(x <= 2 * y for x, y in zip(found, allowed, strict=True)), (found, allowed)


@pytest.mark.usefixtures("_chunks_of_one_tile")
def test_autocast_does_not_round_gradients_of_gates() -> None:
    """They are differences of what values and moments say, which nearly cancel where values have a mean."""
    q, k, v, grad, gate = draw(1, 200, 1, 1, 16, 16, gate=0.002)
    inputs = [x.requires_grad_() for x in (q, k, v + 20, gate)]
    output, _ = attend_power(*inputs, 1.0, 2)
    plain = torch.autograd.grad(output, inputs[3], grad, retain_graph=True)[0]
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = torch.autograd.grad(output, inputs[3], grad)[0]
    torch.testing.assert_close(rounded, plain, rtol=0, atol=0)
