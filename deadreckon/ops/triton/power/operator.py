"""Symmetric power attention, all at once or in chunks, as one operator and one for its backward pass.

    o_i = Σ_j γ_ij (q_i·k_j)^p v_j / Σ_j γ_ij (q_i·k_j)^p,   j ≤ i,   γ_ij the gates after j up to i,   p = 2 or 4

A square is linear in the products of two channels, so that keys of the past need not be kept one by one:

    tokens     |   chunk 0    |   chunk 1    |   chunk 2    |      1024 tokens or more each
    within       q · k, squared: attention as usual                (`within.py`)
    states     0 ──────────▶ S₁ ──────────▶ S₂ ──────────▶ final   each chunk adds its keys to the state (`write.py`),
                              │ read         │ read                which the queries of the next one read (`read.py`)

For p = 2 the state before a chunk is S[a, b] = Σ_t γ_t k_a k_b v, with the moments Z[a, b] = Σ_t γ_t k_a k_b, γ_t the
gates from t to the chunk; a query reads Σ q_a q_b S[a, b] and Σ q_a q_b Z[a, b]. S is symmetric in a and b, and kept
once for each pair of 8 channels: with n = D/8 blocks, pair number δ n + i is blocks i and (i + δ) mod n, δ ≤ n/2, and
row 8 a + b of its 64 rows is channel a of the first with channel b of the second. So D = 64 takes 2304 rows where 2080
would do. A pair of blocks is one tile of a tensor core, whose products q_a q_b are made in registers, never in memory.

Fourth powers are squares of squares: their states take the U = D(D+1)/2 products of two channels in place of channels
(D = 32: 528 of them, a state of 141 504 rows; `products.py`). Without states the whole sequence is one chunk.

Forward: (1) queries and keys are normalised, head-major (heads, T, D), each query and the keys of each head multiplied
by a power of two so that no power overflows (`scaling.py`); (2) keys write states; (3) queries read them; (4) attention
within chunks adds what was read, and divides by the sums. The scale and the length of a query are common factors of all
weights, and cancel. A state that is returned is in the keys' own scale.

Backward, with what the forward pass saved (1 / sums, units, states): (2) queries, in reverse, write the gradients of
states; (3) queries and keys read gradients from both kinds of states; (4) gradients within chunks add these; (5) gates
collect the gradients of all log-weights they are part of.

Shapes: N = B·H key heads, G query heads of each, rows of a state 64 per pair of blocks, U state channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.factors import Form
from deadreckon.ops.layout import dense
from deadreckon.ops.triton.gated.gates import gate_sums
from deadreckon.ops.triton.gated.launch import Sums
from deadreckon.ops.triton.operators import gradients_for
from deadreckon.ops.triton.power.chunks import Chunks, chunk_for
from deadreckon.ops.triton.power.products import state_channels, state_channels_gradient, state_width
from deadreckon.ops.triton.power.read import overlap, read, read_gradient
from deadreckon.ops.triton.power.scaling import (
    decays_of,
    key_unit,
    minus_delta,
    normalise,
    rescaled,
    transposed,
)
from deadreckon.ops.triton.power.within import attend_within, key_gradients_within, query_gradients_within
from deadreckon.ops.triton.power.write import States, pairs_of, write_states

WIDEST: dict[Form, dict[int, int]] = {"attention": {2: 128, 4: 128}, "chunked": {2: 128, 4: 32}}
"""Channels of queries and keys, by form and power."""


class PowerState(NamedTuple):
    """All keys and values so far: Σ γ u_a u_b v and Σ γ u_a u_b, u = k for p = 2, products of two of k for p = 4."""

    values: Tensor  # (B, H, rows, E) float32, in the layout above
    moments: Tensor  # (B, H, U, U) float32


def _per_query(x: Tensor, chunks: Chunks) -> Tensor:
    """(N, T) -> (N G, T)."""
    return x.repeat_interleave(chunks.group, 0) if chunks.group > 1 else x


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 also for float16, which overflows in long sums."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _weights(width: int, device: torch.device) -> Tensor:
    """How often a row of a state counts, (rows, 1): two different blocks of channels stand for both their orders."""
    row = torch.arange(pairs_of(width) * 64, device=device)
    return torch.where(row < width * 8, 1.0, 2.0).unsqueeze(1)


def _state_like(x: Tensor, heads: tuple[int, int] | None, width: int, value_width: int) -> list[Tensor]:
    """Empty tensors for values and moments of states, (*heads, …) in float32; without heads, of no size."""
    if heads is None:
        return [x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)]
    shapes = ((pairs_of(width) * 64, value_width), (width, width))
    return [x.new_empty(*heads, *shape, dtype=torch.float32) for shape in shapes]


def _by_head(values: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, …) -> (N, …), as kernels take states."""
    return values.flatten(0, 1).contiguous(), moments.flatten(0, 1).contiguous()


