"""Conversion of models of other libraries to deadreckon: `convert_model`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from deadreckon.models.convert import fla, rope
from deadreckon.models.convert.source import Source
from deadreckon.models.huggingface import DeadReckonForCausalLM

__all__ = ["convert_model"]


def convert_model(
    model: PreTrainedModel,
    encoding: str | None = None,
    *,
    encoding_options: dict[str, Any] | None = None,
    exact: bool = True,
) -> DeadReckonForCausalLM:
    """Converts a model: a new DeadReckonForCausalLM with its weights, on its device and in its dtype.

    From decoders with RoPE (`LlamaForCausalLM`, `MistralForCausalLM` without a sliding window, `Qwen2ForCausalLM`,
    `Qwen3ForCausalLM`, and ours with encoding "rope") to any encoding. Logits are unchanged at first: the option
    `from_zero` of the encoding initialises Householder steps as the identity (β = 0) and gates as open (log f = 0),
    with gradients as large as those of the usual initialisation. Encodings that cannot start from RoPE are refused,
    unless `exact` is False: a cold swap, with the encoding's usual initialisation.

    From PaTH and FoX models of flash-linear-attention, which keep their own encoding.

    Args:
        model: is not changed; its weights are copied.
        encoding: a name in :data:`deadreckon.ENCODINGS`; by default "rope-path-fox", or the fla model's own.
        encoding_options: keywords of the encoding; RoPE's base and scaling default to the model's.
        exact: refuse an encoding that would change the logits.

    Raises:
        ValueError: for an unsupported model, or one with parts that a DeadReckonForCausalLM lacks; naming them.
    """
    source = Source.of(model)
    if source.kind in rope.KINDS:
        return rope.convert(source, encoding or "rope-path-fox", encoding_options or {}, exact)
    if source.kind in fla.KINDS:
        return fla.convert(source, encoding, encoding_options or {})
    raise ValueError(
        f"model: expected a decoder of one of the kinds {', '.join((*rope.KINDS, *fla.KINDS))}, "
        f"got {type(model).__name__} of kind {source.kind!r}"
    )
