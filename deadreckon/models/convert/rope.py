"""Converts decoders with RoPE (Llama, Mistral, Qwen2, Qwen3) to any encoding, and checks whether logits would change.

All have the parameter names of Hugging Face's Llama, as ours do. They differ in biases, QK-norm, head_dim, and RoPE's
angles.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch

from deadreckon.encodings import ENCODINGS
from deadreckon.encodings.base import LLAMA3_SCALING, Context, Encoding, Sizes, rope_angles
from deadreckon.models.convert.source import Source, fill
from deadreckon.models.huggingface import DeadReckonConfig, DeadReckonForCausalLM
from deadreckon.models.layer import make_encoding

KINDS = ("llama", "mistral", "qwen2", "qwen3", "deadreckon")
CAN_BE_EXACT = ("rope", "rope-fox", "rope-path", "rope-path-fox")


def convert(source: Source, encoding: str, options: dict[str, Any], exact: bool) -> DeadReckonForCausalLM:
    """See :func:`deadreckon.convert_model`."""
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding: expected one of {', '.join(ENCODINGS)}; got {encoding!r}")
    angles = rope_options(source)
    taken = inspect.signature(ENCODINGS[encoding]).parameters
    begun: dict[str, Any] = angles | {"from_zero": exact or None}
    options = {name: value for name, value in begun.items() if name in taken and value is not None} | options
    config = configuration(source, encoding, options)
    if exact:
        check_exact(config, encoding, options, angles)
    source.check_vocabulary("model.embed_tokens.weight")
    model = source.build(config)
    fill(model, source.weights, drawn=".encoding.")
    return model


def configuration(source: Source, encoding: str, options: dict[str, Any]) -> DeadReckonConfig:
    """Our configuration with the same sizes."""
    config = source.config
    if isinstance(config, DeadReckonConfig):
        config = deepcopy(config)
        config.encoding, config.layer_encodings = encoding, None
        config.encoding_options = {encoding: options} if options else None
        return config
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if window is not None or kinds != {"full_attention"}:
        raise source.refuse("sliding windows", f"sliding_window = {window}, layers of {', '.join(sorted(kinds))}")
    every = source.weights.keys()
    return DeadReckonConfig(
        **source.common(),
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        encoding=encoding,
        encoding_options={encoding: options} if options else None,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in every,
        qk_norm_eps=config.rms_norm_eps,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in every,
        attention_output_bias="model.layers.0.self_attn.o_proj.bias" in every,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in every,
    )


def rope_options(source: Source) -> dict[str, Any]:
    """RoPE's base, and the scaling of its angles (None without scaling)."""
    if isinstance(source.config, DeadReckonConfig):
        if set(source.config.encodings()) != {"rope"}:
            found = ", ".join(sorted(set(source.config.encodings())))
            raise ValueError(f"model: expected one of ours with encoding 'rope', got {found}")
        return {"base": 10000.0, "scaling": None} | (source.config.encoding_options or {}).get("rope", {})
    rope = dict(source.config.rope_parameters)
    kind, base = rope.pop("rope_type", "default"), rope.pop("rope_theta")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise source.refuse("heads that turn in part", f"rope_parameters {source.config.rope_parameters}")
    names = {"default": (), "linear": ("factor",), "llama3": LLAMA3_SCALING}.get(kind)
    if names is None:
        raise ValueError(
            f"model: expected rope_type default, linear or llama3, whose angles do not depend on the length of the "
            f"text and which scale nothing else, got {kind!r}"
        )
    return {"base": float(base), "scaling": {name: rope[name] for name in names} or None}


def check_exact(config: DeadReckonConfig, encoding: str, options: dict[str, Any], angles: dict[str, Any]) -> None:
    """Raises a ValueError if attention with this encoding is not initialised as RoPE, saying what would differ."""
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    sizes = Sizes(
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size,
        config.max_position_embeddings,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        probed = make_encoding(encoding, sizes, options)
        found = differences_from_rope(probed, sizes, angles)
    if found:
        raise ValueError(
            f"encoding: {encoding!r} cannot begin with the model's logits: {'; '.join(found)}. "
            f"{', '.join(CAN_BE_EXACT)} can, or exact=False (--cold) allows a cold swap; "
            "deadreckon convert --drop-rope ends with path-fox, path or fox from an exact start"
        )


@torch.no_grad()
def differences_from_rope(encoding: Encoding, sizes: Sizes, angles: dict[str, Any]) -> list[str]:
    """How a new encoding differs from RoPE with these angles, in words, found from its factors on a random input."""
    x = torch.randn(1, 8, sizes.d_model)
    q = torch.randn(1, 8, sizes.n_heads, sizes.head_dim)
    k = torch.randn(1, 8, sizes.n_kv_heads, sizes.head_dim)
    context = Context.of(x, torch.arange(8).unsqueeze(0) % (sizes.vocab_size or 1))
    factors = encoding(x, context)
    rotation, steps = factors.parts()
    found = []
    if rotation is None:
        found.append("it has no rotation")
    else:
        grid = rope_angles(sizes.head_dim, angles["base"], x.device, angles["scaling"])
        if not torch.allclose(rotation.angles.float(), grid.expand_as(rotation.angles), rtol=1e-6, atol=0):
            found.append("its angles are not the model's")
        if rotation.values:
            found.append("it turns values too")
    if steps is not None and bool(steps.beta.any()):
        found.append("it reflects from the start")
    if factors.log_gate is not None and bool(factors.log_gate.any()):
        found.append("it forgets from the start")
    if factors.score != "softmax":
        found.append(f"its score is {factors.score}")
    if not torch.equal(encoding.embed(x, context), x):
        found.append("it adds to the embeddings")
    if any(a.shape != b.shape for a, b in zip(encoding.widen(q, k, x, context), (q, k), strict=True)):
        found.append("it adds terms to the logits")
    return found
