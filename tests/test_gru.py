"""The recurrent network as one operator, on any device and as a kernel, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadreckon.encodings.recurrence import Recurrence
from deadreckon.ops.gru import LARGEST, gru, is_preferred
from deadreckon.ops.triton.gru import FEW, NARROW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(length: int, inputs: int, hidden: int, rows: int = 3) -> list[Tensor]:
    """x, the first state, W, U, b and c, as float32 numbers in float64; gates are from 0.02 to 0.98."""
    torch.manual_seed(0)
    gates = 3 * hidden
    shapes = (rows, length, inputs), (rows, hidden), (gates, inputs), (gates, hidden), (gates,), (gates,)
    scales = 1, 1, inputs**-0.5, hidden**-0.5, 1, 1
    drawn = (scale * torch.randn(*shape) for scale, shape in zip(scales, shapes, strict=True))
    return [x.double().requires_grad_() for x in drawn]


def expected(given: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The states, and the gradients of all that is given."""
    x, before, *weights = given
    states = torch.gru(x, before.unsqueeze(0), weights, True, 1, 0.0, True, False, True)[0]
    return [states.detach(), *torch.autograd.grad(states, given, grad)]


def found(given: list[Tensor], grad: Tensor) -> list[Tensor]:
    states = gru(*given)
    return [states.detach(), *torch.autograd.grad(states, given, grad)]


@pytest.mark.parametrize("length", [1, 9])
def test_operator_is_pytorchs_network(length: int) -> None:
    given = draw(length, 6, 5)
    grad = torch.randn(3, length, 5, dtype=torch.float64).transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(found(given, grad), expected(given, grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 4, 5, 3), (7, 12, 70, 3), (130, 3, 16, 3), (3, 4, NARROW + 2, FEW + 1)], ids=str)
def test_kernels_are_the_network(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A state sums up 2 · hidden products of about 1, and so many tokens; a gradient 3 · hidden of them, or rows."""
    monkeypatch.setattr("deadreckon.ops.gru.has_gru", lambda x, *_: x.dtype != torch.float64)
    length, _, hidden, rows = shape
    given = draw(*shape)
    grad = torch.randn(rows, length, hidden).double()
    exact, single = expected(given, grad), [x.detach().float().to(DEVICE).requires_grad_() for x in given]
    epsilon = max(3 * hidden, rows) * length * torch.finfo(torch.float32).eps
    for one, other in zip(found(single, grad.float().to(DEVICE)), exact, strict=True):
        limit = epsilon * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=limit, check_dtype=False)


@pytest.mark.parametrize("kernels", [False, True])
def test_autocast_changes_nothing(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in the backward pass alone."""
    monkeypatch.setattr("deadreckon.ops.gru.has_gru", lambda *_: kernels)
    given = [x.detach().float().to(DEVICE).requires_grad_() for x in draw(3, 4, 5)]
    grad = torch.randn(3, 3, 5, device=DEVICE)
    exact = found(given, grad)
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(found(given, grad), exact, rtol=0, atol=0)


def test_other_derivatives() -> None:
    """Forward-mode ones, of each input by itself, are those of finite differences; second ones are refused."""
    network = Recurrence(4, 5).double()
    x, before = torch.randn(2, 3, 4).double(), torch.randn(2, 5).double()
    inputs = {"x": x, "before": before, **dict(network.named_parameters())}

    def states(**given: Tensor) -> Tensor:
        given = inputs | given
        x, before = given.pop("x"), given.pop("before")
        return torch.func.functional_call(network, given, (x, before))

    for name, value in inputs.items():
        along = torch.randn_like(value)
        _, slope = torch.func.jvp(lambda y, name=name: states(**{name: y}), (value.detach(),), (along,))
        apart = (states(**{name: value + 1e-5 * along}) - states(**{name: value - 1e-5 * along})) / 2e-5
        torch.testing.assert_close(slope, apart, rtol=1e-7, atol=1e-8)
    with pytest.raises(RuntimeError, match=r"second derivatives need torch\.nn\.GRU; this computes first"):
        torch.autograd.grad(network(x.requires_grad_(), before).sum(), x, create_graph=True)


def test_many_units_of_many_rows_are_left_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadreckon.ops.gru.has_kernels", lambda _: True)
    sizes = [(264, 128), (264, 129), (265, 64), (265, 65)]
    assert [is_preferred(torch.zeros(rows, 1, 1), hidden) for rows, hidden in sizes] == [True, False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, LARGEST, LARGEST + 8])
def test_networks_of_any_size_train_on_a_gpu(hidden: int) -> None:
    """By our kernels or by cuDNN."""
    given = draw(40, 24, hidden)
    x, before, *weights = given
    network, grad = Recurrence(24, hidden), torch.randn(3, 40, hidden).double()
    with torch.no_grad():
        for own, drawn in zip(network.all_weights[0], weights, strict=True):
            own.copy_(drawn)
    exact, network = expected(given, grad), network.cuda()
    leaf = x.detach().float().cuda().requires_grad_()
    states = network(leaf, before.float().cuda())
    states.backward(grad.float().cuda())
    gradients = [leaf.grad, *(weight.grad for weight in network.all_weights[0])]
    for one, other in zip([states, *gradients], [*exact[:2], *exact[3:]], strict=True):
        assert one is not None
        limit = 3 * hidden * 40 * torch.finfo(torch.float32).eps * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.detach().cpu(), other, rtol=0, atol=limit, check_dtype=False)
