"""The Hugging Face configuration: validated, and saved so that later changes of defaults do not change a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from deadreckon.encodings import ENCODINGS
from deadreckon.encodings.base import check_sharpening
from deadreckon.models.cache import LAYER_TYPE
from deadreckon.models.tools import name_for_auto_classes

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
WHOLE = *SIZES, "max_position_embeddings"
REQUIRED = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"
LEAST = dict.fromkeys(WHOLE, 1) | dict.fromkeys(("initializer_range", "rms_norm_eps", "qk_norm_eps"), 0)
# Names that other configurations, or our layers, have for an option of this one.
ELSEWHERE = {
    "d_model": "hidden_size", "n_embd": "hidden_size", "dim": "hidden_size", "embed_dim": "hidden_size",
    "n_heads": "num_attention_heads", "n_head": "num_attention_heads", "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "num_kv_heads": "num_key_value_heads",
    "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers", "num_layers": "num_hidden_layers",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size", "n_positions": "max_position_embeddings",
    "activation": "hidden_act", "activation_function": "hidden_act", "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps", "attn_bias": "attention_bias", "qkv_bias": "attention_bias",
    "position_encoding": "encoding", "position_embedding_type": "encoding",
    "rope_theta": 'encoding_options={"rope": {"base": …}}', "rope_base": 'encoding_options={"rope": {"base": …}}',
}  # fmt: skip
# Options of other models that this one does not have, and what turns them off.
ABSENT = {
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0),
    **dict.fromkeys(("sliding_window", "rope_parameters", "rope_scaling", "impl"), None),
    **dict.fromkeys(("partial_rotary_factor", "logit_scale"), 1),
}
NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


@strict
class DeadReckonConfig(PreTrainedConfig):
    """The configuration of a :class:`DeadReckonForCausalLM`.

    Args:
        encoding: a name in :data:`deadreckon.ENCODINGS`, for every layer.
        layer_encodings: one name per layer, instead.
        encoding_options: keywords of the encodings, by name: ``{"path": {"rank": 16}}``.
        qk_norm: RMS-normalise queries and keys, with `qk_norm_eps`.
        attention_bias: whether the projections to queries, keys and values have biases.
        attention_output_bias: whether the output projection of attention has one.
        intermediate_size: of the MLP; by default 8/3 of hidden_size, rounded up to a multiple of 32, or, without a
            gate, four times hidden_size.
        gated_mlp: down(act(gate x) ⊙ up x), as in Llama; else down(act(up x)), as in GPT-2.
        hidden_act: the MLP's activation, by its name in transformers.
        mlp_bias: whether the MLP's projections have biases.
        norm: "rms" for RMSNorm, or "layer" for LayerNorm; with `rms_norm_eps`.
        max_position_embeddings: the longest document, for encodings that scale their angles by it. It is not a limit.
        sharpen_beyond: the training length in tokens, to keep softmax as sharp beyond it: see :class:`AttentionLayer`.
            Also for a model that was trained without: ``from_pretrained(…, sharpen_beyond=2048)``.
    """

    model_type = "deadreckon"

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    encoding: str = "path-fox"
    layer_encodings: list[str] | None = None
    encoding_options: dict[str, Any] | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_output_bias: bool = False
    gated_mlp: bool = True
    hidden_act: str = "silu"
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    sharpen_beyond: int | None = None
    initializer_range: float = 0.02
    norm: str = "rms"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, least in LEAST.items():
            value, kind = getattr(self, name), int if name in WHOLE else (int, float)
            if value is None and name not in REQUIRED:
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name}: expected {'an integer' if kind is int else 'a number'}, got {value!r}")
            if not least <= value < math.inf:
                raise ValueError(f"{name}: expected {least} or more, got {value!r}")
        if isinstance(self.layer_encodings, str):
            raise ValueError(f"layer_encodings: expected a list of names, got {self.layer_encodings!r}")
        for name in self.encodings():
            if not isinstance(name, str) or name not in ENCODINGS:
                raise ValueError(f"encoding: expected one of {', '.join(ENCODINGS)}; got {name!r}")
        _refuse_ignored(kwargs, vars(self), self.encodings())
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id: expected a token below {self.vocab_size}, got {self.pad_token_id}")
        if self.intermediate_size is None:
            gated = -(-self.hidden_size * 8 // 3 // 32) * 32
            self.intermediate_size = gated if self.gated_mlp else 4 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads = {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size: expected a multiple of num_attention_heads = {self.num_attention_heads} "
                    f"(or head_dim), got {self.hidden_size}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_encodings is not None and len(self.layer_encodings) != self.num_hidden_layers:
            raise ValueError(
                f"layer_encodings: expected a name for each of {self.num_hidden_layers} layers, "
                f"got {len(self.layer_encodings)}"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act: expected one of {', '.join(ACT2FN)}; got {self.hidden_act!r}")
        if self.norm not in NORMS:
            raise ValueError(f"norm: expected one of {', '.join(NORMS)}; got {self.norm!r}")
        check_sharpening(self.sharpen_beyond)
        options = self.encoding_options or {}
        if not isinstance(options, dict) or not all(isinstance(one, dict) for one in options.values()):
            raise ValueError(
                f'encoding_options: expected options by encoding, such as {{"path": {{"rank": 16}}}}, got {options!r}'
            )
        for name in options:
            if name not in self.encodings():
                raise ValueError(
                    f"encoding_options: expected names of encodings in use, {sorted(set(self.encodings()))}, "
                    f"got {name!r}"
                )
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as saved, with options of encodings whose default has changed spelled out."""
        data = super().to_dict()
        defaults = {
            name: {option: inspect.signature(ENCODINGS[name]).parameters[option].default for option in changed}
            for name in self.encodings()
            if (changed := ENCODINGS[name].saved_without)
        }
        return data | {"encoding_options": _spelled_out(data.get("encoding_options"), defaults)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> DeadReckonConfig:
        """Loads a saved configuration; an option that is missing is newer than the model, and gets the old default.

        Those of other models are refused: many of their weights would fit, and the model compute something else.
        """
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"model_type: expected {cls.model_type!r}, got {kind!r}; deadreckon.convert_model, or `deadreckon "
                "convert`, makes a model of ours of it, if it is of a kind that can be converted"
            )
        names = config_dict.get("layer_encodings") or [config_dict.get("encoding", cls.encoding)]
        before = {name: old for name in names if name in ENCODINGS and (old := ENCODINGS[name].saved_without)}
        options = _spelled_out(config_dict.get("encoding_options"), before)
        return super().from_dict(config_dict | {"encoding_options": options}, **kwargs)

    def encodings(self) -> list[str]:
        """The name of each layer's encoding."""
        return self.layer_encodings or [self.encoding] * self.num_hidden_layers

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer that each layer needs, by the name under which transformers finds it."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Skips transformers' check, which accepts only its own layer types."""

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Saves config.json, and the module that Auto classes need where deadreckon has not been imported."""
        self.auto_map = name_for_auto_classes(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: `save_pretrained` refers to the installed package instead of copying this file."""


def _refuse_ignored(given: dict[str, Any], fields: Iterable[str], encodings: list[str]) -> None:
    """Raises a ValueError for keywords that transformers would keep while the model had the default."""
    for name, value in given.items():
        if name in ABSENT and value is not None and value != ABSENT[name]:
            raise ValueError(f"{name}: expected none, which this model does not have, got {value!r}")
        near = [ELSEWHERE[name]] if name in ELSEWHERE else get_close_matches(name, fields, 1, 0.8)
        having = [one for one in encodings if name in inspect.signature(ENCODINGS[one]).parameters]
        if having:
            near = [f'encoding_options={{"{having[0]}": {{"{name}": …}}}}']
        if near and name not in ABSENT:
            raise ValueError(f"{name}: expected the name of an option, such as {near[0]}")


def _spelled_out(options: dict[str, Any] | None, defaults: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Options by encoding, with missing ones filled in from `defaults`."""
    if not defaults:
        return options
    options = options or {}
    return options | {name: default | options.get(name, {}) for name, default in defaults.items()}
