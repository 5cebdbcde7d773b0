"""Symmetric power attention over long sequences: whether its cost is linear, and how it compares with softmax.

    python -m deadreckon.lab.powers --device cuda --lengths 16384 65536 262144 1048576 --save powers.md

Power(p) with learned gates, one sequence, forward and backward, beside PyTorch's own causal attention, which has none,
at the shorter lengths; then one more token after a context of each length. Checked against float64 first.

    python -m deadreckon.lab.powers --device cuda --forms --width 64 --power 2

Both forms over as many tokens in rows of growing length: from where on is chunked the faster, which `form="auto"` wants
to know (`BREAK_EVEN` in `blockwise/power.py`)?
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import logsigmoid

import deadreckon as dr
from deadreckon.lab import bench
from deadreckon.lab.rivals import causal, flash

LENGTHS = {"cpu": [2048, 4096, 8192, 16384, 32768], "cuda": [16384, 65536, 262144, 1048576]}
FORMS = {"cpu": [512, 1024, 2048, 4096, 8192], "cuda": [512, 1024, 2048, 4096, 8192, 16384]}
PATIENCE = {"cpu": 16384, "cuda": 65536}  # tokens up to which quadratic attention is timed
TOKENS = 64  # that are decoded
BATCH_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 17}  # of all rows together, where forms are compared


class Inputs(NamedTuple):
    """One sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gate: Tensor
    grad: Tensor


def draw(length: int, heads: int, width: int, device: str, batch: int = 1) -> Inputs:
    """Gates forget half in some 700 tokens, different ones at every head."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, length, heads, width)
    q, k, v, grad = (torch.randn(shape, generator=generator, device=device).to(bench.DTYPES[device]) for _ in range(4))
    log_gate = logsigmoid(torch.randn(shape[:3], generator=generator, device=device) + 7)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), log_gate.requires_grad_(), grad)


def run(inputs: Inputs, score: dr.Power | None, impl: str = "auto") -> list[Tensor]:
    """Output and gradients; without a score PyTorch's own attention, which has no gates."""
    q, k, v, log_gate, grad = inputs
    if score is None:
        output = flash({"q": q, "k": k, "v": v}) if q.is_cuda else causal(q, k, v)
        return [output, *torch.autograd.grad(output, (q, k, v), grad)]
    output = dr.attend(q, k, v, log_gate=log_gate, score=score, impl=impl)  # type: ignore[arg-type]
    return [output.detach(), *torch.autograd.grad(output, (q, k, v, log_gate), grad.to(output.dtype))]


def check(p: int, width: int, device: str) -> float:
    """The worst error of a short sequence against float64, over what is allowed: right up to 1."""
    inputs = draw(2000, 1, width, device)
    exact = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    truth = run(exact, dr.Power(p, form="attention"), "blockwise")
    found = run(inputs, dr.Power(p, form="chunked"))
    allowed = [1e-4] + [1e-3] * 4 if inputs.q.dtype == torch.float32 else [1e-2] + [2e-2] * 4
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]
    worst = max(error / limit for error, limit in zip(errors, allowed, strict=True))
    if not worst <= 1:
        raise RuntimeError(f"Power({p}) is off: output and gradients by {errors}; nothing was timed")
    return worst


@torch.no_grad()
def decode(length: int, heads: int, width: int, p: int, device: str) -> tuple[float, int]:
    """Seconds for one more token after so many, and the bytes of what is remembered."""
    past, inputs = dr.Past(), draw(length + 2 * TOKENS, heads, width, device)

    def attend(start: int, stop: int) -> None:
        q, k, v, log_gate, _ = (x[:, start:stop] for x in inputs)
        dr.attend_next(q, k, v, log_gate=log_gate, score=dr.Power(p, form="chunked"), past=past)

    def some(first: int) -> None:
        for place in range(first, first + TOKENS):
            attend(place, place + 1)

    for start in range(0, length, 65536):
        attend(start, min(start + 65536, length))
    some(length)
    time = bench.seconds(partial(some, length + TOKENS), device) / TOKENS
    return time, sum(x.numel() * x.element_size() for x in past.tensors())


