"""`deadreckon bench ranks`: what it costs to divide sequences among processes, in time and in bytes sent."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import deadreckon as dr
from deadreckon.lab.arguments import sizes_in
from deadreckon.lab.bench.flags import Ranks
from deadreckon.lab.bench.page import Page, Row, mebibytes, milliseconds, ratio


def _work(rank: int, size: int, folder: str, flags: Ranks, encoding: str) -> None:
    """One process: the best time of a step, and the bytes that it sends in one, written to a file."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/{encoding}-{size}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    layers, width = sizes_in(flags.size, "size", "LAYERSxWIDTH, such as 2x128")
    rows, length = sizes_in(flags.batch, "batch", "ROWSxTOKENS, such as 1x2048")
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32
    )
    model = dr.DeadReckonForCausalLM(config).to(flags.device)
    cp = dr.ContextParallel()
    model.cp = cp if size > 1 else None
    tokens = torch.randint(0, 256, (rows, length), device=flags.device)
    times = list[float]()
    for _ in range(flags.rounds + 1):  # the first warms up
        cp.bytes_sent = 0
        dist.barrier()
        began = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        float(loss.detach())
        times.append(time.perf_counter() - began)
        model.zero_grad()
    if rank == 0:
        torch.save((min(times[1:]), cp.bytes_sent, float(loss.detach())), Path(folder, f"{encoding}-{size}.pt"))
    dist.destroy_process_group()


def _rows(flags: Ranks, folder: str) -> Iterator[Row]:
    for encoding in flags.encodings.split(","):
        alone: Any = None
        for size in flags.processes:
            multiprocessing.spawn(_work, args=(size, folder, flags, encoding), nprocs=size)
            seconds, sent, loss = torch.load(Path(folder, f"{encoding}-{size}.pt"), weights_only=True)
            alone = alone or (seconds, loss)
            yield [f"{encoding}, {size}", milliseconds(seconds), ratio(seconds, alone[0]), mebibytes(sent),
                   f"{abs(loss - alone[1]):.0e}"]  # fmt: skip


def run(flags: Ranks) -> None:
    """Steps of each encoding on growing numbers of processes."""
    if any(size < 1 for size in flags.processes):
        raise ValueError(f"processes: expected numbers of 1 or more, got {flags.processes}")
    page = Page(flags, "Sequences divided among processes")
    page.note(f"{flags.size} model, {flags.batch} tokens, zigzag, gloo, one thread a process; forward and backward")
    headings = ["encoding, processes", "a step", "×", "sent a rank", "loss off by"]
    with tempfile.TemporaryDirectory() as folder:
        page.table(headings, _rows(flags, folder))
