"""How long something takes, how much memory it holds, and where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler's own chatter
import torch
from torch import Tensor

Work = Callable[[], object]
SUMMARIES: dict[str, tuple[str, Callable[[list[float]], float]]] = {"cpu": ("best", min), "cuda": ("median", median)}
"""Device -> what counts of several timings: the best on a CPU, which others may share."""


@cache
def scratch() -> Tensor:
    """A gigabyte to write to."""
    return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def empty_cache(device: str) -> None:
    """Gives unused memory of a GPU back."""
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds(work: Work, device: str, before: Work | None = None) -> float:
    """How long it takes: by the clock on a CPU, by the GPU's own events on CUDA.

    Args:
        before: what the GPU is busy with, not timed, while the host gets ahead of it as it is in training.
    """
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if before is not None:
        before()
    scratch().zero_()  # empties the GPU's cache
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def host_seconds(work: Work, device: str) -> float:
    """How long the host takes to issue it all to a GPU that has nothing else to do; on a CPU, to do it."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summary(times: list[float], device: str) -> float:
    """The figure that counts."""
    return SUMMARIES[device][1](times)


def repeated(work: Work, rounds: int, device: str) -> float:
    """Seconds, after a first time that may compile."""
    work()
    return summary([seconds(work, device, before=work) for _ in range(rounds)], device)


def seconds_per_step(step: Callable[[int], object], steps: int, device: str) -> float:
    """Seconds of step(n), n from `steps` to twice that, after those before."""

    def take(first: int) -> None:
        for number in range(first, first + steps):
            step(number)

    take(0)
    return seconds(partial(take, steps), device) / steps


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """The most memory that `work` held at a time, beyond what was held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    held = peak = 0
    results = profile.profiler.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def shares(work: Work, device: str) -> list[tuple[float, int, str]]:
    """Seconds, calls and name of all that took any time, the longest first: kernels on CUDA, else operators."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU], acc_events=True) as profile:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    parts = [(getattr(one, clock) / 1e6, one.count, one.key) for one in profile.key_averages()]
    return sorted((one for one in parts if one[0] > 0), reverse=True)
