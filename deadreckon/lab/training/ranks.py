"""The ranks of training: a single process, or those of a mesh that `torchrun` has started.

Ranks along "dp" (data parallel) take parts of each batch, ranks along "cp" (context parallel) shards of each sequence.
All draw the same data, so that together they learn what one process learns. They share the rows of tests. The first
rank writes and prints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import deadreckon as dr
from deadreckon.lab.evaluation.scores import alone

DIMENSIONS = ("dp", "cp")
MOST_MINUTES = 7 * 24 * 60  # that ranks wait for one another
T = TypeVar("T")
# Public in torch 2.15, where the private name warns.
set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout


def sizes_in(mesh: str) -> dict[str, int]:
    """Parses a mesh such as "dp=2,cp=4" into sizes by dimension."""
    sizes = dict[str, int]()
    for part in filter(None, mesh.split(",")):
        name, _, number = part.strip().partition("=")
        if name not in DIMENSIONS or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"mesh: expected sizes of dp and cp, such as dp=2,cp=2, got {mesh!r}")
        sizes[name] = int(number)
    return sizes


def processes() -> int:
    """The world size: how many processes `torchrun` has started, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Ranks:
    """This rank among those of the mesh.

    Args:
        mesh: None for a single process; else its dimensions are among "dp" and "cp".
        timeout: seconds that a rank waits for another.
    """

    def __init__(self, mesh: DeviceMesh | None = None, timeout: float = 1800.0) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.size, self.rank = (1, 0) if mesh is None else (mesh.size(), dist.get_rank())
        self.first = self.rank == 0
        names = () if mesh is None else mesh.mesh_dim_names or ()
        self.parts, self.part = 1, 0  # of each batch, and which of them is this rank's
        if mesh is not None and "dp" in names:
            self.parts, self.part = mesh["dp"].size(), mesh.get_local_rank("dp")

    @classmethod
    def start(cls, mesh: str, device: str, minutes: float = 30.0) -> tuple[Ranks, str]:
        """Joins the process group of a mesh such as "dp=2,cp=2"; also returns this rank's device.

        A rank that waits for another for longer than `minutes` raises an error.
        """
        if not 0 < minutes <= MOST_MINUTES:  # which is also what NaN is not
            raise ValueError(f"timeout: expected minutes above 0, at most {MOST_MINUTES}, got {minutes:g}")
        sizes = sizes_in(mesh)
        expected, started = math.prod(sizes.values()), processes()
        if not sizes:
            if started > 1:
                raise ValueError(f"mesh: expected sizes for {started} processes, such as dp={started}, got none")
            return cls(), device
        if started != expected or "RANK" not in os.environ:
            raise ValueError(
                f"mesh: {mesh} needs {expected} process{'es' * (expected > 1)} of torchrun, got {started}; "
                f"start it with torchrun --nproc-per-node {expected} -m deadreckon …"
            )
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
        kind = device.partition(":")[0]
        return cls(init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), 60 * minutes), device

    def console(self, console: Console | None) -> Console:
        """The console of this rank, quiet on all but the first."""
        return (console or Console()) if self.first else Console(quiet=True)

    def divide(self, model: dr.DeadReckonForCausalLM) -> dr.DeadReckonForCausalLM:
        """Shards the model over all ranks."""
        if self.mesh is not None:
            model = dr.parallelize(model, self.mesh)
            groups, parameter = self.mesh.get_all_groups(), next(model.parameters())
            if isinstance(parameter, DTensor):
                groups.append(parameter.device_mesh.get_group())
            for group in groups:
                set_timeout(timedelta(seconds=self.timeout), group)  # by default 10 minutes or 30
        return model

    def same(self, value: T) -> T:
        """Broadcasts the first rank's value to all ranks, which wait for it."""
        if self.mesh is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share(self, count: int, compute: Callable[[slice], Tensor]) -> Tensor:
        """Computes `count` rows, split among ranks; returns all results, (count, ...), on the CPU of every rank.

        All ranks must call this. Results differ from those of one process by rounding, and for encodings that draw
        random numbers because each rank draws its own.
        """
        if self.mesh is None:
            return alone(count, compute)
        mine = slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
        parts: list[Tensor | None] = [None] * self.size
        dist.all_gather_object(parts, compute(mine) if mine.start < mine.stop else None)
        return torch.cat([part for part in parts if part is not None])

    def totals(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Sums each number over all ranks (all-reduce)."""
        if self.mesh is None:
            return list(values)
        together = torch.stack([value.detach().double() for value in values])
        dist.all_reduce(together)
        return list(together)
