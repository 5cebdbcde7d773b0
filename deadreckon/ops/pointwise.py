"""Elementwise operations around attention: gates, strengths and the MLP's SwiGLU.

On a GPU each is one kernel, where PyTorch takes several passes and saves intermediates for the backward pass. A tracer
sees PyTorch's operations, which its compiler fuses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from deadreckon.ops.checks import is_differentiated
from deadreckon.ops.saving import Formula, saving
from deadreckon.ops.tracing import traced
from deadreckon.ops.triton import HAS_TRITON


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels can process x: on a GPU, not float64, not traced, no forward-mode or torch.func AD."""
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64 and not traced(x) and not is_differentiated(x)


def at_least_single(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision: gates and angles add up over long routes."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def swiglu(gate: Tensor, up: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """down(silu(gate) ⊙ up). Where there is a kernel, the backward pass recomputes the input of `down`."""
    if has_kernels(gate) and gate.dtype == up.dtype and gate.shape == up.shape:
        from deadreckon.ops.triton import pointwise

        y = pointwise.swiglu(gate, up)
        with saving(Formula(y, pointwise.swiglu, (gate, up))):
            return down(y)
    return down(silu(gate) * up)


def strength(logit: Tensor) -> Tensor:
    """β = 2σ(a), in float32 or more."""
    if has_kernels(logit) and not (torch.is_grad_enabled() and logit.requires_grad):
        from deadreckon.ops.triton import pointwise

        return pointwise.strength(logit)
    return 2 * at_least_single(logit).sigmoid()


def log_gate(logit: Tensor, scale: float = 1.0) -> Tensor:
    """log f = scale · log σ(a), in float32 or more."""
    if has_kernels(logit) and not (torch.is_grad_enabled() and logit.requires_grad):
        from deadreckon.ops.triton import pointwise

        return pointwise.log_gate(logit, scale)
    y = logsigmoid(at_least_single(logit))
    return y if scale == 1 else scale * y
