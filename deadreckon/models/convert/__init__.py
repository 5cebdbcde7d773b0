"""Models of other libraries as ours: `convert_model`."""

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
    """A model of ours with the weights of another, on its device and in its dtype.

    From decoders with RoPE (`LlamaForCausalLM`, `MistralForCausalLM` without a sliding window, `Qwen2ForCausalLM`,
    `Qwen3ForCausalLM`, and ours with encoding "rope") to any encoding. It begins with the same logits: the option
    `from_zero` of the encoding makes Householder steps the identity (β = 0) and gates open (log f = 0) before training,
    with gradients as large as those of a usual start. Encodings that cannot begin so are refused, unless `exact` is
    False: a cold swap, with the encoding's usual initialisation.

    From PaTH and FoX models of flash-linear-attention, which need no other encoding than their own.

    Args:
        model: stays as it is; its weights are copied.
        encoding: a name in :data:`deadreckon.ENCODINGS`; "rope-path-fox" by default, or the model's own.
        encoding_options: keywords of the encoding, beside RoPE's base and scaling, which are the model's.
        exact: refuse an encoding that would change the logits.

    Raises:
        ValueError: for a model that is none of these, or has parts that ours lacks; naming what it is.
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
