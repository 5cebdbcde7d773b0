"""The state of a layer between pieces of a sequence (prefill, then decode): its KV cache and recent inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.encodings.base import ALWAYS_AS_MANY, Sizes
from deadreckon.ops.streaming.past import Past, check_crop


class Origin(NamedTuple):
    """The layer and the inputs that a state comes from."""

    encoding: str
    sizes: Sizes
    batch: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, encoding: str, sizes: Sizes) -> Origin:
        """Of a layer with that encoding and an input x (B, T, d_model)."""
        return cls(encoding, sizes, x.shape[0], x.dtype, x.device)


@dataclass
class LayerState:
    """The memory of one :class:`AttentionLayer`: ``y, state = layer(x, state=state)``, ``None`` to begin with.

    A layer advances the state that it takes, in place, and returns it; :meth:`fork` first to continue one prefix twice.
    A state belongs to one layer, or one like it, and keeps its dtype: cast layers begin with new states.

    Attributes:
        past: what attention needs: segments of keys and values, with gates, phases or Householder products; with
            powers, the state that all but the last tokens have become.
        recent: what the encoding needs of the last inputs, and of so many before them that `crop` can undo tokens.
        kept: how many tokens `crop` can undo, as far as recent inputs go back.
        left_out: (B,) how many masked tokens each row counts before its first real one; None where there are none.
        gated: whether the encoding has gates; if not, those of the past are closed behind masked tokens and open else.
        origin: the layer and the inputs that it comes from; None before the first piece.
    """

    past: Past = field(default_factory=Past)
    recent: dict[str, Tensor] = field(default_factory=dict)
    kept: int = 0
    left_out: Tensor | None = None
    gated: bool = False
    origin: Origin | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.past.length

    @property
    def batch(self) -> int:
        """The batch size; 0 before the first piece."""
        return 0 if self.origin is None else self.origin.batch

    def check(self, origin: Origin) -> None:
        """Raises a ValueError if the state is of another layer or of other inputs."""
        if self.origin is None or self.origin == origin:
            return
        for name, expected, came in zip(Origin._fields, origin, self.origin, strict=True):
            if expected != came:
                raise ValueError(f"state: expected one of {name} {expected}, like the layer and x, got {came}")

    def draft(self) -> LayerState:
        """A copy to advance; see :meth:`become`."""
        draft = LayerState.__new__(LayerState)
        draft.become(self)
        draft.past, draft.recent = self.past.draft(), dict(self.recent)
        return draft

    def become(self, draft: LayerState) -> None:
        """Takes over a whole draft in one call of C, which no KeyboardInterrupt can interrupt half-way."""
        vars(self).update(vars(draft))

    def fork(self) -> LayerState:
        """Another continuation of the same prefix, which is shared, not copied."""
        recent = {name: x.clone() for name, x in self.recent.items()}  # a graph writes to its own
        return replace(self, past=self.past.fork(), recent=recent)

    def detach(self) -> None:
        """Leaves what a graph writes to, to another state, in place."""
        self.past.detach()
        self.recent = {name: x.clone() for name, x in self.recent.items()}

    def select(self, rows: Tensor) -> LayerState:
        """The state of these sequences in this order, with repetitions: (new batch,) integers."""
        past = self.past.select(rows)
        recent = {name: x.index_select(0, rows.to(x.device)) for name, x in self.recent.items()}
        origin = None if self.origin is None else self.origin._replace(batch=len(rows))
        left_out = None if self.left_out is None else self.left_out.index_select(0, rows.to(self.left_out.device))
        return replace(self, past=past, recent=recent, left_out=left_out, origin=origin)

    def alone(self, rows: Sequence[int], masked: int) -> LayerState:
        """The state of some sequences, of which so many tokens were masked, as if these had never been."""
        state = self.select(torch.tensor(rows))
        past = state.past.without_first(masked, self.gated or self.left_out is None)
        return replace(state, past=past, left_out=None)

    def to(self, device: torch.device | str) -> LayerState:
        """A copy of the state, on any device."""
        past = self.past.to(device)
        origin = None if self.origin is None else self.origin._replace(device=torch.empty(0, device=device).device)
        recent = {name: x.to(device, copy=True) for name, x in self.recent.items()}
        left_out = None if self.left_out is None else self.left_out.to(device, copy=True)
        return replace(self, past=past, recent=recent, left_out=left_out, origin=origin)

    @property
    def croppable(self) -> int:
        """How many tokens :meth:`crop` can undo now, short of all.

        That is back to any of the last 64 tokens of the sequence at its longest (tokens that were undone before count),
        and more where the encoding allows it.
        """
        return min(self.past.croppable, self.kept) if self.recent else self.past.croppable

    def crop(self, tokens: int) -> None:
        """Undoes the last tokens, in place: as many as `croppable` says, or all.

        Raises:
            ValueError: where that is more than there have been, or than is kept.
        """
        check_crop(tokens, self.length, self.croppable)
        if tokens == self.length:
            self.become(LayerState())
        elif tokens:
            cropped = replace(self, past=replace(self.past), kept=max(0, self.kept - tokens), recent={})
            cropped.past.crop(tokens)
            for name, x in self.recent.items():  # those that are kept by place stay where they are
                padding = (0, 0) * (x.dim() - 2) + (tokens, 0)
                cropped.recent[name] = pad(x[:, :-tokens], padding) if name in ALWAYS_AS_MANY else x
            self.become(cropped)

    def bytes(self) -> int:
        """Memory held, whether shared or not."""
        held = [*self.past.tensors(), *self.recent.values()]
        return sum(x.numel() * x.element_size() for x in held)
