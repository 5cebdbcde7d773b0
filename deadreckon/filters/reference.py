"""Reference implementation of the histogram filter: its definition, literally, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def filter_reference(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, eps: float
) -> Tensor:
    """See :func:`deadreckon.histogram_filter`: Algorithm 1 of the paper, with a scatter-add for every move of mass."""
    h = initial.to(reset.dtype)  # (B, C, P)
    place = torch.arange(h.shape[-1], device=h.device)
    above = (place + 1).clamp(max=h.shape[-1] - 1).expand_as(h)
    below = (place - 1).clamp(min=0).expand_as(h)
    origin, first = (torch.full_like(above[..., :1], at) for at in (0, 1))
    histograms = []
    for t in range(reset.shape[1]):
        fresh = reset[:, t].unsqueeze(-1)  # (B, C, 1)
        up, down, stay = move[:, t].to(h.dtype).split(1, dim=-1)
        total = h.sum(-1, keepdim=True)
        new = torch.zeros_like(h)
        new = new.scatter_add(-1, first, total * fresh * up)
        new = new.scatter_add(-1, origin, total * fresh * (down + stay))
        new = new + h * ((1 - fresh) * stay)
        new = new.scatter_add(-1, above, h * ((1 - fresh) * up))
        new = new.scatter_add(-1, below, h * ((1 - fresh) * down))
        if copy is not None:
            jump, none = copy[:, t].to(h.dtype).split([h.shape[-1], 1], dim=-1)
            new = new * none + total * jump
        power = (new + eps) ** gamma.to(h.dtype).unsqueeze(-1)
        h = power / power.sum(-1, keepdim=True)
        histograms.append(h)
    return torch.stack(histograms, dim=1)
