"""Tiling and launch options of the stick-breaking kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deadreckon.ops.triton.tiles import Tiling, cramped, power_of_two

STRIP = 2048  # keys, if there are eight heads or more; a query and head keeps 8 bytes for each tile of a strip
CHECK = 512  # tokens between two checks whether anything is left of a tile's rows
WIDEST = 256
INTERPRETED = bool(triton.knobs.runtime.interpret)

# By the wider of keys and values, for half and for single precision. A warp holds 16 whole rows of logits; with fewer
# rows than that, warps repeat each other's work. Tiles of "keys" are whole steps of "queries". Made for Hopper's
# registers and shared memory.
HALF = {
    "forward": {64: Tiling(128, 64, 8, 3, 128), 128: Tiling(128, 64, 8, 3), 256: Tiling(128, 64, 8, 2)},
    "queries": {64: Tiling(64, 64, 4, 2, 168), 128: Tiling(128, 64, 8, 2), 256: Tiling(128, 32, 8, 2)},
    "keys": {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 128, 8, 2), 256: Tiling(32, 32, 4, 1)},
}
SINGLE = {
    "forward": {64: Tiling(128, 64, 8, 2), 128: Tiling(128, 32, 8, 2), 256: Tiling(64, 32, 4, 1)},
    "queries": {64: Tiling(128, 32, 8, 2), 128: Tiling(64, 32, 4, 2), 256: Tiling(16, 32, 4, 1, 255)},
    "keys": {64: Tiling(32, 32, 4, 1), 128: Tiling(32, 32, 8, 1), 256: Tiling(32, 16, 8, 1, 255)},
}
# The same, where programs have 99 KiB of shared memory, which is too little for wide heads in single precision.
CRAMPED_HALF = {
    "forward": {64: HALF["forward"][64], 128: HALF["forward"][128], 256: Tiling(64, 32, 4, 1)},
    "queries": {64: HALF["queries"][64], 128: HALF["queries"][128], 256: Tiling(64, 32, 4, 1)},
    "keys": {64: HALF["keys"][64], 128: Tiling(64, 64, 8, 1), 256: HALF["keys"][256]},
}
CRAMPED_SINGLE = {
    "forward": {64: SINGLE["forward"][64], 128: Tiling(64, 32, 4, 1)},
    "queries": {64: Tiling(64, 32, 4, 1), 128: Tiling(32, 32, 4, 1)},
    "keys": {64: SINGLE["keys"][64], 128: SINGLE["keys"][128]},
}


def tiling_for(kernel: str, k: Tensor, v: Tensor) -> Tiling:
    width, single = max(k.shape[3], v.shape[3]), k.dtype == torch.float32
    if cramped(k):
        table = CRAMPED_SINGLE if single else CRAMPED_HALF
    else:
        table = SINGLE if single else HALF
    return table[kernel][64 if width <= 64 else 128 if width <= 128 else WIDEST]


def steps_per_check(tiling: Tiling) -> int:
    return max(1, CHECK // tiling.step)


def strip_for(heads: int) -> int:
    """Keys of a strip, more where few heads would leave the device idle: `heads` of all sequences of a batch."""
    return STRIP * max(1, 8 // heads)


def constants(k: Tensor, v: Tensor) -> dict[str, int | bool | str]:
    """Constants that all kernels are compiled with: widths, and how to multiply and divide."""
    width, value_width = k.shape[3], v.shape[3]
    return {
        "D": width,
        "E": value_width,
        "BD": max(16, power_of_two(width)),
        "BE": max(16, power_of_two(value_width)),
        "PRECISION": "tf32x3" if k.dtype == torch.float32 else "tf32",
        "FAST": not (INTERPRETED or torch.version.hip),
    }


def rest_scale(dtype: torch.dtype) -> int:
    """The factor of o's rounding residual before that is rounded itself; 0: o is not rounded, and has no residual."""
    return {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2048}[dtype]  # float16 has no small numbers
