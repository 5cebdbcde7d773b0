"""Rotation by cumulative angles: fused kernels against plain float64, interpreted without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deadreckon.ops.factors import Factors, Householder, Rotation
from deadreckon.ops.triton.rotation import turn_by, turn_by_steps
from deadreckon.ops.triton.turn import turned_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [  # T, B, Hq, H, Hr, D, values
    (1, 2, 2, 2, 1, 8, True),
    (63, 2, 4, 2, 2, 24, True),
    (64, 1, 2, 2, 2, 64, False),
    (100, 2, 2, 1, 1, 24, True),
    (257, 1, 2, 2, 2, 64, True),
    (257, 2, 4, 2, 1, 8, False),
    (70, 1, 20, 10, 1, 128, True),  # more heads to an angle than one program turns
    (40, 1, 1, 1, 1, 256, True),
]
Outputs = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _nan_in_empty() -> Iterator[None]:
    """What a kernel forgets to write is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    angle = angle.repeat_interleave(x.shape[2] // angle.shape[2], dim=2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1)


def plain(q: Tensor, k: Tensor, v: Tensor, angles: Tensor, values: bool) -> Outputs:
    """Turned queries and keys, and an output made of them and of values, turned back if these were turned."""
    phase = angles.cumsum(1)
    q, k = rotate(q, phase), rotate(k, phase)
    if values:
        v = rotate(v, phase)
    o = output(q, k, v)
    return q, k, rotate(o, -phase) if values else o


def fused(q: Tensor, k: Tensor, v: Tensor, angles: Tensor, values: bool) -> Outputs:
    q, k, v, phase = turn_by_steps(q, k, v, angles, values)
    o = output(q, k, v)
    return q, k, turn_by(o, phase, -1) if values else o


def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Something with heads of queries in which queries, keys and values all have a part."""
    return (k * v).flip(1).repeat_interleave(q.shape[2] // k.shape[2], dim=2) * q + q


def inputs(T: int, B: int, Hq: int, H: int, Hr: int, D: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, Hq, D), (B, T, H, D), (B, T, H, D), (B, T, Hr, D // 2)]
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return ((got.double() - expected).norm() / expected.norm()).item()


def weigh(outputs: Outputs) -> Tensor:
    """A loss with a different gradient at each place."""
    weights = [torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view_as(x).cos() for x in outputs]
    return torch.stack([(x * weight).sum() for x, weight in zip(outputs, weights, strict=True)]).sum()


def check(tensors: list[Tensor], values: bool, limit: float = 2e-6) -> None:
    """Outputs and all gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    got, expected = fused(*leaves, values), plain(*exact, values)
    for one, other in zip(got, expected, strict=True):
        assert one.is_contiguous() and error(one, other) < limit
    for one, other in zip(
        torch.autograd.grad(weigh(got), leaves), torch.autograd.grad(weigh(expected), exact), strict=True
    ):
        assert error(one, other) < limit


@pytest.mark.parametrize(("T", "B", "Hq", "H", "Hr", "D", "values"), CASES)
def test_matches_float64(T: int, B: int, Hq: int, H: int, Hr: int, D: int, values: bool) -> None:
    check(inputs(T, B, Hq, H, Hr, D), values)


@pytest.mark.parametrize("values", [False, True])
def test_angles_of_query_heads(values: bool) -> None:
    """The caller repeats keys and values for them."""
    q, k, v, angles = inputs(50, 1, 4, 2, 4, 16)
    check([q, *(x.repeat_interleave(2, dim=2) for x in (k, v)), angles], values)


def test_strides() -> None:
    """Slices of one projection, heads first, channels not last in memory."""
    projection, *_ = inputs(70, 2, 6, 1, 1, 16)
    q, k, v = projection.split([2, 2, 2], dim=2)
    angles = inputs(70, 2, 1, 1, 2, 16)[3]
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    channels_first = v.transpose(1, 3).contiguous().transpose(1, 3)
    expected = plain(q.double(), k.double(), v.double(), angles.double(), True)
    wide = torch.stack([angles, angles], dim=-1)[..., 0]  # a last stride of 2
    for got, other in zip(fused(q, heads_first, channels_first, wide, True), expected, strict=True):
        assert error(got, other) < 1e-6


@pytest.mark.parametrize("shape", [(1, 70, 2, 8), (1, 1, 1, 8)])
def test_shared_angles(shape: tuple[int, ...]) -> None:
    """One row of angles for the whole batch: as it is, with a gradient, and expanded, where it costs one row."""
    q, k, v, _ = inputs(70, 3, 4, 2, 2, 16)
    angles = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expanded = angles.expand(3, 70, 2, 8)
    expected = plain(*(x.double() for x in (q, k, v, expanded)), True)
    for got, other in zip(fused(q, k, v, expanded, True), expected, strict=True):
        assert error(got, other) < 1e-6
    phase = turn_by_steps(q, k, v, expanded, True)[3]
    assert phase.shape == (1, 70, shape[2], 8)
    for one in (angles.expand(1, 70, -1, -1), expanded):  # rows that are summed by us, and by autograd
        leaf, exact = one.clone().requires_grad_(), one.double().requires_grad_()
        weigh(fused(q, k, v, leaf, True)).backward()
        weigh(plain(q.double(), k.double(), v.double(), exact.expand(3, -1, -1, -1), True)).backward()
        assert leaf.grad is not None and exact.grad is not None and error(leaf.grad, exact.grad) < 2e-6


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("rows", "Hr", "D"), [(3, 1, 24), (1, 2, 16), (3, 2, 16), (3, 4, 16)])
def test_one_more_token(rows: int, Hr: int, D: int, values: bool) -> None:
    """After a phase of several turns: queries, keys, directions and values, and an output turned back."""
    q, k, v, angles = (x[:, 3:4] for x in inputs(5, 3, 4, 2, Hr, D))
    w = inputs(1, 3, 1, 4 if Hr == 4 else 2, 1, D, seed=1)[1]
    angles = angles[:rows].expand(3, -1, -1, -1)
    start = 2 * math.pi * torch.rand(rows, 1, Hr, D // 2, dtype=torch.float64, device=DEVICE)
    factors = Factors((Rotation(angles, values=values), Householder(w, torch.ones_like(w[..., 0]))), None, "softmax")
    got = turned_token(q, k, v, factors, start)
    phase = start + angles.double()
    if Hr == 4:  # keys and values are repeated for query heads that turn differently
        k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    expected_v = rotate(v.double(), phase) if values else v.double()
    _, steps = got.factors.parts()
    assert steps is not None
    for one, other in ((got.q, q), (got.k, k), (steps.w, w)):
        assert error(one, rotate(other.double(), phase)) < 1e-6
    assert error(got.v, expected_v) < 1e-6
    assert error(got.back(q), rotate(q.double(), -phase) if values else q.double()) < 1e-6
    assert got.phase.shape == start.shape and got.phase.dtype == torch.float64
    difference = got.phase - (start + angles[:rows].double())
    torch.testing.assert_close((difference / (2 * math.pi)).round() * 2 * math.pi, difference, rtol=0, atol=1e-14)
    assert bool((got.phase >= 0).all()) and bool((got.phase < 2 * math.pi).all())


def test_half_precision() -> None:
    """Rounding the output to float16, and no more."""
    q, k, v, angles = inputs(100, 1, 2, 2, 1, 32)
    q, k, v = (x.half() for x in (q, k, v))
    expected = plain(*(x.double() for x in (q, k, v, angles)), True)
    turned_q, turned_k, _ = fused(q, k, v, angles, True)
    assert turned_q.dtype == torch.float16
    for got, other in zip((turned_q, turned_k), expected[:2], strict=True):
        assert error(got, other) <= 1.01 * error(other.half(), other)


def test_long_phase() -> None:
    """Within 1e-6 rad of float64 after 100 000 steps: two constant ones, whose rounding is a bias, two random."""
    T = 100_000
    random = 100 * torch.randn(1, T, 1, 2, generator=torch.Generator().manual_seed(0))
    angles = torch.cat([torch.tensor([1.0, 0.1]).expand(1, T, 1, 2), random], dim=-1).to(DEVICE)
    x = torch.ones(1, T, 1, 8, device=DEVICE)
    with torch.no_grad():
        turned, _, _, phase = turn_by_steps(x, x, x, angles, False)
    exact = angles.double().cumsum(1)
    exact[..., :2] = angles[..., :2].double() * torch.arange(1, T + 1, device=DEVICE).view(1, T, 1, 1)
    difference = torch.remainder(phase.double() * 2 * math.pi - exact + math.pi, 2 * math.pi) - math.pi
    assert difference[..., :2].abs().max() < 1e-7
    assert difference.abs().max() < 1e-6
    assert (turned.double() - rotate(x.double(), exact)).abs().max() < 1e-6


def test_long_gradient() -> None:
    """Sums of gradients from 20 000 tokens on."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 20_000, 1, 8, generator=generator).to(DEVICE)
    angles = torch.randn(1, 20_000, 1, 4, generator=generator).to(DEVICE)
    leaf, exact = angles.requires_grad_(), angles.detach().double().requires_grad_()
    weigh(turn_by_steps(q, q, q, leaf, False)[:2]).backward()
    turned = rotate(q.double(), exact.cumsum(1))
    weigh((turned, turned)).backward()
    assert leaf.grad is not None and exact.grad is not None and error(leaf.grad, exact.grad) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_large_and_lost_angles() -> None:
    """Steps of many turns are turns; a step that is no number makes none either."""
    q, k, v, angles = inputs(20, 1, 1, 1, 1, 8)
    angles = angles * 1e6
    expected = plain(*(x.double() for x in (q, k, v, angles)), False)
    assert error(turn_by_steps(q, k, v, angles, False)[0], expected[0]) < 1e-6
    for lost in (math.nan, math.inf):
        angles[0, 7, 0, 1] = lost
        turned = turn_by_steps(q, k, v, angles, False)[0]
        assert turned[0, 7, 0, [1, 5]].isnan().all() and turned[0, :7].isfinite().all()


def test_gradients_only_where_needed() -> None:
    """Constant angles: no gradient, nothing kept but the phase. A loss of the phase alone. A loss of q alone."""
    q, k, v, angles = inputs(30, 2, 2, 2, 1, 8)
    q.requires_grad_()
    turned = turn_by_steps(q, k, v, angles, True)
    assert len(turned[0].grad_fn.saved_tensors) == 1  # type: ignore[union-attr]
    turned[0].square().sum().backward()
    assert q.grad is not None and error(q.grad, 2 * q.detach().double()) < 1e-6  # lengths do not change
    angles.requires_grad_()
    turn_by_steps(q, k, v, angles, True)[3].sum().backward()
    expected = torch.arange(30, 0, -1, device=DEVICE).view(1, 30, 1, 1).expand_as(angles) / (2 * math.pi)
    assert angles.grad is not None and error(angles.grad, expected.double()) < 1e-6


def test_runs_agree_bit_for_bit() -> None:
    def run() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in inputs(150, 2, 4, 2, 1, 16)]
        outputs = fused(*leaves, True)
        return [*outputs, *torch.autograd.grad(weigh(outputs), leaves)]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))


@pytest.mark.parametrize("values", [False, True])
def test_operators(values: bool) -> None:
    q, k, v, angles = (x.requires_grad_() for x in inputs(20, 2, 2, 1, 1, 8))
    some = ("test_schema", "test_autograd_registration", "test_faketensor")  # that they compile is tested below
    ops, turn_arguments = torch.ops.deadreckon, (q, k, v if values else None, angles)
    torch.library.opcheck(ops.turn.default, turn_arguments, test_utils=some)
    turned = [x.detach() for x in turn_by_steps(q, k, v, angles, values)]
    o, phase = (turned[0].clone().requires_grad_(), turned[3].clone().requires_grad_())
    torch.library.opcheck(ops.turn_by.default, (o, phase, -1), test_utils=some)
    torch.library.opcheck(ops.turn_by_backward.default, (turned[0], turned[0], turned[3], 1), test_utils=some)
    gradients = (turned[:2], turned[:2], turned[3] if values else None, turned[3], True)
    torch.library.opcheck(ops.turn_backward.default, gradients, test_utils=some)


def test_compiles() -> None:
    tensors = inputs(20, 2, 2, 1, 1, 8)
    leaves, others = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    got = torch.compile(fused, fullgraph=True, backend="aot_eager")(*leaves, True)
    expected = fused(*others, True)
    weigh(got).backward()
    weigh(expected).backward()
    for one, other in zip((*got, *(x.grad for x in leaves)), (*expected, *(x.grad for x in others)), strict=True):
        assert torch.equal(one, other)
