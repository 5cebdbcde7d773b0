"""Integration with Hugging Face tools: Auto classes, peft's LoRA targets, and validation of `forward` arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from deadreckon.ops.tracing import traced

AUTO_MODULE = "modeling_deadreckon"
AUTO_CLASSES = {
    "AutoConfig": "DeadReckonConfig", "AutoModel": "DeadReckonModel", "AutoModelForCausalLM": "DeadReckonForCausalLM",
}  # fmt: skip
"""Auto class -> the class that it loads."""
INDICES = (torch.int64, torch.int32)  # dtypes that embeddings look up


def name_for_auto_classes(folder: str | Path) -> dict[str, str]:
    """Writes a module with one import into the folder of a saved model, and returns the `auto_map` that names it.

    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` then imports the installed package, whereas
    transformers' own `register_for_auto_class` would copy source files next to the weights.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = ", ".join(AUTO_CLASSES.values())
    (Path(folder) / f"{AUTO_MODULE}.py").write_text(f"from deadreckon import {names}  # noqa: F401\n")
    return {auto: f"{AUTO_MODULE}.{name}" for auto, name in AUTO_CLASSES.items()}


def offer_lora_targets(model_type: str) -> None:
    """Sets the default LoRA target modules in peft, if it has been imported: the same as for Llama."""
    if constants := sys.modules.get("peft.utils.constants"):
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, ["q_proj", "v_proj"])


def documents_in(
    keywords: dict[str, Any], tokens: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor | None:  # fmt: skip
    """Boundaries of packed documents: cu_seqlens, or what `DataCollatorWithFlattening` says of them in keywords.

    Takes that out of the keywords. `position_ids` that follow from tokens, mask and cache anyway say nothing; others
    must be those of packed documents.
    """
    queries, keys = keywords.pop("cu_seq_lens_q", None), keywords.pop("cu_seq_lens_k", None)
    for name in ("max_length_q", "max_length_k"):
        keywords.pop(name, None)
    places: Tensor | None = keywords.pop("position_ids", None)
    boundaries: Tensor | None = cu_seqlens
    for name, other in (("cu_seq_lens_q", queries), ("cu_seq_lens_k", keys)):
        boundaries = other if boundaries is None else boundaries
        if other is not None and boundaries is not None and _differ(other, boundaries):
            raise ValueError(f"{name}: expected the boundaries that are given beside it, {boundaries}, got {other}")
    if boundaries is None:
        if places is None:  # as in decoding, where a compiler would guard the number of tokens in the cache
            return None
        past = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
        return _documents_of(places, tokens, mask, past)
    if places is not None and isinstance(boundaries, Tensor) and not boundaries.is_cuda:
        index = torch.arange(places.numel()).to(boundaries)
        begins = boundaries[torch.searchsorted(boundaries, index, right=True) - 1]
        if _differ(places.flatten(), index - begins):
            raise ValueError(f"position_ids: expected none, or those of documents at {boundaries}, got {places!r:.80}")
    return boundaries


def _differ(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors differ; not looked at on a GPU, where the host would wait, and in tracing."""
    return not (x.is_cuda or y.is_cuda or traced(x) or torch.equal(x, y.to(x)))


def _documents_of(places: Tensor, tokens: Tensor, mask: Tensor | None, past: int) -> Tensor | None:
    """The boundaries of documents that positions tell of; None if they are those that tokens have anyway."""
    shape = tuple(tokens.shape[:2])
    if not isinstance(places, Tensor):
        raise ValueError(f"position_ids: expected a tensor (B, T) = {shape}, got {type(places).__name__}")
    if places.dim() < 3 and shape[1:] == places.shape[-1:] and places.shape[:-1].numel() in (1, shape[0]):
        places = places.expand(shape)
        index = torch.arange(shape[1], device=places.device)
        if bool((places == index + past).all()):
            return None
        if mask is not None and mask.shape == (shape[0], past + shape[1]):
            counted, real = mask.long().cumsum(1)[:, past:] - 1, mask[:, past:].bool()
            if bool((places == counted)[real].all()):
                return None
        starts = torch.where(places == 0, index, 0).cummax(1).values
        if len(places) == 1 and bool((places == index - starts).all()):
            begins = (places[0] == 0).nonzero()[:, 0]
            return torch.cat([begins, begins.new_tensor([len(index)])]).to(torch.int32)
    raise ValueError(
        "position_ids: expected those of documents packed in one row, each counted from 0, or none: positions follow "
        f"from tokens, attention_mask and cache; got {places!r:.80} for tokens {shape}"
    )


def refuse_unknown(keywords: dict[str, Any]) -> None:
    """Raises a TypeError for unknown keywords of `forward` that would change the outputs of models that support them.

    None and False request nothing; tokenizers add `token_type_ids` for any model.
    """
    for name, value in keywords.items():
        if value is not None and value is not False and name != "token_type_ids":
            raise TypeError(f"{name}: expected None or False, this model has no such option; got {value!r:.80}")


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, width: int, labels: Tensor | None = None
) -> None:
    """Raises a ValueError unless there are either tokens (B, T) or embeddings (B, T, width), and labels match them."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("input_ids: expected it or inputs_embeds, exactly one of the two")
    name = "input_ids" if inputs_embeds is None else "inputs_embeds"
    for what, x in ((name, given), ("labels", labels)):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{what}: expected a torch.Tensor, got {type(x).__name__}")
    shape = tuple(given.shape)
    if inputs_embeds is None and (len(shape) != 2 or given.dtype not in INDICES):
        raise ValueError(f"input_ids: expected tokens (B, T), got {given.dtype} {shape}")
    if inputs_embeds is not None and (len(shape) != 3 or shape[2] != width):
        raise ValueError(f"inputs_embeds: expected (B, T, hidden_size = {width}), got {shape}")
    if 0 in shape:
        raise ValueError(f"{name}: expected (B, T) with B and T of 1 or more, got {shape[:2]}")
    if labels is not None and labels.shape != shape[:2]:
        raise ValueError(f"labels: expected (B, T) = {shape[:2]}, got {tuple(labels.shape)}")
    if labels is not None and labels.dtype != torch.int64:
        raise ValueError(f"labels: expected torch.int64, got {labels.dtype}")
