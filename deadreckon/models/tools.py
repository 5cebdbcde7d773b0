"""Integration with Hugging Face tools: Auto classes, peft's LoRA targets, and validation of `forward` arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

AUTO_MODULE = "modeling_deadreckon"
AUTO_CLASSES = {
    "AutoConfig": "DeadReckonConfig", "AutoModel": "DeadReckonModel", "AutoModelForCausalLM": "DeadReckonForCausalLM",
}  # fmt: skip
"""Auto class -> the class that it loads."""


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


def documents_in(keywords: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """Takes out of keywords what `DataCollatorWithFlattening` says of packed documents; returns their boundaries."""
    boundaries: Tensor | None = keywords.pop("cu_seq_lens_q", None)
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        keywords.pop(name, None)
    places: Tensor | None = keywords.pop("position_ids", None)
    if boundaries is not None or places is None:
        return boundaries
    if places.shape == tokens.shape[:2]:
        index = torch.arange(places.shape[1], device=places.device)
        if bool((places == index).all()):
            return None
        starts = torch.where(places == 0, index, 0).cummax(1).values
        if len(places) == 1 and bool((places == index - starts).all()):
            begins = (places[0] == 0).nonzero()[:, 0]
            return torch.cat([begins, begins.new_tensor([len(index)])]).to(torch.int32)
    raise ValueError(
        "position_ids: expected those of documents packed in one row, each counted from 0; padding is given by "
        f"attention_mask; got {places!r:.80} for tokens {tuple(tokens.shape[:2])}"
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
    shape = tuple(given.shape)
    if inputs_embeds is None and (len(shape) != 2 or given.is_floating_point()):
        raise ValueError(f"input_ids: expected tokens (B, T), got {given.dtype} {shape}")
    if inputs_embeds is not None and (len(shape) != 3 or shape[2] != width):
        raise ValueError(f"inputs_embeds: expected (B, T, hidden_size = {width}), got {shape}")
    if labels is not None and labels.shape != shape[:2]:
        raise ValueError(f"labels: expected (B, T) = {shape[:2]}, got {tuple(labels.shape)}")
