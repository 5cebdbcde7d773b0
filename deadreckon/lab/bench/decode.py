"""`deadreckon bench decode`: how long one more token takes, PaTH beside RoPE through PyTorch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import deadreckon as dr
from deadreckon.lab.bench.cases import DTYPES
from deadreckon.lab.bench.flags import Decode
from deadreckon.lab.bench.page import Page, Row, microseconds, milliseconds, ratio
from deadreckon.lab.bench.rivals import rotate
from deadreckon.lab.bench.timing import repeated, seconds_per_step

HEADS, KEY_HEADS, WIDTH = 32, 8, 64
LONGEST_CHECKED = 8192
STEPS = 256  # tokens that are timed, after as many that are not: each has two closings of a segment
CACHES = {"cpu": (1024,), "cuda": (4096, 32768, 131072)}
ENCODINGS = {"PaTH": False, "PaTH-FoX": True}  # name -> whether it has gates
BACKEND = SDPBackend.FLASH_ATTENTION  # cuDNN, PyTorch's choice on an H200, plans for some 40 ms at every new length


class Rope:
    """RoPE as models on Hugging Face have it, with a cache that has room for all tokens."""

    def __init__(self, batch: int, length: int, dtype: torch.dtype, device: str) -> None:
        shape = (batch, KEY_HEADS, length, WIDTH)
        self.keys, self.values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        theta = 10000 ** -(torch.arange(0, WIDTH, 2, device=device) / WIDTH)
        phases = (torch.arange(length, device=device)[:, None] * theta).repeat(1, 2)
        self.cos, self.sin = phases.cos().to(dtype), phases.sin().to(dtype)

    def step(self, q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
        """The next token: q (B, 1, Hq, D), k and v (B, 1, H, D)."""
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[place], self.sin[place])
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v.transpose(1, 2)
        keys, values = self.keys[:, :, : place + 1], self.values[:, :, : place + 1]
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def bytes(self) -> int:
        """What the cache takes."""
        return 2 * self.keys.nbytes


class Inputs:
    """Random tokens of one sequence, as attention gets them."""

    def __init__(self, length: int, gated: bool, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(1, length, *shape, generator=generator, device=device)

        self.q, self.k, self.v = (draw(heads, WIDTH).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        self.w, self.beta = normalize(draw(KEY_HEADS, WIDTH), dim=-1), 2 * draw(KEY_HEADS).sigmoid()
        self.gate = logsigmoid(draw(HEADS) + 9) if gated else None  # half is forgotten in some thousands of tokens

    def piece(self, tokens: slice, batch: int = 1) -> tuple[tuple[Tensor, Tensor, Tensor], dr.Factors]:
        """Some of the tokens, the same in every sequence."""
        q, k, v, w, beta = (
            x[:, tokens].expand(batch, *[-1] * (x.dim() - 1)).contiguous()
            for x in (self.q, self.k, self.v, self.w, self.beta)
        )
        gate = None if self.gate is None else self.gate[:, tokens].expand(batch, -1, -1).contiguous()
        return (q, k, v), dr.Factors(dr.Householder(w, beta), gate)


def held_by(past: dr.Past) -> int:
    """Bytes of a cache."""
    return sum(x.numel() * x.element_size() for x in past.tensors())


@torch.no_grad()
def measure(batch: int, length: int, gated: bool, device: str) -> tuple[float, float, float, float]:
    """Seconds of a token with RoPE and with PaTH, PaTH's bytes over RoPE's, the error of the last against one pass."""
    end = length + 2 * STEPS
    tokens = Inputs(end, gated, DTYPES[device], device)
    past = dr.Past()
    for start in range(0, length, LONGEST_CHECKED):  # in pieces, to keep what a piece needs small
        (q, k, v), factors = tokens.piece(slice(start, min(start + LONGEST_CHECKED, length)))
        dr.attend_next(q, k, v, **factors._asdict(), past=past)
    past = past.map(1, lambda x: x.expand(batch, *[-1] * (x.dim() - 1)).contiguous())
    pieces = [tokens.piece(slice(place, place + 1), batch) for place in range(length, end)]
    outputs = list[Tensor]()

    def path(number: int) -> None:
        (q, k, v), factors = pieces[number]
        outputs.append(dr.attend_next(q, k, v, **factors._asdict(), past=past))

    ours = seconds_per_step(path, STEPS, device)
    rope = Rope(batch, end, DTYPES[device], device)
    theirs = seconds_per_step(lambda number: rope.step(*pieces[number][0], length + number), STEPS, device)
    error = 0.0
    if length <= LONGEST_CHECKED:  # longer ones in one pass take long
        (q, k, v), factors = tokens.piece(slice(None))
        exact = dr.attend_next(q, k, v, **factors._asdict(), past=dr.Past())[:, length:].double()
        error = float((torch.cat(outputs, dim=1)[:1].double() - exact).norm() / exact.norm())
    return theirs, ours, held_by(past) / rope.bytes(), error


@torch.no_grad()
def prefill(length: int, gated: bool, device: str) -> tuple[float, float]:
    """Seconds of attention as in training, forward only, and of the same that leaves a cache."""
    (q, k, v), factors = Inputs(length, gated, DTYPES[device], device).piece(slice(None))
    alone = partial(dr.attend, q, k, v, **factors._asdict())
    filling = lambda: dr.attend_next(q, k, v, **factors._asdict(), past=dr.Past())  # noqa: E731
    return repeated(alone, 11, device), repeated(filling, 11, device)


def run(flags: Decode) -> None:
    """Caches of all lengths, and prefill on a GPU."""
    page = Page(flags, "One more token")
    page.note(f"{HEADS} heads of {WIDTH}, {KEY_HEADS} of keys")

    def rows() -> Iterator[Row]:
        for length in flags.caches or CACHES[flags.device]:
            for batch in flags.batches:
                for encoding, gated in ENCODINGS.items():
                    rope, ours, memory, error = measure(batch, length, gated, flags.device)
                    times = [microseconds(rope), microseconds(ours), ratio(ours, rope)]
                    yield [encoding, str(length), str(batch), *times, f"{memory:.3f}", f"{error:.1e}" if error else ""]

    page.table(["", "cache", "batch", "RoPE, SDPA", "ours", "×", "memory ×", "error"], rows())
    for encoding, gated in ENCODINGS.items() if flags.device == "cuda" else ():
        forward, filled = prefill(32768, gated, flags.device)
        times = f"{milliseconds(filled)}, {filled / forward:.3f} × attention alone"
        page.say(f"Prefill of 32768 tokens, {encoding}: {times}.")
    page.end()
