"""Streaming on Triton kernels: what `stream.py` calls in place of PyTorch, and decoding."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from deadreckon.ops.blockwise.rotation import Turned
from deadreckon.ops.blockwise.rotation import turned as turned_later
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.blockwise.symmetric import pairs_of_channels
from deadreckon.ops.factors import Factors
from deadreckon.ops.streaming.decode import Tail
from deadreckon.ops.streaming.kernels import CHUNK, FIELDS, STATE_PARTS, Last, Partial, State, look, placed
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Change, Fields, Segment
from deadreckon.ops.streaming.stream import Kernels
from deadreckon.ops.triton.attend import attend_fused, turned
from deadreckon.ops.triton.householder.operator import ascend
from deadreckon.ops.triton.turn import turned_token

ROOM = LEAF + 512  # tokens of a tail: to close one takes many launches
PROGRAMS = 528  # that segments are divided among, about: four on each of an H200's multiprocessors
SHORTEST = 128  # tokens of a segment for one program, at the least
SPARE = 16  # programs a head, at the least, and segments beyond those that PROGRAMS are for


class KernelDecoder:
    """A token by two kernels, which know segments by where they lie.

    All that it holds stays where it is, also when another past is loaded: a CUDA graph may hold its steps.

    Args:
        past: that it goes on from.
        group: query heads a key head.
        rows: sequences of any lengths that are decoded together, each with a past of its own that is loaded later.
    """

    plain = True

    def __init__(self, past: Past, group: int, rows: int = 1) -> None:
        self.group, self.rows = group, rows
        tail = Tail(past, ROOM)
        self.tails, self.folded = [tail] * rows, [past.folded] * rows  # so that what lies there is not freed

        def room_for(x: Tensor | None, copies: int = 1) -> Tensor | None:
            x = None if x is None else x.repeat(rows, *[1] * (x.dim() - 1))
            return x if x is None or copies == 1 else x.repeat(copies, *[1] * x.dim())

        held = {name: x.repeat(rows, *[1] * (x.dim() - 1)) for name, x in tail.waiting.storage.items()}
        heads, room, _ = held["k"].shape
        device = held["k"].device
        # Where there is gradually more to be seen, programs see more each: their number is the same for ever.
        self.programs = PROGRAMS // heads + SPARE
        while self.programs < 2 * len(tail.segments):
            self.programs *= 2
        self.last = Last(
            held["k"], held["v"], held.get("w"), held.get("beta"), held.get("gates"), room_for(tail.keys),
            room_for(tail.bias), room_for(tail.product, 2), room_for(tail.total, 2),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.state = None
        if past.signature is not None and past.signature.score == 2:
            self.state = _no_state(held, rows, 1 if tail.total is None else tail.total.shape[1])
        state_parts = 0 if self.state is None else STATE_PARTS
        shape = (heads, room // CHUNK + self.programs + state_parts, group)
        out = torch.empty(*shape, held["v"].shape[2], dtype=torch.float32, device=device)
        self.partial = Partial(out, out.new_empty(shape), out.new_empty(shape))
        self.segments = torch.zeros(rows, self.programs, FIELDS, dtype=torch.int64, device=device)
        self.parts = torch.zeros(rows, self.programs + state_parts, 3, dtype=torch.int32, device=device)
        for row in range(rows):
            self._place(copy(tail), past, row)

    def load(self, past: Past, row: int = 0) -> bool:
        tail, last = Tail(past, ROOM, storage=False), self.last
        if 2 * len(tail.segments) > self.programs:
            return False
        held = tail.waiting.storage
        new = (*(held.get(name) for name in ("k", "v", "w", "beta", "gates")), tail.keys, tail.bias)
        heads = self._heads(row)
        for here, there in zip(last[:7], new, strict=True):
            if here is not None and there is not None:
                here[heads, : there.shape[1]].copy_(there)
        for here, there in ((last.products, tail.product), (last.totals, tail.total)):
            if here is not None and there is not None:
                here[:, heads].copy_(there)  # twice
        self._place(tail, past, row)
        return True

    def _heads(self, row: int) -> slice:
        heads = len(self.last.k) // self.rows
        return slice(row * heads, (row + 1) * heads)

    def _place(self, tail: Tail, past: Past, row: int) -> None:
        """Tells the kernels how long a row's tail is, which has been copied, and where its segments and state are."""
        heads, last = self._heads(row), self.last
        storage = {name: getattr(last, name)[heads] for name in tail.waiting.storage}
        tail.waiting = Segment(storage).of_length(tail.waiting.length)
        tail.keys = tail.bias = tail.product = tail.total = None  # they are in `last`
        self.tails[row], self.folded[row] = tail, past.folded
        last.tokens[row].fill_(tail.waiting.length)
        self._place_segments(row)
        if self.state is not None:
            self._place_state(past, row, self.state)

    def _place_segments(self, row: int) -> None:
        """Tells the kernels where segments are, and which program sees what of them."""
        base, single, segments = self.last.k, self.partial.weight, self.tails[row].segments
        lengths = [segment.length for segment, *_ in segments]
        share = max(base.shape[0] * sum(lengths) // PROGRAMS, SHORTEST)
        share = max(share, -(-sum(lengths) // (self.programs - len(lengths))))
        entries, parts = [], []
        for number, (segment, product, total) in enumerate(segments):
            halves = [placed(segment.storage[name], base) for name in ("k", "v")]
            singles = [placed(x, single) for x in (segment.bias, product, total)]
            entries.append([*halves, *singles, segment.length, segment.storage["k"].shape[1]])
            pieces = -(-segment.length // share)
            size = -(-segment.length // pieces // CHUNK) * CHUNK
            parts += [(number, start, min(start + size, segment.length)) for start in range(0, segment.length, size)]
        assert len(parts) <= self.programs
        self.parts[row, : self.programs].zero_()
        for table, numbers in ((self.segments, entries), (self.parts, parts)):
            if numbers:
                table[row, : len(numbers)].copy_(torch.tensor(numbers, dtype=table.dtype))

    def _place_state(self, past: Past, row: int, state: State) -> None:
        """Tells the kernels where the state of all tokens before the segments is, if there is one."""
        assert past.longest is not None
        heads, folded = self._heads(row), past.folded
        state.unit[heads].copy_(1 / past.longest.flatten())
        rows = len(state.first)
        share, parts = -(-rows // STATE_PARTS), self.parts[row, self.programs :]
        if folded is None:
            parts.zero_()
            return
        starts = torch.arange(0, STATE_PARTS * share, share).clamp(max=rows)
        parts.copy_(torch.stack([starts, starts, (starts + share).clamp(max=rows)], dim=1))
        state.address[row].fill_(placed(folded.state, self.partial.weight))
        state.factor[heads].copy_((folded.unit / past.longest).flatten() ** 2)
        state.noise[heads].copy_(16 * torch.finfo(folded.state.dtype).eps * folded.state[..., -1].norm(dim=1))
        totals = [segment.total[..., 0] for segment in past.segments if segment.total is not None]
        if totals:
            state.later[heads].copy_(torch.stack(totals).sum(0))

    @property
    def waiting(self) -> Segment:
        return self.tails[0].waiting

    @property
    def full(self) -> bool:
        return self.tails[0].full

    def tensors(self) -> list[Tensor]:
        held = [x for x in (*self.last[5:], *self.partial, *(self.state or ())) if x is not None]
        between = [x for tail in self.tails for _, *parts in tail.segments for x in parts if x is not None]
        return [*held, *between, self.segments, self.parts]

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gate: Tensor | None, scale: float
    ) -> Tensor:
        with torch.cuda.device_of(q):
            out = look(q, k, v, w, beta, gate, self.last, self.partial, self.state, self.segments, self.parts, scale)
        self.lengthen()
        return out

    def lengthen(self, row: int = 0, tokens: int = 1) -> Segment:
        self.tails[row].lengthen(tokens)
        return self.tails[row].waiting

    def room(self, row: int = 0) -> int:
        return self.tails[row].room - self.tails[row].waiting.length

    def waiting_in(self, row: int) -> Segment:
        return self.tails[row].waiting

    def rewind(self, waiting: Segment) -> None:
        self.tails[0].waiting = waiting

    def ahead(self) -> bool:
        return int(self.last.tokens[0]) > self.waiting.length

    def unload(self, row: int = 0) -> None:
        self.parts[row].zero_()
        self.tails[row].segments, self.folded[row] = [], None

    def release(self) -> None:
        for row, tail in enumerate(self.tails):
            tail.segments, self.folded[row] = [], None

    def select(self, change: Change, past: Past) -> None:
        last, tail = self.last, self.tails[0]
        for x in last[:7]:
            if x is not None:
                x.copy_(change(x))
        for pair in (last.products, last.totals):
            for x in () if pair is None else pair:
                x.copy_(change(x))
        tail.segments = [
            (segment, None if product is None else change(product), None if total is None else change(total))
            for segment, (_, product, total) in zip(reversed(past.segments), tail.segments, strict=True)
        ]
        self._place(tail, past, 0)


def _no_state(held: Fields, rows: int, kinds: int) -> State:
    """Room for what kernels know of the states of squares."""
    heads, _, width = held["k"].shape
    first, second = (x.to(torch.int32) for x in pairs_of_channels(width, held["k"].device))
    one = torch.ones(heads, device=first.device)
    noise = torch.zeros(heads, kinds, device=first.device)
    return State(one, first.new_zeros(rows, dtype=torch.int64), first, second, one.clone(), noise, noise.clone())


def turned_next(q: Tensor, k: Tensor, v: Tensor, factors: Factors, start: Tensor | None) -> Turned:
    """Turns a piece, which is the first one if there is no phase to start at."""
    if start is None:
        return turned(q, k, v, factors)
    turn = turned_token if q.shape[1] == 1 and q.dtype != torch.float64 else turned_later
    return turn(q, k, v, factors, start)


STREAM = Kernels(attend_fused, turned_next, ascend, KernelDecoder)
