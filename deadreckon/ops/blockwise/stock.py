"""PyTorch's stock attention kernels: they return the log-sum-exp, and their backward accepts a global one.

`aten::_scaled_dot_product_*_attention` and their backwards are PyTorch's private names, the same from 2.11 to 2.15;
they are used nowhere else. A backward call that is given the output and log-sum-exp of the *whole* row returns the
exact gradients of its block, as in ring attention.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
Backend = Literal["cpu", "cudnn", "flash", "efficient"]
ALIGNED = 32  # rows that the efficient kernel wants a log-sum-exp to be padded to
WIDEST = 256  # channels of heads that flash and cuDNN take


def backend_for(x: Tensor) -> Backend | None:
    """Which kernel serves x's device, dtype and channels; None for float64 on a GPU and devices that have no kernel."""
    if x.device.type == "cpu":
        return "cpu"
    if x.device.type == "cuda" and x.shape[-1] > WIDEST and x.dtype != torch.float64:
        return "efficient"
    if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16):
        capability = torch.cuda.get_device_capability(x.device)
        return "cudnn" if capability >= (9, 0) and torch.backends.cuda.cudnn_sdp_enabled() else "flash"
    if x.device.type == "cuda" and x.dtype == torch.float32:
        return "efficient"
    return None


def width_for(backend: Backend, *widths: int) -> int:
    """The common head width the kernel requires of q, k and v."""
    multiple = 1 if backend == "cpu" else 8
    return -(-max(widths) // multiple) * multiple


def padded(x: Tensor, width: int) -> Tensor:
    """x zero-padded to `width` channels; x itself if it has as many, which `pad` would copy."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def dense_forward(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v, without a mask unless causal, and its log-sum-exp.

    q (N, n, R, W), k and v (N, n, S, W) -> (N, n, R, W), (N, n, R).
    """
    if backend == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if backend == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.view(q.shape[:3])
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    if backend == "efficient":
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return out, lse[..., : q.shape[2]]
    raise AssertionError(f"no stock kernel named {backend}")


def dense_backward(
    backend: Backend,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    steady: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where out and lse belong to whole rows of which this block is a part.

    PyTorch caches cuDNN plans by the layout of q, k and v alone, so that of grad and out must not vary: they are made
    contiguous, unless the caller guarantees (steady) that it follows from the others' and that no other call has such
    layouts.
    """
    if backend == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    rows, keys = q.shape[2], k.shape[2]
    lse = lse.contiguous()
    if backend == "cudnn":
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        if not steady:
            grad, out = grad.contiguous(), out.contiguous()
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
        )
    if backend == "flash":
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, seed, seed.new_zeros(()), scale=scale
        )
    if backend == "efficient":
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = pad(lse, (0, -rows % ALIGNED), value=torch.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    raise AssertionError(f"no stock kernel named {backend}")
