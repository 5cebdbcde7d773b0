"""Invalid input raises a ValueError that names the argument, what was expected and what came; never a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import deadreckon as dr

B, T, HQ, H, D, E = 2, 6, 4, 2, 8, 5


def good() -> dict[str, Any]:
    return {"q": torch.randn(B, T, HQ, D), "k": torch.randn(B, T, H, D), "v": torch.randn(B, T, H, E)}


def rotation(*shape: int, values: bool = False) -> dr.Rotation:
    return dr.Rotation(torch.randn(*shape), values)


def householder(w: tuple[int, ...] = (B, T, H, D), beta: tuple[int, ...] = (B, T, H)) -> dr.Householder:
    return dr.Householder(torch.randn(*w), torch.rand(*beta))


def bounds(*values: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    one = {name: x[:1] for name, x in good().items()}
    return {**one, "cu_seqlens": torch.tensor(values, dtype=dtype)}


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "q is no tensor": (lambda: {"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    "q of integers": (lambda: {"q": torch.ones(B, T, HQ, D, dtype=torch.int64)}, "q: expected a floating-point tensor"),
    "q of three dimensions": (lambda: {"q": torch.randn(B, T, D)}, r"q: expected 4 dimensions .* \(2, 6, 8\)"),
    "no tokens": (lambda: {"q": torch.randn(B, 0, HQ, D)}, "q: expected every dimension to be at least 1"),
    "k too short": (lambda: {"k": torch.randn(B, T - 1, H, D)}, "k: expected .*2, 6, H, 8.* got .*2, 5, 2, 8"),
    "k too narrow": (lambda: {"k": torch.randn(B, T, H, D - 2)}, "k: expected"),
    "k of another batch": (lambda: {"k": torch.randn(B + 1, T, H, D)}, "k: expected"),
    "v of other heads": (lambda: {"v": torch.randn(B, T, HQ, E)}, "v: expected"),
    "dtypes differ": (lambda: {"v": torch.randn(B, T, H, E).double()}, "v: expected q's dtype torch.float32"),
    "devices differ": (lambda: {"k": torch.randn(B, T, H, D, device="meta")}, "k: expected it on q's device cpu"),
    "heads do not divide": (lambda: {"q": torch.randn(B, T, 3, D)}, "q: expected a multiple of k's 2 heads, got 3"),
    "transport is a tensor": (lambda: {"transport": torch.ones(1)}, "transport: expected None.* got a Tensor"),
    "angles of odd heads": (lambda: {"transport": rotation(B, T, 3, D // 2)}, r"transport.angles: .* in \[1, 2, 4\]"),
    "angles too wide": (lambda: {"transport": rotation(B, T, 1, D)}, "transport.angles: expected"),
    "angles of 3 dimensions": (lambda: {"transport": rotation(B, T, D // 2)}, "transport.angles: expected"),
    "values of another width": (lambda: {"transport": rotation(B, T, 1, D // 2, values=True)}, "E = D = 8, got v with"),
    "values too wide to turn": (
        lambda: {"v": torch.randn(B, T, H, D + 2), "transport": rotation(B, T, 1, D // 2, values=True)},
        "E = D = 8, got v with E = 10",
    ),
    "odd D": (
        lambda: {
            "q": torch.randn(B, T, HQ, 7), "k": torch.randn(B, T, H, 7), "transport": rotation(B, T, 1, 3),
        },
        "even D, got D = 7",
    ),
    "w of query heads": (lambda: {"transport": householder(w=(B, T, HQ, D))}, "transport.w: expected"),
    "transports the other way round": (
        lambda: {"transport": (householder(), rotation(B, T, 1, D // 2))},
        r"transport: expected .* or a tuple \(Rotation, Householder\), got a tuple of Householder, Rotation",
    ),
    "two rotations": (
        lambda: {"transport": (rotation(B, T, 1, D // 2), rotation(B, T, 1, D // 2))},
        "transport: expected .* got a tuple of Rotation, Rotation",
    ),
    "a list of transports": (
        lambda: {"transport": [rotation(B, T, 1, D // 2), householder()]},
        "transport: expected .* got a list of Rotation, Householder",
    ),
    "one transport in a tuple": (lambda: {"transport": (householder(),)}, "transport: .* got a tuple of Householder"),
    "angles for each query head beside steps": (
        lambda: {"transport": (rotation(B, T, HQ, D // 2), householder())},
        rf"transport.angles: expected .* with Hr in \[1, {H}\], got",
    ),
    "w beside a rotation": (
        lambda: {"transport": (rotation(B, T, 1, D // 2), householder(w=(B, T, HQ, D)))},
        "transport.w: expected",
    ),
    "values too wide to turn beside steps": (
        lambda: {"transport": (rotation(B, T, 1, D // 2, values=True), householder())},
        "transport.values: turning values needs E = D",
    ),
    "chunked powers beside both": (
        lambda: {
            "transport": (rotation(B, T, 1, D // 2), householder()),
            "score": dr.Power(2, form="chunked"),
        },
        "score.form: Householder steps allow",
    ),
    "beta of 4 dimensions": (lambda: {"transport": householder(beta=(B, T, H, 1))}, "transport.beta: expected"),
    "gate of odd heads": (lambda: {"log_gate": torch.randn(B, T, 3)}, "log_gate: expected .*Hq = 4, H = 2"),
    "gate of other tokens": (lambda: {"log_gate": torch.randn(B, T + 1, H)}, "log_gate: expected"),
    "gate is a number": (lambda: {"log_gate": -1.0}, "log_gate: expected a torch.Tensor, got float"),
    "unknown score": (lambda: {"score": "sigmoid"}, "score: expected 'softmax', 'stick-breaking' or Power"),
    "score is a tensor": (lambda: {"score": torch.ones(2)}, "score: expected"),
    "chunks of reflections": (
        lambda: {"score": dr.Power(2, form="chunked"), "transport": householder()}, "score.form: .* got 'chunked'",
    ),
    "recurrent reflections": (
        lambda: {"score": dr.Power(2, form="recurrent"), "transport": householder()}, "score.form: .* got 'recurrent'",
    ),
    "scale is infinite": (lambda: {"scale": float("inf")}, "scale: expected a finite number"),
    "scale is a tensor": (lambda: {"scale": torch.tensor(1.0)}, "scale: expected a finite number"),
    "packed batch": (lambda: {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32)}, "need B = 1, got B = 2"),
    "bounds of floats": (lambda: bounds(0, T, dtype=torch.float32), "cu_seqlens: expected an int32 tensor"),
    "bounds are a list": (lambda: {**bounds(0, T), "cu_seqlens": [0, T]}, "cu_seqlens: expected an int32 tensor"),
    "bounds unsorted": (lambda: bounds(0, 4, 2, T), r"sorted boundaries, got \[0, 4, 2, 6\]"),
    "bounds too short": (lambda: bounds(0, T - 1), "from 0 to T = 6, got 0 to 5"),
    "bounds from one": (lambda: bounds(1, T), "cu_seqlens: expected it to run from 0"),
    "one bound": (lambda: bounds(0), "cu_seqlens: expected shape"),
    "no kernels": (lambda: {"impl": "triton"}, "impl: 'triton' needs"),
    "unknown impl": (lambda: {"impl": "fast"}, "impl: expected 'auto'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        dr.attend(**{**good(), **changes()})


@pytest.mark.parametrize("p", [0, 1, 3, -2, 2.0, True, "2"])
def test_powers_are_even(p: Any) -> None:
    with pytest.raises(ValueError, match=r"Power\.p: expected an even integer"):
        dr.Power(p)


def test_forms_are_known() -> None:
    with pytest.raises(ValueError, match=r"Power\.form: expected"):
        dr.Power(2, form="linear")  # type: ignore[arg-type]


SIZES = st.integers(0, 3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shapes_give_an_answer_or_a_value_error(data: st.DataObject) -> None:
    """Arguments of all shapes, mostly wrong: attend answers with the right shape, or says what is wrong."""
    rank = st.sampled_from([4, 4, 4, 4, 3])

    def draw(usual: tuple[int, ...]) -> Tensor:
        if data.draw(st.integers(0, 7)):
            return torch.randn(usual)
        return torch.randn(data.draw(st.lists(SIZES, min_size=(r := data.draw(rank)), max_size=r)))

    batch, length, heads, group, width = (data.draw(st.integers(1, 3)) for _ in range(5))
    width *= 2
    q, k, v = (draw((batch, length, n, width)) for n in (heads * group, heads, heads))
    transport = data.draw(st.sampled_from(["none", "rotation", "householder"]))
    arguments: dict[str, Any] = {}
    if transport == "rotation":
        turns = data.draw(st.sampled_from([1, heads, heads * group]))
        arguments["transport"] = dr.Rotation(draw((batch, length, turns, width // 2)), data.draw(st.booleans()))
    elif transport == "householder":
        arguments["transport"] = dr.Householder(draw((batch, length, heads, width)), draw((batch, length, heads)))
    if data.draw(st.booleans()):
        arguments["log_gate"] = -draw((batch, length, heads)).abs()
    if data.draw(st.integers(0, 3)) == 0:
        cuts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        arguments["cu_seqlens"] = torch.tensor([0, *cuts], dtype=torch.int32)
    arguments["score"] = data.draw(st.sampled_from(["softmax", "stick-breaking", dr.Power(2)]))
    try:
        output = dr.attend(q, k, v, **arguments)
    except ValueError as error:
        assert str(error).split(":")[0].split(".")[0] in {"q", "k", "v", *arguments}
    else:
        assert output.shape == (*q.shape[:3], v.shape[3])
        assert output.isfinite().all()
