"""Attention in plain PyTorch: any device and dtype, memory linear in T, every transport, gate and score.

Rotations are applied up front and leave nothing behind; plain softmax goes straight to PyTorch's own attention; all
else climbs the route tree (`tree.py`), whose dense blocks run on stock kernels (`stock.py`).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from deadreckon.blockwise.documents import unpacked
from deadreckon.blockwise.precision import usual_scale
from deadreckon.blockwise.rotation import phases, rotate
from deadreckon.blockwise.stock import backend_for
from deadreckon.blockwise.tree import attend_tree
from deadreckon.factors import Factors, Householder, Rotation


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, cu_seqlens: list[int] | None
) -> Tensor:
    """See :func:`deadreckon.attend`; the arguments are already checked."""
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        return unpacked(attend_blockwise, q, k, v, factors, scale, cu_seqlens)
    transport, log_gate, score = factors
    q, scale = usual_scale(q, scale)
    phase = None
    if isinstance(transport, Rotation):
        phase = phases(transport.angles)
        if phase.shape[2] == q.shape[2] and q.shape[2] != k.shape[2]:  # keys turn differently for each query head
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
            if log_gate is not None:
                log_gate = log_gate.repeat_interleave(q.shape[2] // log_gate.shape[2], dim=2)
        q, k = rotate(q, phase), rotate(k, phase)
        v = rotate(v, phase) if transport.values else v
    if score == "softmax" and log_gate is None and not isinstance(transport, Householder) and backend_for(q):
        output = _plain(q, k, v, scale)
    else:
        householder = transport if isinstance(transport, Householder) else None
        output = attend_tree(q, k, v, householder, log_gate, score, scale)
    if phase is not None and isinstance(transport, Rotation) and transport.values:
        output = rotate(output, -phase)
    return output


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention with nothing on the route. Equal widths, or PyTorch may choose a kernel that builds T × T."""
    width, value_width = q.shape[3], v.shape[3]
    widest = max(width, value_width)
    if width != value_width:
        q, k, v = (pad(x, (0, widest - x.shape[3])) for x in (q, k, v))
    output = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=True, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return output.transpose(1, 2)[..., :value_width]