def _by_batch(values: Tensor, moments: Tensor, chunks: Chunks) -> list[Tensor]:
    """(N, …) -> (B, H, …)."""
    return [x.unflatten(0, (chunks.batch, chunks.heads)) for x in (values, moments)]


def _results(q: Tensor, k: Tensor, v: Tensor, p: int, chunk: int, states: bool, final: bool) -> list[Tensor]:
    """Empty tensors like those that the operator returns."""
    chunks, width = Chunks.of(q, k, chunk), state_width(k.shape[3], p)
    value_width = v.shape[3]
    out = q.new_empty(chunks.batch, chunks.length, q.shape[2], value_width)
    single = q.new_empty(0, dtype=torch.float32)
    inverse, unit = single.new_empty(chunks.query_heads, chunks.length), single.new_empty(chunks.key_heads)
    finals = _state_like(single, (chunks.batch, chunks.heads) if final else None, width, value_width)
    saved = [q.new_empty(0, dtype=_working_dtype(q.dtype)), single]
    if states:
        saved = [
            empty.new_empty(chunks.key_heads, chunks.count * rows, columns)
            for empty, rows, columns in zip(saved, (pairs_of(width) * 64, width), (value_width, width), strict=True)
        ]
    return [out, *finals, inverse, unit, *saved]


@torch.library.custom_op("deadreckon::power", mutates_args=())
def power_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, values: Tensor | None, moments: Tensor | None,
    p: int, chunk: int, states: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    """Output (B, T, Hq, E) and final state; then what the backward pass needs: 1 / sums, units, and states.

    These have the rows of all chunks one after the other, (N, chunks · rows, E) and (N, chunks · U, U): a size that is
    1 for some lengths alone would restrict a symbolic length.

    `values` and `moments` are the initial state, or None. `chunk` is the tokens of a chunk; 0: all of them. `states`:
    whether any chunk has a state before it, from an initial state or a preceding chunk.
    """
    chunks, dtype = Chunks.of(q, k, chunk), _working_dtype(q.dtype)
    out = q.new_empty(chunks.batch, chunks.length, q.shape[2], v.shape[3])
    final_values, final_moments = _state_like(q, None, 0, 0)
    saved = [q.new_empty(0, dtype=dtype), q.new_empty(0, dtype=torch.float32)]
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, chunks.heads)[0]
        unit = key_unit(k, moments, p, chunk)
        scaled_q, _ = normalise(q, None, dtype)  # 1
        scaled_k, _ = normalise(k, unit, dtype)
        before = None
        if states or final:
            decays = decays_of(chunks, sums, q.device)
            initial = None
            if values is not None and moments is not None:
                initial = _by_head(*rescaled(values, moments, unit, p))
            keys = transposed(state_channels(scaled_k, p), decays.fall)
            written = write_states(chunks, keys, v, None, decays.whole, initial, reverse=False)  # 2
            if final:
                last = rescaled(written.final_values, written.final_moments, 1 / unit, p)
                final_values, final_moments = _by_batch(*last, chunks)
        if states:
            saved = [written.values.flatten(1, 2), written.moments.flatten(1, 2)]
            before = read(chunks, state_channels(scaled_q, p), _per_query(decays.rise, chunks), written, sums=True)  # 3
        inverse = attend_within(chunks, scaled_q, scaled_k, v, sums, p, before, out)  # 4
    return [out, final_values, final_moments, inverse, unit, *saved]


@power_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, values: Tensor | None, moments: Tensor | None,
    p: int, chunk: int, states: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    return _results(q, k, v, p, chunk, states, final)


class _StateGradients(NamedTuple):
    """Gradients that queries and keys receive from beyond their chunk."""

    queries: Tensor | None  # (N G, T, D) from earlier keys
    keys: Tensor  # (N, T, D) from later queries
    values: Tensor  # (N, T, E)
    by_query: Tensor  # (N G, T): gradients of log-weights
    by_key: Tensor  # (N, T)
    across: Tensor | None  # (N, chunks): those of all pairs of a query after and a key before a chunk
    initial: tuple[Tensor, Tensor]  # of the initial state, (N, …)


