"""Tunes kernels on a GPU: times them with other launch options, such as registers, warps and stages.

    python tests/tune_kernels.py PaTH 32x4096x32x64 _leaf_forward:maxnreg=168 _gather:num_stages=2,maxnreg=168

One call of `attend`, forward and backward, with the usual options and with each of the changes, all in one process.
Prints the time of the kernel and of all kernels in ms, the median of several calls, and the difference of results to
those without the change: registers and stages change none, warps may change the order of sums. An improvement belongs
where the kernel is launched; `tests/compile_kernels.py --spills` says what a kernel needs, without a GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial
from typing import Any

from deadreckon.lab.bench import cases
from deadreckon.lab.bench.timing import shares
from deadreckon.ops.triton.kernel import Kernel

ROUNDS = 5
Change = tuple[str, dict[str, int]]


def parse(text: str) -> Change:
    """Parses a change such as _leaf_forward:maxnreg=168,num_stages=1."""
    name, _, options = text.partition(":")
    try:
        return name, {key: int(value) for key, value in (one.split("=") for one in options.split(","))}
    except ValueError:
        raise SystemExit(f"changes: expected KERNEL:OPTION=NUMBER,…, got {text!r}") from None


class Changed:
    """Within this context, a kernel is launched with other options."""

    def __init__(self, name: str, options: dict[str, int]) -> None:
        self.name, self.options, self.launch, self.met = name, options, Kernel.launch, 0

    def __enter__(self) -> Changed:
        def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            if kernel.function.__name__ == self.name:
                self.met, constants = self.met + 1, constants | self.options
            self.launch(kernel, grid, *arguments, **constants)

        Kernel.launch = launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Kernel.launch = self.launch  # type: ignore[method-assign]


def measure(kind: str, inputs: cases.Inputs, device: str) -> tuple[dict[str, float], cases.Inputs]:
    """Milliseconds by kernel, of all of them under "", and the results."""
    run = partial(cases.output_and_gradients, partial(cases.attend, kind, "triton"), inputs)
    run()
    rounds = []
    for _ in range(ROUNDS):
        parts = shares(run, device)
        rounds.append({name: 1e3 * seconds for seconds, _, name in parts} | {"": 1e3 * sum(one[0] for one in parts)})
    return {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in rounds[0]}, run()


def main(kind: str, shape: str, changes: list[Change], device: str = "cuda") -> None:
    inputs = cases.make_inputs(cases.Shape.parse(shape), device)
    before, expected = measure(kind, inputs, device)
    print(f"{kind}, {shape}: {before['']:.2f} ms")
    for name, options in changes:
        words = " ".join(f"{key}={value}" for key, value in options.items())
        with Changed(name, options) as changed:
            after, found = measure(kind, inputs, device)
        if not changed.met:
            raise SystemExit(f"changes: expected a kernel of this call, got {name}; it has {', '.join(sorted(before))}")
        error = max(cases.relative_errors(found, expected).values())
        print(
            f"{name} {words}: {before.get(name, 0.0):.3f} -> {after.get(name, 0.0):.3f} ms, "
            f"all {after['']:.2f}, apart by {error:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    os.environ |= {"DEADRECKON_TAPES": "0", "DEADRECKON_AHEAD": "0"}  # which would launch what they have seen
    main(sys.argv[1], sys.argv[2], [parse(text) for text in sys.argv[3:]])
