"""Histogram filters and superpositions on Triton kernels: two operators, and one each for their backward pass.

Superpositions are not computed inside the filter's kernel. A table of 512 × 340 halves is larger than shared memory, so
that every token of every program would fetch it anew, and rows enough for tensor cores (64 of 512 positions) take all
registers of a multiprocessor. Chunk by chunk, the filter runs at full occupancy and the product at cuBLAS's speed; the
price is that a chunk's histograms go through memory once, in the table's precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.blockwise.operators import filter_operator, superposition_operator
from deadreckon.kernels.histogram import WIDEST, advance, retreat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

filter_fused = filter_operator("deadreckon::histogram_filter", advance, retreat)
superpose_fused = superposition_operator("deadreckon::superpose", advance, retreat)


def reason_against(reset: Tensor, positions: int) -> str | None:
    """Why there is no kernel for these inputs, if there is none."""
    if reset.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {reset.dtype}"
    if positions > WIDEST:
        return f"at most {WIDEST} positions, got {positions}"
    return None
