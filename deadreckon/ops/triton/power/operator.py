"""Symmetric power attention, all at once or in chunks, as one operator and one for its backward pass.

All at once is one chunk, the whole sequence: there are no states then.

The scale is a common factor of all weights, and so has no say. Neither has the length of a query; the keys of a head
are measured by the longest, in powers of two, and a state is kept in the keys' own measure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.factors import Form
from deadreckon.ops.layout import dense
from deadreckon.ops.triton.gated.flash import Sums
from deadreckon.ops.triton.gated.gates import gate_sums
from deadreckon.ops.triton.operators import gradients_for
from deadreckon.ops.triton.power.kernels import (
    PADDING,
    States,
    Walk,
    chunk_for,
    chunk_forward,
    chunk_keys,
    chunk_queries,
    decays_of,
    gather,
    largest,
    level,
    minus_delta,
    overlap,
    pairs_of,
    read,
    read_gradient,
    transposed,
)

WIDEST: dict[Form, dict[int, int]] = {"attention": {2: 128, 4: 128}, "chunked": {2: 128, 4: 32}}
"""Channels of queries and keys, by form and power."""


class PowerState(NamedTuple):
    """All keys and values so far: Σ γ u_a u_b v and Σ γ u_a u_b, u = k for p = 2, products of two of k for p = 4."""

    values: Tensor  # (B, H, rows, E) float32: the layout is that of kernels/power.py
    moments: Tensor  # (B, H, U, U) float32


def state_width(width: int, p: int) -> int:
    """U: channels that a state is of squares of."""
    return width if p == 2 else -(-width * (width + 1) // 2 // 8) * 8


def _per_query(x: Tensor, walk: Walk) -> Tensor:
    return x.repeat_interleave(walk.group, 0) if walk.group > 1 else x


def _products(x: Tensor) -> Tensor:
    """(…, D) -> (…, U): x_a x_b for a ≤ b, so that products of these are squares of products of x; zeros at the end."""
    width = x.shape[-1]
    parts = [x[..., a : a + 1] * torch.cat([x[..., a : a + 1], x[..., a + 1 :] * 2**0.5], -1) for a in range(width)]
    products = torch.cat(parts, -1)
    return torch.nn.functional.pad(products, (0, state_width(width, 4) - products.shape[-1]))


def _products_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, given that of its products, in float32."""
    x, width, at = x.float(), x.shape[-1], 0
    out = torch.zeros_like(x)
    for a in range(width):
        part = grad[..., at : at + width - a]
        at += width - a
        scaled = torch.cat([x[..., a : a + 1], x[..., a + 1 :] * 2**0.5], -1)
        out[..., a] += (part * scaled).sum(-1)
        out[..., a] += part[..., 0] * x[..., a]
        out[..., a + 1 :] += part[..., 1:] * (2**0.5 * x[..., a : a + 1])
    return out


def _channels(x: Tensor, p: int) -> Tensor:
    return x if p == 2 else _products(x)


def _channels_gradient(grad: Tensor, x: Tensor, p: int) -> Tensor:
    return grad if p == 2 else _products_gradient(grad, x)


