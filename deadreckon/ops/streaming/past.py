"""What attention keeps of the tokens behind it: segments, and the last tokens as they came (`stream.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.streaming.fold import Folded, fold, tokens_worth

if TYPE_CHECKING:
    from deadreckon.ops.streaming.decode import Decoder

Fields = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]


class Segment:
    """Some neighbouring tokens, (N, S, ...) of each field, with room to grow.

    Closed segments hold keys and values. Where their end still moves, gates are there as running sums, (N, S, 1 | G);
    with Householder steps, which do not end later, as the sums from each token to the end, `bias` (N, 1 | G, S), and
    of all, `total` (N, 1 | G, 1), beside the product of the steps (N, D, D).
    """

    def __init__(
        self, fields: Fields, product: Tensor | None = None, bias: Tensor | None = None, total: Tensor | None = None
    ) -> None:
        self.storage = fields
        self.length = next(iter(fields.values())).shape[1]
        self.product, self.bias, self.total = product, bias, total
        self.shared = False  # with another continuation: what is in it stays as it is
        self.owned = False  # storage may be somebody else's, until it has grown

    def __getitem__(self, name: str) -> Tensor:
        return self.storage[name][:, : self.length]

    def fields(self) -> Fields:
        """Without the room."""
        return {name: self[name] for name in self.storage}

    @property
    def sums(self) -> Tensor | None:
        return self["sums"] if "sums" in self.storage else None

    def gates(self) -> tuple[Tensor, Tensor] | None:
        """The sums of log gates from each token to the end, (N, S, 1 | G), and of all, (N, 1, 1 | G)."""
        if self.sums is not None:
            return self.sums[:, -1:] - self.sums, self.sums[:, -1:]
        return None if self.bias is None or self.total is None else (self.bias.mT, self.total.mT)

    def append(self, fields: Fields) -> None:
        """Adds tokens at the end. Full storage grows by a sixteenth, which costs as much as a lookup."""
        added = next(iter(fields.values())).shape[1]
        for name, new in fields.items():
            held = self.storage[name]
            if not self.owned or self.length + added > held.shape[1]:
                room = max(self.length + added, self.length + self.length // 16, 64)
                grown = held.new_empty(held.shape[0], room, *held.shape[2:])
                grown[:, : self.length] = held[:, : self.length]
                self.storage[name] = grown
            self.storage[name][:, self.length : self.length + added] = new
        self.length += added
        self.owned = True

    def shortened(self, tokens: int) -> Segment:
        """Without its last tokens; storage is the same, and written to again by one continuation alone."""
        assert self.product is None
        shorter = Segment(self.storage)
        shorter.length, shorter.shared, shorter.owned = self.length - tokens, self.shared, self.owned
        return shorter

    def later(self, tokens: int) -> Segment:
        """Without its first tokens, in storage of its own."""
        fields = {name: self[name][:, tokens:].clone() for name in self.storage}
        if self.sums is not None:
            fields["sums"] -= self.sums[:, tokens - 1 : tokens]
        return Segment(fields)

    def map(self, change: Change) -> Segment:
        """A segment of its own, every tensor changed along its first dimension."""
        fields = {name: change(x) for name, x in self.fields().items()}
        return Segment(fields, *(None if x is None else change(x) for x in (self.product, self.bias, self.total)))

    def tensors(self) -> list[Tensor]:
        """Everything held."""
        return [*self.storage.values(), *(x for x in (self.product, self.bias, self.total) if x is not None)]

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors())


def joined(older: Segment, younger: Segment) -> Segment:
    """One segment from two neighbours: the older keys cross the younger's steps."""
    assert older.product is not None
    assert younger.product is not None
    keys = (older["k"].to(younger.product.dtype) @ younger.product).to(older["k"].dtype)
    fields = {"k": torch.cat([keys, younger["k"]], dim=1), "v": torch.cat([older["v"], younger["v"]], dim=1)}
    bias = total = None
    if older.bias is not None and younger.bias is not None:
        assert older.total is not None
        assert younger.total is not None
        bias = torch.cat([(older.bias + younger.total).to(older.bias.dtype), younger.bias], dim=2)
        total = older.total + younger.total
    return Segment(fields, older.product @ younger.product, bias, total)


