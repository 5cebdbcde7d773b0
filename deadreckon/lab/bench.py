"""Benchmarks: ours beside other people's attention, in one run, and never a figure for ours while ours is wrong.

    python -m deadreckon.lab.bench --device cuda --shapes 32x4096x32x64 2x32768x32x64 --rounds 20 --save bench.md

That is `deadreckon bench` for machines without tyro.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler's own chatter
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.cases import CASES, DTYPES, KINDS, LIMITS, Inputs, Shape, attend, check, make_inputs
from deadreckon.lab.environment import check_device, processor, version_of
from deadreckon.lab.pages import markdown
from deadreckon.lab.rivals import RIVALS, Method, baseline, compiled_rotate, installed

PARTS = ["", "time", "share", "calls"]
SUMMARIES: dict[str, tuple[str, Callable[[list[float]], float]]] = {"cpu": ("best", min), "cuda": ("median", median)}


@dataclass
class Figures:
    """What one method took."""

    forward: float
    both: float
    memory: int


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


@cache
def scratch() -> Tensor:
    """A gigabyte to write to."""
    return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def seconds(run: Callable[[], None], device: str) -> float:
    """How long it takes: by the clock on a CPU, by the GPU's own events on CUDA."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    scratch().zero_()  # empties the GPU's cache, and lets the host get ahead of it, as it is in training
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass
class Trial:
    """One method on one shape."""

    method: Method
    inputs: Inputs
    device: str
    forwards: list[float] = field(default_factory=list)
    boths: list[float] = field(default_factory=list)
    memory: int = 0
    failure: str = ""

    def forward(self) -> None:
        """Without gradients."""
        with torch.no_grad():
            self.method.run(self.inputs)

    def both(self) -> None:
        """Forward and backward."""
        try:
            self.method.run(self.inputs).backward(self.inputs["grad"])
        finally:
            for x in self.inputs.values():
                x.grad = None

    def warm_up(self) -> None:
        """Twice, since the first time may compile; the second shows the memory."""
        self.forward()
        self.both()
        self.forward()
        self.memory = peak_bytes(self.both, self.device)

    def time(self) -> None:
        """Once more."""
        self.forwards.append(seconds(self.forward, self.device))
        self.boths.append(seconds(self.both, self.device))

    def result(self) -> Figures | str:
        """Figures, or why there are none."""
        _, summary = SUMMARIES[self.device]
        return self.failure or Figures(summary(self.forwards), summary(self.boths), self.memory)


def explain(error: Exception) -> str:
    """In a line that fits into a table."""
    first, *_ = str(error).splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"[:120]


def measure(methods: dict[str, Method], shape: Shape, rounds: int, device: str) -> dict[str, Figures | str]:
    """Times all methods in turn, `rounds` times over, so that a slow moment of the machine falls on all alike.

    One that raises, for lack of memory say, is out, and the error stands in the place of its figures.
    """
    if device == "cuda":
        torch.cuda.empty_cache()
    inputs = make_inputs(shape, device)
    trials = {name: Trial(method, method.prepare(inputs), device) for name, method in methods.items()}
    for step in (Trial.warm_up, *[Trial.time] * rounds):
        for trial in trials.values():
            if trial.failure:
                continue
            try:
                step(trial)
            except Exception as error:
                trial.failure = explain(error)
            if trial.failure and device == "cuda":
                torch.cuda.empty_cache()
    return {name: trial.result() for name, trial in trials.items()}


def parts(method: Method, shape: Shape, device: str, most: int = 24) -> list[list[str]]:
    """Where the time of a forward and backward pass goes, the longest first: by kernel on CUDA, else by operator."""
    trial, kinds = Trial(method, method.prepare(make_inputs(shape, device)), device), torch.profiler.ProfilerActivity
    trial.warm_up()
    with torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU]) as profile:
        trial.both()
        if device == "cuda":
            torch.cuda.synchronize()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = sorted(((getattr(one, clock), one.count, one.key) for one in profile.key_averages()), reverse=True)
    found = [(time, count, name) for time, count, name in found if time > 0]
    whole = sum(time for time, _, _ in found)
    rows = [[name[:70], milliseconds(time / 1e6), ratio(time, whole), str(count)] for time, count, name in found[:most]]
    return [*rows, ["all", milliseconds(whole / 1e6), "", ""]]


