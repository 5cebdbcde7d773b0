"""The state of a layer between pieces of a sequence (prefill, then decode): KV cache and recent inputs."""

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
    """The kind of layer and inputs that a state was made with."""

    encoding: str
    sizes: Sizes
    batch: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, encoding: str, sizes: Sizes) -> Origin:
        """From a layer's encoding and sizes, and an input x (B, T, d_model)."""
        return cls(encoding, sizes, x.shape[0], x.dtype, x.device)


@dataclass
class LayerState:
    """The state of one :class:`AttentionLayer`: ``y, state = layer(x, state=state)``, ``None`` at first.

    A layer advances its state in place, and returns it; :meth:`fork` it first to continue one prefix twice.
    A state belongs to one layer, or one like it, and has a fixed dtype: after a layer is cast, start with new states.

    Attributes:
        past: the KV cache: segments of keys and values, with gates, phases or Householder products; with powers, the
            recurrent state that has replaced all but the last tokens.
        recent: the last inputs that the encoding needs, and enough before them for `crop`.
        kept: how many tokens `crop` can undo, as far as recent inputs go back.
        left_out: (B,) number of masked tokens (left padding) in each row; None if there are none.
        gated: whether the encoding has gates; if not, gates in `past` only hide masked tokens, and are open elsewhere.
        origin: the kind of layer and inputs that it was made with; None before the first piece.
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
        """Raises a ValueError if the state was made with another kind of layer or inputs."""
        if self.origin is None or self.origin == origin:
            return
        for name, expected, came in zip(Origin._fields, origin, self.origin, strict=True):
            if expected != came:
                raise ValueError(f"state: expected one of {name} {expected}, like the layer and x, got {came}")

    def draft(self) -> LayerState:
        """A shallow copy to advance; see :meth:`become`."""
        draft = LayerState.__new__(LayerState)
        draft.become(self)
        draft.past, draft.recent = self.past.draft(), dict(self.recent)
        return draft

    def become(self, draft: LayerState) -> None:
        """Replaces this state by a draft, atomically: one call of C, which no KeyboardInterrupt can interrupt."""
        vars(self).update(vars(draft))

    def fork(self) -> LayerState:
        """A second state with the same prefix, whose keys and values are shared, not copied."""
        recent = {name: x.clone() for name, x in self.recent.items()}  # a CUDA graph writes to its own in place
        return replace(self, past=self.past.fork(), recent=recent)

    def detach(self) -> None:
        """Detaches the state, in place, from buffers that a CUDA graph writes to: another state may take them over."""
        self.past.detach()
        self.recent = {name: x.clone() for name, x in self.recent.items()}

    def select(self, rows: Tensor) -> LayerState:
        """The state of these rows in this order, repetitions allowed: (new batch,) integers."""
        past = self.past.select(rows)
        recent = {name: x.index_select(0, rows.to(x.device)) for name, x in self.recent.items()}
        origin = None if self.origin is None else self.origin._replace(batch=len(rows))
        left_out = None if self.left_out is None else self.left_out.index_select(0, rows.to(self.left_out.device))
        return replace(self, past=past, recent=recent, left_out=left_out, origin=origin)

    def alone(self, rows: Sequence[int], masked: int) -> LayerState:
        """The state of some rows, which have so many masked tokens at the front, without these tokens."""
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
        """How many tokens :meth:`crop` can undo now, other than all.

        That is back to any of the last 64 tokens of the sequence at its longest (tokens already undone count), and more
        if the encoding allows it.
        """
        return min(self.past.croppable, self.kept) if self.recent else self.past.croppable

    def crop(self, tokens: int) -> None:
        """Undoes the last tokens, in place: as many as `croppable` says, or all.

        Raises:
            ValueError: if that is more than there are, or than can be undone.
        """
        check_crop(tokens, self.length, self.croppable)
        if tokens == self.length:
            self.become(LayerState())
        elif tokens:
            cropped = replace(self, past=replace(self.past), kept=max(0, self.kept - tokens), recent={})
            cropped.past.crop(tokens)
            for name, x in self.recent.items():  # ring buffers indexed by position stay as they are
                padding = (0, 0) * (x.dim() - 2) + (tokens, 0)
                cropped.recent[name] = pad(x[:, :-tokens], padding) if name in ALWAYS_AS_MANY else x
            self.become(cropped)

    def bytes(self) -> int:
        """Bytes of memory held, whether shared or not."""
        held = [*self.past.tensors(), *self.recent.values()]
        return sum(x.numel() * x.element_size() for x in held)
