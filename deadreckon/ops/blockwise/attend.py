"""Attention in plain PyTorch: any device and dtype, memory linear in T, every transport, gate and score.

Rotations are applied up front, to q, k and Householder directions; plain softmax goes straight to PyTorch's own
attention; everything else takes the route tree (`tree.py`), whose dense blocks run on stock kernels (`stock.py`).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deadreckon.ops.blockwise.documents import unpacked
from deadreckon.ops.blockwise.power import attend_power_blockwise
from deadreckon.ops.blockwise.precision import usual_scale
from deadreckon.ops.blockwise.rotation import turned
from deadreckon.ops.blockwise.stock import WIDEST, Backend, backend_for, dense_forward, padded, width_for
from deadreckon.ops.blockwise.tree import attend_tree
from deadreckon.ops.factors import Factors, Power


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, cu_seqlens: list[int] | None
) -> Tensor:
    """See :func:`deadreckon.attend`; the arguments are already checked."""
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        return unpacked(attend_blockwise, q, k, v, factors, scale, cu_seqlens)
    _, log_gate, score = factors
    rotation, steps = factors.parts()
    q, scale = usual_scale(q, scale, score)
    if rotation is not None:
        turn = turned(q, k, v, factors)
        return turn.back(attend_blockwise(turn.q, turn.k, turn.v, turn.factors, scale, None))
    if isinstance(score, Power) and steps is None:
        return attend_power_blockwise(q, k, v, log_gate, score)
    if score == "softmax" and log_gate is None and steps is None and backend_for(q):
        return plain(q, k, v, scale)
    return attend_tree(q, k, v, steps, log_gate, score, scale)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention without transport or gates.

    q, k and v are padded to one width, or PyTorch may choose a kernel that materialises T × T.
    """
    value_width = v.shape[3]
    widest = max(q.shape[3], value_width)
    if q.is_cuda and widest > WIDEST:
        return wide(q, k, v, scale, "efficient")
    q, k, v = (padded(x, widest) for x in (q, k, v))
    output = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=True, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return output.transpose(1, 2)[..., :value_width]


def wide(q: Tensor, k: Tensor, v: Tensor, scale: float, backend: Backend) -> Tensor:
    """The same for heads wider than `WIDEST`, on a given backend: PyTorch would materialise T × T in float32.

    Values are not padded to the keys' width, since this kernel is faster on narrow ones; key heads are repeated for
    each query head.
    """
    group, value_width = q.shape[2] // k.shape[2], v.shape[3]
    q, k, v = (padded(x, width_for(backend, x.shape[3])) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in (k, v))
    output, _ = dense_forward(backend, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, causal=True)
    return output.transpose(1, 2)[..., :value_width]
