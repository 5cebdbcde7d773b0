"""`deadreckon bench decode`: time to decode one token, PaTH against RoPE with PyTorch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import deadreckon as dr
from deadreckon.lab.bench.cases import Inputs, Shape, bytes_of, make_inputs, relative_error
from deadreckon.lab.bench.flags import Decode
from deadreckon.lab.bench.page import Page, Row, microseconds, milliseconds, ratio
from deadreckon.lab.bench.rivals import rotate
from deadreckon.lab.bench.text import run_models
from deadreckon.lab.bench.timing import repeated, seconds_per_step

HEADS, KEY_HEADS, WIDTH = 32, 8, 64
WEAK = 0.02  # gates forget half in some thousands of tokens
LONGEST_CHECKED = 8192
STEPS = 256  # tokens that are timed, after as many that are not: each has two closings of a segment
CACHES = {"cpu": (1024,), "cuda": (4096, 32768, 131072)}
ENCODINGS = {"PaTH": False, "PaTH-FoX": True}  # name -> whether it has gates
BACKEND = SDPBackend.FLASH_ATTENTION  # cuDNN, PyTorch's choice on an H200, plans for some 40 ms at every new length


class Rope:
    """RoPE as Hugging Face models apply it, with a KV cache preallocated for all tokens of the inputs."""

    def __init__(self, batch: int, inputs: Inputs) -> None:
        self.cos, self.sin = inputs["cos"], inputs["sin"]  # (T, 1, D)
        shape = (batch, KEY_HEADS, len(self.cos), WIDTH)
        self.keys, self.values = (self.cos.new_empty(shape).normal_() for _ in range(2))

    def step(self, q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
        """Decodes the next token: q (B, 1, Hq, D), k and v (B, 1, H, D)."""
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[place], self.sin[place])
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v.transpose(1, 2)
        keys, values = self.keys[:, :, : place + 1], self.values[:, :, : place + 1]
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(q, keys, values, enable_gqa=True)


Piece = tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]  # q, k and v, and factors


def piece_of(x: Inputs, gated: bool, tokens: slice, batch: int = 1) -> Piece:
    """q, k, v and factors of some tokens, repeated for every sequence of a batch."""

    def part_of(name: str, heads: int) -> Tensor:
        part = x[name].detach()[:, tokens, :heads]
        return part.expand(batch, *[-1] * (part.dim() - 1)).contiguous()

    steps = dr.Householder(part_of("w", KEY_HEADS), part_of("beta", KEY_HEADS))
    factors = {"transport": steps, "log_gate": part_of("log_gate", HEADS) if gated else None}
    return (part_of("q", HEADS), part_of("k", KEY_HEADS), part_of("v", KEY_HEADS)), factors


@torch.no_grad()
def measure(batch: int, length: int, gated: bool, device: str) -> tuple[float, float, float, float]:
    """Seconds per token of RoPE and of PaTH, PaTH's cache size over RoPE's, and PaTH's error against a single pass."""
    end = length + 2 * STEPS
    past, inputs = dr.Past(), make_inputs(Shape(1, end, HEADS, WIDTH), device, WEAK)
    piece = partial(piece_of, inputs, gated)
    for start in range(0, length, LONGEST_CHECKED):  # in pieces, to keep what a piece needs small
        (q, k, v), factors = piece(slice(start, min(start + LONGEST_CHECKED, length)))
        dr.attend_next(q, k, v, **factors, past=past)
    past = past.select(torch.zeros(batch, dtype=torch.int64))
    pieces = [piece(slice(place, place + 1), batch) for place in range(length, end)]
    outputs = list[Tensor]()

    def path(number: int) -> None:
        (q, k, v), factors = pieces[number]
        outputs.append(dr.attend_next(q, k, v, **factors, past=past))

    ours = seconds_per_step(path, STEPS, device)
    rope = Rope(batch, inputs)
    theirs = seconds_per_step(lambda number: rope.step(*pieces[number][0], length + number), STEPS, device)
    error = 0.0
    if length <= LONGEST_CHECKED:  # longer ones in one pass take long
        (q, k, v), factors = piece(slice(None))
        exact = dr.attend_next(q, k, v, **factors, past=dr.Past())[:, length:].double()
        error = relative_error(torch.cat(outputs, dim=1)[:1], exact)
    return theirs, ours, bytes_of(past) / (2 * rope.keys.nbytes), error


@torch.no_grad()
def prefill(length: int, gated: bool, device: str) -> tuple[float, float]:
    """Seconds of a forward pass without a cache, and of the same pass filling a cache."""
    (q, k, v), factors = piece_of(make_inputs(Shape(1, length, HEADS, WIDTH), device, WEAK), gated, slice(None))
    alone = repeated(lambda: dr.attend(q, k, v, **factors), 11, device)
    return alone, repeated(lambda: dr.attend_next(q, k, v, **factors, past=dr.Past()), 11, device)


def run(flags: Decode) -> None:
    """Times decoding at every cache length, and prefill on a GPU; with --encodings `generate()` of whole models."""
    if flags.encodings:
        return run_models(flags)
    page = Page(flags, "One more token")
    page.note(f"{HEADS} heads of {WIDTH}, {KEY_HEADS} of keys")

    def rows() -> Iterator[Row]:
        for length, batch, encoding in product(flags.caches or CACHES[flags.device], flags.batches, ENCODINGS):
            rope, ours, memory, error = measure(batch, length, ENCODINGS[encoding], flags.device)
            times = [microseconds(rope), microseconds(ours), ratio(ours, rope)]
            yield [encoding, str(length), str(batch), *times, f"{memory:.3f}", f"{error:.1e}" if error else ""]

    page.table(["", "cache", "batch", "RoPE, SDPA", "ours", "×", "memory ×", "error"], rows())
    for encoding, gated in ENCODINGS.items() if flags.device == "cuda" else ():
        forward, filled = prefill(32768, gated, flags.device)
        times = f"{milliseconds(filled)}, {filled / forward:.3f} × attention alone"
        page.say(f"Prefill of 32768 tokens, {encoding}: {times}.")
