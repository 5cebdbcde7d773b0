"""What other people's tools expect of a model: transformers' Auto classes, peft, and callers with more keywords."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

AUTO_MODULE = "modeling_deadreckon"
AUTO_CLASSES = {"AutoConfig": "DeadReckonConfig", "AutoModelForCausalLM": "DeadReckonForCausalLM"}
"""Auto class -> the class of ours that it loads."""


def name_for_auto_classes(folder: str | Path) -> dict[str, str]:
    """Writes a module of one import into the folder of a saved model, and returns the `auto_map` that names it.

    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` then finds the installed package, where
    transformers' own `register_for_auto_class` would copy source files beside weights.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = ", ".join(AUTO_CLASSES.values())
    (Path(folder) / f"{AUTO_MODULE}.py").write_text(f"from deadreckon import {names}  # noqa: F401\n")
    return {auto: f"{AUTO_MODULE}.{name}" for auto, name in AUTO_CLASSES.items()}


def offer_lora_targets(model_type: str) -> None:
    """Tells peft, where it has been imported, what LoRA adapts by default: what it adapts in a Llama."""
    if constants := sys.modules.get("peft.utils.constants"):
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(model_type, ["q_proj", "v_proj"])


def refuse_unknown(keywords: dict[str, Any]) -> None:
    """Raises a TypeError for keywords of `forward` that would change the answer of a model that knew them.

    None and False ask for nothing; `token_type_ids` come from tokenizers, whatever the model.
    """
    for name, value in keywords.items():
        if value is not None and value is not False and name != "token_type_ids":
            raise TypeError(f"{name}: expected None or False, this model has no such option; got {value!r:.80}")
