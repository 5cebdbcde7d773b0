"""Timing on CPU and GPU, peak memory, and profiles."""

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
    """A gigabyte of GPU memory to overwrite, which flushes the cache."""
    return torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def empty_cache(device: str) -> None:
    """Releases cached GPU memory."""
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds(work: Work, device: str, before: Work | None = None) -> float:
    """Seconds that `work` takes: by the clock on a CPU, by CUDA events on a GPU.

    Args:
        before: untimed work that keeps the GPU busy while the host runs ahead, as in training.
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
    """Seconds that the host takes to launch `work` on an idle GPU; on a CPU, to run it."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summary(times: list[float], device: str) -> float:
    """Summarises timings: the best on a CPU, the median on a GPU."""
    return SUMMARIES[device][1](times)


def repeated(work: Work, rounds: int, device: str) -> float:
    """Summarised seconds over several rounds, after a warm-up that may compile."""
    work()
    return summary([seconds(work, device, before=work) for _ in range(rounds)], device)


def seconds_per_step(step: Callable[[int], object], steps: int, device: str) -> float:
    """Seconds per call of step(n), timed for n from `steps` to 2 · `steps` − 1, after 0 to `steps` − 1 as warm-up."""

    def take(first: int) -> None:
        for number in range(first, first + steps):
            step(number)

    take(0)
    return seconds(partial(take, steps), device) / steps


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Peak memory of `work`, beyond what was held before."""
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
    """Profiles `work`: seconds, calls and name, the most expensive first; kernels on CUDA, operators on a CPU."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU], acc_events=True) as profile:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    parts = [(getattr(one, clock) / 1e6, one.count, one.key) for one in profile.key_averages()]
    return sorted((one for one in parts if one[0] > 0), reverse=True)


def kernel_seconds(work: Work, times: int) -> float:
    """Seconds that the kernels of `work` take on a GPU, without what it waits for; the mean of so many times."""

    def several() -> None:
        for _ in range(times):
            work()

    return sum(seconds for seconds, _, _ in shares(several, "cuda")) / times
