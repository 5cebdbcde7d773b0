"""Attention functions for other models in transformers, through `AttentionInterface`: `register_attention`.

The interface passes q, k and v, to which a model has already applied its own positions, and no hidden states. So scores
and constant gates work here; gates, routes and angles that are computed from hidden states do not: see `convert_model`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    trained with it. They work with padded batches, packed documents, chunks, gradients and transformers' dynamic KV
    cache; other masks, such as a sliding window, and caches with room for later tokens are refused.

    Args:
        names: which to register, by default all. Encodings that compute gates, angles or routes from hidden states are
            refused: the interface does not pass hidden states.

    Returns:
        the names for `attn_implementation`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in names:
        if name not in SERVED:
            raise ValueError(
                f"names: expected some of {', '.join(SERVED)}, got {name!r}; transformers passes q, k and v alone, so "
                "that what is computed from hidden states, such as the gates of fox or the routes of path, needs "
                "convert_model"
            )
    for name in names or SERVED:
        AttentionInterface.register(name, partial(_attention, **SERVED[name]))
        AttentionMaskInterface.register(name, _documents)
    return names or tuple(SERVED)


def _documents(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """What transformers passes on as a mask: the number of each key's document (B, S), from 1 on, or 0 for padding.

    None if all are of one document. A mask is read where documents meet, and at their ends.
    """
    from transformers.masking_utils import causal_mask_function

    documents = None
    if mask_function not in (None, causal_mask_function):
        row, key = torch.arange(batch_size, device=device)[:, None], torch.arange(kv_length, device=device)[None]
        key = key + kv_offset

        def sees(query: Tensor, other: Tensor) -> Tensor:
            there = (other >= kv_offset) & (other < kv_offset + kv_length)
            other = other.clamp(kv_offset, kv_offset + kv_length - 1)
            return there & mask_function(row, row.new_zeros(()), query.expand(batch_size, -1), other)

        begins = ~sees(key, key - 1)
        documents, first = begins.cumsum(1), torch.where(begins, key, kv_offset).cummax(1).values
        known = sees(key, key) & sees(key, first) & ~sees(key, first - 1) & ~sees(key, key + 1)
        if use_vmap or not known.all():
            raise ValueError(
                "attention_mask: expected a causal mask, of whole rows, packed documents or chunks, with attention of "
                "deadreckon; this model's is another, such as a sliding window, or sees later tokens"
            )
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            "past_key_values: expected a cache of the tokens so far, such as DynamicCache, with attention of "
            f"deadreckon; got one of {kv_offset + kv_length} places for {int(q_offset) + q_length} tokens"
        )
    if attention_mask is not None:
        kept = attention_mask[:, -kv_length:].long()
        documents = kept if documents is None else documents * kept
    return None if documents is None or bool((documents == 1).all()) else documents


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
    if attention_mask is not None and attention_mask.shape != k.shape[:2]:
        raise ValueError(
            f"attention_mask: expected one for each token of each row, {tuple(k.shape[:2])}, with attention of "
            f"deadreckon, got shape {tuple(attention_mask.shape)}"
        )
    if q.shape[1] < k.shape[1]:
        return _late(q, k, v, attention_mask, **arguments), None
    if attention_mask is None:
        return attend(q, k, v, cu_seqlens=keywords.get("cu_seq_lens_q"), **arguments), None
    return _packed(q, k, v, attention_mask, arguments), None


def _packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attention of documents (B, T) without padding, packed to one sequence; zeros where padding was."""
    kept, shape = documents > 0, (*q.shape[:-1], v.shape[-1])
    rows = torch.arange(len(documents), device=documents.device).unsqueeze(1)
    lengths = (rows * (documents.max() + 1) + documents)[kept].unique_consecutive(return_counts=True)[1]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    q, k, v = (x[kept].unsqueeze(0) for x in (q, k, v))
    found = attend(q, k, v, cu_seqlens=ends, **arguments)[0]
    return found.new_zeros(shape).index_put((kept,), found)


def _late(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, log_gate: Tensor | None, score: Any, scale: float | None
) -> Tensor:
    """The last T queries over S keys, the others from a KV cache: one query at a time, by the definition."""
    (_, queries, heads, width), length = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (k, v))  # (B, Hq, S, ·)
    logits = at_least_single(q.transpose(1, 2) @ k.mT) * (width**-0.5 if scale is None else scale)  # (B, Hq, T, S)
    of = q.new_ones((1, 1, length), dtype=torch.int64) if documents is None else documents.unsqueeze(1)
    place = (of > 0).cumsum(2)  # among tokens that are not padding
    outputs = []
    for row, end in enumerate(range(length - queries + 1, length + 1)):
        seen = logits[:, :, row, :end]
        nothing = of[:, :, :end] != of[:, :, end - 1 : end]
        gates = torch.zeros_like(seen)
        if log_gate is not None:
            gates = gates + log_gate[:, None] * (place[:, :, end - 1 : end] - place[:, :, :end])
        seen = seen.masked_fill(nothing, 0.0 if isinstance(score, Power) else -torch.inf)
        weights = weigh(seen, gates, score)  # (B, Hq, end)
        outputs.append((weights.to(v.dtype).unsqueeze(2) @ v[:, :, :end]).squeeze(2))
    return torch.stack(outputs, dim=1)
