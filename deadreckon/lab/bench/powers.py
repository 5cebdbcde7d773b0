"""`deadreckon bench powers`: symmetric power attention over long sequences, or its forms beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import deadreckon as dr
from deadreckon.lab.bench.cases import DTYPES
from deadreckon.lab.bench.flags import Powers
from deadreckon.lab.bench.page import Page, Row, mebibytes, microseconds, milliseconds, ratio
from deadreckon.lab.bench.rivals import causal, flash
from deadreckon.lab.bench.timing import peak_bytes, repeated, seconds_per_step

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
    q, k, v, grad = (torch.randn(shape, generator=generator, device=device).to(DTYPES[device]) for _ in range(4))
    log_gate = logsigmoid(torch.randn(shape[:3], generator=generator, device=device) + 7)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), log_gate.requires_grad_(), grad)


def run_once(inputs: Inputs, score: dr.Power | None, impl: str = "auto") -> list[Tensor]:
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
    truth = run_once(exact, dr.Power(p, form="attention"), "blockwise")
    found = run_once(inputs, dr.Power(p, form="chunked"))
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

    for start in range(0, length, 65536):
        attend(start, min(start + 65536, length))
    time = seconds_per_step(lambda number: attend(length + number, length + number + 1), TOKENS, device)
    return time, sum(x.numel() * x.element_size() for x in past.tensors())


def form_rows(flags: Powers, lengths: Sequence[int]) -> Iterator[Row]:
    """Length, time of each form, how many times as fast chunked is, length over the dimension of φ."""
    device, p = flags.device, flags.power
    dimension = math.comb(flags.width + p - 1, p)
    for length in lengths:
        inputs = draw(length, flags.heads, flags.width, device, max(1, BATCH_TOKENS[device] // length))
        forms = (dr.Power(p, form="attention"), dr.Power(p, form="chunked"))
        attention, chunked = (repeated(partial(run_once, inputs, form), flags.rounds, device) for form in forms)
        times = [milliseconds(attention), milliseconds(chunked), ratio(attention, chunked)]
        yield [str(length), *times, f"{length / dimension:.2f}"]


def length_rows(flags: Powers, lengths: Sequence[int]) -> Iterator[Row]:
    """Chunked over long sequences, beside softmax where that does not take too long."""
    device, score = flags.device, dr.Power(flags.power, form="chunked")
    for length in lengths:
        inputs = draw(length, flags.heads, flags.width, device)
        work = partial(run_once, inputs, score)
        time, memory = repeated(work, flags.rounds, device), peak_bytes(work, device)
        softmax = ["", ""]
        if length <= PATIENCE[device]:
            quadratic = repeated(partial(run_once, inputs, None), flags.rounds, device)
            softmax = [milliseconds(quadratic), ratio(quadratic, time)]
        token, state = decode(length, flags.heads, flags.width, flags.power, device)
        cells = [milliseconds(time), f"{1e9 * time / length:.1f}", *softmax, mebibytes(memory)]
        yield [str(length), *cells, microseconds(token), mebibytes(state)]


def run(flags: Powers) -> None:
    """Checks, then measures."""
    page = Page(flags, "Symmetric powers")
    lengths = flags.lengths or (FORMS if flags.forms else LENGTHS)[flags.device]
    error = check(flags.power, flags.width, flags.device)
    sizes = f"forward and backward; {flags.heads} heads of {flags.width}, gated"
    page.note(sizes, f"error {error:.2f} of what is allowed")
    if flags.forms:
        headings = ["tokens", "attention", "chunked", "× faster", "tokens / dimension of φ"]
        page.table(headings, form_rows(flags, lengths))
    else:
        headings = ["tokens", f"Power({flags.power})", "µs / 1000 tokens", "softmax", "× faster", "memory"]
        page.table([*headings, "one more token", "state"], length_rows(flags, lengths))
    page.end()
