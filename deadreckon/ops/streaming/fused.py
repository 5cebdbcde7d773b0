"""Streaming on Triton kernels: what `stream.py` calls in place of PyTorch, and decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.ops.blockwise.symmetric import pairs_of_channels
from deadreckon.ops.streaming.decode import Tail
from deadreckon.ops.streaming.kernels import CHUNK, FIELDS, STATE_PARTS, Last, Partial, State, look, placed
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Change, Fields, Segment
from deadreckon.ops.streaming.stream import Kernels
from deadreckon.ops.triton.attend import attend_fused, turned
from deadreckon.ops.triton.householder.operator import ascend

PROGRAMS = 528  # that segments are divided among, about: four on each of an H200's multiprocessors
SHORTEST = 128  # tokens of a segment for one program, at the least
SPARE = 16  # programs a head, at the least, and segments beyond those that PROGRAMS are for


class KernelDecoder:
    """A token by two kernels, which know segments by where they lie.

    All that it holds stays where it is, also when another past is loaded: a CUDA graph may hold its steps.
    """

    plain = True

    def __init__(self, past: Past, group: int) -> None:
        self.tail, self.group = Tail(past), group
        tail = self.tail
        held, device = tail.waiting.storage, tail.waiting.storage["k"].device
        heads, room, _ = held["k"].shape
        # Where there is gradually more to be seen, programs see more each: their number is the same for ever.
        self.programs = PROGRAMS // heads + SPARE
        while self.programs < 2 * len(tail.segments):
            self.programs *= 2
        self.last = Last(
            held["k"], held["v"], held.get("w"), held.get("beta"), held.get("gates"), tail.keys, tail.bias,
            None if tail.product is None else tail.product.repeat(2, 1, 1, 1),
            None if tail.total is None else tail.total.repeat(2, 1, 1),
            torch.tensor([tail.waiting.length], dtype=torch.int32).to(device),
        )  # fmt: skip
        self.state = None
        if past.signature is not None and past.signature.score == 2:
            self.state = _no_state(held, tail.total)
        self.tail_parts, state_parts = room // CHUNK, 0 if self.state is None else STATE_PARTS
        shape = (heads, self.tail_parts + self.programs + state_parts, group)
        out = torch.empty(*shape, held["v"].shape[2], dtype=torch.float32, device=device)
        self.partial = Partial(out, out.new_empty(shape), out.new_empty(shape))
        self.segments = torch.zeros(self.programs, FIELDS, dtype=torch.int64, device=device)
        self.parts = torch.zeros(self.programs + state_parts, 3, dtype=torch.int32, device=device)
        self._place_segments()
        self._place_state(past)

    def load(self, past: Past) -> bool:
        tail, last = Tail(past), self.last
        if 2 * len(tail.segments) > self.programs:
            return False
        held = tail.waiting.storage
        new = (*(held.get(name) for name in ("k", "v", "w", "beta", "gates")), tail.keys, tail.bias)
        pairs = [*zip(last[:7], new, strict=True), (last.products, tail.product), (last.totals, tail.total)]
        for here, there in pairs:
            if here is not None and there is not None:
                here.copy_(there)  # products and totals twice
        last.tokens.fill_(tail.waiting.length)
        storage = {name: getattr(last, name) for name in held}
        tail.waiting = Segment(storage).of_length(tail.waiting.length)
        tail.keys, tail.bias = last.keys, last.bias
        self.tail = tail
        self._place_segments()
        self._place_state(past)
        return True

    def _place_segments(self) -> None:
        """Tells the kernels where segments are, and which program sees what of them."""
        base, single = self.last.k, self.partial.weight
        lengths = [segment.length for segment, *_ in self.tail.segments]
        share = max(base.shape[0] * sum(lengths) // PROGRAMS, SHORTEST)
        share = max(share, -(-sum(lengths) // (self.programs - len(lengths))))
        rows, parts = [], []
        for number, (segment, product, total) in enumerate(self.tail.segments):
            halves = [placed(segment.storage[name], base) for name in ("k", "v")]
            singles = [placed(x, single) for x in (segment.bias, product, total)]
            rows.append([*halves, *singles, segment.length, segment.storage["k"].shape[1]])
            pieces = -(-segment.length // share)
            size = -(-segment.length // pieces // CHUNK) * CHUNK
            parts += [(number, start, min(start + size, segment.length)) for start in range(0, segment.length, size)]
        assert len(parts) <= self.programs
        self.parts[: self.programs].zero_()
        for table, entries in ((self.segments, rows), (self.parts, parts)):
            if entries:
                table[: len(entries)].copy_(torch.tensor(entries, dtype=table.dtype))

    def _place_state(self, past: Past) -> None:
        """Tells the kernels where the state of all tokens before the segments is, if powers have one."""
        state, self.folded = self.state, past.folded
        if state is None:
            return
        assert past.longest is not None
        state.unit.copy_(1 / past.longest.flatten())
        rows = len(state.first)
        share, parts = -(-rows // STATE_PARTS), self.parts[self.programs :]
        if past.folded is None:
            parts.zero_()
            return
        starts = torch.arange(0, STATE_PARTS * share, share).clamp(max=rows)
        parts.copy_(torch.stack([starts, starts, (starts + share).clamp(max=rows)], dim=1))
        held = past.folded.state  # (N, F, kinds, E + 1)
        state.address.fill_(placed(held, self.partial.weight))
        state.factor.copy_((past.folded.unit / past.longest).flatten() ** 2)
        state.noise.copy_(16 * torch.finfo(held.dtype).eps * held[..., -1].norm(dim=1))
        if self.tail.total is not None:
            totals = [segment.total[..., 0] for segment in past.segments if segment.total is not None]
            state.later.copy_(torch.stack(totals).sum(0))

    @property
    def waiting(self) -> Segment:
        return self.tail.waiting

    @property
    def full(self) -> bool:
        return self.tail.full

    def tensors(self) -> list[Tensor]:
        held = [self.last.products, self.last.totals, *self.partial, *(self.state or ()), self.segments, self.parts]
        return [*self.tail.tensors(), *(x for x in held if x is not None)]

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gate: Tensor | None, scale: float
    ) -> Tensor:
        with torch.cuda.device_of(q):
            out = look(q, k, v, w, beta, gate, self.last, self.partial, self.state, self.segments, self.parts, scale)
        self.lengthen()
        return out

    def lengthen(self) -> None:
        self.tail.lengthen()

    def rewind(self, waiting: Segment) -> None:
        self.tail.waiting = waiting

    def ahead(self) -> bool:
        return int(self.last.tokens) > self.waiting.length

    def unload(self) -> None:
        self.tail.segments, self.folded = [], None

    def select(self, change: Change, past: Past) -> None:
        last, tail, segments = self.last, self.tail, past.segments
        for x in last[:7]:
            if x is not None:
                x.copy_(change(x))
        for pair in (last.products, last.totals):
            for x in () if pair is None else pair:
                x.copy_(change(x))
        between = [tuple(None if x is None else change(x) for x in parts) for _, *parts in tail.segments]
        tail.segments = [(segment, *parts) for segment, parts in zip(reversed(segments), between, strict=True)]
        self._place_segments()
        self._place_state(past)


def _no_state(held: Fields, total: Tensor | None) -> State:
    """Room for what kernels know of a state of squares."""
    heads, _, width = held["k"].shape
    device, kinds = held["k"].device, 1 if total is None else total.shape[1]
    first, second = (x.to(torch.int32) for x in pairs_of_channels(width, device))
    one = torch.ones(heads, device=device)
    noise = torch.zeros(heads, kinds, device=device)
    address = torch.zeros(1, dtype=torch.int64, device=device)
    return State(one, address, first, second, one.clone(), noise, noise.clone())


STREAM = Kernels(attend_fused, turned, ascend, KernelDecoder)