@dataclass
class Past:
    """All that attention needs of the tokens behind it.

    Attributes:
        segments: from the oldest to the youngest.
        waiting: the last tokens as they came (Householder steps only).
        phases: sums of step angles up to each of the last tokens, one more than it is possible to go back.
        longest: what keys are divided by, with powers.
        decoder: what it takes to go on by single tokens; it alone writes to `waiting` in place.
        folded: all tokens before the segments, with powers.
    """

    segments: list[Segment] = field(default_factory=list)
    waiting: Segment | None = None
    phases: Tensor | None = None
    longest: Tensor | None = None
    folded: Folded | None = None
    decoder: Decoder | None = None

    def fork(self) -> Past:
        """Another continuation. Segments are shared from here on, not copied."""
        for segment in self.segments:
            segment.shared = True
        waiting = None if self.waiting is None else Segment(self.waiting.fields())
        return replace(self, segments=list(self.segments), waiting=waiting, decoder=None)

    def map(self, batch: int, change: Change) -> Past:
        """Every tensor changed along the batch, of which this holds `batch` rows: reordered, repeated, moved."""

        def by_row(x: Tensor) -> Tensor:  # N = B · H
            return change(x.unflatten(0, (batch, -1))).flatten(0, 1)

        return Past(
            [segment.map(by_row) for segment in self.segments],
            None if self.waiting is None else self.waiting.map(by_row),
            self.phases if self.phases is None or self.phases.shape[0] == 1 else change(self.phases),
            None if self.longest is None else by_row(self.longest),
            None if self.folded is None else Folded(*map(by_row, self.folded)),
        )

    def tensors(self) -> list[Tensor]:
        """Everything held, once."""
        held = [*self.segments, *(part for part in (self.waiting, self.decoder) if part is not None)]
        found = [x for part in held for x in part.tensors()]
        return found + [x for x in (self.phases, self.longest, *(self.folded or ())) if x is not None]

    @property
    def croppable(self) -> int:
        """By how many tokens it can go back: those that are folded are beyond recall."""
        waiting = 0 if self.waiting is None else self.waiting.length
        allowed = waiting + sum(segment.length for segment in self.segments if segment.product is None)
        return allowed if self.phases is None else min(allowed, self.phases.shape[1] - 1)

    def crop(self, tokens: int) -> None:
        """Goes back by so many tokens, but not to the beginning."""
        assert tokens <= self.croppable
        if self.phases is not None:
            self.phases = self.phases[:, : self.phases.shape[1] - tokens]
        if self.waiting is not None:
            self.waiting = self.waiting.shortened(tokens) if tokens < self.waiting.length else None
            self.decoder = None
            return
        while tokens and tokens >= self.segments[-1].length:
            tokens -= self.segments.pop().length
        if tokens:
            self.segments[-1] = self.segments[-1].shortened(tokens)

    def fold(self, p: int) -> None:
        """Folds all but the last leaf of tokens, where that saves room: a leaf at a time once there is a state."""
        assert self.longest is not None
        first = self.segments[0]
        worth = LEAF if self.folded else tokens_worth(first["k"], first["v"], first.sums, p)
        tokens = sum(segment.length for segment in self.segments) - LEAF
        while tokens >= worth:
            segment = self.segments.pop(0)
            taken = min(tokens, segment.length)
            k, v, sums = segment["k"][:, :taken], segment["v"][:, :taken], segment.sums
            self.folded = fold(self.folded, k, v, None if sums is None else sums[:, :taken], self.longest, p)
            if taken < segment.length:
                self.segments.insert(0, segment.later(taken))
            tokens, worth = tokens - taken, 1
