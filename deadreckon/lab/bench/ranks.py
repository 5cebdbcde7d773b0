"""`deadreckon bench ranks`: the cost of training steps on several processes, in time and in bytes sent.

With one process: the overhead of the mesh itself.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import deadreckon as dr
from deadreckon.lab.arguments import check_counts, names_in, sizes_in
from deadreckon.lab.bench.flags import Ranks
from deadreckon.lab.bench.page import Page, Row, mebibytes, milliseconds, ratio
from deadreckon.lab.bench.text import make_model, training_step
from deadreckon.lab.bench.timing import empty_cache, peak_bytes, seconds
from deadreckon.lab.environment import check_device
from deadreckon.lab.recipes import check_encodings

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"size": "2x128", "head_dim": 32, "batch": "4x1024", "vocab": 256},
    "cuda": {"size": "24x1024", "head_dim": 64, "batch": "8x4096", "vocab": 32000},
}
PLAIN, WHOLE, SHARDED = KINDS = ("plain", "dp=1", "dp=1, sharded")
STEPS = 4  # of a turn


def _layers(flags: Ranks) -> tuple[int, ...]:
    return sizes_in(flags.size, "size", "LAYERSxWIDTH, such as 2x128")


def _tokens(flags: Ranks) -> tuple[int, ...]:
    return sizes_in(flags.batch, "batch", "ROWSxTOKENS, such as 4x1024")


def _join(flags: Ranks, meeting: Path, rank: int = 0, size: int = 1) -> None:
    """Joins the process group that meets at this file."""
    if flags.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if flags.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )  # fmt: skip


def _model(flags: Ranks, encoding: str) -> dr.DeadReckonForCausalLM:
    (layers, width), (_, length) = _layers(flags), _tokens(flags)
    model = make_model(encoding, layers, width, flags.vocab, length, flags.device, head_dim=flags.head_dim)
    assert isinstance(model, dr.DeadReckonForCausalLM)
    return model


def _work(rank: int, size: int, folder: str, flags: Ranks, encoding: str, dimension: str) -> None:
    """Runs one rank. Saves a step's best time, the CPU time of all ranks, the bytes sent by this one, and the loss."""
    torch.set_num_threads(1)
    name = f"{encoding}-{size}-{dimension}"
    _join(flags, Path(folder, name), rank, size)
    model = _model(flags, encoding)
    tokens = torch.randint(0, flags.vocab, _tokens(flags), device=flags.device)
    if size > 1:
        model = dr.parallelize(model, init_device_mesh(flags.device, (size,), mesh_dim_names=(dimension,)))
        tokens = tokens.chunk(size)[rank] if dimension == "dp" else tokens
    optimizer = torch.optim.AdamW(model.parameters())
    times, losses, sent = list[Tensor](), list[Tensor](), 0
    for _ in range(flags.rounds + 1):  # the first warms up
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        sent = -model.cp.bytes_sent if model.cp else 0
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent += model.cp.bytes_sent if model.cp else 0
        losses.append(loss.detach().cpu())
        took = torch.tensor([time.perf_counter() - began, time.process_time() - computed], dtype=torch.float64)
        dist.all_reduce(took)
        times.append(took)
    total = torch.stack(losses)
    dist.all_reduce(total)
    if rank == 0:
        wall, computed = torch.stack(times[1:]).amin(0).tolist()
        figures = wall / size, computed, sent, float(total[-1]) / size
        torch.save(figures, Path(folder, f"{name}.pt"))
    dist.destroy_process_group()


def _rows(flags: Ranks, folder: str) -> Iterator[Row]:
    for encoding in names_in([flags.encodings]):
        alone: Any = None
        for size in flags.processes:
            for dimension in ("cp", "dp") if size > 1 else ("cp",):
                multiprocessing.spawn(_work, args=(size, folder, flags, encoding, dimension), nprocs=size)
                figures = torch.load(Path(folder, f"{encoding}-{size}-{dimension}.pt"), weights_only=True)
                seconds, computed, sent, loss = figures
                alone = alone or figures
                mesh = f"{dimension}={size}" if size > 1 else "alone"
                yield [f"{encoding}, {mesh}", milliseconds(seconds), milliseconds(computed),
                       ratio(computed, alone[1]), mebibytes(sent) if dimension == "cp" else "–",
                       f"{abs(loss - alone[3]):.0e}"]  # fmt: skip


def _on(mesh: DeviceMesh, kind: str, model: dr.DeadReckonForCausalLM) -> dr.DeadReckonForCausalLM:
    if kind == PLAIN:
        return model
    # Given a dtype, `parallelize` shards even on one rank; float32 is what parameters have, so no number changes.
    return dr.parallelize(model, mesh, dtype=torch.float32 if kind == SHARDED else None)