def _state_gradients(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, delta: Tensor, inverse: Tensor, sums: Sums | None,
    unit: Tensor, values: Tensor, moments: Tensor, final: tuple[Tensor, Tensor] | None, p: int, stateful: bool,
) -> _StateGradients:  # fmt: skip
    """Steps 2 and 3 of the backward pass, from normalised q (N G, T, D) and k (N, T, D), and saved states."""
    width = state_width(k.shape[2], p)
    decays = decays_of(chunks, sums, q.device)
    state_q, state_k = state_channels(q, p), state_channels(k, p)
    factor = _per_query(decays.rise, chunks) * inverse
    if final is not None:
        final_values, final_moments = rescaled(*final, 1 / unit, p)
        final = _by_head(final_values / _weights(width, q.device), final_moments)
    later = write_states(chunks, transposed(state_q, factor), grad, delta, decays.whole, final, reverse=True)  # 2
    by_query, from_earlier, across = torch.zeros_like(inverse), None, None
    if values.numel():
        values, moments = (x.unflatten(1, (chunks.count, -1)) for x in (values, moments))
        earlier = States(values, moments, values, moments, -1 if stateful else 0)
        wide, by_query = read_gradient(chunks, state_q, grad, delta, factor, earlier)  # 3
        from_earlier = state_channels_gradient(wide, q, p)
        across = overlap(chunks, width, earlier, later) * decays.whole
    wide, by_key = read_gradient(chunks, state_k, v, None, decays.fall, later)
    return _StateGradients(
        from_earlier,
        state_channels_gradient(wide, k, p),
        read(chunks, state_k, decays.fall, later, sums=False)[0],
        by_query,
        by_key,
        across,
        (later.final_values, later.final_moments),
    )


