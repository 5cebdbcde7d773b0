"""Tests in a process without Triton's interpreter: plain CPU tensors, and kernels compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PLAIN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def test_share_in_reach_of_plain_cpu_tensors() -> None:
    """Without a GPU and without the interpreter: nothing is launched."""
    code = (
        "import torch, deadreckon as dr; q, k = torch.ones(2, 1, 640, 2, 16).unbind(); "
        "print(dr.share_in_reach(q, k, torch.full((1, 640, 2), -1e4)), dr.share_in_reach(q, k, torch.zeros(2)))"
    )
    found = subprocess.run([sys.executable, "-c", code], env=PLAIN, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [float(word) for word in found.stdout.split()] == pytest.approx([19 / 55, 1])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
def test_kernels_compile_for_hopper() -> None:
    """The interpreter forgives what the compiler does not: types that change in loops, too much shared memory."""
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script), "--quick"], env=PLAIN, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert {"_leaf_backward", "_gather", "_key_gradients", "_turn_by_phase", "_filter_backward"} <= set(
        done.stdout.split()
    )


AHEAD = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Hopper())
from deadreckon.ops.triton.gru import _forward as gru, forward
from deadreckon.ops.triton.ahead import compiled_ahead
from deadreckon.ops.triton.norm import _forward as norm
from deadreckon.ops.triton.norm import ResidualNorm
with compiled_ahead():
    zeros = torch.zeros
    places = zeros(1, 1, dtype=torch.int64)
    forward(zeros(1, 1, 12), zeros(12), zeros(12, 4), zeros(12), None, places, zeros(1, 66, 4), True)
    ResidualNorm.apply(zeros(2, 16), None, torch.ones(16), 1e-6, torch.float32)
print(*(len(kernel.function.device_caches[0][0]) for kernel in (gru, norm)))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a driver of its own")
def test_kernels_are_compiled_by_threads(tmp_path: Path) -> None:
    """For a GPU that is not there: kernels are where a launch looks for them, and nothing has been launched."""
    variables = {**PLAIN, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "1"]
