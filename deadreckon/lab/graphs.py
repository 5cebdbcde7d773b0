"""Steps of training as CUDA graphs: a small model's step is hundreds of launches, which take longer than their work.

A graph holds one step for batches of one shape, from the batch to the changed weights. The first batch of a shape is
worked on as it is, so that kernels are compiled and weights have what the optimiser keeps of them; with the second the
launches are recorded; from then on they are replayed. What encodings draw at random is drawn on the device, from the
seed that is set before each step, and is no different in a graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks.task import Batch

MOST = 128  # shapes that are recorded; batches of others are worked on as they are
SWITCH = "DEADRECKON_GRAPHS"  # in the environment: 0 for none
Result = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recorded:
    """A graph, where it reads from and where it writes to."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    result: Result

    def replay(self, batch: Batch) -> Result:
        """The same step for another batch."""
        self.batch.tokens.copy_(batch.tokens)
        self.batch.labels.copy_(batch.labels)
        self.graph.replay()
        return tuple(x.clone() for x in self.result)  # the next replay writes there again


def recorded_on(device: torch.device) -> bool:
    """Whether steps on a device are recorded, unless somebody says otherwise."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class Graphs:
    """A step of training, `step(batch)`, for any batches without packed documents.

    All of them share one pool of memory: what a graph leaves there, none reads but its result.
    """

    def __init__(self, step: Callable[[Batch], Result], device: torch.device) -> None:
        self.step, self.device = step, device
        self.stream = torch.cuda.Stream(device)  # all steps on one, since gradients are added up where they were made
        self.pool = torch.cuda.graph_pool_handle()
        self.recorded: dict[torch.Size, Recorded | None] = {}

    def __call__(self, batch: Batch) -> Result:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):  # and on its device
            result = self._run(batch)
        caller.wait_stream(self.stream)
        return result

    def _run(self, batch: Batch) -> Result:
        shape = batch.tokens.shape
        if shape not in self.recorded:
            if len(self.recorded) < MOST:
                self.recorded[shape] = None
            return self.step(batch)
        found = self.recorded[shape]
        if found is None:
            found = self.recorded[shape] = self._record(batch)
        return found.replay(batch)

    def _record(self, batch: Batch) -> Recorded:
        own = Batch(batch.tokens.clone(), batch.labels.clone())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = self.step(own)
        except RuntimeError as error:
            raise RuntimeError(f"a step of training could not be recorded; {SWITCH}=0 trains without graphs") from error
        return Recorded(graph, own, result)
