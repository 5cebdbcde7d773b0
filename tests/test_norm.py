"""Fused residual + norm, and in-place cross-entropy: kernels against float64, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadreckon as dr
from deadreckon.models.loss import _cross_entropy_
from deadreckon.ops import norm as norms
from deadreckon.ops.triton.loss import cross_entropy_
from deadreckon.ops.triton.norm import ResidualNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("width", [48, 512])
@pytest.mark.parametrize(
    ("residual", "added", "normed"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_a_residual_and_its_norm(
    width: int, residual: torch.dtype, added: torch.dtype | None, normed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both results and every gradient, over tiles that are not full and programs of several tiles."""
    monkeypatch.setattr("deadreckon.ops.triton.norm.PROGRAMS", 2)
    x = drawn(2, 19, width, dtype=residual).requires_grad_()
    y = None if added is None else drawn(2, 19, width, seed=1, dtype=added).requires_grad_()
    gain = (1 + drawn(width, seed=2) / 4).requires_grad_()
    into = drawn(2, 19, width, seed=3, dtype=residual), drawn(2, 19, width, seed=4, dtype=normed)
    wanted = [x, gain] if y is None else [x, y, gain]
    results = ResidualNorm.apply(x, y, gain, 1e-6, normed)
    found = torch.autograd.grad(results, wanted, into)

    exact = [z.detach().double().requires_grad_() for z in wanted]
    total = exact[0] if y is None else exact[0] + exact[1]
    total = total + (results[0] - total).detach()  # rounded, and the norm is that of what it was rounded to
    rounding = torch.finfo(residual).eps * results[0].double().abs() if y is not None else torch.zeros_like(total)
    assert bool(((x if y is None else x.double() + y.double()) - results[0]).abs().le(rounding).all())
    expected = total, nn.functional.rms_norm(total, (width,), exact[-1], 1e-6)
    gradients = torch.autograd.grad(expected, exact, [z.double() for z in into])
    for one, other, kind in zip(
        (*results, *found), (*expected, *gradients), (residual, normed, *(z.dtype for z in wanted)), strict=True
    ):
        assert one.dtype == kind
        # A few roundings of float32, in sums of `width` numbers or of 38 rows; then one to the result's type.
        scale = other.abs().amax()
        allowed = torch.finfo(kind).eps * other.abs() + 64 * torch.finfo(torch.float32).eps * scale
        assert bool(((one.double() - other).abs() <= allowed).all())


def test_gradients_where_only_one_result_is_used() -> None:
    """Of the residual alone, and of the norm alone."""
    x, y, gain = drawn(3, 32).requires_grad_(), drawn(3, 32, seed=1).bfloat16().requires_grad_(), drawn(32, seed=2)
    total, _ = ResidualNorm.apply(x, y, gain, 1e-6, torch.bfloat16)
    dx, dy = torch.autograd.grad(total.sum(), (x, y))
    assert bool((dx == 1).all()) and bool((dy == 1).all()) and dy.dtype == torch.bfloat16
    _, normed = ResidualNorm.apply(x, y, gain, 1e-6, torch.float32)
    dx, dy = torch.autograd.grad(normed.sum(), (x, y))
    expected = (x + y).detach().requires_grad_()
    nn.functional.rms_norm(expected, (32,), gain, 1e-6).sum().backward()
    torch.testing.assert_close(dx, expected.grad)
    torch.testing.assert_close(dy.float(), dx, rtol=2**-7, atol=0)  # interpreted, halves are cut off


@pytest.mark.parametrize("encoding", ["fox", "prism"])
def test_a_model_with_these_kernels(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients are those of PyTorch's norms, under autocast too; hooks on a norm are still called."""
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, encoding=encoding, norm="rms",
        qk_norm=True,
    )  # fmt: skip
    model = dr.DeadReckonForCausalLM(config).to(DEVICE)
    ids = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    calls = list[torch.dtype]()

    def loss(kernels: bool, half: bool) -> tuple[Tensor, dict[str, Tensor]]:
        def use(x: Tensor) -> bool:
            if kernels:
                calls.append(x.dtype)
            return kernels

        monkeypatch.setattr(norms, "has_kernels", use)
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            value = model(ids, labels=ids).loss
        value.backward()
        return value.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    one, other = loss(True, False), loss(False, False)
    assert len(calls) == 8  # in each layer the residual's twice, the queries' and the keys'
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    one, other = loss(True, True), loss(False, True)
    torch.testing.assert_close(one[0], other[0], rtol=2**-7, atol=0)

    seen = list[torch.dtype]()
    model.model.layers[0].input_layernorm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loss(True, False)
    assert seen == [torch.float32]


def test_prism_reads_what_autocast_has_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recurrent network does; linear maps read halves."""
    monkeypatch.setattr(norms, "has_kernels", lambda x: True)
    norm, x = nn.RMSNorm(32, eps=1e-6).to(DEVICE), drawn(2, 3, 32)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert norms.residual_norm(norm, x)[1].dtype == torch.bfloat16
        assert norms.residual_norm(norm, x, cast=False)[1].dtype == torch.float32
    assert dr.ENCODINGS["prism"].precise and not dr.ENCODINGS["path"].precise


@pytest.mark.parametrize("vocabulary", [100, 4096 + 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_in_place(vocabulary: int, dtype: torch.dtype) -> None:
    """Losses and gradients, with logits that are far apart, or minus infinity, and rows with a stride."""
    logits = 20 * drawn(5, vocabulary + 12)[:, :vocabulary].to(dtype)
    logits[1, :60] = -torch.inf
    targets = torch.tensor([0, 99, 64, vocabulary - 1, 7], device=DEVICE).unsqueeze(1)
    exact = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets[:, 0], reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    unchanged = logits.clone()
    losses = cross_entropy_(unchanged, targets, False)
    assert torch.equal(unchanged, logits)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    plain = logits.clone()
    torch.testing.assert_close(
        _cross_entropy_(plain, targets, True)[:, 0].double(), expected.detach(), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(cross_entropy_(logits, targets, True), losses, rtol=0, atol=0)
    # exp of a difference of numbers up to 100 in float32; then one rounding.
    error = (logits.double() - gradient).abs()
    assert bool((error <= (torch.finfo(dtype).eps + 400 * 2.0**-24) * gradient.abs() + 1e-7).all())


def test_a_target_that_there_is_not() -> None:
    """It has no loss, rather than that of what lies behind its row."""
    losses = cross_entropy_(drawn(2, 100), torch.tensor([[150], [3]], device=DEVICE), False)
    assert losses.isnan().tolist() == [True, False]


def test_norms_of_other_kinds_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a `forward` of its own, and sums that are wider than the residual."""
    monkeypatch.setattr(norms, "has_kernels", lambda x: True)

    class Doubled(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x, plain = drawn(2, 3, 32), nn.RMSNorm(32, eps=1e-6).to(DEVICE)
    doubled = norms.residual_norm(Doubled(32, eps=1e-6).to(DEVICE), x)[1]
    torch.testing.assert_close(doubled, 2 * norms.residual_norm(plain, x)[1])
    assert norms.residual_norm(plain, x.bfloat16(), x)[0].dtype == torch.float32
