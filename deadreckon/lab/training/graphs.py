"""Training steps as CUDA graphs: launching a small model's kernels takes longer than running them.

A graph holds one step for batches of one shape, from the batch to the updated weights. The first batch of a shape runs
eagerly, so that kernels are compiled and the optimizer's state exists; the second is captured; later ones replay the
graph. Random numbers of encodings are drawn on the device, from the seed that is set before each step, as without
graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks.task import Batch

MOST = 128  # shapes that are captured; batches of others run eagerly
PARTS = 4  # of a step that is captured whole: with more, each is long enough to hide its launches
SWITCH = "DEADRECKON_GRAPHS"  # in the environment: 0 for none
Result = tuple[Tensor, ...]


@dataclass(frozen=True)
class Captured:
    """A captured graph, with its static input and output."""

    graph: torch.cuda.CUDAGraph
    parts: tuple[Batch, ...]
    result: Result

    def replay(self, parts: tuple[Batch, ...]) -> Result:
        """Replays the step for another batch."""
        for mine, part in zip(self.parts, parts, strict=True):
            mine.tokens.copy_(part.tokens)
            mine.labels.copy_(part.labels)
        self.graph.replay()
        return tuple(x.clone() for x in self.result)  # the next replay writes there again


def captured_on(device: torch.device) -> bool:
    """Whether steps on this device are captured by default."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


class Graphs:
    """Captures and replays a training step, `step(*parts)`, of batches without packed documents, in parts of one shape.

    The graphs share one memory pool: of what a graph leaves there, only its result is read.
    """

    def __init__(self, step: Callable[..., Result], device: torch.device) -> None:
        self.step, self.device = step, device
        self.stream = torch.cuda.Stream(device)  # all steps on one, since gradients are added up where they were made
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[torch.Size, Captured | None] = {}

    def __call__(self, *parts: Batch) -> Result:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):  # and on its device
            result = self._run(parts)
        caller.wait_stream(self.stream)
        return result

    def _run(self, parts: tuple[Batch, ...]) -> Result:
        shape = parts[0].tokens.shape
        if shape not in self.captured:
            if len(self.captured) < MOST:
                self.captured[shape] = None
            return self.step(*parts)
        captured = self.captured[shape]
        if captured is None:
            captured = self.captured[shape] = self._capture(parts)
        return captured.replay(parts)

    def _capture(self, parts: tuple[Batch, ...]) -> Captured:
        static = tuple(Batch(part.tokens.clone(), part.labels.clone()) for part in parts)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = self.step(*static)
        except RuntimeError as error:
            raise RuntimeError(f"a step of training could not be captured; {SWITCH}=0 trains without graphs") from error
        return Captured(graph, static, result)