def line_up(device: str, only: str) -> dict[str, Method]:
    """Ours and the rivals that are installed, by kind: all, or those that `only` names, and always the baseline."""
    ours = {name: Method(partial(attend, name, "auto"), name, "deadreckon") for name in CASES}
    everyone = {**installed(device), **ours}
    wanted = {name.strip().lower() for name in only.split(",") if name.strip()}
    strangers = wanted - {name.lower() for name in everyone}
    if strangers:
        raise ValueError(f"only: expected names among {', '.join(everyone)}; got {', '.join(sorted(strangers))}")
    chosen = [name for name in everyone if not wanted or name.lower() in wanted or name == baseline(device)]
    order = list(KINDS)
    return {name: everyone[name] for name in sorted(chosen, key=lambda name: order.index(everyone[name].kind))}


def _checked(method: Method, width: int, device: str) -> dict[str, float] | str:
    """Its errors over what is allowed, or why there are none."""
    try:
        return check(method, width, device)
    except Exception as error:
        return explain(error)


def check_all(
    methods: dict[str, Method], widths: Iterable[int], device: str, workers: int
) -> dict[int, dict[str, float | str]]:
    """By width, the worst error of each over what is allowed, or why there is none. Raises where ours is amiss.

    Several processes at a time, since kernels take long to compile; what they have compiled stays on the disk.
    """
    tasks = [(name, method, width) for width in widths for name, method in methods.items()]
    _, chosen, wide = zip(*tasks, strict=True)
    if workers > 1:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = list(pool.map(_checked, chosen, wide, repeat(device)))
    else:
        results = list(map(_checked, chosen, wide, repeat(device)))
    found: dict[int, dict[str, float | str]] = {width: {} for width in wide}
    amiss = []
    for (name, method, width), errors in zip(tasks, results, strict=True):
        fault = errors if isinstance(errors, str) else ", ".join(
            f"{part} off by {error:.3g} × what is allowed" for part, error in errors.items() if error > 1
        )  # fmt: skip
        found[width][name] = errors if isinstance(errors, str) else max(errors.values())
        if fault and method.package == "deadreckon":
            amiss.append(f"{name} at D = {width}: {fault}")
    if amiss:
        raise RuntimeError(f"nothing was timed: {'; '.join(amiss)}")
    return found


def run_bench(
    device: str,
    shapes: tuple[Shape, ...],
    rounds: int = 5,
    only: str = "",
    save: Path | None = None,
    profile: bool = False,
) -> dict[Shape, dict[str, Figures | str]]:
    """Checks, then measures, prints and saves shape by shape; see `deadreckon bench --help`."""
    check_device(device)
    if rounds < 1:
        raise ValueError(f"rounds: expected 1 or more, got {rounds}")
    if not shapes:
        raise ValueError("shapes: expected at least one, got none")
    methods, console = line_up(device, only), Console()
    widths = dict.fromkeys(shape.width for shape in shapes)
    found, rows, sections = dict[Shape, dict[str, Figures | str]](), list[list[str]](), list[str]()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("checking", total=1 + len(shapes))
        workers = min(len(methods) * len(widths), os.cpu_count() or 1) if device == "cuda" else 1
        errors = check_all(methods, widths, device, workers)
        progress.advance(bar)
        about = describe(device, rounds)
        console.print(about, markup=False, highlight=False)
        for shape in shapes:
            progress.update(bar, description=str(shape))
            failures = {name: error for name, error in errors[shape.width].items() if isinstance(error, str)}
            sound = {name: method for name, method in methods.items() if name not in failures}
            timed = measure(sound, shape, rounds, device) | failures
            found[shape] = {name: timed[name] for name in methods}
            headings, *lines = tabulate(found[shape], errors[shape.width], device, reach(shape, methods, device))
            console.print(draw(str(shape), headings, lines))
            rows += [[str(shape), *line] for line in lines]
            worked = [name for name, figures in timed.items() if not isinstance(figures, str)]
            for name in [name for name in worked if profile and methods[name].package == "deadreckon"]:
                title, some = f"{name}, {shape}: forward and backward", parts(methods[name], shape, device)
                console.print(draw(title, PARTS, some))
                sections += ["", f"{title}:", "", markdown.table(PARTS, some)]
            if save is not None:  # after every shape: a run that is cut short leaves what it has
                flags = f"--device {device} --shapes {' '.join(map(str, found))} --rounds {rounds}"
                command = f"deadreckon bench {flags}" + (f' --only "{only}"' if only else "") + " --profile" * profile
                write(save, about, command, ["B x T x H x D", *headings], rows, sections=sections)
            progress.advance(bar)
    if save is not None:
        console.print(f"Saved: {save}", markup=False, highlight=False)
    return found