@torch.library.custom_op("deadreckon::power_backward", mutates_args=())
def power_backward(
    grad: Tensor, grad_values: Tensor | None, grad_moments: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, out: Tensor, inverse: Tensor, unit: Tensor,
    values: Tensor, moments: Tensor, p: int, chunk: int, stateful: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of log_gate and the initial state, which are empty where there was none."""
    chunks, dtype = Chunks.of(q, k, chunk), _working_dtype(q.dtype)
    grad = dense(grad)
    grad_q, grad_k, grad_v, grad_gate, *grad_initial = _gradients_for(q, k, v, log_gate, p, stateful)
    with torch.cuda.device_of(q):
        sums = None if log_gate is None else gate_sums(log_gate, chunks.heads)[0]
        scaled_q, query_unit = normalise(q, None, dtype)  # 1
        scaled_k, _ = normalise(k, unit, dtype)
        delta = minus_delta(out, grad)
        beyond = None
        if values.numel() or grad_values is not None:
            final = None if grad_values is None or grad_moments is None else (grad_values, grad_moments)
            beyond = _state_gradients(
                chunks, scaled_q, scaled_k, v, grad, delta, inverse, sums, unit, values, moments, final, p, stateful
            )  # 2, 3
            if stateful:
                initial_values, initial_moments = beyond.initial
                initial_values = initial_values * _weights(state_width(k.shape[3], p), q.device)
                grad_initial = _by_batch(*rescaled(initial_values, initial_moments, unit, p), chunks)
        inputs = (chunks, scaled_q, scaled_k, v, grad, sums, p, delta, inverse)
        by_query = query_gradients_within(*inputs, query_unit, None if beyond is None else beyond.queries, grad_q)  # 4
        by_key = key_gradients_within(
            *inputs, unit, None if beyond is None else (beyond.keys, beyond.values), grad_k, grad_v
        )
        if log_gate is not None:
            grad_gate = _gate_gradient(chunks, by_query, by_key, beyond, log_gate)  # 5
    return [grad_q, grad_k, grad_v, grad_gate, *grad_initial]


def _gate_gradient(
    chunks: Chunks, by_query: Tensor, by_key: Tensor, beyond: _StateGradients | None, log_gate: Tensor
) -> Tensor:
    """The gradient of log_gate, from those of log-weights by query (N G, T) and by key (N, T), and those beyond chunks.

    A gate is part of the log-weights of all queries at or after it with all keys before it. Sums of a chunk are of that
    chunk alone: over the whole sequence they would cancel, and the errors of their rounding would not.
    """
    later = torch.zeros_like(by_key)
    if beyond is not None:
        by_query, later = by_query + beyond.by_query, beyond.by_key
    ends = by_query.view(chunks.key_heads, chunks.group, -1).sum(1, dtype=torch.float64) - by_key - later
    ends = _in_chunks(ends, chunks).flip(2).cumsum(2).flip(2)
    ends += _in_chunks(later.double(), chunks).sum(2, keepdim=True)
    if beyond is not None and beyond.across is not None:
        ends += beyond.across.unsqueeze(2)
    ends = ends.flatten(1)[:, : chunks.length].unflatten(0, (chunks.batch, chunks.heads)).transpose(1, 2)
    return ends.to(log_gate.dtype).contiguous()


def _in_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """(N, T) -> (N, chunks, tokens), zeros at the end."""
    room = chunks.count * chunks.size - chunks.length
    return torch.nn.functional.pad(x, (0, room)).unflatten(1, (chunks.count, chunks.size))


def _gradients_for(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, p: int, stateful: bool) -> list[Tensor]:
    """Empty tensors for the gradients."""
    grads = gradients_for(q, k, v, q.new_empty(0) if log_gate is None else log_gate)
    heads = (k.shape[0], k.shape[2]) if stateful else None
    return [*grads, *_state_like(q, heads, state_width(k.shape[3], p), v.shape[3])]


@power_backward.register_fake
def _(
    grad: Tensor, grad_values: Tensor | None, grad_moments: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, out: Tensor, inverse: Tensor, unit: Tensor,
    values: Tensor, moments: Tensor, p: int, chunk: int, stateful: bool,
) -> list[Tensor]:  # fmt: skip
    return _gradients_for(q, k, v, log_gate, p, stateful)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, log_gate, values, _, ctx.p, ctx.chunk, _, ctx.final = inputs
    ctx.stateful = values is not None
    out, _, _, *saved = output
    ctx.save_for_backward(q, k, v, log_gate, out, *saved)
    ctx.set_materialize_grads(False)  # states are large, and most calls have no gradient for them


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad, *final = grads[:3]
    q, k, v, log_gate, out, *saved = ctx.saved_tensors
    if not ctx.final or (final[0] is None and final[1] is None):
        final = [None, None]
    else:
        zeros = _state_like(q, (k.shape[0], k.shape[2]), state_width(k.shape[3], ctx.p), v.shape[3])
        final = [empty.zero_() if x is None else x for x, empty in zip(final, zeros, strict=True)]
    grad_q, grad_k, grad_v, grad_gate, *initial = power_backward(
        torch.zeros_like(out) if grad is None else grad, *final, q, k, v, log_gate, out, *saved,
        ctx.p, ctx.chunk, ctx.stateful,
    )  # fmt: skip
    grad_initial = initial if ctx.stateful else (None, None)
    return grad_q, grad_k, grad_v, None if log_gate is None else grad_gate, *grad_initial, None, None, None, None


power_forward.register_autograd(_gradients, setup_context=_save)


def _symmetrised(state: PowerState) -> PowerState:
    """A block paired with itself holds two channels in both orders; kernels read either for both."""
    squares_end = state.moments.shape[-1] * 8  # rows of such pairs, which come first
    squares = state.values[:, :, :squares_end].unflatten(2, (-1, 8, 8))
    squares = (squares + squares.transpose(3, 4)).flatten(2, 4) / 2
    values = torch.cat([squares, state.values[:, :, squares_end:]], dim=2)
    return PowerState(values, (state.moments + state.moments.mT) / 2)


def attend_power(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, scale: float, p: int, form: Form = "chunked",
    state: PowerState | None = None, final: bool = False,
) -> tuple[Tensor, PowerState | None]:  # fmt: skip
    """q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E), log_gate (B, T, H or Hq) or None -> (B, T, Hq, E).

    In chunks, it starts from `state` and returns the final one if `final`. With gates per query head there is a state
    for each, as if each query head had keys of its own.
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
    initial = (None, None) if state is None else _symmetrised(state)
    chunk = chunk_for(state_width(k.shape[3], p)) if form == "chunked" else 0
    # With a symbolic length, the shapes that the operator returns must not depend on a branch.
    states = state is not None or (chunk > 0 and (isinstance(q.shape[1], torch.SymInt) or q.shape[1] > chunk))
    out, values, moments, *_ = power_forward(q, k, v, log_gate, *initial, p, chunk, states, final)
    return out, _symmetrised(PowerState(values, moments)) if final else None
