"""Recomputes the attention of a few queries: logits, weights, and sums of values, carried along routes or not.

Only sampled queries are computed, (B, H, Q, T) numbers a layer, so that sequences may be long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import deadreckon as dr

Both = tuple[dr.Rotation, dr.Householder]
Transport = dr.Rotation | dr.Householder | Both
BLOCK = 64  # tokens whose Householder steps are taken at once


def per_head(x: Tensor, heads: int) -> Tensor:
    """Repeats per-head tensors: (B, T, 1 | H | Hq, …) to (B, T, Hq, …)."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def vectors_of(layer: dr.AttentionLayer, x: Tensor, context: dr.Context) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer (B, T, Hq, ·), as attention sees them, from the inputs of its encoding."""
    width = layer.sizes.head_dim
    q, k, v = (norm(project(x).unflatten(-1, (-1, width))) for norm, project in (
        (layer.q_norm, layer.q_proj), (layer.k_norm, layer.k_proj), (torch.nn.Identity(), layer.v_proj)
    ))  # fmt: skip
    q, k = layer.placed(q, k, x, context)
    q, k, v = (per_head(t if t.dtype == torch.float64 else t.float(), layer.sizes.n_heads) for t in (q, k, v))
    return q, k, v


@torch.no_grad()
def maps_of(model: dr.DeadReckonForCausalLM, tokens: Tensor) -> Tensor:
    """Attention weights of all heads on tokens (1, T), for any encoding: (layers, Hq, T, T), a row for each query."""
    model.eval()
    layers: list[Any] = [part.get_submodule("self_attn") for part in model.model.layers]
    went_in: dict[Any, Any] = {}
    hooks = [
        layer.encoding.register_forward_hook(
            lambda _, inputs, factors, layer=layer: went_in.update({layer: (*inputs[:2], factors)})
        )
        for layer in layers
    ]
    try:
        model.model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    places = torch.arange(tokens.shape[1], device=tokens.device)
    maps = []
    for layer in layers:
        x, context, factors = went_in[layer]
        q, k, _ = vectors_of(layer, x, context)
        gates = gates_of(factors.log_gate, x, layer.sizes.n_heads)
        logits = logits_of(q, k, factors.transport, layer.sizes.head_dim**-0.5, places)
        sums = None if gates is None else gate_sums(gates, places)
        maps.append(weights_of(logits, sums, factors.score, places.unsqueeze(-1) - places)[0])
    return torch.stack(maps)


