"""Benchmarks: ours beside PyTorch's attention, in one run, and never a figure for something that is wrong."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler's own chatter
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import deadreckon as dr
from deadreckon.lab.training import check_device

Factors = Callable[[dict[str, Tensor]], dict[str, Any]]

CASES: dict[str, Factors] = {
    "rotation": lambda x: {"transport": dr.Rotation(x["angles"])},
    "rotation of values too": lambda x: {"transport": dr.Rotation(x["angles"], values=True)},
    "FoX": lambda x: {"log_gate": x["log_gate"]},
    "PaTH": lambda x: {"transport": dr.Householder(x["w"], x["beta"])},
    "PaTH-FoX": lambda x: {"transport": dr.Householder(x["w"], x["beta"]), "log_gate": x["log_gate"]},
    "Power(2)": lambda x: {"score": dr.Power(2)},
    "stick-breaking": lambda x: {"score": "stick-breaking"},
}
BASELINE = "SDPA, causal"


def make_inputs(batch: int, length: int, heads: int, width: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Random leaves: q, k, v and the factors of every case. Gates forget half in about 70 tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {name: draw(batch, length, heads, width) for name in ("q", "k", "v")}
    inputs["w"] = normalize(draw(batch, length, heads, width), dim=-1)
    inputs["beta"] = 2 * draw(batch, length, heads).sigmoid()
    inputs["angles"] = draw(batch, length, heads, width // 2)
    inputs["log_gate"] = logsigmoid(draw(batch, length, heads) + 5)
    exact = ("beta", "angles", "log_gate")
    return {
        name: x.to(device, torch.float32 if name in exact else dtype).requires_grad_() for name, x in inputs.items()
    }


def attend(case: str, inputs: dict[str, Tensor], impl: Any = "auto") -> Tensor:
    """One case, or the baseline."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if case == BASELINE:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return dr.attend(q, k, v, **CASES[case](inputs), impl=impl)


def check(case: str, dtype: torch.dtype, device: str, length: int) -> None:
    """Compares output and gradients with the definition in float64."""
    inputs = make_inputs(1, length, 2, 32, dtype, device)
    if length % 64 == 0:  # gates that are too strong for a single causal call
        inputs["log_gate"] = (inputs["log_gate"].detach() * 50).requires_grad_()
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found, expected = attend(case, inputs), attend(case, exact, impl="reference")
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    gradients = zip(
        inputs,
        torch.autograd.grad(found, list(inputs.values()), grad.to(found.dtype), allow_unused=True),
        torch.autograd.grad(expected, list(exact.values()), grad, allow_unused=True),
        strict=True,
    )
    pairs = [("output", found, expected), *(pair for pair in gradients if pair[2] is not None)]
    limit, grad_limit = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 4e-2)
    for name, a, b in pairs:
        error = float((a.double() - b).detach().norm() / b.detach().norm())
        allowed = limit if name == "output" else grad_limit
        if not error <= allowed:
            raise RuntimeError(f"{case}: {name} is off by {error:.1e} (limit {allowed:.0e}); nothing was timed")


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """The most memory that `run` held at a time, beyond what was held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    results = profile.profiler.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@dataclass
class Figures:
    """What one case took."""

    forward: float
    both: float
    memory: int


def measure(length: int, batch: int, heads: int, width: int, rounds: int, device: str) -> dict[str, Figures]:
    """Times all cases in turn, `rounds` times over, so that a slow moment of the machine falls on all alike."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = make_inputs(batch, length, heads, width, dtype, device)
    grad = torch.randn(batch, length, heads, width).to(device, dtype)

    def forward(case: str) -> None:
        with torch.no_grad():
            attend(case, inputs)

    def both(case: str) -> None:
        attend(case, inputs).backward(grad)
        for x in inputs.values():
            x.grad = None

    def seconds(run: Callable[[str], None], case: str) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(case)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    times: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in (BASELINE, *CASES)}
    for number in range(rounds + 1):
        for case, (forwards, boths) in times.items():
            taken = seconds(forward, case), seconds(both, case)
            if number:  # the first round warms up
                forwards.append(taken[0])
                boths.append(taken[1])
    return {case: Figures(min(a), min(b), peak_bytes(partial(both, case), device)) for case, (a, b) in times.items()}


def run_bench(
    device: str, lengths: tuple[int, ...], batch: int, heads: int, width: int, rounds: int, save: Path | None
) -> dict[int, dict[str, Figures]]:
    """Checks, measures and prints; see `deadreckon bench --help`."""
    check_device(device)
    if rounds < 1:
        raise ValueError(f"rounds: expected 1 or more, got {rounds}")
    console = Console()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("checking", total=len(CASES) + len(lengths))
        for case in CASES:
            for length in (200, 256):
                check(case, dtype, device, length)
            progress.advance(bar)
        found = {}
        for length in lengths:
            progress.update(bar, description=f"T = {length}")
            found[length] = measure(length, batch, heads, width, rounds, device)
            progress.advance(bar)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {threads} threads"
    shape = f"B {batch}, H {heads}, D {width}, {str(dtype).removeprefix('torch.')}"
    about = f"{name}; torch {torch.__version__}; {shape}; best of {rounds}; all cases checked against float64 first"
    rows = [
        [str(length), case, *_cells(figures, cases[BASELINE])]
        for length, cases in found.items()
        for case, figures in cases.items()
    ]
    headings = ["T", "", "forward", "×", "forward + backward", "×", "peak memory", "×"]
    table = Table(title=about, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "" else "right")
    for row in rows:
        table.add_row(*row, end_section=row[1] == list(CASES)[-1])
    console.print(table)
    if save is not None:
        flags = f"--device {device} --lengths {' '.join(map(str, lengths))} --batch {batch} --heads {heads}"
        command = f"deadreckon bench {flags} --head-dim {width} --rounds {rounds}"
        lines = [
            f"# Attention on {name}",
            "",
            f"{date.today()}: {about}. Inputs drawn with seed 0.",
            "",
            f"    {command}",
            "",
        ]
        lines += [_markdown(headings), _markdown(["---:"] * len(headings)), *map(_markdown, rows)]
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text("\n".join(lines) + "\n")
        console.print(f"Saved: {save}")
    return found


def _cells(figures: Figures, base: Figures) -> list[str]:
    return [
        f"{1e3 * figures.forward:.1f} ms", f"{figures.forward / base.forward:.2f}",
        f"{1e3 * figures.both:.1f} ms", f"{figures.both / base.both:.2f}",
        f"{figures.memory / 2**20:.1f} MiB", f"{figures.memory / base.memory:.2f}",
    ]  # fmt: skip


def _processor() -> str:
    """What this machine calls its processor."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join([platform.machine(), *names[:1]])


def _markdown(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
