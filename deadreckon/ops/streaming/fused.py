"""Streaming on Triton kernels: what `stream.py` calls in place of PyTorch, and decoding along Householder routes."""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.ops.streaming.decode import Tail
from deadreckon.ops.streaming.kernels import CHUNK, Last, Partial, look, placed
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.segments import Segment
from deadreckon.ops.streaming.stream import Kernels
from deadreckon.ops.triton.attend import attend_fused, turned
from deadreckon.ops.triton.householder.operator import ascend

PROGRAMS = 528  # that segments are divided among, about: four on each of an H200's multiprocessors
SHORTEST, LONGEST = 128, 4096  # tokens of a segment for one program


class KernelDecoder:
    """What `decode.TokenDecoder` does, in two kernels, which know segments by where they lie."""

    def __init__(self, past: Past, group: int) -> None:
        self.tail = tail = Tail(past)
        held, device = tail.waiting.storage, tail.keys.device
        self.last = Last(
            held["k"], held["v"], held["w"], held["beta"], held.get("gates"), tail.keys, tail.bias,
            tail.product.repeat(2, 1, 1, 1), None if tail.total is None else tail.total.repeat(2, 1, 1),
            torch.tensor([tail.waiting.length], dtype=torch.int32).to(device),
        )  # fmt: skip
        heads, room, _ = tail.keys.shape
        keys = heads * sum(segment.length for segment, *_ in tail.segments)
        share = min(max(keys // PROGRAMS, SHORTEST), LONGEST)
        rows, parts = [], []
        for number, (segment, product, total) in enumerate(tail.segments):
            halves = [placed(segment[name], self.last.k) for name in ("k", "v")]
            singles = [placed(x, tail.keys) for x in (segment.bias, product, total)]
            rows.append([*halves, *singles, segment.length])
            pieces = -(-segment.length // share)
            size = -(-segment.length // pieces // CHUNK) * CHUNK
            parts += [(number, start, min(start + size, segment.length)) for start in range(0, segment.length, size)]
        self.segments = torch.tensor(rows or [[0]], dtype=torch.int64).to(device)
        self.parts = torch.tensor(parts or [[0]], dtype=torch.int32).to(device)
        shape = (heads, room // CHUNK + len(parts), group)
        self.partial = Partial(
            tail.keys.new_empty(*shape, held["v"].shape[2]), tail.keys.new_empty(shape), tail.keys.new_empty(shape)
        )

    @property
    def waiting(self) -> Segment:
        return self.tail.waiting

    @property
    def full(self) -> bool:
        return self.tail.full

    def tensors(self) -> list[Tensor]:
        held = [self.last.products, self.last.totals, *self.partial, self.segments, self.parts]
        return [*self.tail.tensors(), *(x for x in held if x is not None)]

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, gate: Tensor | None, scale: float
    ) -> Tensor:
        with torch.cuda.device_of(q):
            out = look(q, k, v, w, beta, gate, self.last, self.partial, self.segments, self.parts, scale)
        self.tail.lengthen()
        return out


STREAM = Kernels(attend_fused, turned, ascend, KernelDecoder)