@dataclass
class Runner:
    """A model of one kind, with its step function and timings."""

    step: Callable[[], Tensor]
    memory: int | None = None  # bytes that it holds at most, weights and optimizer included; on a GPU
    times: list[float] = field(default_factory=list)  # seconds of a step, one a turn
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # of the last step

    @classmethod
    def start(cls, flags: Ranks, encoding: str, kind: str, mesh: DeviceMesh, tokens: Tensor) -> Runner:
        """Makes the model and takes one step, so that kernels are compiled and AdamW's moments exist."""
        on_gpu = flags.device == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        model = _on(mesh, kind, _model(flags, encoding))
        runner = cls(training_step(model, tokens, compiled=False))
        runner.step()
        if on_gpu:
            held = torch.cuda.memory_allocated() - before
            runner.memory = held + peak_bytes(runner.step, "cuda")
        return runner

    def turn(self, device: str) -> None:
        def several() -> None:
            for _ in range(STEPS):
                self.loss = self.step()

        self.times.append(seconds(several, device) / STEPS)


def _turns(flags: Ranks, mesh: DeviceMesh) -> Iterator[Row]:
    device = flags.device
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, flags.vocab, _tokens(flags), generator=generator, device=device)
    for encoding in names_in([flags.encodings]):
        runners = {kind: Runner.start(flags, encoding, kind, mesh, tokens) for kind in KINDS}
        for number in range(flags.rounds):
            for kind in KINDS[:: 1 if number % 2 else -1]:  # none is always the one after another
                runners[kind].turn(device)
        plain = runners[PLAIN]
        for kind, runner in runners.items():
            ratios = [base / own for base, own in zip(plain.times, runner.times, strict=True)]
            middle = median(runner.times)
            yield [
                f"{encoding}, {kind}", milliseconds(min(runner.times)), milliseconds(middle),
                f"{tokens.numel() / middle:,.0f}", ratio(min(plain.times), min(runner.times)), f"{median(ratios):.3f}",
                f"{min(ratios):.3f} – {max(ratios):.3f}",
                "" if runner.memory is None else f"{runner.memory / 2**30:.1f} GiB",
                f"{abs(float(runner.loss) - float(plain.loss)):.0e}",
            ]  # fmt: skip
        del runners, plain, runner
        gc.collect()  # a model and its optimizer are in circles
        empty_cache(device)


def run_alone(flags: Ranks, page: Page) -> None:
    """Times training steps of one process, without a mesh and with one."""
    page.note(
        f"{flags.size} model with heads of {flags.head_dim}, vocabulary of {flags.vocab}, {flags.batch} tokens; "
        "forward, backward, clipping and AdamW's step" + ", bfloat16 by autocast" * (flags.device == "cuda"),
        f"{flags.rounds} turns of {STEPS} steps each in one process; dp=1 leaves the model as it is unless forced",
        "× is the speed over the plain model's, of single turns over that of the same turn",
    )
    headings = [
        "encoding, model", "least step", "median step", "tokens/s", "×, least", "×, median", "× of single turns",
        "peak memory", "loss off by",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        _join(flags, Path(folder, "meeting"))
        try:
            page.table(headings, _turns(flags, init_device_mesh(flags.device, (1,), mesh_dim_names=("dp",))))
        finally:
            dist.destroy_process_group()


def run(flags: Ranks) -> None:
    """Times training steps of each encoding on each number of processes."""
    check_device(flags.device)
    check_encodings(names_in([flags.encodings]))
    devices = torch.cuda.device_count()
    defaults = SIZES[flags.device] | {"processes": (1, 2, 4) if flags.device == "cpu" else (1, devices)[:devices]}
    # The page shows the options as they were typed, without these defaults.
    sizes = replace(flags, **{name: getattr(flags, name) or value for name, value in defaults.items()})
    rows, _ = _tokens(sizes)
    _, width = _layers(sizes)
    check_counts(head_dim=sizes.head_dim, vocab=sizes.vocab)
    if width % sizes.head_dim:
        raise ValueError(f"head_dim: expected a divisor of the width {width}, got {sizes.head_dim}")
    for size in sizes.processes:
        if size < 1 or rows % size:
            raise ValueError(f"processes: expected divisors of the batch's {rows} rows, got {size}")
    if flags.device == "cuda" and max(sizes.processes) > devices:
        raise ValueError(f"processes: expected at most one a GPU, {devices}, got {sizes.processes}")
    if sizes.processes == (1,):
        run_alone(sizes, Page(flags, "Steps of one process with and without a mesh", summary="least and median"))
        return
    page = Page(flags, "Steps divided among processes")
    page.note(
        f"{sizes.size} model, {sizes.batch} tokens, one thread a process; forward, backward and AdamW's step",
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} when it began: compare processor times",
    )
    headings = ["encoding, mesh", "a step", "processor time, all", "×", "sent a rank, attention", "loss off by"]
    with tempfile.TemporaryDirectory() as folder:
        page.table(headings, _rows(sizes, folder))
