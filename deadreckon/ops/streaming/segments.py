"""Segments of the KV cache: neighbouring tokens, by head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deadreckon.ops.blockwise.precision import work

Fields = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]


class Segment:
    """Some neighbouring tokens, (N, S, ...) of each field, in storage with room for more; N = B · H.

    Segments hold keys and values. While a segment can still grow, its gates are running sums, (N, S, 1 | G); once it is
    closed, sums from each token to the end, `bias` (N, 1 | G, S), and of all, `total` (N, 1 | G, 1). With Householder
    steps it also holds the product of its steps (N, D, D).

    The tokens of a segment never change. A longer segment may use the same storage, beyond the end of this one.
    """

    def __init__(
        self, fields: Fields, product: Tensor | None = None, bias: Tensor | None = None, total: Tensor | None = None
    ) -> None:
        self.storage = fields
        self.length = next(iter(fields.values())).shape[1]
        self.product, self.bias, self.total = product, bias, total
        self.shared = False  # with another continuation, which might write to the same storage
        self.has_room = False  # storage may be somebody else's, until it has grown
        self.lent = False  # storage is a decoder's, which will write to it

    def __getitem__(self, name: str) -> Tensor:
        return self.storage[name][:, : self.length]

    def fields(self) -> Fields:
        """The fields, without unused storage."""
        return {name: self[name] for name in self.storage}

    @property
    def sums(self) -> Tensor | None:
        return self["sums"] if "sums" in self.storage else None

    def gates(self) -> tuple[Tensor, Tensor] | None:
        """The sums of log gates from each token to the end, (N, S, 1 | G), and of all, (N, 1, 1 | G)."""
        if self.sums is not None:
            return self.sums[:, -1:] - self.sums, self.sums[:, -1:]
        return None if self.bias is None or self.total is None else (self.bias.mT, self.total.mT)

    def extended(self, fields: Fields) -> Segment:
        """With more tokens at the end. Full storage grows by a sixteenth, which costs as much as reading the cache."""
        assert not self.shared
        added = next(iter(fields.values())).shape[1]
        storage = dict(self.storage)
        for name, new in fields.items():
            held = storage[name]
            if not self.has_room or self.length + added > held.shape[1]:
                room = max(self.length + added, self.length + self.length // 16, 64)
                storage[name] = held.new_empty(held.shape[0], room, *held.shape[2:])
                storage[name][:, : self.length] = held[:, : self.length]
            storage[name][:, self.length : self.length + added] = new
        longer = Segment(storage)
        longer.length, longer.has_room = self.length + added, True
        return longer

    def closed(self) -> Segment:
        """Closed, as kernels take it: gates are sums to its end, storage is contiguous and aligned."""
        tight = {name: x for name, x in self.storage.items() if name != "sums"}
        for name, x in tight.items():
            if not x.is_contiguous() or x.data_ptr() % 16:
                tight[name] = x.clone(memory_format=torch.contiguous_format)
        bias, total = self.bias, self.total
        if self.sums is not None:
            bias, total = counted_to_end(self.sums.mT, work(self["k"].dtype))
        closed = Segment(tight, self.product, bias, total)
        closed.length, closed.shared, closed.has_room = self.length, self.shared, self.has_room
        return closed

    def of_length(self, tokens: int) -> Segment:
        """With fewer tokens at the end, or with more that are already in the storage."""
        assert self.product is None
        bias, total = self.bias, self.total
        if bias is not None and total is not None and tokens < self.length:
            later = bias[..., tokens - 1 : tokens]
            bias, total = (bias[..., :tokens] - later).contiguous(), total - later
        other = Segment(self.storage, bias=bias, total=total)
        other.length, other.shared, other.has_room, other.lent = tokens, self.shared, self.has_room, self.lent
        return other

    def without_first(self, tokens: int) -> Segment:
        """Without its first tokens, in storage of its own. The product, if there is one, is still that of all steps."""
        fields = {name: self[name][:, tokens:].clone() for name in self.storage}
        if self.sums is not None:
            fields["sums"] -= self.sums[:, tokens - 1 : tokens]
        if self.bias is None or self.total is None:
            return Segment(fields, self.product)
        total = self.bias[..., tokens - 1 : tokens].to(self.total.dtype)
        bias = self.bias[..., tokens:].clone(memory_format=torch.contiguous_format)
        return Segment(fields, self.product, bias, total)

    def without_gates(self) -> Segment:
        """The same without gates, which must all be open."""
        fields = {name: x for name, x in self.storage.items() if name not in ("sums", "gates")}
        other = Segment(fields, self.product)
        other.length, other.shared, other.has_room, other.lent = self.length, self.shared, self.has_room, self.lent
        return other

    def of_heads(self, which: slice) -> Segment:
        """Some of its heads, as views."""
        parts = (None if x is None else x[which] for x in (self.product, self.bias, self.total))
        other = Segment({name: x[which] for name, x in self.storage.items()}, *parts)
        other.length, other.shared, other.has_room, other.lent = self.length, self.shared, self.has_room, self.lent
        return other

    def map(self, change: Change) -> Segment:
        """A separate segment, with `change` applied to every tensor, along its first dimension."""
        fields = {name: change(x) for name, x in self.fields().items()}
        return Segment(fields, *(None if x is None else change(x) for x in (self.product, self.bias, self.total)))

    def kept(self) -> Segment:
        """A segment that no decoder will overwrite: itself, or a copy if its storage is a decoder's."""
        return self.map(torch.clone) if self.lent else self

    def tensors(self) -> list[Tensor]:
        """Everything held."""
        return [*self.storage.values(), *(x for x in (self.product, self.bias, self.total) if x is not None)]

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors())


def counted_to_end(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`bias` and `total` of a segment, from running sums of log gates (N, 1 | G, S)."""
    total = sums[..., -1:].contiguous()
    return (total - sums).to(dtype).contiguous(), total  # near the end, where it matters, exact


def joined(older: Segment, younger: Segment) -> Segment:
    """Merges two closed neighbours: the older keys cross the younger's steps, if there are any."""
    keys, product = older["k"], None
    if older.product is not None and younger.product is not None:
        keys = (keys.to(younger.product.dtype) @ younger.product).to(keys.dtype)
        product = older.product @ younger.product
    fields = {"k": torch.cat([keys, younger["k"]], dim=1), "v": torch.cat([older["v"], younger["v"]], dim=1)}
    bias = total = None
    if older.bias is not None and younger.bias is not None:
        assert older.total is not None
        assert younger.total is not None
        bias = torch.cat([(older.bias + younger.total).to(older.bias.dtype), younger.bias], dim=2)
        total = older.total + younger.total
    return Segment(fields, product, bias, total)


def add_closed(segments: list[Segment], segment: Segment) -> None:
    """Appends a closed segment; merges the last two while the older length has no more binary digits, like a carry.

    So there are never more segments than their total length has digits, whatever lengths are appended.
    """
    segments.append(segment)
    while len(segments) > 1 and segments[-2].length.bit_length() <= segments[-1].length.bit_length():
        younger, older = segments.pop(), segments.pop()
        segments.append(joined(older, younger))
