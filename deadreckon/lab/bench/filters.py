"""`deadreckon bench filters`: histogram filters against Algorithm 1 as a plain loop of scatter_add."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.arguments import sizes_in
from deadreckon.lab.bench.cases import relative_error
from deadreckon.lab.bench.flags import Filters
from deadreckon.lab.bench.page import Page, Row, mebibytes, milliseconds, ratio
from deadreckon.lab.bench.timing import peak_bytes, repeated

NAMES = {"reference": "loop of scatter_add", "blockwise": "PyTorch", "native": "C", "triton": "Triton"}
PATHS = {"cpu": ("reference", "blockwise", "native"), "cuda": ("reference", "blockwise", "triton")}
SIZES = {"cpu": "8x128x16x128x340", "cuda": "100x512x140x512x340"}
HEADINGS = ["", "", "error", "forward + backward", "×", "peak memory", "×"]
KINDS = {"histograms": None, "superpositions": torch.float32, "superpositions, bfloat16 table": torch.bfloat16}


class Size(NamedTuple):
    batch: int
    length: int
    cursors: int
    positions: int
    width: int  # of the table of encodings


def draw(size: Size, dtype: torch.dtype | None, device: str) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Gates and exponents, a table of this dtype (None if dtype is None), and a gradient of the result."""
    random = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    gates = [(random(*size[:3]) - 3).sigmoid(), random(*size[:3], 3).softmax(-1), 2 + 0.1 * random(size.cursors)]
    if dtype is None:
        return gates, None, random(*size[:4])
    place, channel = torch.arange(size.positions, device=device), torch.arange(size.width, device=device)
    angle = place[:, None] / 10_000 ** (channel // 2 * 2 / size.width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(dtype)
    return gates, table, random(*size[:3], size.width).to(dtype)


def run_once(gates: list[Tensor], table: Tensor | None, grad: Tensor, impl: Any) -> list[Tensor]:
    """The result and its gradients: of superpositions, or of the histograms if there is no table."""
    leaves = reset, move, gamma = [x.detach().requires_grad_() for x in gates]
    if table is None:
        out = dr.histogram_filter(reset, move, gamma, positions=grad.shape[-1], impl=impl)
    else:
        out = dr.superpose(reset, move, gamma, table, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(size: Size, dtype: torch.dtype | None, impl: str, device: str) -> float:
    """The worst error against the definition in float64, as a multiple of the tolerance; raises if that is above 1."""
    gates, table, grad = draw(size._replace(batch=2, length=37, cursors=3), dtype, device)
    exact = run_once([x.double() for x in gates], None if table is None else table.double(), grad.double(), "reference")
    limits = [2.0**-8] + [2.0**-7] * 3 if dtype == torch.bfloat16 else [1e-5] + [1e-4] * 3
    pairs = zip(run_once(gates, table, grad, impl), exact, limits, strict=True)
    worst = max(relative_error(x, y) / limit for x, y, limit in pairs)
    if not worst <= 1:
        raise RuntimeError(f"{NAMES[impl]} is off by {worst:.3g} × what is allowed: nothing was timed")
    return worst


def serves(impl: str, device: str) -> bool:
    """Whether an implementation is available: C needs a compiler."""
    gates, _, grad = draw(Size(1, 1, 1, 2, 1), None, device)
    try:
        run_once(gates, None, grad, impl)
    except ValueError as reason:
        print(reason)
        return False
    return True


def measure(size: Size, dtype: torch.dtype | None, impl: str, rounds: int, device: str) -> tuple[float, float, str]:
    """Seconds and bytes. If a batch does not fit into memory, part of it is measured and scaled up, with a remark."""
    for part in (size.batch >> halved for halved in range(size.batch.bit_length())):
        try:
            inputs = draw(size._replace(batch=part), dtype, device)
            work = partial(run_once, *inputs, impl)
            time = repeated(work, rounds, device)
            memory = peak_bytes(work, device) - inputs[2].nbytes  # the result has that size too
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        remark = "" if part == size.batch else f", scaled up from batch {part}"
        return time * size.batch / part, memory * size.batch / part, remark
    raise RuntimeError(f"{NAMES[impl]}: not even one sequence fits into memory")


def run(flags: Filters) -> None:
    """Checks each implementation, then measures it."""
    device, size, page = flags.device, flags.size or SIZES[flags.device], Page(flags, "Histogram filters")
    task = Size(*sizes_in(size, "size", "BxTxCxPxW, such as 100x512x140x512x340"))
    page.note(f"size {size}", "× is the loop's over ours", "error is over what is allowed")
    paths = [impl for impl in PATHS[device] if serves(impl, device)]

    def rows() -> Iterator[Row]:
        base = (0.0, 0.0)
        for kind, dtype in list(KINDS.items())[: 3 if device == "cuda" else 2]:
            for impl in paths:
                error = check(task, dtype, impl, device)
                time, memory, remark = measure(task, dtype, impl, flags.rounds, device)
                base = (time, memory) if impl == "reference" else base
                cells = [milliseconds(time), ratio(base[0], time), mebibytes(memory), ratio(base[1], memory)]
                yield [kind, NAMES[impl] + remark, f"{error:.2f}", *cells]

    page.table(HEADINGS, rows(), left=2)
