"""Converts flash-linear-attention's PaTH and FoX: `PaTHAttentionForCausalLM`, `ForgettingTransformerForCausalLM`.

Their PaTH layer has SiLU after the convolution, divides w by √(‖w‖² + 1e-6), and adds gates to logits before these are
scaled: all of them options of our encodings. Its convolution stores its filters in reverse order of time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.models.convert.source import Source, fill
from deadreckon.models.huggingface import DeadReckonConfig, DeadReckonForCausalLM

KINDS = ("path_attn", "forgetting_transformer")
NORM_EPS = 1e-6  # of their l2_norm
RENAMED = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.bt_proj.": ".self_attn.encoding.steps.strength.",
    ".attn.w_proj.0.": ".self_attn.encoding.steps.down.",
    ".attn.w_proj.1.": ".self_attn.encoding.steps.up.",
    ".attn.w_proj.": ".self_attn.encoding.steps.down.",
    ".attn.w_conv1d.": ".self_attn.encoding.steps.convolution.",
    ".attn.g_proj.": ".self_attn.encoding.gate.",
    ".attn.f_proj.": ".self_attn.encoding.gate.",
    ".attn.": ".self_attn.",
}
"""Parts of parameter names: theirs -> ours; the first match counts."""


def convert(source: Source, encoding: str | None, options: dict[str, Any]) -> DeadReckonForCausalLM:
    """See :func:`deadreckon.convert_model`."""
    own = "fox" if source.kind == "forgetting_transformer" else "path-fox" if source.config.use_forget_gate else "path"
    if encoding not in (None, own) or options:
        raise ValueError(f"encoding: expected {own!r}, the model's own, without options, got {encoding!r}, {options}")
    check(source)
    source.check_vocabulary("model.embeddings.weight")
    weights = renamed(source.weights)
    if own != "fox":
        heads = source.config.num_kv_heads or source.config.num_heads
        options = complete_steps(weights, source.config, heads)
        if own == "path-fox":
            options["gate_scale"] = (source.config.hidden_size // source.config.num_heads) ** -0.5
    model = source.build(configuration(source, own, options, weights))
    fill(model, weights)
    return model


def check(source: Source) -> None:
    """Raises a ValueError for parts that our attention layer lacks."""
    config = source.config
    for name, what in (
        ("attnres_block_size", "attention residuals"),
        ("window_size", "windows"),
        ("use_output_gate", "output gates"),
        ("qk_norm", "norms of queries and keys, whose gains differ by head"),
    ):
        if value := getattr(config, name, None):
            raise source.refuse(what, f"{name} = {value}")


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names; the convolution's (channels, 1, width), oldest token first, become (width, channels)."""
    found = {}
    for name, weight in weights.items():
        if ".w_conv1d." in name:
            weight = weight.squeeze(1).flip(1).T.contiguous()
        theirs = next((part for part in RENAMED if part in name), None)
        found[name if theirs is None else name.replace(theirs, RENAMED[theirs])] = weight
    return found


def complete_steps(weights: dict[str, Tensor], config: Any, heads: int) -> dict[str, Any]:
    """Options of PaTH's steps. Fills in weights: a full-rank projection to w gets an identity as its second factor, and
    a missing convolution becomes one that reads the current token only.
    """
    channels = heads * (config.hidden_size // config.num_heads)
    for layer in range(config.num_hidden_layers):
        steps = f"model.layers.{layer}.self_attn.encoding.steps."
        down = weights[f"{steps}down.weight"]
        if not config.use_low_rank_w:
            weights[f"{steps}up.weight"] = torch.eye(channels, dtype=down.dtype, device=down.device)
        if not config.use_w_shortconv:
            only = torch.zeros(3, channels, dtype=down.dtype, device=down.device)
            only[0] = 1
            weights[f"{steps}convolution.weight"] = only
    activation = "silu" if config.use_w_shortconv else "none"
    return {"rank": down.shape[0], "activation": activation, "norm_eps": NORM_EPS}


def configuration(
    source: Source, encoding: str, options: dict[str, Any], weights: dict[str, Tensor]
) -> DeadReckonConfig:
    """Our configuration with the same sizes."""
    config = source.config
    return DeadReckonConfig(
        **source.common() | {"hidden_act": "silu" if config.hidden_act == "swish" else config.hidden_act},
        intermediate_size=weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.norm_eps,
        encoding=encoding,
        encoding_options={encoding: options} if options else None,
        attention_bias=bool(getattr(config, "qkv_bias", False)),
    )
