"""The equation of DESIGN.md, written out pair by pair in NumPy, against every implementation of ``attend``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import deadreckon as dr

Score = str | dr.Power
IMPLS = ["reference", "blockwise"]
SOFTMAX, STICK, POWER2, POWER4 = "softmax", "stick-breaking", dr.Power(2), dr.Power(4)
SCORES = [SOFTMAX, STICK, POWER2, POWER4]
TRANSPORTS = ["none", "one", "kv", "query", "one-values", "kv-values", "query-values", "householder", "one+householder"]
GATES = ["none", "query-constant", "kv-constant", "kv", "query"]
# A quarter of the combinations, holding every pair (transport, gate), (transport, score) and (gate, score).
PAIRED = [(t, g, SCORES[(a + b) % 4]) for a, t in enumerate(TRANSPORTS) for b, g in enumerate(GATES)]
SIZES = {"length": 9, "batch": 2, "heads": 2, "query_heads": 4, "dim": 6, "seed": 0}
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_score = pytest.mark.parametrize("score", SCORES, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose time to threads waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """One call of ``attend``: its tensors by name (the leaves of a gradient) and its other arguments."""

    leaves: dict[str, Tensor]
    values: bool = False
    score: Score = SOFTMAX
    scale: float | None = None
    cuts: tuple[int, ...] | None = None

    def attend(self, impl: str) -> Tensor:
        """The implementation's answer."""
        x = self.leaves
        rotation = dr.Rotation(x["angles"], values=self.values) if "angles" in x else None
        steps = dr.Householder(x["w"], x["beta"]) if "w" in x else None
        transport: Any = (rotation, steps) if rotation and steps else rotation or steps
        cuts = None if self.cuts is None else torch.tensor(self.cuts, dtype=torch.int32)
        rest = {"log_gate": x.get("log_gate"), "score": self.score, "scale": self.scale, "cu_seqlens": cuts}
        return dr.attend(x["q"], x["k"], x["v"], transport=transport, impl=impl, **rest)

    def change(self, **leaves: Tensor) -> Case:
        """The same call with some tensors replaced or added."""
        return replace(self, leaves=self.leaves | leaves)

    def tokens(self, start: int, stop: int) -> Case:
        """The call on tokens start..stop-1 alone."""
        leaves = {name: x[:, start:stop] if x.ndim > 1 else x for name, x in self.leaves.items()}
        return replace(self, cuts=None, leaves=leaves)


def make_case(transport: str = "none", gate: str = "none", **options: Any) -> Case:
    """Random float64 tensors for the named factors (SIZES) and a Case's options; E is D only for rotated values."""
    length, batch, heads, query_heads, dim, seed = (options.pop(name, size) for name, size in SIZES.items())
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    counts, values = {"one": 1, "kv": heads, "query": query_heads}, "-values" in transport
    x = {"q": normal(batch, length, query_heads, dim), "k": normal(batch, length, heads, dim)}
    x["v"] = normal(batch, length, heads, dim if values else dim - 1)
    if transport.endswith(
        "householder"
    ):  # neither unit vectors nor beta <= 2 are promised, yet long products stay bounded
        x["w"] = 0.9 * torch.nn.functional.normalize(normal(batch, length, heads, dim), dim=-1)
        x["beta"] = 2.4 * normal(batch, length, heads).sigmoid()
    turns = transport.removesuffix("+householder").removesuffix("-values")
    if turns in counts:
        x["angles"] = 2 * normal(batch, length, counts[turns], dim // 2)
    if gate != "none":
        count = counts[gate.removesuffix("-constant")]
        x["log_gate"] = -normal(*((count,) if "constant" in gate else (batch, length, count))).abs() * 0.7
    return Case(x, values=values, **options)


def rotation_matrix(angles: np.ndarray) -> np.ndarray:
    """The D x D matrix that turns every pair (m, m + D/2) by angles[m]."""
    cosine, sine = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cosine, -sine], [sine, cosine]])


def row_weights(logits: list[float], gates: list[float], score: Score) -> list[float]:
    """The weights of one query from its scaled logits and gate products, the query's own token last."""
    if score == STICK:
        sigma = [1 / (1 + math.exp(-z)) for z in logits[:-1]]
        sticks = [chance * math.prod(1 - later for later in sigma[j + 1 :]) for j, chance in enumerate(sigma)]
        return [a * g for a, g in zip([*sticks, 0.0], gates, strict=True)]
    kappa = [math.exp(z) if score == SOFTMAX else z**score.p for z in logits]
    total = sum(a * g for a, g in zip(kappa, gates, strict=True))
    return [a * g / total if total else 0.0 for a, g in zip(kappa, gates, strict=True)]


