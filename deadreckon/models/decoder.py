"""One decoder layer: attention and an MLP, each with a pre-norm and a residual connection."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from deadreckon.encodings.base import Context
from deadreckon.models.configuration import NORMS, DeadReckonConfig
from deadreckon.models.layer import AttentionLayer
from deadreckon.models.state import LayerState
from deadreckon.ops.norm import residual_norm
from deadreckon.ops.pointwise import swiglu
from deadreckon.ops.tracing import cast_once


class MLP(nn.Module):
    """down(act(gate x) ⊙ up x), SwiGLU if act is SiLU; without a gate, down(act(up x))."""

    def __init__(self, config: DeadReckonConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.act, self.is_silu = ACT2FN[config.hidden_act], config.hidden_act in ("silu", "swish")

    def forward(self, x: Tensor) -> Tensor:
        x = cast_once(x)
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        gate, up = self.gate_proj(x), self.up_proj(x)
        return swiglu(gate, up, self.down_proj) if self.is_silu else self.down_proj(self.act(gate) * up)


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and an MLP, each with a pre-norm and a residual connection."""

    def __init__(self, config: DeadReckonConfig, encoding: str, number: int) -> None:
        super().__init__()
        self.input_layernorm = NORMS[config.norm](config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = AttentionLayer(
            config.hidden_size, config.num_attention_heads, encoding, config.num_key_value_heads, config.qk_norm,
            head_dim=config.head_dim, vocab_size=config.vocab_size, max_length=config.max_position_embeddings,
            qk_norm_eps=config.qk_norm_eps, bias=config.attention_bias, output_bias=config.attention_output_bias,
            sharpen_beyond=config.sharpen_beyond,
            encoding_options=(config.encoding_options or {}).get(encoding), place=(number, config.num_hidden_layers),
        )  # fmt: skip
        self.post_attention_layernorm = NORMS[config.norm](config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        attention = self.self_attn
        x, normed = residual_norm(self.input_layernorm, x, cast=not attention.encoding.precise)
        attended = attention(normed, context=context, state="none" if state is None else state)
        x, normed = residual_norm(self.post_attention_layernorm, x, attended)
        return x + self.mlp(normed)