def median_time(inputs: Inputs, score: dr.Power | None, rounds: int, device: str) -> float:
    """Seconds for output and gradients, after a first time that may compile."""

    def work() -> None:
        run(inputs, score)

    work()
    return bench.SUMMARIES[device][1]([bench.seconds(work, device) for _ in range(rounds)])


def compare_forms(lengths: list[int], heads: int, width: int, p: int, rounds: int, device: str) -> list[list[str]]:
    """Rows of a table: length, time of each form, how many times as fast chunked is, length over the dimension of φ."""
    dimension, rows = math.comb(width + p - 1, p), []
    for length in lengths:
        inputs = draw(length, heads, width, device, max(1, BATCH_TOKENS[device] // length))
        forms = (dr.Power(p, form="attention"), dr.Power(p, form="chunked"))
        attention, chunked = (median_time(inputs, score, rounds, device) for score in forms)
        times = [bench.milliseconds(attention), bench.milliseconds(chunked), bench.ratio(attention, chunked)]
        rows.append([str(length), *times, f"{length / dimension:.2f}"])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Checks, measures, prints, and saves if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(LENGTHS), default="cpu")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="channels of a head")
    parser.add_argument("--power", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"{LENGTHS} by default, of forms {FORMS}")
    parser.add_argument("--forms", action="store_true", help="compare forms, in place of long sequences")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="also write the table as Markdown")
    chosen = parser.parse_args()
    device, heads, width, p = chosen.device, chosen.heads, chosen.width, chosen.power
    bench.check_device(device)
    error, lengths = check(p, width, device), chosen.lengths or (FORMS if chosen.forms else LENGTHS)[device]
    notes = f"forward and backward, {bench.SUMMARIES[device][0]} of {chosen.rounds}; {heads} heads of {width}, gated"
    about = "; ".join([*bench.setting(device), notes, f"error {error:.2f} of what is allowed"])
    command = f"python -m deadreckon.lab.powers --device {device} --heads {heads} --width {width} --power {p}"
    command += f" --lengths {' '.join(map(str, lengths))} --rounds {chosen.rounds}" + " --forms" * chosen.forms
    if chosen.forms:
        headings = ["tokens", "attention", "chunked", "× faster", "tokens / dimension of φ"]
        rows = compare_forms(lengths, heads, width, p, chosen.rounds, device)
    else:
        headings, rows = measure_lengths(lengths, heads, width, p, chosen.rounds, device)
    Console().print(about, bench.draw("Symmetric powers", headings, rows), markup=False, highlight=False)
    if chosen.save:
        bench.write(chosen.save, about, command, headings, rows, "Symmetric powers")


def measure_lengths(
    lengths: list[int], heads: int, width: int, p: int, rounds: int, device: str
) -> tuple[list[str], list[list[str]]]:
    """The table of long sequences."""
    headings = ["tokens", f"Power({p})", "µs / 1000 tokens", "softmax", "× faster", "memory", "one more token", "state"]
    rows = list[list[str]]()
    for length in lengths:
        inputs, score = draw(length, heads, width, device), dr.Power(p, form="chunked")
        time = median_time(inputs, score, rounds, device)
        memory = bench.peak_bytes(partial(run, inputs, score), device)
        softmax = ["", ""]
        if length <= PATIENCE[device]:
            quadratic = median_time(inputs, None, rounds, device)
            softmax = [bench.milliseconds(quadratic), bench.ratio(quadratic, time)]
        token, state = decode(length, heads, width, p, device)
        cells = [bench.milliseconds(time), f"{1e9 * time / length:.1f}", *softmax, bench.mebibytes(memory)]
        rows.append([str(length), *cells, f"{1e6 * token:.0f} µs", bench.mebibytes(state)])
        print(" | ".join(rows[-1]), flush=True)
    return headings, rows


if __name__ == "__main__":
    main()
