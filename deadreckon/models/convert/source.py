"""The model to convert: its configuration and weights, and helpers to build and fill a new model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deadreckon.models.huggingface import DeadReckonConfig, DeadReckonForCausalLM


@dataclass(frozen=True)
class Source:
    """A causal language model to convert.

    Attributes:
        kind: transformers' `model_type`.
        weights: its state dict, with both embeddings and lm_head, tied or not.
        generation: its generation config, or None.
    """

    kind: str
    config: PreTrainedConfig
    weights: dict[str, Tensor]
    generation: Any

    @classmethod
    def of(cls, model: object) -> Source:
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or not isinstance(config, PreTrainedConfig):
            raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
        weights = model.state_dict()
        if "lm_head.weight" not in weights:
            raise ValueError(f"model: expected a causal language model, with lm_head, got {type(model).__name__}")
        return cls(config.model_type, config, weights, getattr(model, "generation_config", None))

    def refuse(self, part: str, came: object) -> ValueError:
        """The error for a part of the model that ours do not have."""
        return ValueError(f"model: expected a {self.kind} model without {part}, got {came}")

    def check_vocabulary(self, embeddings: str) -> None:
        """Raises a ValueError unless embeddings and lm_head have vocab_size rows."""
        for name in (embeddings, "lm_head.weight"):
            rows = self.weights[name].shape[0]
            if rows != self.config.vocab_size:
                raise ValueError(f"model: expected {name} of vocab_size = {self.config.vocab_size} rows, got {rows}")

    def common(self) -> dict[str, Any]:
        """Fields of the configuration that have the same name in all supported models."""
        names = (
            "vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "initializer_range", "tie_word_embeddings",
            "pad_token_id", "bos_token_id", "eos_token_id",
        )  # fmt: skip
        return {name: getattr(self.config, name) for name in names}

    def build(self, config: DeadReckonConfig) -> DeadReckonForCausalLM:
        """A new model with this configuration, on the device and in the dtype of the source's weights."""
        like, usual = self.weights["lm_head.weight"], torch.get_default_dtype()
        torch.set_default_dtype(like.dtype)
        try:
            with torch.device(like.device):
                model = DeadReckonForCausalLM(config)
        finally:
            torch.set_default_dtype(usual)
        if self.generation is not None:
            model.generation_config = type(self.generation).from_dict(self.generation.to_dict())
        return model


def fill(model: DeadReckonForCausalLM, weights: dict[str, Tensor], drawn: str | None = None) -> None:
    """Loads weights into a model: all must be used, and only parameters whose names contain `drawn` may be missing."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if drawn is None or drawn not in name]
    if missing or unexpected:
        raise ValueError(
            "model: expected weights as its configuration has them, "
            f"got {', '.join(unexpected[:3]) or 'none'} too many and {', '.join(missing[:3]) or 'none'} too few"
        )
