"""PaTH's two kernels for one token: against the definition in float64, and in whole models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_directions import DEVICE, definition
from test_steps import CLOSE, as_on_a_gpu, decode, kernel_model
from test_streaming import prompts
from torch import Tensor
from torch.nn.functional import linear, logsigmoid
from transformers import DynamicCache

from deadreckon.encodings import base, maps
from deadreckon.ops.directions import convolve
from deadreckon.ops.token import directions_of_token, maps_of_token

__all__ = ["as_on_a_gpu"]  # a fixture

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="interprets kernels; on a GPU, test_steps_gpu.py has models",
)


@pytest.mark.parametrize(("batch", "inputs", "rows"), [(1, 70, (5,)), (3, 1100, (7, 2, 9)), (2, 64, (32, 1))])
def test_maps_of_one_token(batch: int, inputs: int, rows: tuple[int, ...]) -> None:
    """Sums of so many products of numbers of about 1, each off by ε: endings make them no larger than twice that."""
    torch.manual_seed(0)
    x = torch.randn(batch, 1, inputs, device=DEVICE)
    parts = [
        (torch.randn(n, inputs, device=DEVICE), torch.randn(n, device=DEVICE) if n != 2 else None, ending, 0.5)
        for n, ending in zip(rows, ("none", "strength", "log gate"), strict=False)
    ]
    found = maps_of_token(x, parts)
    for (weight, bias, ending, scale), y in zip(parts, found, strict=True):
        exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
        exact = {"none": exact, "strength": 2 * exact.sigmoid(), "log gate": scale * logsigmoid(exact)}[ending]
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=inputs * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_maps_round_as_products_do(dtype: torch.dtype) -> None:
    """To the input's dtype, before what follows; weights of another are cast, as by autocast."""
    x, weight = torch.full((1, 1, 16), 1 / 3, dtype=dtype, device=DEVICE), torch.full((1, 16), 1 / 3, device=DEVICE)
    logit = (x.double() * weight.to(dtype).double()).sum().to(dtype)
    for ending, expected in (("none", logit), ("strength", 2 * logit.double().sigmoid())):
        [y] = maps_of_token(x, [(weight, None, ending, 1.0)])
        assert y.dtype == (dtype if ending == "none" else torch.float32)
        assert float(y) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "heads", "width", "rank", "place", "activation", "epsilon"),
    [(1, 2, 16, 5, (0,), "none", 0.0), (2, 1, 24, 8, (1, 7), "silu", 1e-6), (2, 3, 8, 4, (9,), "none", 0.0)],
)
def test_directions_of_one_token(
    batch: int, heads: int, width: int, rank: int, place: tuple[int, ...], activation: str, epsilon: float
) -> None:
    torch.manual_seed(0)
    channels, places = heads * width, torch.tensor(place).unsqueeze(1)
    low, up = torch.randn(batch, 1, rank).double(), torch.randn(channels, rank).double()
    recent, filters = torch.randn(batch, 6, channels).double(), torch.randn(3, channels).double()
    x = torch.cat([recent, linear(low, up)], dim=1)
    expected = definition(x, filters, places, heads, activation, epsilon)
    inputs = [y.float().to(DEVICE) for y in (low, up, recent, filters)]
    w, kept = directions_of_token(*inputs, places.to(DEVICE), heads, activation, epsilon)
    limit = {"rtol": 0, "atol": 100 * torch.finfo(torch.float32).eps, "check_dtype": False}  # as in test_directions
    torch.testing.assert_close(w.cpu(), expected, **limit)
    torch.testing.assert_close(kept.cpu(), x[:, 1:], **limit)
    assert torch.equal(kept[:, :-1].cpu(), inputs[2][:, 1:].cpu())
    filters = torch.randn(4, channels).double()  # of another width, and no unit vectors
    plain, _ = directions_of_token(
        *inputs[:3], filters.float().to(DEVICE), places.to(DEVICE), heads, "none", 0.0, False
    )
    torch.testing.assert_close(plain.flatten(2).cpu(), convolve(x, filters, places), **limit)
    inputs[3] = inputs[3].mT.contiguous().mT  # strides that a file of weights may have
    again, _ = directions_of_token(*inputs, places.to(DEVICE), heads, activation, epsilon)
    assert torch.equal(again, w)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels of this file as they are launched in encodings, which take every step for one on a GPU."""
    launched = list[str]()

    def counted(name: str, launch: Any) -> Any:
        return lambda *arguments: (launched.append(name), launch(*arguments))[1]

    monkeypatch.setattr(maps, "has_kernels", lambda x: True)
    monkeypatch.setattr(maps, "maps_of_token", counted("maps", maps_of_token))
    monkeypatch.setattr(base, "directions_of_token", counted("directions", directions_of_token))
    return launched


@interpreted
@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("path-fox", ["maps", "directions"]),
        ("rope-path-fox", ["maps", "directions"]),
        ("conformal-sympow", ["maps"]),
        ("selective-rope", ["directions"]),
    ],
)
@torch.no_grad()
def test_steps_of_models_give_what_one_pass_gives(encoding: str, expected: list[str], launches: list[str]) -> None:
    """From the second token on, so that the convolution meets the beginning of the sequence, and across closings."""
    model, ids = kernel_model(encoding), prompts(2, 14)
    logits, cache = model(ids).logits, DynamicCache(config=model.config)
    model(ids[:, :1], past_key_values=cache)
    launches.clear()
    torch.testing.assert_close(decode(model, ids[:, :2], cache, 1), logits[:, 1:2], **CLOSE)
    assert launches == expected
    torch.testing.assert_close(decode(model, ids, cache, 2), logits[:, 2:], **CLOSE)


@interpreted
@torch.no_grad()
def test_what_stands_in_a_maps_place_is_called(launches: list[str]) -> None:
    """A module of another class, as adapters are: it adds to the logit. A hook; a function in place of `forward`."""

    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * gate(x)

    encoding, x = kernel_model("path-fox").model.layers[0].self_attn.encoding, torch.randn(1, 1, 16)
    context, gate = base.Context.of(x).remembering({}), encoding.gate
    torch.testing.assert_close(encoding(x, context).log_gate, logsigmoid(gate(x)))
    assert launches == ["maps"]
    encoding.gate = Doubled()
    torch.testing.assert_close(encoding(x, context).log_gate, logsigmoid(2 * gate(x)))
    encoding.gate, heard = gate, list[Tensor]()
    hook = gate.register_forward_hook(lambda _, __, y: heard.append(y))
    encoding(x, context)
    assert len(heard) == 1
    hook.remove()
    gate.forward = lambda x: torch.zeros(1, 1, 2)  # as accelerate does, whose weights may be nowhere until then
    torch.testing.assert_close(encoding(x, context).log_gate, torch.full((1, 1, 2), -math.log(2)))
    assert launches == ["maps", "directions", "directions", "directions"]
