"""`deadreckon bench attention`: ours beside other people's, and never a figure for ours while it is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from multiprocessing import get_context

import torch

import deadreckon as dr
from deadreckon.lab.bench import cases
from deadreckon.lab.bench.cases import Inputs, Shape, make_inputs
from deadreckon.lab.bench.flags import Attention
from deadreckon.lab.bench.page import Page, Row, explain, mebibytes, milliseconds, ratio, sizes_in
from deadreckon.lab.bench.rivals import Method, compiled_rotate, installed, rivals_on
from deadreckon.lab.bench.timing import peak_bytes, seconds, shares, summary

PARTS = ["", "time", "share", "calls"]
MOST = 24  # parts that are shown
GATED = {"FoX": "log_gate", "forgetful FoX": "strong_gate"}
GATED |= {"PaTH-FoX": "log_gate", "forgetful PaTH-FoX": "strong_gate"}

Checked = tuple[int, bool]  # width, packed: what methods are checked for


@dataclass
class Figures:
    """What one method took."""

    forward: float
    both: float
    memory: int


Found = dict[str, Figures | str]  # or why there are none
Errors = dict[str, float | str]


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
        if self.failure:
            return self.failure
        return Figures(summary(self.forwards, self.device), summary(self.boths, self.device), self.memory)


def measure(methods: dict[str, Method], shape: Shape, rounds: int, device: str) -> Found:
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


def parts(method: Method, shape: Shape, device: str) -> list[Row]:
    """Where the time of a forward and backward pass goes, the longest first."""
    trial = Trial(method, method.prepare(make_inputs(shape, device)), device)
    trial.warm_up()
    found = shares(trial.both, device)
    whole = sum(time for time, _, _ in found)
    rows = [[name[:70], milliseconds(time), ratio(time, whole), str(count)] for time, count, name in found[:MOST]]
    return [*rows, ["all", milliseconds(whole), "", ""]]


def everyone(device: str, packed: bool) -> dict[str, Method]:
    """Ours and the rivals that are installed, by kind."""
    kinds = cases.PACKED if packed else {name: name for name in cases.CASES}
    ours = {name: Method(partial(cases.attend, kind, "auto"), kind, "deadreckon") for name, kind in kinds.items()}
    found, order = {**installed(rivals_on(device, packed)), **ours}, list(cases.KINDS)
    return dict(sorted(found.items(), key=lambda one: order.index(one[1].kind)))


def line_up(device: str, packed: bool, only: str = "") -> dict[str, Method]:
    """All, or those that `only` names, and always the baseline."""
    wanted = {name.strip().lower() for name in only.split(",") if name.strip()}
    known = everyone(device, False) | everyone(device, True)
    strangers = wanted - {name.lower() for name in known}
    if strangers:
        raise ValueError(f"only: expected names among {', '.join(known)}; got {', '.join(sorted(strangers))}")
    wanted |= {next(iter(rivals_on(device, packed))).lower()} if wanted else set()
    return {name: one for name, one in everyone(device, packed).items() if not wanted or name.lower() in wanted}


def _checked(method: Method, what: Checked, device: str) -> dict[str, float] | str:
    """Its errors over what is allowed, or why there are none."""
    try:
        return cases.check(method, *what, device)
    except Exception as error:
        return explain(error)


def check_all(
    line_ups: dict[bool, dict[str, Method]], wanted: Iterable[Checked], device: str, workers: int
) -> dict[Checked, Errors]:
    """The worst error of each method over what is allowed, or why there is none. Raises where ours is amiss.

    Several processes at a time, since kernels take long to compile; what they have compiled stays on the disk.
    """
    tasks = [(name, method, what) for what in wanted for name, method in line_ups[what[1]].items()]
    _, methods, cases = zip(*tasks, strict=True)
    workers = min(workers, len(tasks))
    if workers > 1:
        spawn = get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = list(pool.map(_checked, methods, cases, repeat(device)))
    else:
        results = list(map(_checked, methods, cases, repeat(device)))
    found: dict[Checked, Errors] = {what: {} for what in cases}
    amiss = []
    for (name, method, what), errors in zip(tasks, results, strict=True):
        fault = errors if isinstance(errors, str) else ", ".join(
            f"{part} off by {error:.3g} × what is allowed" for part, error in errors.items() if error > 1
        )  # fmt: skip
        found[what][name] = errors if isinstance(errors, str) else max(errors.values())
        if fault and method.package == "deadreckon":
            amiss.append(f"{name} at D = {what[0]}{', packed' * what[1]}: {fault}")
    if amiss:
        raise RuntimeError(f"nothing was timed: {'; '.join(amiss)}")
    return found


def shapes_of(flags: Attention) -> list[Shape]:
    """What is to be timed: packed rows after others, and the default ones if nothing else is asked for."""
    means = [mean.strip() for mean in flags.documents.split(",") if mean.strip()]
    if not all(mean.isdecimal() and int(mean) > 0 for mean in means):
        raise ValueError(f"documents: expected mean lengths, such as 600,2500,10000, got {flags.documents!r}")
    shapes = [Shape.parse(shape) for shape in flags.shapes]
    if not shapes and not means:
        shapes = [Shape(flags.batch, length, flags.heads, flags.head_dim) for length in flags.lengths]
    length, heads, width = sizes_in(flags.row, "row", "TxHxD")
    found = [*shapes, *(Shape(1, length, heads, width, int(mean)) for mean in means)]
    if not found:
        raise ValueError("lengths: expected at least one, got none")
    return found


def run(flags: Attention) -> dict[Shape, Found]:
    """Checks, then measures, prints and saves shape by shape."""
    device, shapes = flags.device, shapes_of(flags)
    page = Page(flags, "Attention", ("triton", "fla-core"))
    kinds = dict.fromkeys((shape.width, bool(shape.documents)) for shape in shapes)
    line_ups = {packed: line_up(device, packed, flags.only) for _, packed in kinds}
    errors = check_all(line_ups, kinds, device, (os.cpu_count() or 1) if device == "cuda" else 1)
    page.note(*notes(device, list(line_ups)))
    found = dict[Shape, Found]()
    with_fla = any(name.startswith("fla ") for methods in line_ups.values() for name in methods)
    headings = ["B x T x H x D" + " / documents" * (True in line_ups), "", "error"]
    for heading in ("forward", "forward + backward", "peak memory"):
        headings += [heading, "×", *["× fla"] * with_fla]

    def rows() -> Iterator[Row]:
        for shape in shapes:
            methods, allowed = line_ups[bool(shape.documents)], errors[shape.width, bool(shape.documents)]
            failures = {name: error for name, error in allowed.items() if isinstance(error, str)}
            sound = {name: method for name, method in methods.items() if name not in failures}
            timed = measure(sound, shape, flags.rounds, device) | failures
            found[shape] = {name: timed[name] for name in methods}
            base = found[shape].get(next(iter(rivals_on(device, bool(shape.documents)))), "not installed")
            remarks = reach(shape, methods, device)
            for name in methods:
                cells = row(name, found[shape], base, allowed[name], with_fla, remarks.get(name, ""))
                yield [str(shape), *cells, *[""] * (len(headings) - 1 - len(cells))]

    page.table(headings, rows(), left=2)
    for shape, timed in found.items() if flags.profile else ():
        methods = line_ups[bool(shape.documents)]
        for name, figures in timed.items():
            if isinstance(figures, Figures) and methods[name].package == "deadreckon":
                title = f"{name}, {shape}: forward and backward"
                page.table(PARTS, parts(methods[name], shape, device), title)
    return found


def row(name: str, found: Found, base: Figures | str, error: float | str, with_fla: bool, remark: str) -> Row:
    """One method on one shape: its figures, each over those of the baseline and, if there is one, of fla's."""
    figures = found[name]
    if isinstance(figures, str):
        return [f"{name} ({figures})"]
    assert isinstance(error, float)
    cells = [name + remark, f"{error:.2f}" + " ✗" * (error > 1)]
    rivals = [base, found.get(f"fla {name}")] if with_fla else [base]
    for part, form in (("forward", milliseconds), ("both", milliseconds), ("memory", mebibytes)):
        value = getattr(figures, part)
        cells += [form(value), *(ratio(value, getattr(rival, part, 0)) for rival in rivals)]
    return cells


