"""RoPE with scaled or fading angles, combined with PaTH and FoX that may start at zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_encodings import angles_of, factors, make_input, make_layer

import deadreckon as dr


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0},
        {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
        },
    ],
)  # fmt: skip
def test_scaled_rope_is_that_of_transformers(scaling: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = "linear" if len(scaling) == 1 else "llama3"
    parameters = {"rope_type": kind, "rope_theta": 500.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert attention_factor == 1
    for name in ("rope", "rope-fox"):
        layer = dr.AttentionLayer(64, 2, name, encoding_options={"base": 500.0, "scaling": scaling})
        found = angles_of(factors(layer, torch.randn(1, 3, 64)))
        torch.testing.assert_close(found[0, 1, 0], expected, rtol=2e-7, atol=0)
    unscaled = angles_of(
        factors(dr.AttentionLayer(64, 2, "rope", encoding_options={"base": 500.0}), torch.ones(1, 1, 64))
    )
    changed = (unscaled[0, 0, 0] != expected).nonzero().flatten().tolist()
    assert changed == list(range(16)) if kind == "linear" else 0 < len(changed) < 16


def test_rotations_that_may_fade() -> None:
    """A factor on RoPE's angles, beside the factors of PaTH and FoX computed alike."""
    x, _ = make_input(12)
    for name, alone in (("rope-fox", "fox"), ("rope-path", "path"), ("rope-path-fox", "path-fox")):
        layer, other = make_layer(name), make_layer(alone)
        missing, unexpected = other.load_state_dict(layer.state_dict(), strict=False)
        assert not missing
        assert unexpected == ["encoding.turns.angle_factor", "encoding.turns.new_factor"]
        found, expected = factors(layer, x), factors(other, x)
        rotation, steps = found.parts()
        assert rotation is not None
        assert not rotation.values
        assert torch.equal(rotation.angles, angles_of(factors(make_layer("rope"), x)))
        assert (found.log_gate is None) == (expected.log_gate is None)
        if steps is not None:
            assert torch.equal(steps.w, expected.transport.w)  # type: ignore[union-attr]
        turned = layer(x)
        layer.encoding.turns.angle_factor.fill_(0)
        torch.testing.assert_close(layer(x), other(x))
        assert not torch.allclose(turned, other(x))
        layer.encoding.turns.angle_factor.fill_(1)
        layer.encoding.turns.new_factor.fill_(0)
        rope = make_layer("rope")
        rope.load_state_dict(layer.state_dict(), strict=False)
        torch.testing.assert_close(layer(x), rope(x), rtol=0, atol=1e-12)


def test_ramps_begin_at_zero_and_learn_at_once() -> None:
    """RoPE to the last bit, with gradients; afterwards ramps of u · x + b, which are never negative."""
    x, _ = make_input(80)
    layer, rope = make_layer("rope-path-fox", encoding_options={"from_zero": True}), make_layer("rope")
    rope.load_state_dict(layer.state_dict(), strict=False)
    found = layer(x)
    torch.testing.assert_close(found, rope(x), rtol=0, atol=1e-12)
    found.square().sum().backward()
    for part in (layer.encoding.steps.strength, layer.encoding.gate):
        assert all((p.grad.abs() > 0).all() for p in part.parameters())
        torch.nn.init.normal_(part.weight)
        torch.nn.init.normal_(part.bias)
    logits = [torch.nn.functional.linear(x, part.weight, part.bias)
              for part in (layer.encoding.steps.strength, layer.encoding.gate)]  # fmt: skip
    steps, log_gate = factors(layer, x).parts()[1], factors(layer, x).log_gate
    assert steps is not None
    torch.testing.assert_close(steps.beta, (2 * (2 * logits[0].sigmoid() - 1)).relu())
    torch.testing.assert_close(log_gate, -(-logits[1]).relu())


def test_a_factor_on_angles_may_be_learned() -> None:
    x, _ = make_input(20)
    layer = make_layer("rope-path-fox", encoding_options={"learn_factor": True})
    layer(x).square().sum().backward()
    assert layer.encoding.turns.angle_factor.grad.abs() > 0


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 0.0},
        {"type": "yarn"},
        {"factor": 2.0, "low_freq_factor": 1.0},
        {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
    ],
)
def test_scalings_are_checked(scaling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scaling: expected"):
        dr.AttentionLayer(32, 4, "rope-path", encoding_options={"scaling": scaling})
