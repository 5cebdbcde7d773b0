"""`impl="triton"` against the float64 definition: interpreted in float32 where there is no GPU, else in all dtypes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, Case, relative_errors, run
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import normalize

import deadreckon as dr
from deadreckon.ops.triton.gated import gates
from deadreckon.ops.triton.householder.frames import Frames
from deadreckon.ops.triton.householder.walk import Walk

EXACT = ("w", "beta", "angles", "log_gate")
CASES = [
    Case("householder", None, length=1),
    Case("householder", None, length=63, batch=1, beta=1.0),
    Case("householder", "learned", length=64, group=1),
    Case("householder", "learned per key head", length=100, batch=1),
    Case("householder", "constant", length=257, batch=1, heads=1, beta=2.0, forgetting=0.02),
    Case("householder", None, length=192, batch=1, heads=1, width=40, value_width=8),
    Case(None, "learned", length=257, batch=1, heads=1),
    Case(None, "constant", length=100, scale=-0.3),
    Case(None, "learned per key head", length=64),
    Case("rotation", None, length=100),
    Case("rotation per query head", "learned", length=63),
    Case("rotation of values", "learned per key head", length=130, batch=1),
    Case("rotation and householder", None, length=100),
    Case("rotation of values and householder", "learned", length=130, batch=1, group=1),
    Case("rotation", None, "stick-breaking", length=100, batch=1),
    Case("rotation", "learned per key head", dr.Power(2, form="chunked"), length=100, batch=1),
    Case("rotation", "learned", dr.Power(4), length=100, batch=1),
]
GPU_CASES = [
    Case("householder", None, length=1100, width=64, value_width=64),
    Case("householder", "learned", length=1100, width=64, value_width=64),
    Case("householder", None, length=1100, width=128, value_width=128, heads=1),
    Case("householder", None, length=700, width=32, value_width=80),
    Case(None, "learned", length=2100, width=64, value_width=64, heads=1),
    Case(None, "learned", length=300, width=128, value_width=96, heads=1),
    Case("rotation of values", "learned", length=577, width=64),
    Case("rotation and householder", "learned", length=1100, width=64, value_width=64),
    Case("rotation of values and householder", None, length=577, width=128, heads=1),
    Case("rotation", None, "stick-breaking", length=577, width=64, value_width=64),
    Case("rotation", "learned", dr.Power(2, form="chunked"), length=1300, width=64, value_width=64),
    Case(None, "learned", dr.Power(2, form="attention"), length=1300, width=64, value_width=64),
    Case("rotation", None, dr.Power(4), length=577, width=64, value_width=96),
]


def check(case: Case) -> None:
    expected = run(case, impl="reference")
    errors = relative_errors(run(case, torch.float32, DEVICE, impl="triton"), expected)
    assert errors["output"] <= 1e-5 and max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("case", CASES)
def test_definition(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("householder", "learned", length=300, batch=1, heads=2, group=1),
        Case("householder", None, length=577, batch=1, heads=1, group=1, beta=1.9),  # products do not fade
        Case("householder", "learned per key head", length=256, batch=1, heads=1),
    ],
)
@pytest.mark.usefixtures("short_walks")
def test_levels(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(None, "learned", length=100, batch=1, heads=2, group=1, width=128, value_width=128),
        Case(None, None, "stick-breaking", length=100, batch=1, heads=1, group=1, width=64, value_width=64),
        Case(None, None, "stick-breaking", length=70, batch=1, heads=1, group=1, width=128, value_width=128),
        Case(
            None,
            "learned per key head",
            dr.Power(2),
            length=100,
            batch=1,
            heads=2,
            group=1,
            width=128,
            value_width=128,
            forgetting=40.0,
        ),
    ],
    ids=str,
)
def test_little_shared_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of other GPUs, which only these cases have."""
    monkeypatch.setattr("deadreckon.ops.triton.tiles.shared_memory", lambda _: 99)
    check(case)