def reach(shape: Shape, methods: dict[str, Method], device: str) -> dict[str, str]:
    """On CUDA, what gates and used-up sticks leave to our kernels; along routes, of what is farther than a block."""
    if device == "cpu" or shape.documents:
        return {}
    inputs = make_inputs(shape, device)
    q, k = inputs["q"], inputs["k"]
    left = {name: dr.share_in_reach(q, k, inputs[gate]) for name, gate in GATED.items() if name in methods}
    if "stick-breaking" in methods:
        left["stick-breaking"] = cases.sticks_in_reach(q, k)
    return {name: f" ({share:.0%} in reach)" for name, share in left.items()}


def notes(device: str, packed: Iterable[bool]) -> list[str]:
    """What the columns mean."""
    dtype = cases.DTYPES[device]
    output, gradient = cases.LIMITS[dtype]
    allowed = f"{output} of the output and {gradient} of a gradient"
    if dtype == torch.bfloat16:
        allowed += ", or twice the definition's own in bfloat16 where that is less"
    rivals = [rivals_on(device, kind) for kind in packed]
    found = [str(dtype).removeprefix("torch."), f"× is the ratio to {' or '.join(next(iter(some)) for some in rivals)}"]
    if device == "cuda":
        found.append(compiled_rotate(device)[1])
    absent = [name for some in rivals for name in some if name not in installed(some)]
    if absent:
        found.append(f"not installed: {', '.join(dict.fromkeys(absent))}")
    return [*found, f"error is the worst relative error against float64, over what is allowed ({allowed})"]
