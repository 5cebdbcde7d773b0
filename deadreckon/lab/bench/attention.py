"""`deadreckon bench attention`: our attention against other libraries' kernels; ours is checked before it is timed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import NamedTuple

import torch

import deadreckon as dr
from deadreckon.lab.arguments import names_in, numbers_in, sizes_in
from deadreckon.lab.bench import cases
from deadreckon.lab.bench.cases import Inputs, Shape, make_inputs
from deadreckon.lab.bench.flags import Attention
from deadreckon.lab.bench.page import PARTS, Page, Row, explain, mebibytes, milliseconds, parts_of, ratio
from deadreckon.lab.bench.rivals import Method, baseline, compiled_rotate, installed, rivals_on
from deadreckon.lab.bench.timing import empty_cache, peak_bytes, seconds, summary

GATED = {"FoX": "log_gate", "forgetful FoX": "strong_gate"}
GATED |= {"PaTH-FoX": "log_gate", "forgetful PaTH-FoX": "strong_gate"}


class Figures(NamedTuple):
    """Seconds and peak memory in bytes of one method."""

    forward: float
    both: float
    memory: int


Results = dict[str, Figures | str]  # by method; or why there are none
Checked = tuple[int, bool]  # width, packed: what methods are checked for
Errors = dict[str, float | str]


class Trial:
    """Timings of one method on one shape."""

    def __init__(self, method: Method, inputs: Inputs, device: str) -> None:
        self.method, self.inputs, self.device = method, method.prepare(inputs), device
        self.times: tuple[list[float], list[float]] = ([], [])  # of `forward` and of `both`
        self.memory, self.failure = 0, ""

    def forward(self) -> None:
        """Runs the forward pass without gradients."""
        with torch.no_grad():
            self.method.run(self.inputs)

    def both(self) -> None:
        """Runs forward and backward."""
        try:
            self.method.run(self.inputs).backward(self.inputs["grad"])
        finally:
            for x in self.inputs.values():
                x.grad = None

    def warm_up(self) -> None:
        """Runs everything twice: the first run may compile, the second backward pass measures peak memory."""
        self.forward()
        self.both()
        self.forward()
        self.memory = peak_bytes(self.both, self.device)

    def time(self) -> None:
        """Times the forward pass, and forward and backward, once each."""
        for times, run in zip(self.times, (self.forward, self.both), strict=True):
            times.append(seconds(run, self.device, before=run))

    def result(self) -> Figures | str:
        """Summarised timings, or the error that prevented them."""
        if self.failure:
            return self.failure
        forward, both = (summary(times, self.device) for times in self.times)
        return Figures(forward, both, self.memory)


def measure(methods: dict[str, Method], shape: Shape, rounds: int, device: str) -> Results:
    """Times all methods round-robin, `rounds` times, so that a slowdown of the machine affects all of them alike.

    A method that raises (out of memory, say) is dropped, and its error message takes the place of its timings.
    """
    empty_cache(device)
    inputs = make_inputs(shape, device)
    trials = {name: Trial(method, inputs, device) for name, method in methods.items()}
    for step in (Trial.warm_up, *[Trial.time] * rounds):
        for trial in trials.values():
            if trial.failure:
                continue
            try:
                step(trial)
            except Exception as error:
                trial.failure = explain(error)
            if trial.failure:
                empty_cache(device)
    return {name: trial.result() for name, trial in trials.items()}


def parts(method: Method, shape: Shape, device: str) -> list[Row]:
    """Profiles forward and backward: where the time goes, the most expensive first."""
    trial = Trial(method, make_inputs(shape, device), device)
    trial.warm_up()
    return parts_of(trial.both, device)


def everyone(device: str, packed: bool) -> dict[str, Method]:
    """Our methods and the installed ones of other libraries, grouped by kind."""
    kinds = cases.PACKED if packed else {name: name for name in cases.CASES}
    ours = {name: Method(partial(cases.attend, kind, "auto"), kind, "deadreckon") for name, kind in kinds.items()}
    methods, order = {**installed(rivals_on(device, packed)), **ours}, list(cases.KINDS)
    return dict(sorted(methods.items(), key=lambda one: order.index(one[1].kind)))


def line_up(device: str, packed: bool, only: str = "") -> dict[str, Method]:
    """All methods, or those named in `only`, always with the baseline."""
    wanted = {name.lower() for name in names_in([only])}
    known = everyone(device, False) | everyone(device, True)
    if strangers := wanted - {name.lower() for name in known}:
        raise ValueError(f"only: expected names among {', '.join(known)}; got {', '.join(sorted(strangers))}")
    wanted |= {baseline(device, packed).lower()} if wanted else set()
    return {name: one for name, one in everyone(device, packed).items() if not wanted or name.lower() in wanted}


def _checked(method: Method, what: Checked, device: str) -> dict[str, float] | str:
    """Errors of a method as multiples of the tolerance, or the exception's message."""
    try:
        return cases.check(method, *what, device)
    except Exception as error:
        return explain(error)


def check_all(
    line_ups: dict[bool, dict[str, Method]], wanted: Iterable[Checked], device: str, workers: int
) -> dict[Checked, Errors]:
    """The worst error of each method as a multiple of the tolerance, or an error message. Raises if one of ours fails.

    Runs in several processes, since kernels take long to compile; compiled kernels are cached on disk.
    """
    tasks = [(name, method, what) for what in wanted for name, method in line_ups[what[1]].items()]
    _, methods, checked = zip(*tasks, strict=True)
    workers = min(workers, len(tasks))
    if workers > 1:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = list(pool.map(_checked, methods, checked, repeat(device)))
    else:
        results = list(map(_checked, methods, checked, repeat(device)))
    worst: dict[Checked, Errors] = {what: {} for what in checked}
    amiss = []
    for (name, method, what), errors in zip(tasks, results, strict=True):
        if isinstance(errors, str):
            fault = worst[what][name] = errors
        else:
            worst[what][name] = max(errors.values())
            far_off = {part: error for part, error in errors.items() if error > 1}
            fault = ", ".join(f"{part} off by {error:.3g} × what is allowed" for part, error in far_off.items())
        if fault and method.package == "deadreckon":
            amiss.append(f"{name} at D = {what[0]}{', packed' * what[1]}: {fault}")
    if amiss:
        raise RuntimeError(f"nothing was timed: {'; '.join(amiss)}")
    return worst


