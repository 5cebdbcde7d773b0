"""Elementwise kernels around attention, in one pass each way.

swiglu     y = silu(g) · u;  backward from g and u alone, where PyTorch keeps silu(g), too
strength   β = 2σ(a), in float32
log gate   log f = scale · log σ(a), in float32

Triton specialises on COUNT: if it is a multiple of 16, each thread loads and stores eight numbers at a time. Otherwise
it could not know whether all eight are there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deadreckon.ops.tracing import operator
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import INTERPRETED, ceil_div

BLOCK = 1024


@triton.jit
def _place(COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < COUNT


@triton.jit
def ratio(x, y):
    """x / y for normal y below 2¹²⁶."""
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def sigmoid(b_x):
    """Without overflow: exp of what is not above zero."""
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x >= 0, 1 / (1 + b_e), b_e / (1 + b_e))


@triton.jit
def log_sigmoid(b_x):
    """Accurate to an ulp or two."""
    b_e = tl.exp(-tl.abs(b_x))
    b_one = 1 + b_e  # what it has rounded away, the ratio brings back
    b_log = tl.where(b_one == 1, b_e, tl.log(b_one) * (b_e / tl.where(b_one == 1, 1.0, b_one - 1)))
    return tl.minimum(b_x, 0.0) - b_log


@Kernel
@triton.jit
def _swiglu(p_gate, p_up, p_y, COUNT, BLOCK: tl.constexpr):
    at, mask = _place(COUNT, BLOCK)
    b_gate = tl.load(p_gate + at, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y + at, b_gate * sigmoid(b_gate) * b_up, mask=mask)


@Kernel
@triton.jit
def _swiglu_backward(p_grad, p_gate, p_up, p_dgate, p_dup, COUNT, BLOCK: tl.constexpr):
    at, mask = _place(COUNT, BLOCK)
    b_grad = tl.load(p_grad + at, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + at, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + at, mask=mask, other=0.0).to(tl.float32)
    b_open = sigmoid(b_gate)
    tl.store(p_dgate + at, b_grad * b_up * b_open * (1 + b_gate * (1 - b_open)), mask=mask)
    tl.store(p_dup + at, b_grad * b_gate * b_open, mask=mask)


@Kernel
@triton.jit
def _strength(p_logit, p_y, COUNT, BLOCK: tl.constexpr):
    at, mask = _place(COUNT, BLOCK)
    tl.store(p_y + at, 2 * sigmoid(tl.load(p_logit + at, mask=mask, other=0.0).to(tl.float32)), mask=mask)


@Kernel
@triton.jit
def _log_gate(p_logit, p_y, scale, COUNT, BLOCK: tl.constexpr):
    at, mask = _place(COUNT, BLOCK)
    b_logit = tl.load(p_logit + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_y + at, log_sigmoid(b_logit) * scale, mask=mask)


def _launch(kernel: Kernel, *arguments: Any, **constants: Any) -> None:
    count = arguments[0].numel()
    if count:
        with torch.cuda.device_of(arguments[0]):
            kernel[(ceil_div(count, BLOCK),)](*arguments, count, **constants, BLOCK=BLOCK, num_warps=4)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_swiglu, gate.contiguous(), up.contiguous(), y)
    return y


def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _no_gradients(grad, gate, up)
    _launch(_swiglu_backward, grad.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup)
    return dgate, dup


def _no_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    return dgate, dup


swiglu_backward = operator("deadreckon::swiglu_backward", _backward, _no_gradients)
swiglu = operator(
    "deadreckon::swiglu",
    _forward,
    lambda gate, up: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    gradients=lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def strength(logit: Tensor) -> Tensor:
    """β of logits, without gradients."""
    y = torch.empty(logit.shape, dtype=torch.float32, device=logit.device)
    _launch(_strength, logit.contiguous(), y)
    return y


def log_gate(logit: Tensor, scale: float) -> Tensor:
    """log f of logits, without gradients."""
    y = torch.empty(logit.shape, dtype=torch.float32, device=logit.device)
    _launch(_log_gate, logit.contiguous(), y, float(scale))
    return y
