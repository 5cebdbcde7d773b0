"""Decode: attention of one new token, with softmax, even powers or stick-breaking, that reads each cached key once.

The last tokens, the tail, wait in storage with room for more; earlier segments are closed, and change only when the
tail is full and becomes one, too. With Householder steps the tail's keys are kept in the frame of the newest token, in
the working precision: a new token updates them all, and the product of their steps. A query reads a segment through
that product and one more, that of all steps between the segment and the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from deadreckon.ops.blockwise.precision import work
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.factors import Householder
from deadreckon.ops.streaming.fold import unit_of
from deadreckon.ops.streaming.past import Decoder, Past
from deadreckon.ops.streaming.routes import close_waiting, in_newest_frame
from deadreckon.ops.streaming.segments import Fields, Segment, add_closed, counted_to_end

ROOM = LEAF + 128  # tokens of a tail, which are closed when it is full: of Householder steps all but a leaf


class Tail:
    """The waiting tokens, in storage with room for more, and keys, gates and segments relative to the newest token.

    Args:
        past: the cache whose last tokens they are.
        room: the capacity, in tokens.
        storage: whether to allocate it; False for a tail that will be copied into existing storage.

    Attributes:
        waiting: the tokens as they came.
        keys: (N, room, D) in the newest frame, with Householder steps.
        bias: (N, room, 1 | G) sums of gates up to the newest token, if there are gates.
        product: (N, D, D) of the tail's steps; `total`: (N, 1 | G) of its gates.
        segments: from the youngest to the oldest, each with the product and the sum (N, 1 | G) of what lies between it
            and the tail.
    """

    def __init__(self, past: Past, room: int, storage: bool = True) -> None:
        self.room = room
        stored = partial(roomy, room=room) if storage else torch.Tensor.contiguous
        past.segments = [segment.closed() for segment in past.segments]
        fields = _last_tokens(past)
        tokens, dtype = fields["k"].shape[1], work(fields["k"].dtype)
        self.keys = self.product = self.bias = self.total = None
        if "w" in fields:
            keys, whole_product = in_newest_frame(fields)
            self.keys, self.product = stored(keys.to(dtype)), whole_product.to(dtype)
        if "gates" in fields:
            sums = fields["gates"].cumsum(1)
            whole = sums[:, -1:].sum(1, keepdim=True)  # zero where no token waits
            self.bias, self.total = stored((whole - sums).to(dtype)), whole[:, 0].to(dtype)
        self.waiting = Segment({name: stored(x) for name, x in fields.items()}).of_length(tokens)
        self.waiting.lent = storage
        self.segments = seen_from_tail(past.segments)

    @property
    def full(self) -> bool:
        return self.waiting.length == self.room

    def lengthen(self, tokens: int = 1) -> None:
        """Adds new tokens, whose fields are already in the storage, to the waiting ones."""
        self.waiting = self.waiting.of_length(self.waiting.length + tokens)

    def tensors(self) -> list[Tensor]:
        """Everything held, except the waiting tokens and the segments."""
        between = [x for _, product, total in self.segments for x in (product, total)]
        return [x for x in (self.keys, self.bias, self.product, self.total, *between) if x is not None]


class TokenDecoder:
    """A decoder in PyTorch, for Householder routes."""

    plain = False

    def __init__(self, past: Past, group: int) -> None:
        self.group = group
        self.load(past)

    def load(self, past: Past) -> bool:
        self.tail = Tail(past, ROOM)
        return True

    @property
    def waiting(self) -> Segment:
        return self.tail.waiting

    @property
    def full(self) -> bool:
        return self.tail.full

    def tensors(self) -> list[Tensor]:
        return self.tail.tensors()

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gate: Tensor | None, scale: float
    ) -> Tensor:
        assert w is not None
        assert beta is not None
        tail, dtype, new = self.tail, work(k.dtype), self.tail.waiting.length
        assert tail.keys is not None
        assert tail.product is not None
        fields = {"k": k, "v": v, "w": w, "beta": beta}
        if gate is not None and tail.bias is not None and tail.total is not None:
            gate = gate.clamp(min=-1e4)  # as kernels do
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
            assert product is not None
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


def seen_from_tail(segments: Sequence[Segment]) -> list[tuple[Segment, Tensor | None, Tensor | None]]:
    """Closed segments, youngest first, with product and sum of what lies between each and the tail: see `Tail`."""
    if not segments:
        return []
    youngest, dtype = segments[-1], work(segments[-1]["k"].dtype)
    product = total = None
    if youngest.product is not None:
        heads, width, _ = youngest.product.shape
        product = torch.eye(width, dtype=dtype, device=youngest.product.device).repeat(heads, 1, 1)
    if youngest.total is not None:
        total = torch.zeros_like(youngest.total[..., 0], dtype=dtype)
    seen = list[tuple[Segment, Tensor | None, Tensor | None]]()
    for segment in reversed(segments):
        seen.append((segment, product, total))
        if product is not None and segment.product is not None:
            product = segment.product.to(dtype) @ product
        if total is not None and segment.total is not None:
            total = (total + segment.total[..., 0]).to(dtype)
    return seen


def roomy(x: Tensor, room: int) -> Tensor:
    """x (N, T, ...), copied to storage with room for `room` tokens."""
    storage = x.new_empty(x.shape[0], room, *x.shape[2:])
    storage[:, : x.shape[1]] = x
    return storage


def _last_tokens(past: Past) -> Fields:
    """The fields of the waiting tokens, perhaps none."""
    if past.waiting is not None:
        return past.waiting.fields()
    last = past.segments[-1]
    fields, gates = {"k": last["k"][:, :0], "v": last["v"][:, :0]}, last.gates()
    if last.product is not None:
        fields["w"] = fields["k"].to(work(fields["k"].dtype))
        fields["beta"] = fields["w"][..., 0]
    return fields if gates is None else {**fields, "gates": gates[1][:, :0]}


def closes(tokens: int) -> bool:
    """Whether a tail of so many tokens is worth closing."""
    return tokens >= 2 * LEAF


def close_tail(past: Past) -> None:
    """Makes room in the tail: its tokens become a segment, with Householder steps all but the last leaf of them."""
    assert past.waiting is not None
    fields, tokens = past.waiting.fields(), past.waiting.length
    if not tokens:
        past.waiting = None
        return
    if "w" in fields:
        close_waiting(past, tokens // LEAF * LEAF - LEAF)
        return
    bias = total = None
    if "gates" in fields:
        bias, total = counted_to_end(fields["gates"].cumsum(1).mT, work(fields["k"].dtype))
    kept = {name: fields[name].clone(memory_format=torch.contiguous_format) for name in ("k", "v")}
    past.waiting = None
    add_tail(past, Segment(kept, None, bias, total))


def add_tail(past: Past, segment: Segment) -> None:
    """Adds the segment that a tail has become."""
    past.segments = [before.closed() for before in past.segments]
    add_closed(past.segments, segment)
    if past.longest is not None and past.signature is not None and isinstance(past.signature.score, int):
        past.longest = unit_of(segment["k"].to(past.longest.dtype), past.longest)
        past.fold(past.signature.score)


def decode_token(
    q: Tensor, k: Tensor, v: Tensor, steps: Householder | None, log_gate: Tensor | None, scale: float, past: Past,
    kind: type[Decoder],
) -> Tensor:  # fmt: skip
    """Attention of the next token (B, 1, ...), not the first, by a decoder of that kind."""
    batch, _, heads, _ = k.shape
    group = q.shape[2] // heads
    prepare_decoder(past, group, kind)
    decoder = past.decoder
    assert decoder is not None

    def flat(x: Tensor) -> Tensor:  # (B, 1, H, ...) -> (B · H, ...)
        return x.reshape(batch * heads, *x.shape[3:]).contiguous()

    gate = None if log_gate is None else log_gate.reshape(batch * heads, -1).contiguous()
    queries = q.reshape(batch * heads, group, -1).contiguous()
    w, beta = (None, None) if steps is None else (flat(steps.w), flat(steps.beta))
    output = decoder.step(queries, flat(k), flat(v), w, beta, gate, scale)
    past.waiting = decoder.waiting
    return output.view(batch, 1, heads * group, -1).to(q.dtype)


def prepare_decoder(past: Past, group: int, kind: type[Decoder]) -> None:
    """Ensures that the past has a decoder of that kind with room for a token; reuses its own where possible."""
    decoder = past.decoder if isinstance(past.decoder, kind) else None
    if decoder is not None and not decoder.full:
        return
    if past.waiting is not None and closes(past.waiting.length):
        close_tail(past)
    if decoder is None or not decoder.load(past):
        decoder = kind(past, group)
    past.decoder = decoder


def renew(past: Past) -> None:
    """Closes the tail of a past whose decoder is full, and reloads the decoder."""
    draft = past.draft()
    assert draft.decoder is not None
    prepare_decoder(draft, draft.decoder.group, type(draft.decoder))
    draft.waiting = draft.decoder.waiting
    past.become(draft)
