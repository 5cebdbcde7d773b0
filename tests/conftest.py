"""Tests share two cores: one thread each, or threads wait for each other. Without a GPU, kernels are interpreted."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported


def hurry_the_interpreter() -> None:
    """Leaves out what takes half of interpreted kernels' time to no effect.

    For each call of one function of a kernel by another it looks through `tl` for what to replace, which the launch has
    replaced. And all sums of integers are done twice, to find overflows that nothing reports unless `debug` is set.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, modules = interpreter._patch_lang, {}

    def patch_if_needed(fn: Callable[..., Any]) -> Any:
        if fn not in modules:
            modules[fn] = [x for x in (tl, tl.core) if any(x is value for value in fn.__globals__.values())]
        done = modules[fn] and not any(tl.core.is_builtin(module.load) for module in modules[fn])
        return interpreter._LangPatchScope() if done else patch(fn)

    interpreter._patch_lang = patch_if_needed
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    hurry_the_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two leaves, so that a few hundred tokens have several levels, and a head at a time."""
    from deadreckon.ops.triton.householder import operator, prefill, walk

    monkeypatch.setattr(walk, "WALK", 2)
    monkeypatch.setattr(walk, "PASSED", 1)
    monkeypatch.setattr(operator, "WALK", 2)
    monkeypatch.setattr(prefill, "WALK", 2)
    monkeypatch.setattr(operator, "ROWS", 64)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding by as many programs as there is work for, about: interpreted, idle ones take time, too."""
    from deadreckon.ops.streaming import fused

    monkeypatch.setattr(fused, "PROGRAMS", 1)
    monkeypatch.setattr(fused, "SPARE", 6)
