"""Attention functions for other models in transformers, through `AttentionInterface`: `register_attention`.

The interface passes q, k and v, to which a model has already applied its own positions, and no hidden states. So scores
and constant gates work here; gates, routes and angles that are computed from hidden states do not: see `convert_model`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deadreckon.encodings.alibi import slopes
from deadreckon.ops.attention import attend
from deadreckon.ops.factors import Power
from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.reference import weigh

SERVED: dict[str, dict[str, Any]] = {
    "deadreckon": {},
    "deadreckon-alibi": {"fades": True},
    "deadreckon-stickbreaking": {"score": "stick-breaking"},
    "deadreckon-power-2": {"score": Power(2)},
}
"""Names for `attn_implementation` -> the score or gate that they choose."""

REFUSED = ("sliding_window", "softcap", "position_bias", "s_aux", "cache")  # keywords that would change the output


def register_attention(*names: str) -> tuple[str, ...]:
    """Registers attention functions that any model in transformers can use.

    ``model.set_attn_implementation("deadreckon")`` then computes the same as before; ``"deadreckon-alibi"`` adds
    ALiBi's slopes; ``"deadreckon-stickbreaking"`` and ``"deadreckon-power-2"`` have another score, for models that are
    trained with it. They work with padded batches, gradients and transformers' KV cache.

    Args:
        names: which to register, by default all. Encodings that compute gates, angles or routes from hidden states are
            refused: the interface does not pass hidden states.

    Returns:
        the names for `attn_implementation`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    for name in names:
        if name not in SERVED:
            raise ValueError(
                f"names: expected some of {', '.join(SERVED)}, got {name!r}; transformers passes q, k and v alone, so "
                "that what is computed from hidden states, such as the gates of fox or the routes of path, needs "
                "convert_model"
            )
    for name in names or SERVED:
        AttentionInterface.register(name, partial(_attention, **SERVED[name]))
        AttentionMaskInterface.register(name, flash_attention_mask)  # (B, T) of padded rows, else None
    return names or tuple(SERVED)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    score: Any = "softmax",
    fades: bool = False,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: q (B, Hq, T, D), k and v (B, H, S, ·), S ≥ T -> output (B, T, Hq, E)."""
    if dropout:
        raise ValueError(f"dropout: expected 0 with attention of deadreckon, got {dropout}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("is_causal: expected True with attention of deadreckon, which is causal, got False")
    for name in REFUSED:
        if keywords.get(name) is not None:
            raise ValueError(f"{name}: expected None with attention of deadreckon, got {keywords[name]!r:.80}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    gate = -slopes(q.shape[2], q.device) if fades else None
    arguments: dict[str, Any] = {"log_gate": gate, "score": score, "scale": scaling}
    if q.shape[1] < k.shape[1]:
        return _late(q, k, v, attention_mask, **arguments), None
    if attention_mask is None:
        return attend(q, k, v, **arguments), None
    return _packed(q, k, v, attention_mask, arguments), None


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attention of padded rows, unpadded to packed documents of one sequence; zeros where padding was."""
    kept, shape = mask.bool(), (*q.shape[:-1], v.shape[-1])
    ends = kept.sum(1).cumsum(0)
    documents = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    q, k, v = (x[kept].unsqueeze(0) for x in (q, k, v))
    rows = attend(q, k, v, cu_seqlens=documents, **arguments)[0]
    return rows.new_zeros(shape).index_put((kept,), rows)


def _late(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, log_gate: Tensor | None, score: Any, scale: float | None
) -> Tensor:
    """The last T queries over S keys, the others from a KV cache: one query at a time, by the definition."""
    (_, queries, heads, width), length = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (k, v))  # (B, Hq, S, ·)
    logits = at_least_single(q.transpose(1, 2) @ k.mT) * (width**-0.5 if scale is None else scale)  # (B, Hq, T, S)
    padded = torch.zeros(1, length, dtype=torch.bool, device=q.device) if mask is None else ~mask.bool()
    place, padded = (~padded).cumsum(1).unsqueeze(1), padded.unsqueeze(1)  # position among tokens that are not padding
    outputs = []
    for row, end in enumerate(range(length - queries + 1, length + 1)):
        nothing, seen = padded[:, :, :end], logits[:, :, row, :end]
        gates = torch.zeros_like(seen)
        if log_gate is not None:
            gates = gates + log_gate[:, None] * (place[:, :, end - 1 : end] - place[:, :, :end])
        seen = seen.masked_fill(nothing, 0.0 if isinstance(score, Power) else -torch.inf)
        weights = weigh(seen, gates, score).masked_fill(nothing, 0.0)  # (B, Hq, end); padding attends to nothing
        outputs.append((weights.to(v.dtype).unsqueeze(2) @ v[:, :, :end]).squeeze(2))
    return torch.stack(outputs, dim=1)
