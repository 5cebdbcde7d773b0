"""Runs several ranks on one machine, for tests: processes with a gloo (or NCCL) process group."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "pytest", "torch.distributed.fsdp", "transformers.modeling_utils", "transformers.cache_utils",
    "deadreckon.lab.training", "deadreckon.lab.cli",
]  # fmt: skip


def prepared() -> Any:
    """A context whose processes start with all modules imported. (A fork of the test runner might inherit locks.)"""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_world(
    size: int, work: Callable[..., Any], *arguments: Any, timeout: int = 60, backend: str = "gloo", lost: int = -1,
    cuda: bool = False,
) -> list[Any]:  # fmt: skip
    """Runs work(*arguments) on `size` ranks, one process each, in one process group; returns their results.

    The rank that is `lost` may be killed, and returns nothing. Ranks that use CUDA are spawned, not forked: once any
    library has looked for devices, CUDA does not start in a fork.
    """
    context: Any = get_context("spawn") if cuda else prepared()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(rank, size, Path(folder), work, arguments, timeout, backend), daemon=True
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        failed = list[Path]()
        while not failed and any(process.is_alive() for rank, process in enumerate(ranks) if rank != lost):
            time.sleep(0.05)
            failed = sorted(Path(folder).glob("*.failed"))
        for rank, process in enumerate(ranks):
            if failed or rank == lost:  # the others would wait for it
                process.join(0 if rank == lost else 1)
                process.kill()
            process.join()
        failures = [file.read_text() for file in failed]
        assert not failures, "\n".join(failures)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size) if rank != lost]


def _rank(
    rank: int, size: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...], timeout: int, backend: str
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        dist.barrier()  # a rank that has nothing to say might be gone before the others have met it
        torch.save(work(*arguments), folder / f"{rank}.pt")
    except BaseException:  # whatever it is, the parent must hear of it
        text = f"rank {rank} of {size}:\n{traceback.format_exc()}"
        Path(folder, f"{rank}.text").write_text(text)
        Path(folder, f"{rank}.text").rename(folder / f"{rank}.failed")  # whole, or not there
    os._exit(0)  # the test runner's own exit handlers belong to the parent