def _walk(q: Tensor, k: Tensor, chunk: int) -> Walk:
    """Chunks of so many tokens, or a single one."""
    batch, length, heads, _ = k.shape
    return Walk(batch, heads, q.shape[2] // heads, length, chunk or -(-length // PADDING) * PADDING)


def _sums(log_gate: Tensor | None, walk: Walk) -> Sums | None:
    """Below −150 a gate leaves nothing in float32; smaller ones would only cost the sums that they are in digits."""
    return None if log_gate is None else gate_sums(log_gate.clamp(min=-150.0), walk.heads)


def _key_unit(k: Tensor, moments: Tensor | None, p: int, chunk: int) -> Tensor:
    """A power of two for each head, (N,), that brings its keys, and those in a state, to 1 or less."""
    limit = 120 // p if chunk else 120  # states are multiplied by its power p
    longest = largest(k)
    if moments is not None:
        past = moments.diagonal(dim1=-2, dim2=-1).amax(-1).flatten()
        longest = torch.maximum(longest, past ** (1 / p))
    exponent = torch.frexp(longest).exponent.clamp(-limit, limit)
    return torch.ldexp(torch.ones_like(longest), -exponent)


def _measured(values: Tensor, moments: Tensor, unit: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """A state in another measure of keys, (B, H, …) or (N, …) alike."""
    half = (unit ** (p // 2)).view(*values.shape[:-2], 1, 1)
    return values * half * half, moments * half * half


def _working(dtype: torch.dtype) -> torch.dtype:
    """Long sums are too much for float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _weights(width: int, device: torch.device) -> Tensor:
    """How often a row of a state counts, (rows, 1): two blocks of channels stand for both their orders."""
    row = torch.arange(pairs_of(width) * 64, device=device)
    return torch.where(row < width * 8, 1.0, 2.0).unsqueeze(1)


def _state_like(x: Tensor, heads: tuple[int, int] | None, width: int, value_width: int) -> list[Tensor]:
    """Room for states; without heads, nothing."""
    if heads is None:
        return [x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)]
    shapes = ((pairs_of(width) * 64, value_width), (width, width))
    return [x.new_empty(*heads, *shape, dtype=torch.float32) for shape in shapes]


def _results(q: Tensor, k: Tensor, v: Tensor, p: int, chunk: int, stateful: bool, final: bool) -> list[Tensor]:
    """Room for what the operator returns."""
    walk, width = _walk(q, k, chunk), state_width(k.shape[3], p)
    value_width = v.shape[3]
    out = q.new_empty(walk.batch, walk.length, q.shape[2], value_width)
    single = q.new_empty(0, dtype=torch.float32)
    inverse, unit = single.new_empty(walk.queries, walk.length), single.new_empty(walk.keys)
    kept = _state_like(single, (walk.keys, walk.chunks) if stateful or walk.chunks > 1 else None, width, value_width)
    lasts = _state_like(single, (walk.batch, walk.heads) if final else None, width, value_width)
    values, moments = torch.empty_like(kept[0], dtype=_working(q.dtype)), kept[1]
    return [out, *lasts, inverse, unit, values, moments]


@torch.library.custom_op("deadreckon::power", mutates_args=())
def power_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, values: Tensor | None, moments: Tensor | None,
    p: int, chunk: int, final: bool,
) -> list[Tensor]:  # fmt: skip
    """Output (B, T, Hq, E) and final state; then what the backward pass needs: 1 / sums, units, and states.

    A chunk has so many tokens; 0: all of them.
    """
    stateful = values is not None
    out, last_values, last_moments, inverse, unit, _, _ = results = _results(q, k, v, p, chunk, stateful, final)
    walk, dtype = _walk(q, k, chunk), _working(q.dtype)
    with torch.cuda.device_of(q):
        sums = _sums(log_gate, walk)
        unit = _key_unit(k, moments, p, chunk)
        near_q, _ = level(q, None, dtype)
        near_k, _ = level(k, unit, dtype)
        before = None
        if stateful or final or walk.chunks > 1:
            decays = decays_of(walk, sums, q.device)
            first = None
            if values is not None and moments is not None:
                first_values, first_moments = _measured(values, moments, unit, p)
                first = (first_values.flatten(0, 1).contiguous(), first_moments.flatten(0, 1).contiguous())
            states = gather(
                walk, transposed(_channels(near_k, p), decays.fall), v, None, decays.whole, first, reverse=False
            )
            if final:
                last = _measured(states.last_values, states.last_moments, 1 / unit, p)
                last_values, last_moments = (x.unflatten(0, (walk.batch, walk.heads)) for x in last)
        if stateful or walk.chunks > 1:
            results[5:] = states.values, states.moments
            before = read(walk, _channels(near_q, p), _per_query(decays.rise, walk), states, sums=True)
        inverse = chunk_forward(walk, near_q, near_k, v, sums, p, before, out)
    return [out, last_values, last_moments, inverse, unit, *results[5:]]


@power_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, values: Tensor | None, moments: Tensor | None,
    p: int, chunk: int, final: bool,
) -> list[Tensor]:  # fmt: skip
    return _results(q, k, v, p, chunk, values is not None, final)


@torch.library.custom_op("deadreckon::power_backward", mutates_args=())
def power_backward(
    grad: Tensor, grad_values: Tensor | None, grad_moments: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, out: Tensor, inverse: Tensor, unit: Tensor,
    values: Tensor, moments: Tensor, p: int, chunk: int, stateful: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of log_gate and the first state, which are empty where there was none."""
    walk, dtype = _walk(q, k, chunk), _working(q.dtype)
    width = state_width(k.shape[3], p)
    grad = dense(grad)
    results = _gradients_for(q, k, v, log_gate, p, stateful)
    with torch.cuda.device_of(q):
        sums = _sums(log_gate, walk)
        near_q, unit_q = level(q, None, dtype)
        near_k, _ = level(k, unit, dtype)
        delta = minus_delta(out, grad)
        from_before = to_after = None
        flow = None
        if values.numel() or grad_values is not None:
            decays = decays_of(walk, sums, q.device)
            wide_q, wide_k = _channels(near_q, p), _channels(near_k, p)
            factor = _per_query(decays.rise, walk) * inverse
            last = None
            if grad_values is not None and grad_moments is not None:
                last_values, last_moments = _measured(grad_values, grad_moments, 1 / unit, p)
                last_values = last_values / _weights(width, q.device)
                last = (last_values.flatten(0, 1).contiguous(), last_moments.flatten(0, 1).contiguous())
            later = gather(walk, transposed(wide_q, factor), grad, delta, decays.whole, last, reverse=True)
            by_query = torch.zeros_like(inverse)
            if values.numel():
                earlier = States(values, moments, values, moments, -1 if stateful else 0)
                from_before, by_query = read_gradient(walk, wide_q, grad, delta, factor, earlier)
                from_before = _channels_gradient(from_before, near_q, p)
                flow = overlap(walk, width, earlier, later) * decays.whole
            wide_grad, by_key = read_gradient(walk, wide_k, v, None, decays.fall, later)
            to_after = (_channels_gradient(wide_grad, near_k, p), read(walk, wide_k, decays.fall, later, sums=False)[0])
            if stateful:
                first = _measured(later.last_values * _weights(width, q.device), later.last_moments, unit, p)
                results[4:] = [x.unflatten(0, (walk.batch, walk.heads)) for x in first]
        rows = chunk_queries(walk, near_q, near_k, v, grad, sums, p, delta, inverse, unit_q, from_before, results[0])
        columns = chunk_keys(
            walk, near_q, near_k, v, grad, sums, p, delta, inverse, unit, to_after, results[1], results[2]
        )
        if log_gate is not None:
            gone = torch.zeros_like(columns)
            if to_after is not None:
                rows, gone = rows + by_query, by_key
            results[3] = _gate_gradient(walk, rows, columns, gone, flow, log_gate)
    return results


def _gate_gradient(
    walk: Walk, rows: Tensor, columns: Tensor, gone: Tensor, flow: Tensor | None, log_gate: Tensor
) -> Tensor:
    """From d log-weights (N, T): of each query, of each key within its chunk, and of each key beyond; and flow (N,
    chunks), those of all routes across a whole chunk.

    A gate is on the routes that end with it or later and begin before it. Sums of a chunk are of that chunk alone: over
    the whole sequence they would cancel, and what they were rounded by would not.
    """
    room = walk.chunks * walk.chunk - walk.length
    ends = rows.view(walk.keys, walk.group, -1).sum(1, dtype=torch.float64) - columns - gone
    ends = torch.nn.functional.pad(ends, (0, room)).unflatten(1, (walk.chunks, walk.chunk))
    ends = ends.flip(2).cumsum(2).flip(2)
    ends += (
        torch.nn.functional.pad(gone.double(), (0, room)).unflatten(1, (walk.chunks, walk.chunk)).sum(2, keepdim=True)
    )
    if flow is not None:
        ends += flow.unsqueeze(2)
    ends = ends.flatten(1)[:, : walk.length].unflatten(0, (walk.batch, walk.heads)).transpose(1, 2)
    return ends.to(log_gate.dtype).contiguous()


def _gradients_for(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, p: int, stateful: bool) -> list[Tensor]:
    grads = gradients_for(q, k, v, q.new_empty(0) if log_gate is None else log_gate)
    first = (k.shape[0], k.shape[2]) if stateful else None
    return [*grads, *_state_like(q, first, state_width(k.shape[3], p), v.shape[3])]


@power_backward.register_fake
def _(
    grad: Tensor, grad_values: Tensor | None, grad_moments: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, out: Tensor, inverse: Tensor, unit: Tensor,
    values: Tensor, moments: Tensor, p: int, chunk: int, stateful: bool,
) -> list[Tensor]:  # fmt: skip
    return _gradients_for(q, k, v, log_gate, p, stateful)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, log_gate, values, _, ctx.p, ctx.chunk, ctx.final = inputs
    ctx.stateful = values is not None
    out, _, _, *kept = output
    ctx.save_for_backward(q, k, v, log_gate, out, *kept)
    ctx.set_materialize_grads(False)  # states are large, and those that are kept have no gradient


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad, *last = grads[:3]
    q, k, v, log_gate, out, *kept = ctx.saved_tensors
    if not ctx.final or (last[0] is None and last[1] is None):
        last = [None, None]
    else:
        room = _state_like(q, (k.shape[0], k.shape[2]), state_width(k.shape[3], ctx.p), v.shape[3])
        last = [empty.zero_() if x is None else x for x, empty in zip(last, room, strict=True)]
    grad_q, grad_k, grad_v, grad_gate, *first = power_backward(
        torch.zeros_like(out) if grad is None else grad, *last, q, k, v, log_gate, out, *kept,
        ctx.p, ctx.chunk, ctx.stateful,
    )  # fmt: skip
    grad_first = first if ctx.stateful else (None, None)
    return grad_q, grad_k, grad_v, None if log_gate is None else grad_gate, *grad_first, None, None, None


power_forward.register_autograd(_gradients, setup_context=_save)


def _symmetric(state: PowerState) -> PowerState:
    """Squares of blocks with themselves hold two channels in both orders; kernels read either for both."""
    own = state.moments.shape[-1] * 8  # rows of such squares
    squares = state.values[:, :, :own].unflatten(2, (-1, 8, 8))
    squares = (squares + squares.transpose(3, 4)).flatten(2, 4) / 2
    values = torch.cat([squares, state.values[:, :, own:]], dim=2)
    return PowerState(values, (state.moments + state.moments.mT) / 2)


def attend_power(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, scale: float, p: int, form: Form = "chunked",
    state: PowerState | None = None, final: bool = False,
) -> tuple[Tensor, PowerState | None]:  # fmt: skip
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E), log_gate (B, T, H or Hq) or None -> (B, T, Hq, E).

    In chunks, it begins with a state of what came before, if there is one, and returns the one it ends with, if asked
    for. Gates of queries' heads make as many states, as if each had keys of its own.
    """
    assert form == "chunked" or (state is None and not final)
    if p not in WIDEST[form]:
        raise ValueError(f"p: expected 2 or 4, got {p}")
    widest = WIDEST[form][p]
    if k.shape[3] % 8 or k.shape[3] > widest:
        raise ValueError(f"k: expected heads of a multiple of 8 up to {widest} for p = {p}, got {k.shape[3]}")
    if v.shape[3] % 8 or v.shape[3] > 128:
        raise ValueError(f"v: expected heads of a multiple of 8 up to 128, got {v.shape[3]}")
    if scale == 0:
        q = q * 0
    if log_gate is not None and log_gate.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (dense(x) for x in (q, k, v))
    first = (None, None) if state is None else _symmetric(state)
    chunk = chunk_for(state_width(k.shape[3], p)) if form == "chunked" else 0
    out, values, moments, *_ = power_forward(q, k, v, log_gate, *first, p, chunk, final)
    return out, _symmetric(PowerState(values, moments)) if final else None
