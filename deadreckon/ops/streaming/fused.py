"""Streaming on Triton kernels: the operations that `stream.py` calls in place of PyTorch's, and the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.power import state_dtype
from deadreckon.ops.blockwise.rotation import Turned
from deadreckon.ops.blockwise.rotation import turned as turned_later
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.blockwise.symmetric import channels_of
from deadreckon.ops.factors import Factors, Power
from deadreckon.ops.layout import sent
from deadreckon.ops.streaming.decode import Tail, add_tail, close_tail, seen_from_tail
from deadreckon.ops.streaming.kernels import CHUNK, FIELDS, STATE_PARTS, Last, Partial, State, chunk_for, look, placed
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Change, Fields, Segment
from deadreckon.ops.streaming.stream import Kernels
from deadreckon.ops.triton.attend import DTYPES, attend_fused, reason_against, turned
from deadreckon.ops.triton.householder.operator import ascend
from deadreckon.ops.triton.tiles import cramped
from deadreckon.ops.triton.turn import turned_token

ROOM = LEAF + 512  # tokens of a tail: to close one takes many launches
PROGRAMS = 528  # that segments are divided among, about: four on each of an H200's multiprocessors
SHORTEST = 128  # tokens of a segment for one program, at the least
WIDEST = 1024  # bytes of a key: a program has 64 of them in shared memory, or half of that where there is little
SPARE = 16  # programs a head, at the least, and segments beyond those that PROGRAMS are for

_Loaded = tuple[Tail, Past, Sequence[int], Sequence[int]]
"""A past loaded into some rows: tail, past, rows, and how many tokens of each are masked."""


class KernelDecoder:
    """Decodes a token with two kernels, which find segments by their addresses.

    All its tensors keep their addresses, also when another past is loaded, so that a CUDA graph can replay its steps.

    Args:
        past: the cache to continue from.
        group: query heads per key head.
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
        # The number of programs is fixed: as the cache grows, each reads more.
        self.programs = PROGRAMS // heads + SPARE
        while self.programs < 2 * len(tail.segments):
            self.programs *= 2
        self.last = Last(
            held["k"], held["v"], held.get("w"), held.get("beta"), held.get("gates"), room_for(tail.keys),
            room_for(tail.bias), room_for(tail.product, 2), room_for(tail.total, 2),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )  # fmt: skip
        score = None if past.signature is None else past.signature.score
        self.state, self.sticks, state_parts, dtype = None, score == "stick-breaking", 0, torch.float32
        if isinstance(score, int):
            self.state = _no_state(held, rows, 1 if tail.total is None else tail.total.shape[1], score)
            state_parts, dtype = STATE_PARTS, self.state.factor.dtype
        shape = (heads, room // chunk_for(held["k"], held["v"]) + self.programs + state_parts, group)
        out = torch.empty(*shape, held["v"].shape[2], dtype=dtype, device=device)
        self.partial = Partial(out, out.new_empty(shape), out.new_empty(shape, dtype=torch.float32))
        self.segments = torch.zeros(rows, self.programs, FIELDS, dtype=torch.int64, device=device)
        self.parts = torch.zeros(rows, self.programs + state_parts, 3, dtype=torch.int32, device=device)
        self._take([(tail, past, [row], [0]) for row in range(rows)])

    def load(self, past: Past, rows: Sequence[int] = (0,), masked: Sequence[int] = (0,)) -> bool:
        tail = Tail(past, ROOM, storage=False)
        if 2 * len(tail.segments) > self.programs:
            return False
        self._copy(tail, rows, [past.length - left_out for left_out in masked])
        self._take([(tail, past, rows, masked)])
        return True

    def close(self, pasts: Sequence[Past], rows: Sequence[Sequence[int]]) -> bool:
        every = [row for of_past in rows for row in of_past]
        padding, fields = self._ending_together(every)
        joint, heads, end = Past(waiting=Segment(fields)), len(self.last.k) // self.rows, 0
        close_tail(joint)
        [segment], tail, loaded = joint.segments, Tail(joint, ROOM, storage=False), list[_Loaded]()
        self._copy(tail, every, [tail.waiting.length] * len(every))
        for past, of_past in zip(pasts, rows, strict=True):
            start, end = end, end + len(of_past)
            which = slice(start * heads, end * heads)
            part = segment.of_heads(which)
            past.waiting = None if joint.waiting is None else joint.waiting.of_heads(which)
            add_tail(past, part.without_first(padding[start]) if padding[start] else part)
            past.segments = [one.closed() for one in past.segments]
            if 2 * len(past.segments) > self.programs:
                return False
            mine = copy(tail)
            mine.segments = seen_from_tail(past.segments)
            loaded.append((mine, past, of_past, [0] * len(of_past)))
        self._take(loaded)
        return True

    def _ending_together(self, rows: Sequence[int]) -> tuple[list[int], Fields]:
        """The tails of rows, left-padded to equal length: the padding of each, and the fields.

        Padding repeats a row's first token, which is at least initialised. Its β is 0, or older keys would take its
        steps; its gates are removed with it.
        """
        lengths, device = [self.tails[row].waiting.length for row in rows], self.last.k.device
        padding = [max(lengths) - length for length in lengths]
        place = torch.arange(max(lengths), device=device) - sent(padding, device)[:, None, None]  # (rows, 1, tokens)
        row = sent(rows, device)[:, None, None]
        head = torch.arange(len(self.last.k) // self.rows, device=device).unsqueeze(1)
        fields = dict[str, Tensor]()
        for name in self.tails[rows[0]].waiting.storage:
            x = self._by_row(getattr(self.last, name))[row, head, place.clamp(min=0)]  # (rows, H, tokens, ...)
            if name == "beta":
                x.masked_fill_(place < 0, 0)
            fields[name] = x.flatten(0, 1)
        return padding, fields

    def _copy(self, tail: Tail, rows: Sequence[int], real: Sequence[int]) -> None:
        """Copies tails into the kernels' buffers; of a sequence with fewer real tokens, the last ones."""
        last, where, held = self.last, self._where(rows), tail.waiting.storage
        new = (*(held.get(name) for name in ("k", "v", "w", "beta", "gates")), tail.keys, tail.bias)
        tokens = tail.waiting.length
        for here, there in zip(last[:7], new, strict=True):
            if here is not None and there is not None:
                by_row, new_by_row = self._by_row(here), there.unflatten(0, (len(rows), -1))
                by_row[where, :, :tokens] = new_by_row
                for row, length, one in zip(rows, real, new_by_row, strict=True):
                    if length < tokens:
                        by_row[row, :, :length] = one[:, tokens - length :]
        for pair, there in ((last.products, tail.product), (last.totals, tail.total)):
            if pair is not None and there is not None:
                pair.unflatten(1, (self.rows, -1))[:, where] = there.unflatten(0, (len(rows), -1))

    def _where(self, rows: Sequence[int]) -> slice | Tensor:
        """The index of rows: a slice if they are consecutive, which needs no transfer to the device."""
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return sent(rows, self.last.k.device)

    def _by_row(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.rows, -1))

    def _take(self, loaded: Sequence[_Loaded]) -> None:
        """Writes the lengths of copied tails and the addresses of segments and states to the kernels' tables."""
        last, heads, every = self.last, len(self.last.k) // self.rows, list[int]()
        tokens, entries, parts = list[int](), list[list[list[int]]](), list[list[tuple[int, int, int]]]()
        for tail, past, rows, masked in loaded:
            every += rows
            folded = past.length - tail.waiting.length - sum(segment.length for segment, *_ in tail.segments)
            for number, (row, left_out) in enumerate(zip(rows, masked, strict=True)):
                of_row, held = slice(row * heads, (row + 1) * heads), slice(number * heads, (number + 1) * heads)
                storage = {name: getattr(last, name)[of_row] for name in tail.waiting.storage}
                tokens.append(min(tail.waiting.length, past.length - left_out))
                mine = self.tails[row] = copy(tail)
                mine.waiting = Segment(storage).of_length(tokens[-1])
                mine.waiting.lent = True
                mine.keys = mine.bias = mine.product = mine.total = None  # they are in `last`
                mine.segments = [
                    (segment.of_heads(held), None if product is None else product[held], None if x is None else x[held])
                    for segment, product, x in tail.segments
                ]
                self.folded[row] = past.folded
                of_segments, of_programs = self._tables(mine, max(0, left_out - folded))
                entries.append(of_segments)
                parts.append(of_programs)
            if self.state is not None:
                self._place_state(past, rows, self._where(rows), self.state)
        where, alike = self._where(every), len(set(tokens)) == 1  # then there is nothing to send to the device
        last.tokens[where] = tokens[0] if alike else sent(tokens, last.k.device, torch.int32)
        self.segments[where] = _padded(entries, self.segments)
        self.parts[where, : self.programs] = _padded(parts, self.parts[:, : self.programs])

    def _tables(self, tail: Tail, masked: int) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        """Tables of a row: the addresses of its segments, and which program reads which part; skips masked tokens."""
        base, single, starts = self.last.k, self.partial.greatest, list[int]()
        for segment, *_ in reversed(tail.segments):
            starts.insert(0, min(masked, segment.length))
            masked -= starts[0]
        seen = sum(segment.length for segment, *_ in tail.segments) - sum(starts)
        share = max(base.shape[0] * seen // PROGRAMS, SHORTEST)
        share = max(share, -(-seen // (self.programs - len(starts))))
        entries, parts = [], []
        for number, ((segment, product, total), start) in enumerate(zip(tail.segments, starts, strict=True)):
            halves = [placed(segment.storage[name], base) for name in ("k", "v")]
            of_gates = [placed(x, single, 4) for x in (segment.bias, total)]
            addresses = [*halves, of_gates[0], placed(product, single), of_gates[1]]
            entries.append([*addresses, segment.length, segment.storage["k"].shape[1]])
            if start < segment.length:
                length = segment.length - start
                size = -(-length // -(-length // share) // CHUNK) * CHUNK
                ends = (*range(start + size, segment.length, size), segment.length)
                parts += [(number, first, end) for first, end in pairwise((start, *ends))][::-1]  # the nearest first
        assert len(parts) <= self.programs
        return entries, parts

    def _place_state(self, past: Past, rows: Sequence[int], where: slice | Tensor, state: State) -> None:
        """Writes the addresses of the states of all tokens before the segments, if any, to the kernels' tables."""
        assert past.longest is not None

        def put(here: Tensor, there: Tensor) -> None:
            here = self._by_row(here)
            here[where] = there.reshape(len(rows), *here.shape[1:]).to(here.dtype)

        folded, (p, count) = past.folded, state.channels.shape
        put(state.unit, 1 / past.longest)
        if folded is None:
            self.parts[where, self.programs :] = 0
            return
        share = -(-count // STATE_PARTS)
        starts = torch.arange(0, STATE_PARTS * share, share).clamp(max=count)
        parts = torch.stack([starts, starts, (starts + share).clamp(max=count)], dim=1)
        self.parts[where, self.programs :] = sent(parts, self.parts.device, self.parts.dtype)
        states = folded.state.unflatten(0, (len(rows), -1))
        addresses = [placed(x, state.factor, x.element_size()) for x in states]
        state.address[where] = sent(addresses, state.unit.device)
        put(state.factor, (folded.unit / past.longest) ** p)
        put(state.noise, 16 * torch.finfo(folded.state.dtype).eps * folded.state[..., -1].norm(dim=1))
        totals = [segment.total[..., 0] for segment in past.segments if segment.total is not None]
        if totals:
            put(state.later, torch.stack(totals).sum(0))

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
            out = look(
                q, k, v, w, beta, gate, self.last, self.partial, self.state, self.segments, self.parts, scale,
                self.sticks,
            )  # fmt: skip
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
        self._take([(tail, past, [0], [0])])


def _padded(tables: Sequence[Sequence[Sequence[int]]], like: Tensor) -> Tensor:
    """Tables of some rows as one tensor, each padded with lines of zeros."""
    longest, empty = max(map(len, tables)), [0] * like.shape[2]
    lines = [[*table, *[empty] * (longest - len(table))] for table in tables]
    short = sent(lines, like.device, like.dtype).view(len(tables), longest, like.shape[2])
    return pad(short, (0, 0, 0, like.shape[1] - longest))


def _no_state(held: Fields, rows: int, kinds: int, p: int) -> State:
    """Buffers for the units and addresses of states of powers p."""
    heads, _, width = held["k"].shape
    channels, dtype = channels_of(width, p, held["k"].device), state_dtype(torch.float32, p, held["k"].device)
    one, later = torch.ones(heads, device=channels.device), torch.zeros(heads, kinds, device=channels.device)
    address = torch.zeros(rows, dtype=torch.int64, device=channels.device)
    return State(one, address, channels, one.to(dtype, copy=True), later.to(dtype, copy=True), later)


def turned_next(q: Tensor, k: Tensor, v: Tensor, factors: Factors, start: Tensor | None) -> Turned:
    """Rotates a piece: the first one if there is no phase to start from."""
    if start is None:
        return turned(q, k, v, factors)
    turn = turned_token if q.shape[1] == 1 and q.dtype != torch.float64 else turned_later
    return turn(q, k, v, factors, start)


def reason_against_next(q: Tensor, v: Tensor, factors: Factors) -> str | None:
    """What kernels for pieces after the first would need; None if they can. They take more than those for the first."""
    rotation, steps = factors.parts()
    if steps is not None:
        return reason_against(q, v, factors, packed=False)
    if q.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {q.dtype}"
    widest = (WIDEST // 2 if cramped(q) else WIDEST) // q.element_size()
    limits = {"D": min(256, widest), "E": min(256, widest)}
    if rotation is None and not isinstance(factors.score, Power):
        limits["D"] = widest
    for (name, limit), width in zip(limits.items(), (q.shape[3], v.shape[3]), strict=True):
        if width % 8 or width > limit:
            return f"{name} a multiple of 8 up to {limit} for a later piece, got {width}"
    return None


STREAM = Kernels(attend_fused, turned_next, ascend, KernelDecoder)