def turn(x: Tensor, phase: Tensor) -> Tensor:
    """Rotates the pairs (m, m + D/2) of x by a phase in float64."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def unrolled(transport: Transport | None, heads: int) -> tuple[Tensor | None, dr.Householder | None]:
    """Accumulated angles and Householder steps of a transport, in the frame of the sequence's start; None if missing.

    Phases are cumulative sums of angles (B, T, Hq, D/2), in float64; the directions of steps are rotated by them.
    """
    rotation, steps = dr.Factors(transport).parts()
    if rotation is None:
        return None, steps
    phases = per_head(rotation.angles.double().cumsum(1), heads)
    return phases, steps and dr.Householder(turn(per_head(steps.w, heads), phases), steps.beta)


def logits_of(q: Tensor, k: Tensor, transport: Transport | None, scale: float, places: Tensor) -> Tensor:
    """scale · k_jᵀ T_ji q_i for the queries i at `places`, (B, H, Q, T); entries after a query are undefined.

    Args:
        q, k: (B, T, H, D), keys repeated to the query heads.
    """
    phases, steps = unrolled(transport, q.shape[2])
    if phases is not None:
        q, k = turn(q, phases), turn(k, phases)
    queries = q[:, places].transpose(1, 2)  # (B, H, Q, D)
    if steps is None:
        return scale * queries @ k.permute(0, 2, 3, 1)
    logits = []
    for met, w, keys, x, y in reversed(_blocks(steps, k, places)):
        along = met * (queries @ w.mT)
        logits.append(queries @ keys.mT - along @ y)
        queries = queries - along @ x
    return scale * torch.cat(logits[::-1], dim=-1)


def _blocks(steps: dr.Householder, k: Tensor, places: Tensor) -> list[tuple[Tensor, ...]]:
    """For each block of tokens: which steps a query meets (Q, S), W and K (B, H, S, D), and X and Y of all its routes.

    With rows for steps, [X, Y] = M⁻¹ diag(β) [W, strictLower(W Kᵀ)], where M = I + strictLower(diag(β) W Wᵀ). Then
    H_1 ⋯ H_s = I − Xᵀ W with the first s rows of both, and H_s ⋯ H_{j+1} k_j = k_j − Σ_{r≤s} Y_rj w_r. The solver
    assumes 1 on the diagonal of M and ignores what is above it.
    """
    every = (per_head(x, k.shape[2]).to(k.dtype).transpose(1, 2) for x in (steps.w, steps.beta.unsqueeze(-1), k))
    met = torch.arange(k.shape[1], device=k.device) <= places.unsqueeze(-1)
    blocks = []
    for mask, w, beta, keys in zip(met.split(BLOCK, 1), *(x.split(BLOCK, 2) for x in every), strict=True):
        system, right = beta * (w @ w.mT), beta * torch.cat([w, (w @ keys.mT).tril(-1)], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        blocks.append((mask, w, keys, *solved.split([w.shape[-1], w.shape[-2]], dim=-1)))
    return blocks


def gates_of(log_gate: Tensor | None, like: Tensor, heads: int) -> Tensor | None:
    """log f of each token and query head (B, T, Hq)."""
    if log_gate is None:
        return None
    gates = log_gate if log_gate.dim() == 3 else log_gate.expand(*like.shape[:2], -1)
    return per_head(gates, heads)


def gate_sums(gates: Tensor, places: Tensor) -> Tensor:
    """Σ log f along the route from each token to each query, (B, H, Q, T)."""
    total = gates.double().cumsum(1).transpose(1, 2)  # (B, H, T)
    return total[..., places].unsqueeze(-1) - total.unsqueeze(-2)


def weights_of(logits: Tensor, gates: Tensor | None, score: object, distance: Tensor) -> Tensor:
    """Attention weights by the definition, of keys at a distance (Q, T) from the query; zero for keys after it."""
    behind = distance >= 0
    gate = torch.zeros_like(logits) if gates is None else gates.to(logits.dtype)
    if isinstance(score, dr.Power):
        weights = torch.where(behind, logits**score.p * gate.exp(), 0)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)
    if score == "stick-breaking":
        taken = torch.where(distance > 0, logsigmoid(logits), -torch.inf)
        left = torch.where(distance > 0, logsigmoid(-logits), 0)
        left_before = left.flip(-1).cumsum(-1).flip(-1) - left
        return (taken + left_before + gate).exp()
    return torch.where(behind, logits + gate, -torch.inf).softmax(-1)


def carried_sum(weights: Tensor, v: Tensor, transport: Transport | None, places: Tensor) -> Tensor:
    """Σ_j a_j U_ji v_j for each query (B, H, Q, E), values carried along their routes.

    Rotations turn them back by the route's angle. For reflections, whose values no published encoding carries, it is
    what happens to keys: H_i ⋯ H_{j+1} v_j.
    """
    phases, steps = unrolled(transport, v.shape[2])
    v = v if phases is None else turn(v, phases)
    if steps is None:
        arrived = weights @ v.transpose(1, 2)
    else:
        arrived = v.new_zeros(*weights.shape[:3], v.shape[-1])
        for share, (met, w, values, x, y) in zip(weights.split(BLOCK, -1), _blocks(steps, v, places), strict=True):
            arrived = arrived + share @ values - (met * (arrived @ x.mT + share @ y.mT)) @ w
    return arrived if phases is None else turn(arrived, -phases[:, places].transpose(1, 2))
