"""Hugging Face's Trainer with an FSDP2 configuration (`examples/fsdp.py`), on two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import deadreckon as dr

ROOT = Path(__file__).parent.parent
# accelerate leaves FSDP to accelerators: this lets it have CPUs, with gloo, and is all that differs from the example.
ON_CPUS = """
import runpy, sys
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

begin = AcceleratorState.__init__

def begin_on_cpus(self, *arguments, fsdp_plugin=None, **keywords):
    begin(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

AcceleratorState.__init__ = begin_on_cpus
sys.argv = sys.argv[1:]
found = runpy.run_path(sys.argv[0], run_name="__main__")
assert found["trainer"].accelerator.is_fsdp2 and "FSDP" in type(found["trainer"].model).__name__
"""


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_trainer_with_fsdp2_learns_as_one_process_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "on_cpus.py"
    script.write_text(ON_CPUS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    example = [str(ROOT / "examples" / "fsdp.py"), "--cpu", "--length", "32", "--width", "32", "--layers", "2"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), str(script)]
    one, two = (tmp_path / name for name in ("one", "two"))
    for words in (
        [*example, "--out", str(one), "--steps", "4", "--batch", "16"],
        [*torchrun, *example, "--out", str(two), "--steps", "4"],
        [*torchrun, *example, "--out", str(two), "--steps", "6"],  # resumes
    ):
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    sharded, whole = (losses(path) for path in (two / "checkpoint-4", one / "checkpoint-4"))
    assert sharded == pytest.approx(whole, rel=1e-4)
    assert list(losses(two / "checkpoint-6")) == list(range(1, 7))  # those of the first start were not taken again
    names = dr.DeadReckonForCausalLM.from_pretrained(two).state_dict().keys()
    assert load_file(two / "model.safetensors").keys() == names


def losses(checkpoint: Path) -> dict[int, float]:
    """The logged ones, by step."""
    logged = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {line["step"]: line["loss"] for line in logged if "loss" in line}