def reach(shape: Shape, methods: dict[str, Method], device: str) -> dict[str, str]:
    """On CUDA, what gates leave to our kernels: of what is farther than a block of the tree, along routes."""
    some = {"FoX": "log_gate", "forgetful FoX": "strong_gate"}
    some |= {"PaTH-FoX": "log_gate", "forgetful PaTH-FoX": "strong_gate"}
    gates = some if device == "cuda" else {}
    inputs = make_inputs(shape, device) if gates else {}
    shares = {
        name: dr.share_in_reach(inputs["q"], inputs["k"], inputs[gate])
        for name, gate in gates.items()
        if name in methods
    }
    return {name: f" ({share:.0%} in reach)" for name, share in shares.items()}


def tabulate(
    found: dict[str, Figures | str], errors: dict[str, float | str], device: str, notes: dict[str, str] | None = None
) -> list[list[str]]:
    """Headings and rows, with notes beside some names."""
    base, with_fla = found[baseline(device)], any(name.startswith("fla ") for name in found)
    headings = ["", "error"]
    for heading in ("forward", "forward + backward", "peak memory"):
        headings += [heading, "×", *["× fla"] * with_fla]
    rows = [headings]
    for name, figures in found.items():
        if isinstance(figures, str):
            rows.append([f"{name} ({figures})", *[""] * (len(headings) - 1)])
            continue
        error = errors[name]
        assert isinstance(error, float)
        row = [name + (notes or {}).get(name, ""), f"{error:.2f}" + " ✗" * (error > 1)]
        rivals = [base, found.get(f"fla {name}")] if with_fla else [base]
        for part, form in (("forward", milliseconds), ("both", milliseconds), ("memory", mebibytes)):
            value = getattr(figures, part)
            row += [form(value), *(ratio(value, getattr(rival, part, 0)) for rival in rivals)]
        rows.append(row)
    return rows


def milliseconds(value: float) -> str:
    """Of seconds."""
    return f"{1e3 * value:.2f} ms"


def mebibytes(value: int) -> str:
    """Of bytes."""
    return f"{value / 2**20:.1f} MiB"


def ratio(value: float, base: float) -> str:
    """Empty where there is nothing to compare with."""
    return f"{value / base:.2f}" if base else ""


def setting(device: str, packages: tuple[str, ...] = ("triton",)) -> list[str]:
    """The machine and versions."""
    threads = torch.get_num_threads()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {threads} threads"
    versions = [f"{package} {found}" for package in packages if (found := version_of(package))]
    return [machine, f"torch {torch.__version__}", *versions]


def describe(device: str, rounds: int) -> str:
    """The machine, versions, and what the columns mean."""
    word, _ = SUMMARIES[device]
    dtype = DTYPES[device]
    output, gradient = LIMITS[dtype]
    allowed = f"{output} of the output and {gradient} of a gradient"
    if dtype == torch.bfloat16:
        allowed += ", or twice the definition's own in bfloat16 where that is less"
    notes = [f"× is the ratio to {baseline(device)}"]
    if device == "cuda":
        notes.append(compiled_rotate(device)[1])
    absent = [name for name in RIVALS[device] if name not in installed(device)]
    if absent:
        notes.append(f"not installed: {', '.join(absent)}")
    notes.append(f"error is the worst relative error against float64, over what is allowed ({allowed})")
    return "; ".join(
        [*setting(device, ("triton", "fla-core")), str(dtype).removeprefix("torch."), f"{word} of {rounds}", *notes]
    )


def draw(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """For the terminal."""
    table = Table(title=title, title_justify="left")
    table.add_column(headings[0], max_width=40)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def write(
    path: Path,
    about: str,
    command: str,
    headings: list[str],
    rows: list[list[str]],
    title: str = "Attention",
    sections: Sequence[str] = (),
) -> None:
    """For the record: a table, and lines of what else there is to say."""
    machine, _ = about.split("; ", 1)
    lines = [f"# {title} on {machine}", "", f"{date.today()}: {about}. Inputs drawn with seed 0.", ""]
    lines += [f"    {command}", "", markdown.table(headings, rows, left=2), *sections]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """`python -m deadreckon.lab.bench`."""
    parser = argparse.ArgumentParser(description="Time ours beside other people's attention; see `deadreckon bench`.")
    parser.add_argument("--device", choices=list(RIVALS), default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["1x512x4x64", "1x2048x4x64"], help="B x T x H x D each")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case")
    parser.add_argument("--only", default="", help='names, such as "PaTH,fla PaTH"')
    parser.add_argument("--save", type=Path, help="also write the tables as Markdown")
    parser.add_argument("--profile", action="store_true", help="also show where the time of ours goes")
    chosen = parser.parse_args()
    try:
        shapes = tuple(map(Shape.parse, chosen.shapes))
        run_bench(chosen.device, shapes, chosen.rounds, chosen.only, chosen.save, chosen.profile)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
