"""The contract of every encoding, and what each of them computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import AWAKE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deadreckon as dr
from deadreckon.encodings.alibi import slopes
from deadreckon.encodings.base import Context

RANDOM = ("randomized", "random-rotation", "random-rotation-values")  # drawn anew in each forward pass
STEADY = [name for name in dr.ENCODINGS if name not in RANDOM]
WIDTH, HEADS, KV_HEADS, VOCABULARY = 32, 4, 2, 11


def make_layer(name: str, **keywords: object) -> dr.AttentionLayer:
    torch.manual_seed(0)
    arguments = {"n_kv_heads": KV_HEADS, "vocab_size": VOCABULARY, "encoding_options": AWAKE.get(name), **keywords}
    return dr.AttentionLayer(WIDTH, HEADS, name, **arguments).double()  # type: ignore[arg-type]


def make_input(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def run(layer: dr.AttentionLayer, x: Tensor, ids: Tensor, **keywords: Tensor) -> Tensor:
    torch.manual_seed(2)  # random encodings draw the same
    return layer(x, token_ids=ids, **keywords)


def factors(layer: dr.AttentionLayer, x: Tensor, ids: Tensor | None = None) -> dr.Factors:
    return layer.encoding(x, dr.Context.of(x, ids))


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_causal(name: str) -> None:
    layer, (x, ids) = make_layer(name), make_input(90)
    changed, changed_ids = x.clone(), ids.clone()
    changed[:, 70:] += 1
    changed_ids[:, 70:] = (ids[:, 70:] + 1) % VOCABULARY
    before, after = run(layer, x, ids), run(layer, changed, changed_ids)
    torch.testing.assert_close(after[:, :70], before[:, :70], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 70:], before[:, 70:])


class HandOver(TorchDispatchMode):
    """Records host-device synchronisation: numbers read back from the device, tensors made of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "lift_fresh", "nonzero", "_pin_memory"):
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_a_cuda_graph_may_hold_it(name: str) -> None:
    """Whole sequences: neither device waits for the other."""
    layer, (x, ids) = make_layer(name), make_input(20)
    q, k = (torch.randn(2, 20, heads, WIDTH // HEADS, dtype=x.dtype) for heads in (HEADS, KV_HEADS))
    with HandOver() as noted:
        context = dr.Context.of(x, ids)
        layer.encoding.embed(x, context)
        layer.encoding(x, context)
        layer.encoding.widen(q, k, x, context)
    assert not noted.found


@pytest.mark.parametrize("name", STEADY)
@torch.no_grad()
def test_a_cuda_graph_may_hold_one_more_token(name: str) -> None:
    """Nor does a device wait then, be there padding or not, and what is kept of inputs is of the same shape."""
    layer, (x, ids), recent = make_layer(name), make_input(21), dict[str, torch.Tensor]()
    q, k = (torch.randn(2, 21, heads, WIDTH // HEADS, dtype=x.dtype) for heads in (HEADS, KV_HEADS))

    def advance(tokens: slice, context: dr.Context) -> None:
        layer.encoding.embed(x[:, tokens], context)
        layer.encoding(x[:, tokens], context)
        layer.encoding.widen(q[:, tokens], k[:, tokens], x[:, tokens], context)

    advance(slice(20), dr.Context.of(x[:, :20], ids[:, :20]).remembering(recent))
    shapes, last = {name: kept.shape for name, kept in recent.items()}, slice(20, 21)
    for places in (torch.full((1, 1), 20), torch.tensor([[20], [-1]])):
        with HandOver() as noted:
            advance(last, dr.Context(places, ids[:, last], length=1).remembering(recent))
        assert not noted.found
        assert {name: kept.shape for name, kept in recent.items()} == shapes


@pytest.mark.parametrize("name", STEADY)
def test_prefix_consistent(name: str) -> None:
    layer, (x, ids) = make_layer(name), make_input(90)
    torch.testing.assert_close(run(layer, x[:, :33], ids[:, :33]), run(layer, x, ids)[:, :33], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STEADY)
def test_packed_equals_separate(name: str) -> None:
    layer, (x, ids) = make_layer(name), make_input(90, batch=1)
    packed = run(layer, x, ids, cu_seqlens=torch.tensor([0, 1, 40, 90], dtype=torch.int32))
    separate = [run(layer, x[:, a:b], ids[:, a:b]) for a, b in ((0, 1), (1, 40), (40, 90))]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_a_nan_stays_in_its_document(name: str) -> None:
    """Short convolutions and cursors reach back over documents' ends, too."""
    layer, (x, ids) = make_layer(name), make_input(90, batch=1)
    documents, bad = torch.tensor([0, 30, 48, 90], dtype=torch.int32), x.clone()
    bad[0, 47] = torch.nan
    expected, found = (run(layer, y, ids, cu_seqlens=documents) for y in (x, bad))
    assert found[0, 47].isnan().all()
    for others in (slice(0, 30), slice(48, 90)):
        torch.testing.assert_close(found[:, others], expected[:, others], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", dr.ENCODINGS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_blockwise_layer_equals_reference_layer(name: str, qk_norm: bool) -> None:
    layer, (x, ids) = make_layer(name, qk_norm=qk_norm), make_input(80)
    found = run(layer, x, ids)
    layer.impl = "reference"
    torch.testing.assert_close(found, run(layer, x, ids), rtol=0, atol=1e-10)


def test_a_layer_is_scaled_dot_product_attention_of_its_projections() -> None:
    """Without positions; queries and keys are normalised each with a gain of its own."""
    layer, (x, _) = make_layer("nope", qk_norm=True), make_input(9)
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.uniform_(norm.weight)  # type: ignore[arg-type]

    def heads(projection: Any, norm: Any = None) -> Tensor:
        y = projection(x).unflatten(-1, (-1, WIDTH // HEADS))
        y = y if norm is None else y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        return y.transpose(1, 2)

    q, k, v = heads(layer.q_proj, layer.q_norm), heads(layer.k_proj, layer.k_norm), heads(layer.v_proj)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(layer(x), layer.o_proj(expected.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_every_parameter_learns_and_half_precision_runs(name: str) -> None:
    layer, (x, ids) = make_layer(name), make_input(40)
    run(layer, x, ids).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    half = layer.bfloat16()
    assert run(half, x.bfloat16(), ids).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(layer.float(), x.float(), ids).isfinite().all()


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_reset_parameters_is_a_fresh_draw(name: str) -> None:
    layer = make_layer(name)
    with torch.no_grad():
        for parameter in layer.encoding.parameters():
            parameter.fill_(7)
    layer.encoding.reset_parameters()
    assert all((p != 7).any() and p.isfinite().all() for p in layer.encoding.parameters())


def test_layers_say_what_is_wrong() -> None:
    for arguments, message in (
        ((30, 4), "d_model: expected a multiple"),
        ((32, 4, "rotary"), "encoding: expected one of nope"),
        ((32, 4, "path", 3), "n_kv_heads: expected a divisor"),
        ((32, 0), "n_heads: expected an integer"),
        ((32, 4, "learned-rotation"), "learned-rotation: expected vocab_size"),
    ):
        with pytest.raises(ValueError, match=message):
            dr.AttentionLayer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="encoding_options: 'path' does not take"):
        dr.AttentionLayer(32, 4, "path", encoding_options={"depth": 3})
    for name, option in (("learned-rotation", "initial"), ("conformal-sympow", "pace")):
        with pytest.raises(ValueError, match=f"{option}: expected one of .*; got 'x'"):
            dr.AttentionLayer(32, 4, name, vocab_size=5, encoding_options={option: "x"})
    layer = dr.AttentionLayer(32, 4, "learned-rotation", vocab_size=5)
    with pytest.raises(ValueError, match="expected token_ids"):
        layer(torch.randn(1, 3, 32))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, d_model = 32\)"):
        layer(torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match="token_ids: expected"):
        layer(torch.randn(1, 3, 32), token_ids=torch.zeros(1, 4, dtype=torch.int64))
    for options, message in (
        ({"encoding": ["path"]}, "encoding: expected one of"),
        ({"encoding": "path", "encoding_options": "rank"}, "'path' does not take 'rank': expected some of rank, "),
        ({"encoding": "path", "encoding_options": {"path": {"rank": 3}}}, "'path' does not take .*: expected some of"),
        ({"encoding": "nope", "encoding_options": {"rank": 3}}, "'nope' does not take .*: expected none"),
        ({"encoding": "path", "encoding_options": {"rank": "16"}}, "rank: expected a number, got '16'"),
        ({"encoding": "rope", "encoding_options": {"base": "10000"}}, "base: expected a number, got '10000'"),
        ({"max_length": 0}, "max_length: expected an integer of 1 or more, got 0"),
        ({"qk_norm_eps": -1.0}, "qk_norm_eps: expected 0 or more, got -1.0"),
        ({"impl": "trition"}, "impl: expected 'auto', 'reference', .*; got 'trition'"),
    ):
        with pytest.raises(ValueError, match=message):
            dr.AttentionLayer(32, 4, **options)
    with pytest.raises(ValueError, match=r"x: expected at least one token, got shape \(1, 0, 32\)"):
        layer(torch.randn(1, 0, 32))
    with pytest.raises(ValueError, match="token_ids: expected integers"):
        layer(torch.randn(1, 3, 32), token_ids=torch.zeros(1, 3))
    long = dr.AttentionLayer(32, 4, "randomized", encoding_options={"positions": 16})
    with pytest.raises(ValueError, match="17 tokens needs as many positions, got 16"):
        x = torch.randn(1, 17, 32)
        long.encoding.embed(x, dr.Context.of(x))


def test_states_do_not_lose_gradients_in_silence() -> None:
    layer, x = dr.AttentionLayer(32, 4, "path-fox"), torch.randn(1, 3, 32, requires_grad=True)
    with pytest.raises(ValueError, match=r"x: expected no gradients to be required \(or torch.no_grad\(\)\)"):
        layer(x, state=None)
    y, _ = layer(x.detach(), state=None)
    with torch.no_grad():
        assert torch.equal(layer(x, state=None)[0], y)


def test_documents_too_long_to_be_compiled() -> None:
    """Compiled, boundaries are not read by the host; a document without positions is an error all the same."""
    torch.manual_seed(0)
    layer = dr.AttentionLayer(32, 4, "randomized", encoding_options={"positions": 8})

    def embed(x: Tensor, bounds: Tensor) -> Tensor:
        return layer.encoding.embed(x, dr.Context.of(x, None, bounds))

    x, compiled = torch.randn(1, 24, 32), torch.compile(embed, backend="eager")
    assert compiled(x, torch.tensor([0, 8, 16, 24], dtype=torch.int32)).isfinite().all()
    with pytest.raises((ValueError, IndexError)):
        compiled(x, torch.tensor([0, 12, 16, 24], dtype=torch.int32))


# What each computes ---------------------------------------------------------------------------------------------------


def angles_of(found: dr.Factors) -> Tensor:
    assert isinstance(found.transport, dr.Rotation)
    return found.transport.angles


def test_rope_is_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = (torch.randn(1, 50, 2, 16, dtype=torch.float64) for _ in range(3))
    layer = dr.AttentionLayer(32, 2, "rope")
    theta = angles_of(factors(layer, torch.randn(1, 50, 32))).double()
    expected_theta = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(theta[0, 0, 0].float(), expected_theta)
    phase = torch.arange(50)[:, None] * theta[0, 0]
    cos, sin = (torch.cat([f, f], -1)[None] for f in (phase.cos(), phase.sin()))
    q_turned, k_turned = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    expected = torch.nn.functional.scaled_dot_product_attention(q_turned, k_turned, v.transpose(1, 2), is_causal=True)
    torch.testing.assert_close(dr.attend(q, k, v, transport=dr.Rotation(theta)), expected.transpose(1, 2))


def test_alibi_slopes() -> None:
    assert slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert slopes(2).tolist() == [2.0**-4, 2.0**-8]
    assert slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    assert slopes(12)[:8].equal(slopes(8))
    assert slopes(12)[8:].equal(torch.tensor([2.0 ** (-n / 2) for n in (1, 3, 5, 7)]))
    x, _ = make_input(3)
    assert factors(make_layer("alibi"), x).log_gate.equal(-slopes(HEADS))  # type: ignore[union-attr]


def test_fox_gates() -> None:
    layer, (x, _) = make_layer("fox"), make_input(10)
    gate = layer.encoding.gate
    expected = torch.nn.functional.linear(x, gate.weight, gate.bias).sigmoid().log()
    torch.testing.assert_close(factors(layer, x).log_gate, expected)


def test_path_steps() -> None:
    layer, (x, _) = make_layer("path-fox"), make_input(20)
    found = factors(layer, x)
    assert isinstance(found.transport, dr.Householder)
    assert found.log_gate is not None
    w, beta = found.transport.w, found.transport.beta
    assert w.shape == (2, 20, KV_HEADS, WIDTH // HEADS)
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(2, 20, KV_HEADS, dtype=torch.float64))
    strength = layer.encoding.steps.strength
    torch.testing.assert_close(beta, 2 * torch.nn.functional.linear(x, strength.weight, strength.bias).sigmoid())
    logits = torch.nn.functional.linear(x, layer.encoding.steps.strength.weight, layer.encoding.steps.strength.bias)
    torch.testing.assert_close(beta, 2 / (1 + torch.exp(-logits)))  # at 2 a reflection, not only a projection
    # The convolution reaches back two tokens, the first one included, and no farther.
    for token in (0, 5):
        nudged = x.clone()
        nudged[:, token] += 1
        moved = (factors(layer, nudged).transport.w - w).abs().amax((0, 2, 3)) > 0  # type: ignore[union-attr]
        assert moved.nonzero().flatten().tolist() == [token, token + 1, token + 2]


@pytest.mark.parametrize("name", ["path", "path-fox"])
def test_path_begins_as_asked(name: str) -> None:
    """In a layer and in a model, which draws all weights again."""
    options = {"initial": 0.003, "beta": 0.5, "activation": "silu"}
    config = dr.DeadReckonConfig(
        encoding=name, vocab_size=9, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        encoding_options={name: options},
    )  # fmt: skip
    inside_a_model = dr.DeadReckonForCausalLM(config).model.layers[0].self_attn
    layer = dr.AttentionLayer(64, 2, name, encoding_options=options)
    for encoding in (layer.encoding, inside_a_model.encoding):
        steps = encoding.steps
        drawn = [steps.down, steps.up, steps.strength, *([encoding.gate] if name == "path-fox" else [])]
        for part in drawn:
            count = part.weight.numel()  # a standard deviation of n draws is off by 1/√(2n) of it
            assert abs(part.weight.std() / 0.003 - 1) < 5 / math.sqrt(2 * count)
        torch.testing.assert_close(2 * steps.strength.bias.sigmoid(), torch.full((2,), 0.5))
    x = torch.randn(1, 5, 64)
    context = Context.of(x)
    steps = layer.encoding.steps
    w = torch.nn.functional.silu(steps.convolution(steps.up(steps.down(x)), context, 2))
    torch.testing.assert_close(steps(x, context).w, w / w.norm(dim=-1, keepdim=True))
    for bad, said in (({"beta": 2.0}, "beta: .* got 2.0"), ({"activation": "relu"}, "one of none, silu; got 'relu'")):
        with pytest.raises(ValueError, match=said):
            dr.AttentionLayer(64, 2, name, encoding_options=bad)
    with pytest.raises(ValueError, match=r"initial: expected 0 or more, got -0\.1"):
        dr.AttentionLayer(64, 2, name, encoding_options={"initial": -0.1})


def test_random_rotations_are_drawn_in_their_range() -> None:
    layer, (x, _) = make_layer("random-rotation"), make_input(400)
    grid = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    first, second = angles_of(factors(layer, x)), angles_of(factors(layer, x))
    assert first.shape == (2, 400, 1, 4)
    assert not torch.equal(first, second)
    assert (first.abs() <= grid).all()
    assert (first.abs().amax((0, 1, 2)) > 0.97 * grid).all()
    torch.testing.assert_close(first.mean((0, 1, 2)) / grid, torch.zeros(4), rtol=0, atol=0.1)
    values = factors(make_layer("random-rotation-values"), x).transport
    assert isinstance(values, dr.Rotation)
    assert values.values


def test_learned_angles_may_have_a_rate_of_their_own() -> None:
    layer = dr.AttentionLayer(32, 4, "learned-rotation", vocab_size=5, encoding_options={"rate": 0.02})
    rest, own = dr.parameter_groups(layer, 1e-3, 0.1)
    assert own["params"] == [layer.encoding.angles] and (own["lr"], own["weight_decay"]) == (0.02, 0.1)
    assert (rest["lr"], rest["weight_decay"]) == (1e-3, 0.1) and layer.encoding.angles not in set(rest["params"])
    assert len(dr.parameter_groups(dr.AttentionLayer(32, 4, "learned-rotation", vocab_size=5), 1e-3, 0.1)) == 1
    with pytest.raises(ValueError, match=r"rate: expected a positive learning rate or None, got 0"):
        dr.AttentionLayer(32, 4, "learned-rotation", vocab_size=5, encoding_options={"rate": 0})


def test_learned_rotations_belong_to_tokens() -> None:
    layer, (x, ids) = make_layer("learned-rotation-values", vocab_size=1000), make_input(30)
    found = factors(layer, x, ids)
    assert isinstance(found.transport, dr.Rotation)
    assert found.transport.values
    angles = angles_of(found)[:, :, 0]
    for token in range(VOCABULARY):
        same = angles[ids == token]
        assert (same == same[0]).all()
    torch.testing.assert_close(angles, layer.encoding.angles[ids])
    assert (layer.encoding.angles.std(0) - 1).abs().max() < 4 / 2000**0.5  # 1000 of N(0, 1); four standard errors
    narrow = make_layer("learned-rotation", vocab_size=1000, encoding_options={"spread": 0.2}).encoding.angles
    assert (narrow.std(0) / 0.2 - 1).abs().max() < 4 / 2000**0.5
    grid = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    options = {"initial": "rope", "spread": 0.01}
    near = make_layer("learned-rotation", vocab_size=1000, encoding_options=options).encoding.angles
    assert ((near - grid).std(0) / 0.01 - 1).abs().max() < 4 / 2000**0.5
    assert (near.mean(0) - grid).abs().max() < 4 * 0.01 / 1000**0.5
    layer = make_layer("learned-rotation", vocab_size=1000, encoding_options={"initial": "grid"})
    table = layer.encoding.table
    torch.testing.assert_close(angles_of(factors(layer, x, ids))[:, :, 0], table[ids] * grid)
    assert -1 <= table.min() < -0.99 and 0.99 < table.max() <= 1  # 4000 numbers, uniform from −1 to 1


def test_values_turn_where_the_name_says_so() -> None:
    x, ids = make_input(3)
    transports = {name: factors(make_layer(name), x, ids).transport for name in dr.ENCODINGS}
    turning = {name for name, found in transports.items() if isinstance(found, dr.Rotation) and found.values}
    assert turning == {"rope-values", "random-rotation-values", "learned-rotation-values"}


def test_selective_rope_turns_by_a_convolution_of_the_normalised_input() -> None:
    layer, (x, _) = make_layer("selective-rope"), make_input(12)
    encoding = layer.encoding
    share = x.unflatten(-1, (HEADS, -1))
    share = (share / share.norm(dim=-1, keepdim=True)).flatten(-2)
    chosen = share @ encoding.down.weight.T @ encoding.up.weight.T
    taps = encoding.convolution.weight
    expected = torch.zeros_like(chosen)
    for t in range(12):
        for lag in range(min(4, t + 1)):
            expected[:, t] += taps[lag] * chosen[:, t - lag]
    grid = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    found = angles_of(factors(layer, x))
    torch.testing.assert_close(found, (expected.unflatten(-1, (KV_HEADS, -1)) * grid))


def test_conformal_sympow_scales_the_angles_of_sympow() -> None:
    x, _ = make_input(10)
    keywords = {"max_length": 100, "encoding_options": {"p": 4}}
    fixed = factors(make_layer("sympow", **keywords), x)
    grid = 2 * math.pi / 100 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(angles_of(fixed), grid.expand(2, 10, 1, 4))
    assert fixed.score == dr.Power(4)
    assert fixed.log_gate is None
    keywords["encoding_options"] = {"p": 4, "initial": 0.0}  # paces that differ
    layer = make_layer("conformal-sympow", **keywords)
    found = factors(layer, x)
    pace = 1 + (x @ layer.encoding.pace.weight.T).tanh()
    assert pace.shape[-1] == KV_HEADS and pace.std() > 0.1
    torch.testing.assert_close(angles_of(found), pace.unsqueeze(-1) * grid)
    layer = make_layer("conformal-sympow", max_length=100, encoding_options={"p": 4, "pace": "layer", "initial": 0.0})
    pace = 1 + (x @ layer.encoding.pace.weight.T).tanh()
    torch.testing.assert_close(angles_of(factors(layer, x)), (pace * grid).unsqueeze(2))
    gated = factors(make_layer("sympow-gated", max_length=100), x)
    assert gated.log_gate is not None
    assert (gated.log_gate < 0).all()


def test_conformal_sympow_begins_nearly_as_gated() -> None:
    """In a layer and in a model, which draws all weights again."""
    config = dr.DeadReckonConfig(
        encoding="conformal-sympow", vocab_size=9, hidden_size=1024, num_hidden_layers=1, num_attention_heads=4
    )
    inside_a_model = dr.DeadReckonForCausalLM(config).model.layers[0].self_attn
    for layer in (dr.AttentionLayer(1024, 4, "conformal-sympow"), inside_a_model):
        assert abs(layer.encoding.pace.weight.std() / 1e-6 - 1) < 5 / math.sqrt(2 * 4096)
    with pytest.raises(ValueError, match="initial: expected 0 or more, got -1"):
        dr.AttentionLayer(64, 2, "conformal-sympow", encoding_options={"initial": -1})


def test_positions_added_to_embeddings() -> None:
    x = torch.zeros(2, 30, WIDTH)
    context = dr.Context.of(x[:1], cu_seqlens=torch.tensor([0, 20, 30]))
    assert context.positions.tolist() == [[*range(20), *range(10)]]
    encoding = make_layer("sinusoidal", encoding_options={"gain": 1.0}).encoding
    added = encoding.embed(x, dr.Context.of(x))
    torch.testing.assert_close(added[0, :, 0], torch.arange(30).float().sin())
    torch.testing.assert_close(added[0, :, WIDTH // 2], torch.arange(30).float().cos())
    drawn = make_layer("randomized", encoding_options={"gain": 1.0, "positions": 1000}).encoding
    slowest = 10000.0 ** -((WIDTH - 2) / WIDTH)
    places = drawn.embed(x, dr.Context.of(x))[0, :, WIDTH // 2 - 1].asin() / slowest
    assert (places.diff() > 0.5).all()
    assert -0.5 < places.min() < places.max() < 999.5
    assert not torch.equal(drawn.embed(x, dr.Context.of(x)), drawn.embed(x, dr.Context.of(x)))


def test_sinusoids_shift_in_training_only() -> None:
    layer = dr.AttentionLayer(16, 2, "sinusoidal", encoding_options={"shift": 40, "gain": 1.0})
    x = torch.zeros(300, 7, 16)
    context = dr.Context.of(x)
    still, moved = layer.eval().encoding.embed(x, context), layer.train().encoding.embed(x, context)
    assert torch.equal(still, still[:1].expand_as(still))
    long = dr.Context.of(torch.zeros(1, 47, 16))
    table = layer.eval().encoding.embed(torch.zeros(1, 47, 16), long)[0]
    begins = torch.cdist(moved[:, 0], table).argmin(1)  # the position of each row's first token
    torch.testing.assert_close(moved, table[begins[:, None] + torch.arange(7)])
    assert begins.min() == 0 and begins.max() == 40 and begins.unique().numel() == 41
    with pytest.raises(ValueError, match="sinusoidal: expected shift to be an integer of 0 or more, got -1"):
        dr.AttentionLayer(16, 2, "sinusoidal", encoding_options={"shift": -1})
