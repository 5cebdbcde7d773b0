"""What a layer remembers of a sequence that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deadreckon.ops.streaming.past import Past


@dataclass
class LayerState:
    """The memory of one :class:`AttentionLayer`: ``y, state = layer(x, state=state)``, ``None`` to begin with.

    A layer moves on the state it is given and returns it; :meth:`fork` first to go on from one place twice.

    Attributes:
        past: what attention needs: segments of keys and values, with gates, phases or Householder products; with
            powers, the state that all but the last tokens have become.
        recent: the last inputs of a short convolution, and some before them.
        length: how many tokens have been.
        kept: how many tokens recent inputs go back beyond what is needed.
        batch: of how many sequences.
        padded: whether some of these sequences began with padding.
    """

    past: Past = field(default_factory=Past)
    recent: dict[str, Tensor] = field(default_factory=dict)
    kept: int = 0
    length: int = 0
    batch: int = 0
    padded: bool = False

    def fork(self) -> LayerState:
        """Another continuation from here. What is behind is shared, not copied."""
        return replace(self, past=self.past.fork(), recent=dict(self.recent))

    def select(self, rows: Tensor) -> LayerState:
        """The state of these sequences, in this order, as often as they are named."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)), len(rows))

    def to(self, device: torch.device | str) -> LayerState:
        """The state on another device."""
        return self._map(lambda x: x.to(device), self.batch)

    def crop(self, tokens: int) -> None:
        """Goes back by so many tokens, in place: any number up to 64, more where the encoding allows it, or all.

        Raises:
            ValueError: where that is more than there have been, or than is kept.
        """
        if not isinstance(tokens, int) or not 0 <= tokens <= self.length:
            raise ValueError(f"crop: expected 0 to {self.length} tokens, which have been, got {tokens!r}")
        if tokens == self.length:
            self.past, self.recent, self.kept = Past(), {}, 0
        elif tokens:
            allowed = min(self.past.croppable, self.kept if self.recent else self.length)
            if tokens > allowed:
                raise ValueError(f"crop: expected at most {allowed} tokens, got {tokens}")
            self.past.crop(tokens)
            self.kept = max(0, self.kept - tokens)
            self.recent = {name: x[:, : x.shape[1] - tokens] for name, x in self.recent.items()}
        self.length -= tokens

    def bytes(self) -> int:
        """Memory held, whether shared or not."""
        held = [*self.past.tensors(), *self.recent.values()]
        return sum(x.numel() * x.element_size() for x in held)

    def _map(self, change: Callable[[Tensor], Tensor], batch: int) -> LayerState:
        recent = {name: change(x) for name, x in self.recent.items()}
        return replace(self, past=self.past.map(self.batch, change), recent=recent, batch=batch)
