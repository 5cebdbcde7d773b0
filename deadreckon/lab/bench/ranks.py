"""`deadreckon bench ranks`: what it costs to divide steps among processes, in time and in bytes sent."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import deadreckon as dr
from deadreckon.lab.arguments import sizes_in
from deadreckon.lab.bench.flags import Ranks
from deadreckon.lab.bench.page import Page, Row, mebibytes, milliseconds, ratio


def _work(rank: int, size: int, folder: str, flags: Ranks, encoding: str, dimension: str) -> None:
    """One process: the best time of a step, that of all processors, and the bytes that it sends, written to a file."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/{encoding}-{size}-{dimension}"
    if flags.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if flags.device == "cuda" else "gloo"
    dist.init_process_group(backend, meeting, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    layers, width = sizes_in(flags.size, "size", "LAYERSxWIDTH, such as 2x128")
    rows, length = sizes_in(flags.batch, "batch", "ROWSxTOKENS, such as 4x1024")
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32
    )
    model = dr.DeadReckonForCausalLM(config).to(flags.device)
    tokens = torch.randint(0, 256, (rows, length), device=flags.device)
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
        torch.save(figures, Path(folder, f"{encoding}-{size}-{dimension}.pt"))
    dist.destroy_process_group()


def _rows(flags: Ranks, folder: str) -> Iterator[Row]:
    for encoding in flags.encodings.split(","):
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


def run(flags: Ranks) -> None:
    """Steps of each encoding on growing numbers of processes."""
    rows, _ = sizes_in(flags.batch, "batch", "ROWSxTOKENS, such as 4x1024")
    for size in flags.processes:
        if size < 1 or rows % size:
            raise ValueError(f"processes: expected divisors of the batch's {rows} rows, got {size}")
    if flags.device == "cuda" and max(flags.processes) > torch.cuda.device_count():
        raise ValueError(f"processes: expected at most one a GPU, {torch.cuda.device_count()}, got {flags.processes}")
    page = Page(flags, "Steps divided among processes")
    page.note(
        f"{flags.size} model, {flags.batch} tokens, one thread a process; forward, backward and AdamW's step",
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} when it began: compare processor times",
    )
    headings = ["encoding, mesh", "a step", "processor time, all", "×", "sent a rank, attention", "loss off by"]
    with tempfile.TemporaryDirectory() as folder:
        page.table(headings, _rows(flags, folder))