def shapes_of(flags: Attention) -> list[Shape]:
    """The shapes to time, packed rows last; the default lengths unless only other shapes or documents are given."""
    means = numbers_in([flags.documents], "documents", "mean lengths")
    shapes = [Shape.parse(shape) for shape in flags.shapes]
    if not shapes and (not means or flags.lengths != Attention.lengths):
        shapes = [Shape(flags.batch, length, flags.heads, flags.head_dim) for length in flags.lengths]
    length, heads, width = sizes_in(flags.row, "row", "TxHxD")
    shapes += [Shape(1, length, heads, width, mean) for mean in means]
    if not shapes:
        raise ValueError("lengths: expected at least one, got none")
    if odd := [shape.width for shape in shapes if shape.width % 2]:
        raise ValueError(f"head_dim: expected an even number, as RoPE's pairs take, got {odd[0]}")
    return shapes


def run(flags: Attention) -> dict[Shape, Results]:
    """Checks all methods, then times, prints and saves shape by shape."""
    device, shapes = flags.device, shapes_of(flags)
    page = Page(flags, "Attention", ("triton", "fla-core"))
    kinds = dict.fromkeys((shape.width, bool(shape.documents)) for shape in shapes)
    line_ups = {packed: line_up(device, packed, flags.only) for _, packed in kinds}
    errors = check_all(line_ups, kinds, device, (os.cpu_count() or 1) if device == "cuda" else 1)
    page.note(*notes(device, list(line_ups)))
    results = dict[Shape, Results]()
    with_fla = any(name.startswith("fla ") for methods in line_ups.values() for name in methods)
    headings = ["B x T x H x D" + " / documents" * (True in line_ups), "", "error"]
    for heading in ("forward", "forward + backward", "peak memory"):
        headings += [heading, "×", *["× fla"] * with_fla]

    def rows() -> Iterator[Row]:
        for shape in shapes:
            packed = bool(shape.documents)
            methods, worst = line_ups[packed], errors[shape.width, packed]
            failures = {name: error for name, error in worst.items() if isinstance(error, str)}
            sound = {name: method for name, method in methods.items() if name not in failures}
            timed = measure(sound, shape, flags.rounds, device) | failures
            results[shape] = {name: timed[name] for name in methods}
            remarks = reach(shape, methods, device)
            for name in methods:
                rivals = [baseline(device, packed), *[f"fla {name}"] * with_fla]
                cells = row(name + remarks.get(name, ""), timed[name], worst[name], [timed.get(one) for one in rivals])
                yield [str(shape), *cells, *[""] * (len(headings) - 1 - len(cells))]

    page.table(headings, rows(), left=2)
    for shape, timed in results.items() if flags.profile else ():
        for name, method in line_ups[bool(shape.documents)].items():
            if isinstance(timed[name], Figures) and method.package == "deadreckon":
                page.table(PARTS, parts(method, shape, device), f"{name}, {shape}: forward and backward")
    return results


def row(name: str, figures: Figures | str, error: float | str, rivals: list[Figures | str | None]) -> Row:
    """The table row of one method on one shape: its figures, and their ratios to those of `rivals`, if available."""
    if isinstance(figures, str) or isinstance(error, str):
        return [f"{name} ({figures})"]
    cells = [name, f"{error:.2f}" + " ✗" * (error > 1)]
    for part, form in (("forward", milliseconds), ("both", milliseconds), ("memory", mebibytes)):
        value = getattr(figures, part)
        cells += [form(value), *(ratio(value, getattr(rival, part, 0)) for rival in rivals)]
    return cells


def reach(shape: Shape, methods: dict[str, Method], device: str) -> dict[str, str]:
    """On CUDA, the share of attention that gates or used-up sticks leave to our kernels; on routes, beyond a block."""
    if device == "cpu" or shape.documents:
        return {}
    inputs = make_inputs(shape, device)
    q, k = inputs["q"], inputs["k"]
    left = {name: dr.share_in_reach(q, k, inputs[gate]) for name, gate in GATED.items() if name in methods}
    if "stick-breaking" in methods:
        left["stick-breaking"] = cases.sticks_in_reach(q, k)
    return {name: f" ({share:.0%} in reach)" for name, share in left.items()}


def notes(device: str, packed: list[bool]) -> list[str]:
    """Notes for the page header: what the columns mean."""
    dtype = cases.DTYPES[device]
    output, gradient = cases.LIMITS[dtype]
    allowed = f"{output} of the output and {gradient} of a gradient"
    if dtype == torch.bfloat16:
        allowed += ", or twice the definition's own in bfloat16 where that is less"
    lines = [str(dtype).removeprefix("torch.")]
    lines.append(f"× is the ratio to {' or '.join(baseline(device, kind) for kind in packed)}")
    if device == "cuda":
        lines.append(compiled_rotate(device)[1])
    if absent := [name for kind in packed for name in rivals_on(device, kind).keys() - everyone(device, kind).keys()]:
        lines.append(f"not installed: {', '.join(dict.fromkeys(sorted(absent)))}")
    return [*lines, f"error is the worst relative error against float64, over what is allowed ({allowed})"]