def oracle(case: Case) -> Tensor:
    """The equation, with a D x D matrix per token and one explicit product of them per pair (i, j)."""
    batch, length, query_heads, dim = case.leaves["q"].shape
    scale = dim**-0.5 if case.scale is None else case.scale
    cuts = (0, length) if case.cuts is None else case.cuts
    first = [start for start, stop in pairwise(cuts) for _ in range(start, stop)]
    out = np.zeros((batch, length, query_heads, case.leaves["v"].shape[-1]))
    for b, h in np.ndindex(batch, query_heads):
        full = {n: x.expand(batch, length, -1) if x.ndim == 1 else x for n, x in case.leaves.items()}
        x = {n: array[b, :, h // (query_heads // array.shape[2])].numpy() for n, array in full.items()}
        steps = turns = [np.eye(dim)] * length
        if "angles" in x:
            steps = turns = [rotation_matrix(angles) for angles in x["angles"]]
        if "w" in x:
            reflections = [np.eye(dim) - beta * np.outer(w, w) for w, beta in zip(x["w"], x["beta"], strict=True)]
            steps = [turn @ reflection for turn, reflection in zip(turns, reflections, strict=True)]
        factors = [math.exp(g) for g in x["log_gate"]] if "log_gate" in x else [1.0] * length
        for i in range(length):
            route = {j: reduce(np.matmul, steps[j + 1 : i + 1], np.eye(dim)) for j in range(first[i], i + 1)}
            logits = [scale * (x["k"][j] @ matrix @ x["q"][i]) for j, matrix in route.items()]
            gates = [math.prod(factors[j + 1 : i + 1]) for j in route]
            for j, weight in zip(route, row_weights(logits, gates, case.score), strict=True):
                turned = reduce(np.matmul, turns[j + 1 : i + 1], np.eye(dim))
                out[b, i, h] += weight * (turned.T @ x["v"][j] if case.values else x["v"][j])
    return torch.from_numpy(out)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Equal to an absolute and relative tolerance; NaN is never equal."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def assert_both_match(case: Case) -> None:
    """Both implementations against the oracle, to the tolerance each one owes."""
    expected = oracle(case)
    assert_near(case.attend("reference"), expected, 1e-12)
    assert_near(case.attend("blockwise"), expected, 1e-11)


def gradients(case: Case, impl: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of a fixed random projection of it for every leaf."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in case.leaves.items()}
    out = replace(case, leaves=leaves).attend(impl)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return out.detach(), dict(zip(leaves, torch.autograd.grad((out * weight).sum(), [*leaves.values()]), strict=True))


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's own attention, in the layout of ``attend``."""
    options = {"enable_gqa": True, "is_causal": "attn_mask" not in options} | options
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def turn(x: Tensor, phase: Tensor) -> Tensor:
    """Hugging Face Llama's RoPE: x cos + rotate_half(x) sin; phase (T, D/2), x (B, T, heads, D)."""
    left, right = x.chunk(2, dim=-1)
    full = torch.cat([phase, phase], dim=-1)[:, None]
    return x * full.cos() + torch.cat([-right, left], dim=-1) * full.sin()


@pytest.mark.parametrize(("transport", "gate", "score"), PAIRED, ids=str)
def test_equation(transport: str, gate: str, score: Score) -> None:
    scale = [None, 6.0, -0.6][len(transport + gate) % 3]  # 6.0: logits of 40 and more
    assert_both_match(make_case(transport, gate, score=score, scale=scale))


@pytest.mark.parametrize(
    ("transport", "gate"),
    [("none", "kv"), ("query-values", "none"), ("householder", "query"), ("kv-values+householder", "kv")],
)
@each_score
@pytest.mark.parametrize("cuts", [(0, 1, 5, 5, 13), (0, 0, 6, 7, 13, 13)])
def test_packed_documents(transport: str, gate: str, score: Score, cuts: tuple[int, ...]) -> None:
    case = make_case(transport, gate, score=score, cuts=cuts, scale=-0.6, batch=1, length=13)
    assert_both_match(case)
    for impl in IMPLS:
        separate = [case.tokens(start, stop).attend(impl) for start, stop in pairwise(cuts) if stop > start]
        assert_near(case.attend(impl), torch.cat(separate, dim=1))


@pytest.mark.parametrize(
    ("transport", "score"),
    [("kv-values", SOFTMAX), ("householder", STICK), ("one", POWER2), ("kv+householder", SOFTMAX)],
)
def test_other_shapes(transport: str, score: Score) -> None:
    for heads, query_heads, length in ((1, 3, 7), (2, 2, 7), (1, 1, 1), (1, 1, 70)):
        shape = {"length": length, "batch": 1, "heads": heads, "query_heads": query_heads, "dim": 4}
        assert_both_match(make_case(transport, "kv", score=score, **shape))


@pytest.mark.parametrize(("transport", "gate", "score"), PAIRED[::7] + PAIRED[20:21] + PAIRED[36:], ids=str)
def test_gradients(transport: str, gate: str, score: Score) -> None:
    for length, cuts in ((70, None), (130, (0, 1, 1, 66, 130))):
        case = make_case(transport, gate, score=score, cuts=cuts, batch=1, length=length)
        (expected, expected_grads), (actual, grads) = gradients(case, "reference"), gradients(case, "blockwise")
        assert_near(actual, expected, 1e-11)
        for name, grad in expected_grads.items():
            assert grad.abs().max() > 1e-3, name
            assert_near(grads[name], grad, 1e-10)


@each_impl
def test_trivial_factors_are_plain_attention(impl: str) -> None:
    q, k, v, w, beta = make_case("householder", length=70).leaves.values()
    case = Case({"q": q, "k": k, "v": v})
    extras = [{}, {"log_gate": torch.zeros(2, 70, 4).double()}, {"log_gate": torch.zeros(2).double()}]
    extras += [{"angles": torch.zeros(2, 70, 4, 3).double()}, {"w": w, "beta": 0 * beta}]
    for extra in extras:
        assert_near(case.change(**extra).attend(impl), plain(q, k, v))
    for scale in (0.5, 0.0, -0.6):
        assert_near(replace(case, scale=scale).attend(impl), plain(q * scale, k, v, scale=1.0))


@each_impl
def test_constant_steps_are_rope(impl: str) -> None:
    case = make_case(length=70, dim=8)
    q, k, v = case.leaves.values()
    theta = 10000.0 ** -(torch.arange(4).double() / 4)
    phase = torch.arange(70).double()[:, None] * theta
    actual = case.change(angles=theta.expand(2, 70, 1, 4)).attend(impl)
    assert_near(actual, plain(turn(q, phase), turn(k, phase), v))
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    full = torch.cat([phase, phase], dim=-1)[None]
    assert_near(actual, plain(*llama.apply_rotary_pos_emb(q, k, full.cos(), full.sin(), unsqueeze_dim=2), v))


@each_impl
def test_gates_are_alibi_and_fox(impl: str) -> None:
    case = make_case("householder", "query", length=70, scale=0.3)
    q, k, v, _, beta, gate = case.leaves.values()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    place = torch.arange(70)
    bias = (-slopes[:, None, None] * (place[:, None] - place)).masked_fill(place[:, None] < place, -math.inf)
    alone = Case({"q": q, "k": k, "v": v}, scale=0.3)
    assert_near(alone.change(log_gate=-slopes).attend(impl), plain(q, k, v, attn_mask=bias, scale=0.3))
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)  # a gate per query head: a key per query head
    c = gate.cumsum(dim=1)[..., None]
    longer = torch.cat([q, c / 0.3, torch.ones_like(c) / 0.3], -1), torch.cat([k, torch.ones_like(c), -c], -1)
    fox = alone.change(log_gate=gate).attend(impl)
    assert_near(fox, plain(*longer, v, scale=0.3))
    assert_near(case.change(beta=0 * beta).attend(impl), fox)


@each_impl
def test_rotations_and_reflections_are_each_alone_without_the_other(impl: str) -> None:
    """β = 0 leaves the rotation, to the last bit where the same sums are added up; angles of 0 the reflections."""
    for transport in ("one+householder", "kv-values+householder"):
        both = make_case(transport, "query", length=70, score=STICK)
        without = {name: x for name, x in both.leaves.items() if name not in ("w", "beta")}
        still = both.change(beta=torch.zeros_like(both.leaves["beta"]))
        assert torch.equal(still.attend(impl), replace(both, leaves=without).attend(impl))
        reflections = {name: x for name, x in both.leaves.items() if name != "angles"}
        unturned = both.change(angles=torch.zeros_like(both.leaves["angles"]))
        assert torch.equal(unturned.attend(impl), replace(both, leaves=reflections, values=False).attend(impl))


@each_impl
def test_grouped_queries_are_repeated_keys(impl: str) -> None:
    for transport, score in (
        ("kv-values", SOFTMAX),
        ("householder", STICK),
        ("kv", POWER2),
        ("kv+householder", SOFTMAX),
    ):
        case = make_case(transport, "kv", score=score, length=70)
        repeated = {name: x.repeat_interleave(2, dim=2) for name, x in case.leaves.items() if name != "q"}
        assert_near(case.attend(impl), case.change(**repeated).attend(impl))


@each_impl
@each_score
@pytest.mark.parametrize("transport", ["query-values", "householder"])
def test_causality(transport: str, score: Score, impl: str) -> None:
    before = make_case(transport, "query", score=score, length=80)
    other = make_case(transport, "query", length=80, seed=1)
    out = before.attend(impl)
    for t in (1, 33, 66):
        mixed = {n: torch.cat([x[:, :t], other.leaves[n][:, t:]], dim=1) for n, x in before.leaves.items()}
        after = before.change(**mixed).attend(impl)
        assert_near(after[:, :t], out[:, :t])
        assert (after[:, t + 1 :] - out[:, t + 1 :]).abs().amax(dim=(0, 2, 3)).min() > 1e-6
        assert_near(before.tokens(0, t).attend(impl), out[:, :t])


@pytest.mark.parametrize(("impl", "dtype"), [("blockwise", torch.float32), ("reference", torch.float64)])
@pytest.mark.parametrize("gate", ["none", "kv"])
@each_score
def test_huge_first_angle_changes_nothing(score: Score, gate: str, impl: str, dtype: torch.dtype) -> None:
    case = make_case("query-values", gate, score=score, length=70)
    case = replace(case, leaves={name: leaf.to(dtype) for name, leaf in case.leaves.items()})
    later = case.leaves["angles"][:, 1:]
    first = torch.zeros_like(later[:, :1])
    still, spun = (case.change(angles=torch.cat([x, later], dim=1)).attend(impl) for x in (first, first + 1e6))
    assert_near(spun, still, 1e-5)


@pytest.mark.parametrize("gates", [{}, {"log_gate": torch.zeros(1)}], ids=["ungated", "gated"])
def test_phases_stay_right_far_out(gates: dict[str, Tensor]) -> None:
    length, step = 20_000, torch.tensor(0.7, dtype=torch.float32)
    case = make_case("one-values", batch=1, length=length, heads=1, query_heads=1, dim=8)
    single = {name: leaf.float() for name, leaf in case.leaves.items()} | {"angles": step.expand(1, length, 1, 4)}
    phase = (torch.arange(length).double() * step.double())[:, None].expand(-1, 4)
    q, k, v = (turn(single[name].double(), phase)[0, :, 0] for name in "qkv")
    weights = (q[-5:] @ k.T * 8**-0.5 + torch.full((5, length), -math.inf).triu(length - 4)).softmax(dim=-1)
    turned_back = turn((weights @ v)[None, :, None], -phase[-5:])[0, :, 0]
    for values, expected in ((False, weights @ single["v"][0, :, 0].double()), (True, turned_back)):
        actual = replace(case, leaves=single | gates, values=values).attend("blockwise")[0, -5:, 0].double()
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@each_impl
@each_score
@pytest.mark.parametrize("transport", ["none", "query-values", "householder"])
def test_hard_reset_is_a_document_boundary(transport: str, score: Score, impl: str) -> None:
    for cuts in ((0, 5, 6, 64, 69, 70), range(71)):
        packed = make_case(transport, "query", score=score, cuts=tuple(cuts), batch=1, length=70)
        packed.leaves["log_gate"][:, ::3] = 0
        gate = packed.leaves["log_gate"].index_fill(1, torch.tensor(cuts[:-1]), -math.inf)
        out, grads = gradients(replace(packed, cuts=None).change(log_gate=gate), impl)
        expected, expected_grads = gradients(packed, impl)
        assert_near(out, expected, 1e-11)
        for name, grad in expected_grads.items():
            assert_near(grads[name], grad, 1e-10)


@each_impl
@each_score
def test_row_sums(score: Score, impl: str) -> None:
    case = make_case("householder", "query", score=score, length=70).change(v=torch.ones(2, 70, 2, 1).double())
    ungated = case.change(log_gate=torch.zeros(4).double())
    sums = torch.cat([case.attend(impl), ungated.attend(impl)])
    if score != STICK:
        assert_near(sums, torch.ones_like(sums))
    else:  # and with equal chances every step back takes half of what is left
        assert 0 < sums[:, 1:].min() <= sums.max() <= 1 + 1e-12
        halves = replace(ungated, scale=0.0).attend(impl)
        assert_near(halves, 1 - 0.5 ** torch.arange(70).double()[:, None, None].expand_as(halves))


@each_impl
@pytest.mark.parametrize("score", [POWER2, POWER4])
def test_power_rows_of_zero_logits_are_zero(score: dr.Power, impl: str) -> None:
    for name, rows in (("q", [0, 7, 66]), ("k", [0, 1, 2])):  # rows without a query, rows with no key behind them
        case = make_case("householder", "query", score=score, length=70)
        case.leaves[name][:, rows] = 0
        out, grads = gradients(case, impl)
        assert (out == 0).all(-1).all(-1).all(0).nonzero().flatten().tolist() == rows
        assert all(grad.isfinite().all() for grad in grads.values())
