"""Softmax attention along Householder routes for one more token, at the cost of a look at the keys.

The last tokens, the tail, have their keys in the frame of the newest, in the working precision: a new token turns them
all, and the product of their steps. A segment further back is seen through that product and one more, that of all steps
between the segment and the tail, which changes only when a segment is closed: every `ROOM − LEAF` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.ops.blockwise.precision import work
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.factors import Householder
from deadreckon.ops.streaming.past import Decoder, Past
from deadreckon.ops.streaming.routes import close_waiting, without_queries
from deadreckon.ops.streaming.segments import Segment

ROOM = LEAF + 128  # tokens of the tail, all but a leaf of which are closed when it is full


class Tail:
    """The tokens that wait, in storage with room for more, and how they and the segments look from the newest.

    Attributes:
        waiting: the tokens as they came.
        keys: (N, room, D) in the newest frame.
        bias: (N, room, 1 | G) sums of gates up to the newest token, if there are gates.
        product: (N, D, D) of the tail's steps; `total`: (N, 1 | G) of its gates.
        segments: from the youngest to the oldest, each with the product and the sum (N, 1 | G) of what lies between it
            and the tail.
    """

    def __init__(self, past: Past) -> None:
        assert past.waiting is not None
        fields, tokens = past.waiting.fields(), past.waiting.length
        dtype = work(fields["k"].dtype)
        top = without_queries(fields)
        assert top.product is not None
        self.keys, self.product = roomy(top.keys[:, :tokens].to(dtype)), top.product.to(dtype)
        self.bias = self.total = None
        if top.sums is not None:
            last = top.sums[:, tokens - 1 : tokens]
            self.bias, self.total = roomy((last - top.sums[:, :tokens]).to(dtype)), last[:, 0].to(dtype)
        self.waiting = Segment({name: roomy(x) for name, x in fields.items()}).of_length(tokens)
        product = torch.eye(self.keys.shape[2], dtype=dtype, device=self.keys.device).repeat(self.keys.shape[0], 1, 1)
        total = None if self.total is None else torch.zeros_like(self.total)
        self.segments = list[tuple[Segment, Tensor, Tensor | None]]()
        for segment in reversed(past.segments):
            self.segments.append((segment, product, total))
            assert segment.product is not None
            product = segment.product.to(dtype) @ product
            if total is not None and segment.total is not None:
                total = (total + segment.total[..., 0]).to(dtype)

    @property
    def full(self) -> bool:
        return self.waiting.length == ROOM

    def lengthen(self) -> None:
        """Counts the new token, whose fields are in the storage, among those that wait."""
        self.waiting = self.waiting.of_length(self.waiting.length + 1)

    def tensors(self) -> list[Tensor]:
        """Everything held, but for the tokens that wait and the segments."""
        between = [x for _, product, total in self.segments for x in (product, total)]
        return [x for x in (self.keys, self.bias, self.product, self.total, *between) if x is not None]


class TokenDecoder:
    """In PyTorch."""

    def __init__(self, past: Past, group: int) -> None:
        self.tail = Tail(past)

    @property
    def waiting(self) -> Segment:
        return self.tail.waiting

    @property
    def full(self) -> bool:
        return self.tail.full

    def tensors(self) -> list[Tensor]:
        return self.tail.tensors()

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, gate: Tensor | None, scale: float
    ) -> Tensor:
        tail, dtype, new = self.tail, self.tail.keys.dtype, self.tail.waiting.length
        fields = {"k": k, "v": v, "w": w, "beta": beta}
        if gate is not None and tail.bias is not None and tail.total is not None:
            fields["gates"] = gate
            tail.bias[:, :new] += gate.unsqueeze(1)
            tail.bias[:, new] = 0
            tail.total += gate
        for name, x in fields.items():
            tail.waiting.storage[name][:, new] = x
        tail.lengthen()
        q, along, strength = q.to(dtype) * scale, w.to(dtype).unsqueeze(1), -beta.to(dtype)[:, None, None]
        for x in (tail.keys[:, :new], tail.product):  # both end with the new step from here on
            x.baddbmm_(strength * (x @ along.mT), along)
        tail.keys[:, new] = k
        bias = None if tail.bias is None else tail.bias[:, : new + 1]
        seen = [(tail.keys[:, : new + 1], tail.waiting["v"], q, bias)]
        carried = q @ tail.product.mT
        for segment, product, total in tail.segments:
            bias = None
            if total is not None and tail.total is not None and segment.bias is not None:
                bias = (segment.bias + (tail.total + total).unsqueeze(2)).mT
            seen.append((segment["k"], segment["v"], carried @ product.mT, bias))
        logits = []
        for keys, _, queries, bias in seen:
            plain = queries @ keys.to(dtype).mT  # (N, G, tokens)
            logits.append(plain if bias is None else plain + bias.mT)
        weights = torch.cat(logits, dim=-1).softmax(-1).split([keys.shape[1] for keys, *_ in seen], dim=-1)
        parts = [weight @ values.to(dtype) for weight, (_, values, *_) in zip(weights, seen, strict=True)]
        return torch.stack(parts).sum(0)


def roomy(x: Tensor) -> Tensor:
    """(N, T, ...) in storage with room for more tokens."""
    storage = x.new_empty(x.shape[0], ROOM, *x.shape[2:])
    storage[:, : x.shape[1]] = x
    return storage


def decode_token(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder, log_gate: Tensor | None, scale: float, past: Past,
    kind: type[Decoder],
) -> Tensor:  # fmt: skip
    """The next token (B, 1, ...), with softmax, by a decoder of that kind; some tokens must wait."""
    assert past.waiting is not None
    batch, _, heads, _ = k.shape
    group, decoder = q.shape[2] // heads, past.decoder
    if decoder is None or decoder.full or not isinstance(decoder, kind):
        if past.waiting.length >= 2 * LEAF:
            close_waiting(past, past.waiting.length // LEAF * LEAF - LEAF)
        past.decoder = decoder = kind(past, group)

    def flat(x: Tensor) -> Tensor:  # (B, 1, H, ...) -> (B · H, ...)
        return x.reshape(batch * heads, *x.shape[3:]).contiguous()

    gate = None if log_gate is None else log_gate.reshape(batch * heads, -1).clamp(min=-1e4)
    queries = q.reshape(batch * heads, group, -1).contiguous()
    output = decoder.step(queries, flat(k), flat(v), flat(steps.w), flat(steps.beta), gate, scale)
    past.waiting = decoder.waiting
    return output.view(batch, 1, heads * group, -1).to(q.dtype)
