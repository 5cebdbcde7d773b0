"""Histogram filters: Algorithm 1 of the PRISM paper, its gradients, and conservation of mass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.filters import chunked as histogram
from deadreckon.filters.library import NoCompilerError, find_compiler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = dict[str, Any]


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except NoCompilerError:
        return False


NATIVE = pytest.param("native", marks=pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"))


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory that nobody has written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(batch: int, length: int, cursors: int, positions: int, copy: bool = False, initial: bool = True) -> Case:
    """Arguments of a filter, in float64."""
    torch.manual_seed(length + positions)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "reset": (random(batch, length, cursors) - 1).sigmoid(),
        "move": random(batch, length, cursors, 3).softmax(-1),
        "gamma": 1 + torch.rand(cursors, dtype=torch.float64),
        "copy": random(batch, length, cursors, positions + 1).softmax(-1) if copy else None,
        "initial": random(batch, cursors, positions).softmax(-1) if initial else None,
    }


def leaves(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
    return {name: x if x is None else x.to(device, dtype).requires_grad_() for name, x in case.items()}


def oracle(case: Case, positions: int, eps: float) -> Tensor:
    """The paper's listing with Python's own numbers, one position after another."""
    batch, length, cursors = case["reset"].shape
    found = torch.empty(batch, length, cursors, positions, dtype=torch.float64)
    for b in range(batch):
        for c in range(cursors):
            h = [1.0] + [0.0] * (positions - 1) if case["initial"] is None else case["initial"][b, c].tolist()
            gamma = case["gamma"][c].item()
            for t in range(length):
                p_reset = case["reset"][b, t, c].item()
                p_incr, p_decr, p_keep = case["move"][b, t, c].tolist()
                total = sum(h)
                after = [0.0] * positions
                after[1] += total * p_reset * p_incr
                after[0] += total * p_reset * (p_decr + p_keep)
                for i, mass in enumerate(h):
                    after[i] += mass * (1 - p_reset) * p_keep
                    after[i + 1 if i + 1 < positions else positions - 1] += mass * (1 - p_reset) * p_incr
                    after[i - 1 if i > 0 else 0] += mass * (1 - p_reset) * p_decr
                if case["copy"] is not None:
                    *p_pos, p_none = case["copy"][b, t, c].tolist()
                    after = [mass * p_none + total * p for mass, p in zip(after, p_pos, strict=True)]
                after = [(mass + eps) ** gamma for mass in after]
                h = [mass / sum(after) for mass in after]
                found[b, t, c] = torch.tensor(h, dtype=torch.float64)
    return found


@pytest.mark.parametrize("impl", ["reference", "blockwise", NATIVE])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 2), (1, 21, 2, 3), (2, 37, 2, 7)])
@pytest.mark.parametrize("copy", [False, True])
def test_algorithm_1(impl: Any, sizes: tuple[int, ...], copy: bool) -> None:
    for initial in (False, True):
        case = draw(*sizes, copy=copy, initial=initial)
        h = dr.histogram_filter(**case, positions=sizes[3], impl=impl)
        torch.testing.assert_close(h, oracle(case, sizes[3], 1e-8), rtol=1e-12, atol=1e-12)
    unnormalised = {**case, "initial": 3 * case["initial"]}
    h = dr.histogram_filter(**unnormalised, positions=sizes[3], eps=1e-2, impl=impl)
    torch.testing.assert_close(h, oracle(unnormalised, sizes[3], 1e-2), rtol=1e-12, atol=1e-12)


def ordered(case: Case) -> tuple[list[str], list[Tensor]]:
    names = [name for name, x in case.items() if x is not None]
    return names, [case[name] for name in names]


@pytest.mark.parametrize("impl", ["reference", "blockwise", NATIVE])
@pytest.mark.parametrize("copy", [False, True])
def test_gradients_of_every_input(impl: Any, copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "BLOCK", 3)
    names, tensors = ordered(leaves(draw(1, 5, 2, 4, copy=copy)))
    table = torch.randn(4, 3, dtype=torch.float64)

    def run(*tensors: Tensor) -> Tensor:
        return dr.histogram_filter(**dict(zip(names, tensors, strict=True)), positions=4, eps=1e-3, impl=impl)

    def run_superposed(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        case = dict(zip(names, tensors, strict=True))
        return dr.superpose(**case, table=table, eps=1e-3, impl=impl, final=True)

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradcheck(run_superposed, tensors)


@pytest.mark.parametrize("impl", ["blockwise", NATIVE])
@pytest.mark.parametrize("copy", [False, True])
def test_a_first_histogram_of_any_total(impl: Any, copy: bool) -> None:
    """Resets and jumps bring as much as there was."""
    case = draw(2, 3, 2, 5, copy=copy)
    case["initial"] = case["initial"] * 3
    names, tensors = ordered(leaves(case))
    found, expected = (
        dr.histogram_filter(**dict(zip(names, tensors, strict=True)), positions=5, eps=1e-3, impl=way)
        for way in (impl, "reference")
    )
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(h, tensors, grad) for h in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def entropy(h: Tensor) -> Tensor:
    return -(h * h.clamp_min(1e-300).log()).sum(-1)


@pytest.mark.parametrize("impl", ["blockwise", NATIVE])
def test_mass_is_never_lost(impl: Any) -> None:
    case = leaves(draw(1, 10_000, 2, 9, copy=True, initial=False), torch.float32)
    with torch.no_grad():
        h = dr.histogram_filter(**case, positions=9, impl=impl)
    assert h.min() >= 0
    assert (h.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("impl", ["reference", "blockwise", NATIVE, "triton"])
def test_both_ends_hold(impl: Any) -> None:
    """Mass that only goes one way gathers at that end, all of it."""
    reset, gamma = torch.zeros(1, 6, 2), torch.ones(2)
    move = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).expand(1, 6, 2, 3)
    initial = torch.tensor([0.5, 0.0, 0.25, 0.25]).expand(1, 2, 4)
    tensors = (x.to(DEVICE if impl == "triton" else "cpu") for x in (reset, move, gamma, initial))
    reset, move, gamma, initial = tensors
    h = dr.histogram_filter(reset, move, gamma, positions=4, initial=initial, impl=impl).cpu()
    torch.testing.assert_close(h.sum(-1), torch.ones(1, 6, 2))
    torch.testing.assert_close(h[0, :2, 0], torch.tensor([[0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]), rtol=0, atol=1e-6)
    ends = torch.tensor([[0.0, 0, 0, 1], [1, 0, 0, 0]])
    torch.testing.assert_close(h[0, -1], ends, rtol=0, atol=1e-6)


def test_reset_comes_before_the_move() -> None:
    reset, gamma = torch.ones(1, 1, 1), torch.ones(1)
    initial = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])
    move = torch.tensor([0.5, 0.2, 0.3]).expand(1, 1, 1, 3)
    h = dr.histogram_filter(reset, move, gamma, positions=4, initial=initial)
    torch.testing.assert_close(h[0, 0, 0], torch.tensor([0.5, 0.5, 0, 0]), rtol=0, atol=1e-6)


def test_gamma_keeps_what_moves_would_spread() -> None:
    length, positions = 60, 64
    move = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).expand(1, length, 2, 3)
    gamma = torch.tensor([1.0, 2.0], dtype=torch.float64)
    h = dr.histogram_filter(torch.zeros(1, length, 2, dtype=torch.float64), move, gamma, positions=positions)
    spread, sharp = entropy(h).unbind(-1)
    assert (spread.diff() > 0).all() and spread[0, -1] > 2
    assert sharp.max() < 0.7 and h[0, -1, 1].argmax() == length
    # Without moves, sharpening alone lets the entropy fall with every token.
    still = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(1, 5, 2, 3)
    initial = torch.arange(1.0, 65, dtype=torch.float64).expand(1, 2, 64) / 2080
    h = dr.histogram_filter(
        torch.zeros(1, 5, 2, dtype=torch.float64), still, gamma, positions=64, initial=initial
    )  # fmt: skip
    assert (entropy(h)[..., 1].diff() < -0.1).all()
    # With γ = 1 nothing happens but that ε is added five times, at each of 64 positions.
    torch.testing.assert_close(h[:, -1, 0], initial[:, 0], rtol=5 * 64 * 1e-8, atol=5 * 1e-8)


@pytest.mark.parametrize("impl", ["blockwise", NATIVE])
@pytest.mark.parametrize("copy", [False, True])
def test_pieces_are_the_whole(copy: bool, impl: Any) -> None:
    case = leaves(draw(2, 37, 2, 7, copy=copy, initial=False))
    whole = dr.histogram_filter(**case, positions=7, impl=impl)
    table = torch.randn(7, 5, dtype=torch.float64)
    whole_e, last = dr.superpose(**case, table=table, final=True, impl=impl)
    torch.testing.assert_close(last, whole[:, -1])
    pieces, superposed, state, e_state = [], [], None, None
    for some in (slice(0, 1), slice(1, 20), slice(20, 37)):
        piece = {n: x if x is None or n == "gamma" else x[:, some] for n, x in case.items() if n != "initial"}
        pieces.append(dr.histogram_filter(**piece, positions=7, initial=state, impl=impl))
        state = pieces[-1][:, -1]
        e, e_state = dr.superpose(**piece, table=table, initial=e_state, final=True, impl=impl)
        superposed.append(e)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(torch.cat(superposed, 1), whole_e)
    inputs = [x for x in case.values() if x is not None]
    grad = torch.randn_like(whole_e)
    for a, b in zip(
        torch.autograd.grad(torch.cat(superposed, 1), inputs, grad, retain_graph=True),
        torch.autograd.grad(whole_e, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
    return [float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


def results(run: Callable[..., Tensor], case: Case, grad: Tensor) -> list[Tensor]:
    """What it returns, and gradients."""
    out = run(**case)
    inputs = [x for x in case.values() if x is not None]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out))]


@pytest.mark.parametrize(
    ("sizes", "copy", "dtype"),
    [
        ((2, 1, 2, 2), True, torch.float32),
        ((1, 25, 2, 7), True, torch.float32),
        ((2, 20, 1, 100), False, torch.float32),
        ((1, 1, 2, 100), True, torch.float32),
        ((1, 12, 1, 700), False, torch.float32),
        ((1, 6, 3, 70), True, torch.float32),
        ((1, 4, 5, 128), False, torch.float32),
        ((1, 4, 2, 320), True, torch.float32),
        ((1, 12, 2, 64), True, torch.float16),
    ],
)
def test_kernels(sizes: tuple[int, ...], copy: bool, dtype: torch.dtype) -> None:
    case = {name: x if x is None else x.to(dtype).double() for name, x in draw(*sizes, copy=copy).items()}
    grad = torch.randn(sizes, dtype=torch.float64)

    def run(impl: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = leaves(case, dtype, DEVICE if impl == "triton" else "cpu")
        return results(lambda **x: dr.histogram_filter(**x, positions=sizes[3], impl=impl), inputs, grad.to(dtype))  # type: ignore[call-overload]

    expected = run("reference", torch.float64)
    out, *grads = errors(run("triton", dtype), expected)
    if dtype == torch.float32:
        assert out <= 1e-5 and max(grads) <= 1e-4, (out, grads)
    else:  # inputs are exact, so that only the output and gradients are rounded, and the histograms that lead back
        unit = 2.0**-11
        assert out <= unit and max(grads) <= 4 * unit, (out, grads)


@pytest.mark.parametrize("copy", [False, True])
def test_kernels_with_any_mass(copy: bool) -> None:
    """A first histogram that does not sum to one, which resets and jumps take with them."""
    case, grad = draw(1, 3, 2, 20, copy=copy), torch.randn(1, 3, 2, 20, dtype=torch.float64)
    case["initial"] *= 3

    def run(impl: str, dtype: torch.dtype, device: str) -> list[Tensor]:
        inputs = leaves(case, dtype, device)
        return results(lambda **x: dr.histogram_filter(**x, positions=20, eps=1e-2, impl=impl), inputs, grad)  # type: ignore[call-overload]

    found = errors(run("triton", torch.float32, DEVICE), run("reference", torch.float64, "cpu"))
    assert found[0] <= 1e-5 and max(found) <= 1e-4, found


@pytest.mark.parametrize("impl", ["blockwise", NATIVE, "triton"])
@pytest.mark.parametrize("copy", [False, True])
def test_superposition_is_the_product(impl: Any, copy: bool) -> None:
    length, positions = (18, 12) if impl == "triton" else (70, 12)
    case = draw(1, length, 2, positions, copy=copy)
    table = torch.randn(positions, 5, dtype=torch.float64)
    grad, grad_last = (
        torch.randn(1, length, 2, 5, dtype=torch.float64),
        torch.randn(1, 2, positions, dtype=torch.float64),
    )
    inputs = leaves(case)
    h = dr.histogram_filter(**inputs, positions=positions, impl="reference")
    tensors = [x for x in inputs.values() if x is not None]
    expected = [h @ table, h[:, -1], *torch.autograd.grad([h @ table, h[:, -1]], tensors, [grad, grad_last])]
    inputs = leaves(case, torch.float32, DEVICE if impl == "triton" else "cpu")
    tensors = [x for x in inputs.values() if x is not None]
    e, last = dr.superpose(**inputs, table=table.to(tensors[0]), final=True, impl=impl)
    found = [e, last, *torch.autograd.grad([e, last], tensors, [grad.to(e), grad_last.to(last)])]
    out, end, *grads = errors([x.detach() for x in found], [x.detach() for x in expected])
    assert max(out, end) <= 1e-5 and max(grads) <= 1e-4, (out, end, grads)


@pytest.mark.parametrize("impl", ["blockwise", NATIVE])
def test_superpositions_have_the_dtype_of_the_table(impl: Any) -> None:
    case = leaves(draw(1, 5, 2, 8), torch.float32)
    table = torch.randn(8, 6)
    exact, half = (dr.superpose(**case, table=x, impl=impl) for x in (table, table.bfloat16()))
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() <= 2.0**-7 * exact.norm()
    half.float().sum().backward()
    assert case["reset"].grad.dtype == torch.float32 and case["reset"].grad.abs().sum() > 0


@pytest.mark.parametrize("path", ["blockwise", NATIVE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, path: str) -> None:
    """At most twice the error that the definition makes in the same precision."""
    case, grad = draw(2, 30, 2, 20, copy=True), torch.randn(2, 30, 2, 20, dtype=torch.float64)

    def run(impl: Any, dtype: torch.dtype) -> list[Tensor]:
        rounded = leaves(case, dtype)
        return results(lambda **x: dr.histogram_filter(**x, positions=20, eps=1e-4, impl=impl), rounded, grad)

    expected = run("reference", torch.float64)
    ours, plain = errors(run(path, dtype), expected), errors(run("reference", dtype), expected)
    assert all(a <= 2 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize("impl", ["blockwise", NATIVE])
def test_little_is_kept(impl: Any) -> None:
    """Of what autograd would keep for each token a filter keeps the result alone; a superposition an eighth of it."""
    case = leaves(draw(2, 64, 4, 64, initial=False), torch.float32)
    size = 2 * 64 * 4 * 64 * 4
    table = torch.randn(64, 8)
    kept = {}
    for name, run in {
        "filter": lambda: dr.histogram_filter(**case, positions=64, impl=impl),
        "superpose": lambda: dr.superpose(**case, table=table, impl=impl),
        "definition": lambda: dr.histogram_filter(**case, positions=64, impl="reference"),
    }.items():
        storages: dict[int, int] = {}

        def pack(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = run()
        kept[name] = sum(storages.values())
        del result
    given = table.nbytes + sum(x.nbytes for x in case.values() if x is not None) + 64 * 4  # with where mass begins
    assert kept["filter"] <= size + given
    assert kept["superpose"] <= size // 8 + size // 64 + given  # a state before each chunk, and the last
    assert kept["definition"] > 3 * size


@pytest.mark.parametrize("impl", [NATIVE, "triton"])
@pytest.mark.parametrize("copy", [False, True])
def test_operators(impl: Any, copy: bool) -> None:
    """What torch asks of operators; compiled graphs hold them whole; two backward passes agree bit for bit."""
    device = DEVICE if impl == "triton" else "cpu"
    case = leaves(draw(1, 3, 1, 8, copy=copy), torch.float32, device)
    table = torch.randn(8, 4, device=device)
    ops, order = torch.ops.deadreckon, ("reset", "move", "gamma", "initial", "copy")
    dr.superpose(**case, table=table, impl=impl)
    suffix, tensors = "_native" if impl == "native" else "", [case[name] for name in order]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(ops, "histogram_filter" + suffix).default, (*tensors, 1e-8), test_utils=tests)
    torch.library.opcheck(getattr(ops, "superpose" + suffix).default, (*tensors, table, 1e-8), test_utils=tests)

    def run(case: Case) -> Tensor:
        e = dr.superpose(**case, table=table, impl=impl)
        return e.square().sum() + dr.histogram_filter(**case, positions=8, impl=impl).square().sum()

    tensors = [x for x in case.values() if x is not None]
    twice = [
        torch.autograd.grad(f(case), tensors) for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager"))
    ]
    for a, b in zip(*twice, strict=True):
        assert torch.equal(a, b)


B, T, C, P = 2, 4, 3, 6
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "reset is no tensor": ({"reset": 1.0}, "reset: expected a torch.Tensor, got float"),
    "reset of integers": ({"reset": torch.ones(B, T, C, dtype=torch.int64)}, "reset: expected a floating-point tensor"),
    "reset of four dimensions": ({"reset": torch.rand(B, T, C, 1)}, r"reset: expected \(B, T, C\).*\(2, 4, 3, 1\)"),
    "no tokens": ({"reset": torch.rand(B, 0, C)}, r"reset: expected \(B, T, C\), each 1 or more"),
    "two moves": (
        {"move": torch.rand(B, T, C, 2)},
        r"move: expected \(B, T, C, 3\) = \(2, 4, 3, 3\), got \(2, 4, 3, 2\)",
    ),
    "gamma for others": ({"gamma": torch.ones(C + 1)}, r"gamma: expected \(C,\) = \(3,\), got \(4,\)"),
    "gamma a number": ({"gamma": 2.0}, "gamma: expected a torch.Tensor, got float"),
    "gamma elsewhere": ({"gamma": torch.ones(C, device="meta")}, "gamma: expected it on reset's device cpu, got meta"),
    "copy without none": ({"copy": torch.rand(B, T, C, P)}, r"copy: expected \(B, T, C, P \+ 1\) = \(2, 4, 3, 7\)"),
    "initial with tokens": ({"initial": torch.rand(B, T, C, P)}, r"initial: expected \(B, C, P\) = \(2, 3, 6\)"),
    "one position": ({"positions": 1}, "positions: expected an integer of 2 or more, got 1"),
    "half a position": ({"positions": 6.0}, "positions: expected an integer of 2 or more, got 6.0"),
    "no eps": ({"eps": 0.0}, "eps: expected a number from 1e-30 to 1, got 0.0"),
    "eps of nothing": ({"eps": float("nan")}, "eps: expected a number"),
    "unknown": ({"impl": "cuda"}, "impl: expected 'auto', 'reference', 'blockwise', 'native' or 'triton', got 'cuda'"),
    "double precision": (
        {"impl": "triton", "reset": torch.rand(B, T, C, device=DEVICE).double()},
        "impl: 'triton' needs dtype float32",
    ),
    "too wide": ({"impl": "triton", "positions": 5000, "copy": None}, "impl: 'triton' needs at most 4096 positions"),
}


def good(device: str = "cpu") -> dict[str, Any]:
    shapes = {"reset": (B, T, C), "move": (B, T, C, 3), "gamma": (C,)}
    return {name: torch.rand(shape, device=device) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        dr.histogram_filter(**{"positions": P, **good(DEVICE if "impl" in arguments else "cpu"), **arguments})


def test_bad_tables() -> None:
    for table, message in {
        torch.rand(P): r"table: expected \(P, d\)",
        torch.rand(1, 3): "table: expected .* P of 2 or more",
        torch.rand(P, 3, requires_grad=True): "table: expected a tensor that does not require a gradient",
        torch.rand(P, 3, device="meta"): "table: expected it on reset's device cpu",
    }.items():
        with pytest.raises(ValueError, match=message):
            dr.superpose(**good(), table=table)
