"""The reference, literally the definition: walk along the sequence, and let every token act on all preceding tokens.

At token i each earlier key takes the step of token i (``T_ji = T_j,i-1 · step_i``), each earlier value the same when
values travel, and each running gate sum grows by ``log f_i``. Then query i attends to the keys so far. Nothing is
factored, chunked or reordered; O(T²·D), in whatever precision the inputs have. Everything fast is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from deadreckon.ops.factors import Factors, Power


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates the pairs (m, m + D/2) of x by angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def weigh(logits: Tensor, gate_sum: Tensor, score: object) -> Tensor:
    """The weights of one query over all keys up to and including its own, (B, H, i+1)."""
    if isinstance(score, Power):
        weights = logits**score.p * gate_sum.exp()
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)
    if score == "stick-breaking":
        # The stick is broken from the nearest key to the farthest; a token takes nothing from its own stick.
        taken, left = logsigmoid(logits[..., :-1]), logsigmoid(-logits[..., :-1])
        left_before = left.flip(-1).cumsum(-1).flip(-1) - left
        weights = (taken + left_before + gate_sum[..., :-1]).exp()
        return torch.cat([weights, torch.zeros_like(logits[..., -1:])], dim=-1)
    return (logits + gate_sum).softmax(-1)


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, cu_seqlens: list[int] | None
) -> Tensor:
    """See :func:`deadreckon.attend`; the arguments are already checked."""
    _, log_gate, score = factors
    rotation, steps = factors.parts()
    heads = q.shape[2]

    def tokens(x: Tensor) -> tuple[Tensor, ...]:  # (B, T, 1 | H | Hq, ...) -> T times (B, Hq, 1, ...)
        # Unbound at once: the gradient of x[:, i] is as large as x, for every token.
        return x.repeat_interleave(heads // x.shape[2], dim=2).to(q.dtype).unsqueeze(3).unbind(1)

    starts = set(cu_seqlens or [0])
    queries, new_keys, new_values = tokens(q), tokens(k), tokens(v)
    gates = tokens(q.new_zeros(q.shape[:3]) if log_gate is None else log_gate)
    if rotation is not None:
        angles = tokens(rotation.angles)
    if steps is not None:
        w, beta = tokens(steps.w), tokens(steps.beta)

    outputs = []
    keys = values = gate_sum = q.new_empty(0)
    for i, query in enumerate(queries):
        if i in starts:  # a new document: no preceding tokens
            keys, values, gate_sum = new_keys[i][:, :, :0], new_values[i][:, :, :0], gates[i][:, :, :0]
        if rotation is not None:
            step = -angles[i]  # k^T R(a) is R(-a) k
            keys = turn(keys, step)
            values = turn(values, step) if rotation.values else values
        if steps is not None:  # after the rotation: k^T R H is H (R(-a) k)
            keys = keys - beta[i].unsqueeze(3) * (keys * w[i]).sum(-1, keepdim=True) * w[i]
        gate_sum = gate_sum + gates[i]
        keys = torch.cat([keys, new_keys[i]], dim=2)  # (B, Hq, i+1, D)
        values = torch.cat([values, new_values[i]], dim=2)
        gate_sum = torch.cat([gate_sum, torch.zeros_like(gates[i])], dim=2)
        logits = scale * (keys * query).sum(-1)
        weights = weigh(logits, gate_sum, score)
        outputs.append((weights.unsqueeze(-1) * values).sum(2))
    return torch.stack(outputs, dim=1)
