"""How long one more token takes: PaTH beside RoPE through PyTorch's attention, over caches of several lengths.

    python -m deadreckon.lab.decoding --device cuda --batches 1 32 --caches 4096 32768 131072 --save decoding.md

Both go on from a cache that is filled, a token at a time, each token an attention of its own with its position and its
entry into the cache. Up to 8192 tokens, the error of what is decoded against one pass over everything is shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import deadreckon as dr
from deadreckon.lab.environment import check_device
from deadreckon.lab.rivals import rotate

HEADS, KEY_HEADS, WIDTH = 32, 8, 64
STEPS = 256  # tokens that are timed, after as many that are not: each has two closings of a segment
BACKEND = SDPBackend.FLASH_ATTENTION  # cuDNN, PyTorch's choice on an H200, plans for some 40 ms at every new length

Step = Callable[[int], Tensor]


class Rope:
    """RoPE as models on Hugging Face have it, with a cache that has room for all tokens."""

    def __init__(self, batch: int, length: int, dtype: torch.dtype, device: str) -> None:
        shape = (batch, KEY_HEADS, length + STEPS, WIDTH)
        self.keys, self.values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        theta = 10000 ** -(torch.arange(0, WIDTH, 2, device=device) / WIDTH)
        phases = (torch.arange(length + STEPS, device=device)[:, None] * theta).repeat(1, 2)
        self.cos, self.sin = phases.cos().to(dtype), phases.sin().to(dtype)

    def step(self, q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
        """The next token: q (B, 1, Hq, D), k and v (B, 1, H, D)."""
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos[place], self.sin[place])
        self.keys[:, :, place : place + 1] = k
        self.values[:, :, place : place + 1] = v.transpose(1, 2)
        keys, values = self.keys[:, :, : place + 1], self.values[:, :, : place + 1]
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def bytes(self, tokens: int) -> int:
        """What so many tokens take."""
        return 2 * self.keys[:, :, :tokens].numel() * self.keys.element_size()


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


def seconds(step: Step, first: int, steps: int, device: str) -> float:
    """Of one token, over some."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(first, first + steps):
        step(number)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


@torch.no_grad()
def measure(batch: int, length: int, gated: bool, device: str) -> tuple[float, float, float, float, float]:
    """Seconds of a token with RoPE and with PaTH, bytes of both, and the error of the last tokens against one pass."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    warm = STEPS
    tokens = Inputs(length + STEPS + warm, gated, dtype, device)
    past = dr.Past()
    for start in range(0, length, 8192):  # in pieces, to keep what a piece needs small
        (q, k, v), factors = tokens.piece(slice(start, min(start + 8192, length)))
        dr.attend_next(q, k, v, **factors._asdict(), past=past)
    past = past.map(1, lambda x: x.expand(batch, *[-1] * (x.dim() - 1)).contiguous())
    pieces = [tokens.piece(slice(n, n + 1), batch) for n in range(length, length + STEPS + warm)]
    outputs = []

    def path(number: int) -> Tensor:
        (q, k, v), factors = pieces[number]
        outputs.append(dr.attend_next(q, k, v, **factors._asdict(), past=past))
        return outputs[-1]

    seconds(path, 0, warm, device)
    ours = seconds(path, warm, STEPS, device)
    held = sum(x.numel() * x.element_size() for x in past.tensors())
    rope = Rope(batch, length + warm, dtype, device)

    def plain(number: int) -> Tensor:
        (q, k, v), _ = pieces[number]
        return rope.step(q, k, v, length + number)

    seconds(plain, 0, warm, device)
    theirs = seconds(plain, warm, STEPS, device)
    last = dr.Past()
    error = 0.0
    if length <= 8192:  # longer ones in one pass take long
        (q, k, v), factors = tokens.piece(slice(None))
        exact = dr.attend_next(q, k, v, **factors._asdict(), past=last)[:, length:].double()
        found = torch.cat(outputs, dim=1)[:1].double()
        error = float((found - exact).norm() / exact.norm())
    return theirs, ours, rope.bytes(length + STEPS + warm), held, error


@torch.no_grad()
def prefill(length: int, gated: bool, device: str) -> tuple[float, float]:
    """Seconds of attention as in training, forward only, and of the same that leaves a cache: medians of 11."""
    (q, k, v), factors = Inputs(length, gated, torch.bfloat16, device).piece(slice(None))
    found = []
    for run in (
        lambda _: dr.attend(q, k, v, **factors._asdict()),
        lambda _: dr.attend_next(q, k, v, **factors._asdict(), past=dr.Past()),
    ):
        seconds(run, 0, 3, device)
        found.append(median(seconds(run, 0, 1, device) for _ in range(11)))
    return found[0], found[1]


def main() -> None:
    """Prints a table and, if asked, saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="sequences at a time")
    parser.add_argument("--caches", type=int, nargs="+", default=[4096, 32768, 131072], help="tokens that have been")
    parser.add_argument("--save", type=Path, help="also write the table as Markdown")
    chosen = parser.parse_args()
    check_device(chosen.device)
    console = Console()
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else chosen.device
    about = f"{date.today()}: {name}, torch {torch.__version__}, {HEADS} heads of {WIDTH}, {KEY_HEADS} of keys, seed 0"
    lines = [
        "| cache | batch | | RoPE, SDPA | ours | × | memory × | error |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    console.print(about)
    for length in chosen.caches:
        for batch in chosen.batches:
            for encoding, gated in (("PaTH", False), ("PaTH-FoX", True)):
                rope, ours, kept, held, error = measure(batch, length, gated, chosen.device)
                cells = [str(length), str(batch), encoding, f"{1e6 * rope:.0f} µs", f"{1e6 * ours:.0f} µs"]
                cells += [f"{ours / rope:.2f}", f"{held / kept:.3f}", f"{error:.1e}" if error else ""]
                lines.append("| " + " | ".join(cells) + " |")
                console.print(lines[-1], markup=False)
    if chosen.device == "cuda":
        for encoding, gated in (("PaTH", False), ("PaTH-FoX", True)):
            forward, filled = prefill(32768, gated, chosen.device)
            times = f"{1e3 * filled:.2f} ms, {filled / forward:.3f} × attention alone"
            lines += ["", f"Prefill of 32768 tokens, {encoding}: {times}."]
            console.print(lines[-1])
    if chosen.save is not None:
        command = (
            f"python -m deadreckon.lab.decoding --device {chosen.device} --batches {' '.join(map(str, chosen.batches))}"
        )
        command += f" --caches {' '.join(map(str, chosen.caches))}"
        head = ["# One more token", "", about, "", f"    {command}", ""]
        chosen.save.parent.mkdir(parents=True, exist_ok=True)
        chosen.save.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