@pytest.mark.parametrize("length", [40, 200])
def test_leaves_can_be_computed_again(length: int) -> None:
    """The same to the last bit, and nothing but inputs, output and log-sum-exp is kept for the backward pass."""
    generator = torch.Generator().manual_seed(0)

    def attend(recompute: bool) -> tuple[list[Tensor], int]:
        generator.manual_seed(0)
        q, k, v, w = (torch.randn(1, length, heads, 16, generator=generator).to(DEVICE) for heads in (2, 1, 1, 1))
        beta, gate = (torch.rand(1, length, heads, generator=generator).to(DEVICE) for heads in (1, 2))
        inputs = [x.requires_grad_() for x in (q, k, v, normalize(w, dim=-1), beta, -0.1 * gate)]
        kept = list[Tensor]()

        def keep(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            transport = dr.Householder(*inputs[3:5], recompute=recompute)
            output = dr.attend(*inputs[:3], transport=transport, log_gate=inputs[5], impl="triton")
        found = [
            output,
            *torch.autograd.grad(output, inputs, torch.linspace(-1, 1, 16, device=DEVICE).expand_as(output)),
        ]
        return found, sum(x.numel() for x in kept)

    (saved, more), (again, less) = attend(False), attend(True)
    assert all(torch.equal(one, other) for one, other in zip(saved, again, strict=True))
    padded = -(-length // 64) * 64
    assert more - less == padded * (16 * 4 + 16 * 16 // 64 + 64)  # frames of two queries, key and value; P; M⁻¹


def test_suffixes_of_wide_heads() -> None:
    """Two programs have a block's columns between them.

    Orthogonal products have rows of norm 1: halves round them by 2⁻¹² or less, keys of norm 10 times these by 2⁻⁸, and
    what two halves lose of a factor is 2⁻²² of it, a few times over.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 10 * 64, 104, generator=generator).half().to(DEVICE)
    products = torch.linalg.qr(torch.randn(2, 10, 104, 104, generator=generator)).Q.contiguous().to(DEVICE)
    halves = products.half()
    rest = (products - halves.float()).half()
    walk = Walk(Frames(keys.unsqueeze(2), keys, keys, halves, rest), None, None, 1.0)
    moved = torch.empty_like(keys)
    suffixes, blocks = walk.suffixes(moved, keep=True)
    assert suffixes is not None
    for first, end in ((0, 8), (8, 10)):
        product = torch.eye(104, dtype=torch.float64, device=DEVICE).expand(2, 104, 104)
        for leaf in reversed(range(first, end)):
            torch.testing.assert_close(suffixes[:, leaf].double(), product, rtol=0, atol=2**-10)
            expected = keys[:, 64 * leaf : 64 * leaf + 64].double() @ product
            torch.testing.assert_close(moved[:, 64 * leaf : 64 * leaf + 64].double(), expected, rtol=0, atol=2**-7)
            product = products[:, leaf].double() @ product
        torch.testing.assert_close(blocks[:, first // 8].double(), product, rtol=0, atol=2**-18)


@pytest.mark.parametrize("transport", [None, "householder"])
def test_strong_gates_are_pruned_and_right(
    transport: str | None, monkeypatch: pytest.MonkeyPatch, short_walks: None
) -> None:
    """Gates that leave a few blocks in reach: what is skipped is much, and nobody misses it."""
    monkeypatch.setattr("deadreckon.ops.triton.gated.gates.PRUNED", 1)
    found: list[gates.Reach] = []

    def watched(*arguments: object) -> gates.Reach:
        found.append(gates.reach_of(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(f"deadreckon.ops.triton.{transport or 'gated'}.operator.reach_of", watched)
    case = Case(transport, "learned", length=500, batch=1, heads=1, group=1)
    leaves = {name: x.float().to(DEVICE) for name, x in case.inputs().items()}
    leaves["log_gate"] = leaves["log_gate"] * 10
    exact = {name: x.double().cpu().requires_grad_() for name, x in leaves.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    output, expected = case.attend(leaves, impl="triton"), case.attend(exact, impl="reference")
    grad = torch.ones_like(expected)
    ours = torch.autograd.grad(output, list(leaves.values()), grad.float().to(DEVICE))
    theirs = torch.autograd.grad(expected, list(exact.values()), grad)
    first, last = found[0].both
    assert first.max() >= 64 and last.min() < 500
    assert all(bool((row.diff() >= 0).all()) for row in first.flatten(0, 1))
    limit = 2.0**-23 * 64  # a weight that counts has log gates (base 2) that add up to −64 at most, in single precision
    torch.testing.assert_close(output.cpu().double(), expected, rtol=limit, atol=limit)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=10 * limit, atol=10 * limit)


def test_share_in_reach() -> None:
    q, k = torch.randn(2, 1, 640, 2, 16, device=DEVICE).unbind()
    assert dr.share_in_reach(q, k, -torch.zeros(2, device=DEVICE)) == 1
    # With −1e4 at every token a block sees itself and, since sums are known at its edges, the one before.
    share = dr.share_in_reach(q, k, torch.full((1, 640, 2), -1e4, device=DEVICE))
    assert share == pytest.approx((1 + 9 * 2) / 55)
    some = dr.share_in_reach(q, k, torch.full((2,), -0.2, device=DEVICE))
    assert share < some < 1
    grown = torch.full((1, 640, 2), -1e4, device=DEVICE)
    grown[0, 7, 1] = 1e-3  # of whose head nothing is known, and of no other
    assert dr.share_in_reach(q, k, grown) == pytest.approx((1 + share) / 2)
    with pytest.raises(ValueError, match="log_gate: expected"):
        dr.share_in_reach(q, k, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("growing", [False, True])
def test_what_gates_leave_in_reach_is_not_pruned(
    growing: bool, monkeypatch: pytest.MonkeyPatch, short_walks: None
) -> None:
    """A key far behind that wins in spite of its gate, because its logit is as high as any can be.

    Logits are −b but for the key at 5, whose is +b, or 9 b where two steps with β = 4 lengthen it on its way; and one
    gate between has −g. Queries behind the gate see that key alone if g is less than the difference of logits. The
    bound must not be less than the difference either: a half of it, log T and margin included, or one without the
    growth of steps, is below g.
    """
    monkeypatch.setattr("deadreckon.ops.triton.gated.gates.PRUNED", 1)
    length, width, far, gate = 256, 16, 5, 100
    b, g = (20.0, 100.0) if growing else (60.0, 95.0)
    highest, margins = (9 * b if growing else b), math.log(length) + 20
    assert g < highest + b - 10
    assert (2 * b + margins if growing else max(b + margins, (2 * b + margins) / 2)) < g
    direction = torch.nn.functional.normalize(torch.ones(width), dim=0)
    q = (direction * b * width**0.5).expand(1, length, 1, width).contiguous()
    k = -direction.expand(1, length, 1, width).contiguous()
    k[:, far] = direction
    v = torch.randn(1, length, 1, width, generator=torch.Generator().manual_seed(0))
    log_gate = torch.zeros(1, length, 1)
    log_gate[:, gate] = -g
    transport = None
    if growing:
        beta = torch.zeros(1, length, 1)
        beta[:, [20, 30]] = 4  # each turns the direction round and makes it three times as long
        transport = dr.Householder(direction.expand(1, length, 1, width).contiguous(), beta)
        transport = replace(transport, w=transport.w.to(DEVICE), beta=beta.to(DEVICE))
    q, k, v, log_gate = (x.to(DEVICE) for x in (q, k, v, log_gate))
    found = dr.attend(q, k, v, transport=transport, log_gate=log_gate, impl="triton")
    expected = v[:, far].expand(1, length - 192, 1, width)
    torch.testing.assert_close(found[:, 192:], expected.view(1, -1, 1, width), rtol=0, atol=1e-3)


def test_steps_that_grow_reach_farther() -> None:
    w = torch.nn.functional.normalize(torch.randn(2, 300, 3, 16, device=DEVICE), dim=-1)
    beta = 2 * torch.rand(2, 300, 3, device=DEVICE)
    torch.testing.assert_close(gates.growth_of(w, beta), torch.zeros(6, 5, device=DEVICE), rtol=0, atol=1e-4)
    beta[1, 5, 2] = 4
    expected = torch.zeros(6, 5, device=DEVICE)
    expected[5, 0] = math.log(3)
    torch.testing.assert_close(gates.growth_of(w, beta), expected, rtol=0, atol=1e-4)
    assert gates.growth_of(w, beta + 9).isfinite().all()


def test_gates_that_grow_are_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadreckon.ops.triton.gated.gates.PRUNED", 1)
    q, k, v = (torch.randn(1, 200, 1, 16, device=DEVICE) for _ in range(3))
    log_gate = torch.where(torch.arange(200, device=DEVICE) % 2 == 0, -40.0, 39.0).view(1, 200, 1)
    found = dr.attend(q, k, v, log_gate=log_gate, impl="triton")
    expected = dr.attend(*(x.double() for x in (q, k, v)), log_gate=log_gate.double(), impl="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transport", [None, "householder"])
def test_gradients_of_any_layout(transport: str | None) -> None:
    """Autograd hands on expanded and transposed gradients."""
    case = Case(transport, "learned", length=70, batch=1, heads=1)
    leaves = {name: x.float().to(DEVICE).requires_grad_() for name, x in case.inputs().items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    for loss in (lambda o: o.sum(), lambda o: o.transpose(-1, -2).contiguous().square().sum()):
        ours = torch.autograd.grad(loss(case.attend(leaves, impl="triton")), list(leaves.values()))
        theirs = torch.autograd.grad(loss(case.attend(exact, impl="reference")), list(exact.values()))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case("householder", "learned", length=100, batch=1, heads=1),
        Case("rotation", "learned", dr.Power(4), length=100, batch=1, heads=1),
    ],
)
def test_packed_documents(case: Case) -> None:
    leaves = {name: x.float().to(DEVICE) for name, x in case.inputs().items()}
    ends = torch.tensor([0, 1, 30, 30, 100], dtype=torch.int32, device=DEVICE)
    found = case.attend(leaves, cu_seqlens=ends, impl="triton")
    expected = case.attend({name: x.double() for name, x in leaves.items()}, cu_seqlens=ends, impl="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("transport", "gate"), [("householder", None), ("householder", "learned"), (None, "learned")])
def test_operators(transport: str | None, gate: str | None) -> None:
    """What torch asks of operators; compiled graphs hold them whole; two backward passes agree bit for bit."""
    case = Case(transport, gate, length=70, batch=1, heads=1)
    leaves = {name: x.float().to(DEVICE).requires_grad_() for name, x in case.inputs().items()}
    log_gate = leaves.get("log_gate")
    if transport:
        inputs = (
            *(leaves[name] for name in ("q", "k", "v", "w", "beta")),
            log_gate,
            None,
            gate is not None,
            0.25,
            True,
        )
        operator = torch.ops.deadreckon.householder.default
    else:
        inputs = (*(leaves[name] for name in ("q", "k", "v")), log_gate, None, gate is not None, 0.25)
        operator = torch.ops.deadreckon.gated.default
    torch.library.opcheck(operator, inputs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    compiled = torch.compile(lambda leaves: case.attend(leaves, impl="triton"), fullgraph=True, backend="aot_eager")
    results = []
    for attend in (lambda leaves: case.attend(leaves, impl="triton"), compiled):
        output = attend(leaves)
        results.append([output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_what_no_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 5, 2, 16, device=DEVICE)
    wide, wider = torch.randn(2, 1, 3, 2, 136, device=DEVICE)
    steps = dr.Householder(wide, wide[..., 0])
    with pytest.raises(ValueError, match="impl: 'triton' needs D a multiple of 8 up to 128 with Householder steps in"):
        dr.attend(*(wide.half(),) * 3, transport=steps, impl="triton")
    with pytest.raises(ValueError, match=r"needs D a multiple of 8 up to 128 with gates in torch\.float32, got 136"):
        dr.attend(wide, wider, wide, log_gate=-torch.ones(2, device=DEVICE), impl="triton")
    assert dr.attend(wide, wider, wide, transport=steps).shape == wide.shape  # "auto" may pick
    with pytest.raises(ValueError, match="impl: 'triton' needs D a multiple of 8"):
        dr.attend(q[..., :12], q[..., :12], q, impl="triton")
    with pytest.raises(ValueError, match="impl: 'triton' needs dtype"):
        dr.attend(q.double(), q.double(), q.double(), impl="triton")
    for score in (dr.Power(2, form="recurrent"), dr.Power(6), dr.Power(6, form="chunked")):
        with pytest.raises(ValueError, match="impl: 'triton' needs score Power"):
            dr.attend(q, q, q, score=score, impl="triton")
    with pytest.raises(ValueError, match=r"impl: 'triton' needs score Power.*without Householder"):
        dr.attend(q, q, q, transport=dr.Householder(q, q[..., 0]), score=dr.Power(2), impl="triton")
    with pytest.raises(ValueError, match="impl: 'triton' needs D a multiple of 8 up to 32"):
        dr.attend(*(q.repeat(1, 1, 1, 3),) * 3, score=dr.Power(4, form="chunked"), impl="triton")
    assert dr.attend(wide, wider, wide, score="stick-breaking", impl="triton").shape == wide.shape
    monkeypatch.setattr("deadreckon.ops.triton.tiles.shared_memory", lambda _: 99)
    with pytest.raises(ValueError, match=r"up to 128 with sticks on this GPU in torch\.float32, got 136"):
        dr.attend(wide, wider, wide, score="stick-breaking", impl="triton")
    with pytest.raises(ValueError, match="neither Householder"):
        dr.attend(q, q, q, score="stick-breaking", log_gate=-torch.ones(2, device=DEVICE), impl="triton")


def test_a_processor_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(ValueError, match="impl: 'triton' needs tensors on a CUDA device"):
        dr.attend(q, q, q, impl="triton")


def magnified(case: Case, expected: dict[str, Tensor]) -> float:
    """By how much errors in the gradients of turned tensors are magnified in those of angles, both relative.

    A step's gradient is the sum over all later tokens of x × dx, x what was turned, in which routes that do not cross
    the step cancel: but not the errors of dx, which add up in quadrature.
    """
    leaves = case.inputs()
    grad = torch.randn(expected["output"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [(leaves["q"], expected["q"]), (leaves["k"], expected["k"])]
    if case.transport == "rotation of values":
        pairs += [(leaves["v"], expected["v"]), (expected["output"], grad)]
    noise = 0.0
    for x, dx in pairs:
        (x1, x2), (dx1, dx2) = x.chunk(2, -1), dx.chunk(2, -1)
        later = ((x1**2 + x2**2) * (dx1**2 + dx2**2) / 2).flip(1).cumsum(1)
        noise += float(later.sum())
    return noise**0.5 / float(expected["angles"].norm())


@pytest.mark.parametrize(
    ("impl", "case"),
    [
        ("blockwise", Case("rotation", "learned", length=300, batch=1, heads=1)),
        ("blockwise", Case("rotation", None, "stick-breaking", length=130, batch=1, heads=1)),
        ("triton", Case("rotation of values", "learned", length=130, batch=1, heads=1)),
    ],
)
def test_angles_learn_as_well_as_what_they_turn(impl: str, case: Case) -> None:
    """Gates and sticks make routes short, but the sums over all later tokens no shorter.

    So angles' gradients have several times the error of the definition, which turns keys step by step, and no more
    than the errors of dq and dk (and dv) make it: those are at most three times the definition's.
    """
    expected = run(case, impl="reference")
    plain = relative_errors(run(case, torch.float32, impl="reference"), expected)
    found = relative_errors(run(case, torch.float32, DEVICE, impl=impl), expected)
    turned = max(found[name] for name in ("q", "k", "v", "output"))
    assert turned <= 3 * max(plain[name] for name in ("q", "k", "v", "output")), (found, plain)
    assert found["angles"] <= 1.5 * magnified(case, expected) * turned, found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_CASES)
def test_precision(case: Case, dtype: torch.dtype) -> None:
    """At most twice the error that the definition makes in the same precision."""
    if dtype == torch.float32 and case.transport is not None and "householder" in case.transport:
        # wider ones need more shared memory than there is
        case = replace(case, width=min(case.width, 64), value_width=min(case.value_width, 64))
    expected = {name: x.cpu() for name, x in run(case, device="cuda", impl="reference").items()}
    ours = relative_errors(run(case, dtype, "cuda", EXACT, impl="triton"), expected)
    if dtype == torch.float32:
        assert ours["output"] <= 1e-5 and max(ours.values()) <= 1e-4, ours
        return
    plain = relative_errors(run(case, dtype, "cuda", EXACT, impl="reference"), expected)
    if "angles" in plain:
        rounding = 0.2 * torch.finfo(dtype).eps  # of each number of dx
        plain["angles"] = max(plain["angles"], rounding * magnified(case, expected))
    wrong = {name: (ours[name], plain[name]) for name in expected if ours[name] > 2 * plain[name]}
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("gate", [None, "learned"])
def test_cuda_graphs_checkpoints_and_autocast(gate: str | None) -> None:
    case = Case("householder", gate, length=700, width=64, value_width=64)
    exact = ("w", "beta", "log_gate")
    leaves = {
        name: x.to("cuda", torch.float32 if name in exact else torch.bfloat16).requires_grad_()
        for name, x in case.inputs().items()
    }
    output = case.attend(leaves)
    grads = torch.autograd.grad(output.float().sum(), list(leaves.values()))
    again = torch.utils.checkpoint.checkpoint(lambda: case.attend(leaves), use_reentrant=False)
    for a, b in zip(grads, torch.autograd.grad(again.float().sum(), list(leaves.values())), strict=True):
        assert torch.equal(a, b)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(case.attend(leaves), output)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            recorded = case.attend(leaves)
        graph.replay()
    assert torch.equal(recorded, output)
