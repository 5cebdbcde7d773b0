"""Fixtures. Tests share two cores: one thread each, or threads wait for each other. Without a GPU, kernels are run by
Triton's interpreter."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands tests to others, which need not wait until it has imported torch
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from interpreter import hurry  # which imports triton

        hurry()
        if os.environ.get("CHECK_BOUNDS") == "1":
            from bounds import check

            check()


def pytest_collection_finish() -> None:
    """Modules stay loaded: the garbage collector need not scan them again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two leaves, so that a few hundred tokens have several levels; and one head at a time."""
    from deadreckon.ops.triton.householder import operator, prefill, walk

    monkeypatch.setattr(walk, "WALK", 2)
    monkeypatch.setattr(walk, "PASSED", 1)
    monkeypatch.setattr(operator, "WALK", 2)
    monkeypatch.setattr(prefill, "WALK", 2)
    monkeypatch.setattr(operator, "ROWS", 64)
    monkeypatch.setenv("DEADRECKON_TAPES", "0")  # these do not know of it


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding kernels launch about as many programs as there is work for: interpreted, idle ones take time too."""
    from deadreckon.ops.streaming import fused

    monkeypatch.setattr(fused, "PROGRAMS", 1)
    monkeypatch.setattr(fused, "SPARE", 6)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic kernels; and torch.empty is filled with NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
