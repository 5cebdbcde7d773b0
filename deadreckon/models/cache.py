"""Layer states as Hugging Face's KV cache: cache layers for `DynamicCache`, which `generate()` uses."""

from __future__ import annotations

from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from deadreckon.models.rows import Rows
from deadreckon.models.state import LayerState

LAYER_TYPE = "deadreckon"


class StateLayer(DynamicLayer):
    """The cache layer of one attention layer, made by `DynamicCache(config=config)` from `config.layer_types`."""

    _layer_type = LAYER_TYPE
    is_croppable = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: LayerState | Rows = LayerState()
        self.home: torch.device | None = None  # the device to return to, while the state is offloaded

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the first piece creates the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses keys and values: the attention layer advances its state itself."""
        raise ValueError("past_key_values: this cache belongs to DeadReckon models, got keys and values of another")

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.state.length

    def reset(self) -> None:
        """Empties the cache."""
        self.state = LayerState()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last −tokens_to_remove tokens: transformers passes 0 or a negative number, or a tensor of one."""
        try:
            tokens = -index(tokens_to_remove)
        except TypeError as error:
            raise ValueError(f"crop: expected a whole number of 0 or less, got {tokens_to_remove!r}") from error
        if tokens < 0:
            raise ValueError(f"crop: expected a number of 0 or less, got {-tokens}")
        self.state.crop(tokens)
        if not self.state.length:
            self.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the batch for beam search."""
        if self.state.length:
            self.state = self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        if self.state.length:
            self.state = self.state.select(torch.arange(self.state.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch only."""
        if self.state.length:
            rows = torch.arange(self.state.batch, device=indices.device)
            self.state = self.state.select(rows[indices])

    def offload(self) -> None:
        """Moves the state to the CPU."""
        if self.state.origin is not None:
            self.home = self.state.origin.device
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        """Moves the state back to its device."""
        if self.home is not None:
            self.state = self.state.to(self.home)
