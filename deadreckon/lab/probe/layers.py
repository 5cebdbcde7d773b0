"""Probes one layer of a model: findings on each head, from the vectors and factors that its attention received."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.probe import attention, theory
from deadreckon.lab.probe.attention import Transport
from deadreckon.lab.probe.findings import Head, Mass, Mixing, Reach, Scores, Values
from deadreckon.lab.probe.reach import FarTokens, predict
from deadreckon.lab.probe.transport import mean_gates, mean_transport, route_lengths, second_moment

AT_ONCE = 1 << 23  # logits in memory
CHANCE = 0.05  # with which a bound in probability may fail
AGREE = 0.02  # how far the probe's output may be off the layer's, which may be in half precision


@dataclass(frozen=True)
class Options:
    """How to probe; see :func:`deadreckon.lab.probe.run_probe`."""

    places: Tensor  # of queries
    window: int | None
    tolerance: float
    routes: int
    trained: int
    keep: float


class UndefinedError(Exception):
    """Raised for a layer that the theory, or the probe, does not cover."""


def probe_layer(
    number: int, name: str, layer: dr.AttentionLayer, x: Tensor, context: dr.Context, factors: dr.Factors,
    output: Tensor, options: Options,
) -> list[Head]:  # fmt: skip
    """Findings on all heads of a layer.

    Args:
        x, context: inputs of its encoding, factors: what the encoding returned, output: (B, T, Hq · E) of attention.
    """
    beyond = [field for field in factors._fields if field not in ("transport", "log_gate", "score")]
    if any(getattr(factors, field) is not None for field in beyond):
        raise UndefinedError(f"{name} adds {', '.join(beyond)} to the equation, which the probe does not know")
    heads, width = layer.sizes.n_heads, layer.sizes.head_dim
    q, k, v = attention.vectors_of(layer, x, context)
    transport, gates = factors.transport, attention.gates_of(factors.log_gate, x, heads)
    mixing = _mixing(transport, heads, options)
    windows = [_window(one, x.shape[1], options) for one in mixing]
    split = torch.tensor([window for window, _ in windows], device=x.device).view(-1, 1, 1)
    at_once = max(AT_ONCE // (x.shape[1] * heads * len(options.places)), 1)  # rows of the batch

    def look(rows: slice) -> dict[str, Tensor]:
        return _look(
            q[rows], k[rows], v[rows], factors.map_transport(lambda x: x[rows]), None if gates is None else gates[rows],
            factors.score, output[rows], split, width**-0.5, options,
        )  # fmt: skip

    parts = [look(slice(start, start + at_once)) for start in range(0, len(x), at_once)]
    stats = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}  # (B, H, Q, …)
    off = float((stats["off"].square().sum() / stats["output"].square().sum()).sqrt())
    if not off <= AGREE:
        raise UndefinedError(f"the probe's weights give an output {off:.2g} off that of the {name} layer")
    lengths = route_lengths(x.shape[1] // 2)
    let_through = None if gates is None else mean_gates(gates, lengths).T.tolist()
    return [
        _head(number, head, name, factors, {key: value[:, head].double() for key, value in stats.items()}, mixing[head],
              *windows[head], None if let_through is None else let_through[head], lengths, options)
        for head in range(heads)
    ]  # fmt: skip


def distance_bins(tokens: int) -> list[int]:
    """The first distance of each bin: 0, 1, 2, 4, …"""
    return [0, *route_lengths(tokens - 1)]


def _mixing(transport: Transport | None, heads: int, options: Options) -> list[Mixing | None]:
    """Mixing of routes, for each query head."""
    if transport is None:
        return [None] * heads
    mean = mean_transport(transport, routes=options.routes)
    key_heads = mean.norm.shape[1]
    second = second_moment(transport).tolist() if isinstance(transport, dr.Householder) else [None] * key_heads
    by_key_head = []
    for head in range(key_heads):
        norm, noise = mean.norm[:, head], mean.noise[:, head]
        decay, mixed, pair_rates = mean.decay(head), None, None
        if mean.pairs is not None and mean.pairs_noise is not None:
            limit = (2 * mean.pairs_noise[:, head]).clamp(min=options.tolerance)
            mixed = (mean.pairs[:, head] <= limit).double().mean(-1).tolist()
            pair_rates = [pair.rate for pair in mean.pair_decays(head)]
        by_key_head.append(Mixing(
            norm.tolist(), mean.typical[:, head].tolist(), noise.tolist(), mean.size[:, head].tolist(), float(norm[0]),
            decay.rate, decay.error, decay.gap, decay.gap_ceiling,
            None if decay.gap is None else theory.mixing_window(decay.rate, options.tolerance), mixed, pair_rates,
            second[head],
        ))  # fmt: skip
    return [by_key_head[head * key_heads // heads] for head in range(heads)]


def _window(mixing: Mixing | None, tokens: int, options: Options) -> tuple[int, str]:
    """The distance from which tokens are far, and its origin: "given", "mixing" or "assumed"."""
    if options.window is not None:
        return options.window, "given"
    if mixing is not None and mixing.window is not None and mixing.window <= tokens // 4:
        return mixing.window, "mixing"
    return max(min(tokens, options.trained) // 4, 1), "assumed"


def _look(
    q: Tensor, k: Tensor, v: Tensor, transport: Transport | None, gates: Tensor | None,
    score: object, output: Tensor, split: Tensor, scale: float, options: Options,
) -> dict[str, Tensor]:  # fmt: skip
    """Statistics of each sampled query, (B, H, Q, …); tokens are far from a distance of `split` (H, 1, 1) on."""
    places, tokens = options.places, q.shape[1]
    distance = places.unsqueeze(-1) - torch.arange(tokens, device=q.device)  # (Q, T)
    behind, far = distance >= 0, distance >= split  # (Q, T), (H, Q, T)
    near = behind & ~far
    seen = far & (distance < torch.where(split < options.trained, options.trained, tokens))
    logits = attention.logits_of(q, k, transport, scale, places)
    sums = None if gates is None else attention.gate_sums(gates, places)
    weights = attention.weights_of(logits, sums, score, distance)
    gated = logits if sums is None else logits + sums.to(logits.dtype)
    rotation, steps = dr.Factors(transport).parts()
    truth = output[:, places].unflatten(-1, (q.shape[2], -1)).transpose(1, 2).to(v.dtype)
    by_head = v.transpose(1, 2)
    carrying = rotation if rotation is not None and rotation.values else None
    whole = attention.carried_sum(weights, v, carrying, places)
    far_weights = torch.where(far, weights, 0)
    far_length = (far_weights * by_head.norm(dim=-1).unsqueeze(-2)).sum(-1).clamp(min=1e-30)
    starts = torch.tensor(distance_bins(tokens), device=q.device)
    which = (torch.bucketize(distance, starts, right=True) - 1).clamp(min=0).expand_as(logits)
    empty = logits.new_zeros(*logits.shape[:-1], len(starts))
    stats = {
        "output": truth, "off": whole - truth,
        "mass": empty.scatter_add(-1, which, weights),
        "logits": empty.scatter_add(-1, which, torch.where(behind, logits, 0)),
        "count": empty.scatter_add(-1, which, behind.to(logits.dtype).expand_as(logits)),
        "near": torch.where(near, weights, 0).sum(-1), "seen": torch.where(seen, weights, 0).sum(-1),
        "far": far_weights.sum(-1), "far_norm": far_weights.norm(dim=-1),
        "far_count": far.sum(-1).expand(len(q), -1, -1), "near_count": near.sum(-1).expand(len(q), -1, -1),
        "near_mean": torch.where(near, logits, 0).sum(-1) / near.sum(-1),
        "far_mean": torch.where(far, logits, 0).sum(-1) / far.sum(-1),
        "near_best": torch.where(near, gated, -torch.inf).amax(-1),
        "far_best": torch.where(far, gated, -torch.inf).amax(-1),
        "far_least": torch.where(far, gated, torch.inf).amin(-1),
        "limit": 2 * scale * q[:, places].norm(dim=-1).transpose(1, 2)
        * k.norm(dim=-1).amax(1).unsqueeze(-1),
        "plain": (far_weights @ by_head).norm(dim=-1) / far_length,
    }  # fmt: skip
    if transport is not None and v.shape[-1] == q.shape[-1]:
        stats["carried"] = attention.carried_sum(far_weights, v, transport, places).norm(dim=-1) / far_length
    phases, _ = attention.unrolled(rotation, q.shape[2])
    if phases is not None and steps is None:
        along = [far_weights.double() @ side.transpose(1, 2) for side in (phases.cos(), phases.sin())]
        stats["transport"] = torch.hypot(*along).amax(-1) / far_weights.double().sum(-1).clamp(min=1e-300)
    return stats


def _head(
    number: int, head: int, name: str, factors: dr.Factors, stats: dict[str, Tensor], mixing: Mixing | None,
    window: int, window_from: str, gates: list[float] | None, lengths: list[int], options: Options,
) -> Head:  # fmt: skip
    """Findings on one head: averages over queries, (B, Q, …), and predictions from them."""
    transport, softmax = factors.transport, factors.score == "softmax"
    _, steps = factors.parts()
    stretches = steps is not None and not _contracts(steps)
    far, tokens = stats["far"], FarTokens(window, lengths, gates)
    # Far tokens within the trained length stand for those of longer contexts.
    last = options.trained - 1 if window < options.trained else math.inf
    counts = torch.tensor([tokens.at(min(place, last)) for place in options.places.tolist()], dtype=torch.float64)
    # Averages logarithms: odds of single queries differ by orders of magnitude.
    each = math.exp(float((_log_odds(stats, "seen").cpu() - counts.clamp(min=1e-300).log()).mean()))
    floor = norm_floor = ceiling = weight_gap = None
    if softmax:
        gap = stats["near_best"] - stats["far_least"]
        floor = float(theory.far_mass_floor(gap, stats["near_count"], stats["far_count"]).mean())
        if gates is None and not stretches:
            norm_floor = float(theory.far_mass_floor(stats["limit"], stats["near_count"], stats["far_count"]).mean())
        above = stats["near_best"] - stats["far_best"]  # of one near key: N = 1
        ceiling = float(torch.sigmoid(stats["far_count"].log() - above).mean())
    if factors.score != "stick-breaking":
        weight_gap = float((stats["far_count"].log() - stats["near_count"].log() - _log_odds(stats, "far")).mean())
        reach = predict(each, tokens, options.trained, options.keep)
        if gates is None and isinstance(transport, dr.Rotation) and _by_position(transport):
            reach = Reach(float(options.trained), "routes turn by their length alone: longer ones than trained are new")
    else:
        reach = Reach(None, "stick-breaking gives what is near its weight first: far tokens take none of it")
    scores = Scores(
        (stats["logits"].sum((0, 1)) / stats["count"].sum((0, 1)).clamp(min=1)).tolist(),
        float((stats["near_mean"] - stats["far_mean"]).mean()),
        float((stats["near_best"] - stats["far_best"]).mean()), weight_gap,
    )  # fmt: skip
    mass = Mass(
        stats["mass"].mean((0, 1)).tolist(), float(far.mean()),
        float(far.std() / math.sqrt(far.numel())) if far.numel() > 1 else None,
        floor, norm_floor, ceiling, float(stats["far_norm"].mean()),
    )  # fmt: skip
    values = _values(stats, transport, mixing, window)
    plain = carried = None
    if gates is None and factors.score != "stick-breaking":
        plain = 1 / (each * values.plain)
        carried = None if values.carried is None else 1 / (each * values.carried)
    kind = {dr.Rotation: "rotation", dr.Householder: "householder", tuple: "both"}.get(type(transport), "none")
    return Head(
        number, head, name, kind, window, window_from, mixing, gates, scores, mass, values, reach, plain, carried
    )


def _log_odds(stats: dict[str, Tensor], which: str) -> Tensor:
    """log(far mass / near mass), with all far mass ("far") or that within the trained length ("seen")."""
    return stats[which].clamp(min=1e-300).log() - stats["near"].clamp(min=1e-300).log()


def _by_position(transport: dr.Rotation) -> bool:
    """Whether all tokens turn by the same angles, as in RoPE, so that a route depends on its length alone."""
    return bool((transport.angles == transport.angles[:1, :1]).all() and transport.angles.any())


def _contracts(transport: dr.Householder) -> bool:
    """Whether every step has a norm of at most 1, up to rounding: 0 ≤ β ‖w‖² ≤ 2."""
    strength = transport.beta * transport.w.square().sum(-1)
    return bool((strength >= -1e-5).all() and (strength <= 2 + 1e-5).all())


def _values(stats: dict[str, Tensor], transport: object, mixing: Mixing | None, window: int) -> Values:
    turned = bound = None
    if isinstance(transport, dr.Rotation) and mixing is not None:
        turned, far = float(stats["transport"].mean()), float(stats["far"].mean())
        rate = 1.0 if mixing.gap is None else mixing.rate
        bound = theory.prefix_radius(
            far, float(stats["far_norm"].mean()), rate, transport.angles.shape[-1], CHANCE, rate**window
        ) / max(far, 1e-300)
    carried = float(stats["carried"].mean()) if "carried" in stats else None
    in_use = isinstance(transport, dr.Rotation) and transport.values
    return Values(float(stats["plain"].mean()), carried, turned, bound, in_use)
