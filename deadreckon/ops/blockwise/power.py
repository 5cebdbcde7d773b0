"""Even-power attention in three forms. A weight (qᵀk)^p is ⟨φ(q), φ(k)⟩, so that one matrix holds all preceding keys:

    state_t = f_t · state_{t−1} + φ(k_t) [v_t, 1]ᵀ,    [o_t · Z_t, Z_t] = φ(q_t)ᵀ state_t

- attention: every logit to the power p, quadratic in T (`tree.py`);
- recurrent: the above, token by token, except for the last few keys, which are attended to directly;
- chunked: powers of logits inside a chunk, and the state of all preceding chunks. The cost is linear in T.

Rotations are already applied to q and k (the paper's μ, the running angle). Gates are summed from the edges of a
chunk, exp(c_i − c_start) and exp(c_end − c_j), so that no sum is long; a state decays by exp(c_end − c_start).

A state is (N, F, kinds, E + 1), F the dimension of φ; there is one kind, or one for each query head of a group where
their gates differ. It is scaled by multiplicities, not their roots. The last column accumulates the normaliser Z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.backward import backward
from deadreckon.ops.blockwise.finite import contained
from deadreckon.ops.blockwise.forward import forward
from deadreckon.ops.blockwise.precision import exact, faded, in_range, work
from deadreckon.ops.blockwise.problem import Problem, by_head, gates_by_head
from deadreckon.ops.blockwise.products import times_transposed
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.blockwise.symmetric import dimension, monomial_gradients, monomials, multiplicities, symmetric_power
from deadreckon.ops.blockwise.tree import tree_backward_pass, tree_forward_pass
from deadreckon.ops.factors import Form, Power
from deadreckon.ops.tracing import operator, room_like, without_autocast

RECENT = 8  # tokens that the recurrent form has not folded into its state
HELD = {"cpu": 1 << 22, "cuda": 1 << 26}  # numbers of φ that are held at a time: few in a cache, many for few launches
BREAK_EVEN = {("cpu", 2): 2.0, ("cuda", 2): 2.2, ("cuda", 4): 10.0}
"""T from which the chunked form is faster, in multiples of the dimension of φ, by device and p; 4 where not measured.

On a CPU: one core, float32, 4 heads, forward and backward, process times at four lengths and more, best of several
runs. Without gates chunked and attention break even at about T = 800 for (D, p) = (16, 2), 1000 for (32, 2), 5200 for
(64, 2), 1250 for (8, 4) and beyond 12 000 for (16, 4); with gates, which cost attention more, at 400, 750, 2600, below
1000 and at 5000. States for p > 2 are float64. On an H200, bfloat16, 8 heads, gated (results/powers-h200.md), they
break even at about T = 2600 for (32, 2) and 4500 for (64, 2), and by extrapolation at 38 000 for (16, 4): the kernels'
φ has more rows there than it needs.
"""
# With gates:
BREAK_EVEN_GATED = BREAK_EVEN | {("cpu", 2): 1.4, ("cpu", 4): 1.3}
FEWEST = {"cpu": 768, "cuda": 2560}  # tokens: below, chunks are too small to be fast


def chunk_tokens(width: int, p: int) -> int:
    """The size of a chunk: half the dimension of φ, so that its state takes about the memory of its keys and values."""
    return -(-max(dimension(width, p) // 2, 4 * LEAF) // LEAF) * LEAF


def chunked_from(width: int, p: int, device: torch.device, gated: bool) -> int:
    """The number of tokens from which the chunked form is faster."""
    even = (BREAK_EVEN_GATED if gated else BREAK_EVEN).get((device.type, p), 4.0) * dimension(width, p)
    return math.ceil(max(even, FEWEST.get(device.type, 768)))


def form_for(score: Power, q: Tensor, gated: bool) -> Form:
    """The form for q (B, T, Hq, D): the requested one or, for ``"auto"``, the faster.

    For a symbolic length, chunked: a sequence shorter than a chunk is then one chunk, computed as attention.
    """
    if score.form != "auto":
        return score.form
    length = q.shape[1]
    long_enough = isinstance(length, torch.SymInt) or length >= chunked_from(q.shape[3], score.p, q.device, gated)
    return "chunked" if long_enough else "attention"


def state_dtype(dtype: torch.dtype, p: int, device: torch.device) -> torch.dtype:
    """The precision of states for inputs of that dtype: single for squares, double beyond.

    One key may be far longer than all others, and a query almost at a right angle to it, so that its weight is a small
    difference of large monomials: off by ε / cos^p. In float32 a twelfth of all queries would lose a key of 16 channels
    that way with p = 4.
    """
    return work(dtype) if p == 2 else exact(device)


# States ---------------------------------------------------------------------------------------------------------------


def _pieces(length: int, numbers: int, device: torch.device) -> Iterator[slice]:
    """Slices of tokens, sized so that φ of a slice stays within `HELD`; `numbers` is the size of φ per token."""
    size = max(16, HELD.get(device.type, HELD["cpu"]) // numbers)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _kinds(q: Tensor, kinds: int) -> Iterator[tuple[int, slice]]:
    """Each kind of gates, and the query heads of a group that it applies to."""
    share = q.shape[2] // kinds
    for kind in range(kinds):
        yield kind, slice(kind * share, (kind + 1) * share)


def with_ones(v: Tensor) -> Tensor:
    """v and a column of ones, which adds up to the sum of weights."""
    return pad(v, (0, 1), value=1.0)


def without_noise(values: Tensor, q: Tensor, p: int, sums: Tensor) -> Tensor:
    """Values (..., G, E + 1) read by q (..., G, D), zeroed where they are rounding error; sums (..., 1 | G, F) hold Z.

    A sum of weights no larger than the rounding errors of its terms carries no information: numerically, that query is
    orthogonal to all keys.
    """
    noise = 16 * torch.finfo(values.dtype).eps * q.detach().norm(dim=-1) ** p * sums.detach().norm(dim=-1)
    return values.masked_fill(values[..., -1:] <= noise.unsqueeze(-1), 0)


def read(state: Tensor, q: Tensor, p: int) -> Tensor:
    """φ(q)ᵀ state: (N, T, G, D) -> (N, T, G, E + 1)."""
    values = q.new_empty(*q.shape[:3], state.shape[3])
    for tokens in _pieces(q.shape[1], q.shape[0] * q.shape[2] * state.shape[1], q.device):
        for kind, heads in _kinds(q, state.shape[2]):
            rows = q[:, tokens, heads]
            features = monomials(rows.flatten(1, 2).mT.contiguous(), p)  # (N, F, tokens · heads)
            values[:, tokens, heads] = (features.mT @ state[:, :, kind]).unflatten(1, rows.shape[1:3])
    return without_noise(values, q, p, state[..., -1].mT.unsqueeze(1))


def read_gradients(state: Tensor, q: Tensor, p: int, grad: Tensor, grad_state: Tensor) -> Tensor:
    """d q, from the gradient of the values read (N, T, G, E + 1); adds to grad_state."""
    grad_q = torch.empty_like(q)
    for tokens in _pieces(q.shape[1], q.shape[0] * q.shape[2] * state.shape[1], q.device):
        for kind, heads in _kinds(q, state.shape[2]):
            rows, grad_rows = q[:, tokens, heads], grad[:, tokens, heads].flatten(1, 2)
            columns = rows.flatten(1, 2).mT.contiguous()
            grad_columns = monomial_gradients(columns, p, times_transposed(state[:, :, kind], grad_rows))
            grad_q[:, tokens, heads] = grad_columns.mT.unflatten(1, rows.shape[1:3])
            grad_state[:, :, kind] += monomials(columns, p) @ grad_rows
    return grad_q


def written(k: Tensor, v: Tensor, fade: Tensor, p: int) -> Tensor:
    """The state of these tokens alone: k (N, T, D), v (N, T, E), and the decay `fade` (N, T, kinds) of each."""
    columns = (with_ones(v).unsqueeze(2) * fade.unsqueeze(3)).flatten(2)
    state = k.new_zeros(k.shape[0], dimension(k.shape[2], p), columns.shape[2])
    for tokens in _pieces(k.shape[1], k.shape[0] * state.shape[1], k.device):
        state += monomials(k[:, tokens].mT.contiguous(), p) @ columns[:, tokens]
    state *= multiplicities(k.shape[2], p).to(state).unsqueeze(1)
    return state.unflatten(2, (fade.shape[2], -1))


def write_gradients(k: Tensor, v: Tensor, fade: Tensor, p: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d k, d v and d log fade, from the gradient of the state."""
    values = with_ones(v).unsqueeze(2)
    columns = (values * fade.unsqueeze(3)).flatten(2)
    grad = grad.flatten(2) * multiplicities(k.shape[2], p).to(grad).unsqueeze(1)
    grad_k, grad_columns = torch.empty_like(k), torch.empty_like(columns)
    for tokens in _pieces(k.shape[1], k.shape[0] * grad.shape[1], k.device):
        keys = k[:, tokens].mT.contiguous()
        grad_columns[:, tokens] = monomials(keys, p).mT @ grad
        grad_k[:, tokens] = monomial_gradients(keys, p, times_transposed(grad, columns[:, tokens])).mT
    grad_columns = grad_columns.unflatten(2, (fade.shape[2], -1)) * fade.unsqueeze(3)
    return grad_k, grad_columns[..., :-1].sum(2), (grad_columns * values).sum(3)


# Forms ----------------------------------------------------------------------------------------------------------------


def attend_power_blockwise(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, score: Power) -> Tensor:
    """Even-power attention of (B, T, Hq, D), (B, T, H, D), (B, T, H, E), in the form that `score` requests.

    There is no scale: weights are divided by their sum.
    """
    batch, length, query_heads, _ = q.shape
    heads = k.shape[2]
    rows, keys, values = (by_head(x.to(work(q.dtype)), heads) for x in (q, k, v))
    rows, keys = in_range(rows, keys.squeeze(2))
    gates = None if log_gate is None else gates_by_head(log_gate, heads)
    if score.form == "recurrent":
        output = recurrent(rows, keys, values.squeeze(2), gates, score.p)
    else:
        inputs = rows, keys, values.squeeze(2), gates
        # A tracer may not know the length, and so not how many states there are.
        keep = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        keep = keep and any(x is not None and x.requires_grad for x in inputs)
        output = power_forward(*inputs, score.p, score.form, keep)[0]
    output = output.unflatten(0, (batch, heads)).transpose(1, 2)  # (B, T, H, G, E)
    return output.reshape(batch, length, query_heads, -1).to(q.dtype)


def recurrent(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, p: int) -> Tensor:
    """The recurrent form, one token at a time, q (N, T, G, D): for reading and testing.

    The last `RECENT` keys are not in the state yet: their weights are powers of logits, exact. A weight read from a
    state is a difference of monomials, and lost below 16 ε of their size, where all keys in the state are within
    (16 ε)^(1/p) of a right angle to the query. (3.9e-3 for p = 6: one key of 16 channels in eighty, but never eight of
    them; and where gates leave fewer, the whole state has decayed.) In float64. Gradients need the states of all
    tokens, T · F · (E + 1) numbers.
    """
    dtype = exact(q.device)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    gates = k.new_zeros(*k.shape[:2], 1) if gates is None else gates.to(dtype)
    recent = _over_recent(q, k, v, gates, p)
    queries, keys, values = symmetric_power(q, p), symmetric_power(k, p), with_ones(v)
    state = keys.new_zeros(k.shape[0], gates.shape[2], keys.shape[2], values.shape[2])  # (N, kinds, F, E + 1)
    outputs = []
    for t in range(q.shape[1]):
        state = gates[:, t].exp()[..., None, None] * state
        if t >= RECENT:
            fade = gates[:, t - RECENT + 1 : t + 1].sum(1).exp()[..., None, None]
            state = state + fade * (keys[:, t - RECENT, None, :, None] * values[:, t - RECENT, None, None])
        read_out = without_noise((queries[:, t].unsqueeze(2) @ state).squeeze(2), q[:, t], p, state[..., -1])
        weighted, total = (read_out + recent[:, t]).split([v.shape[2], 1], dim=-1)
        outputs.append(weighted / torch.where(total == 0, 1, total))
    return torch.stack(outputs, dim=1)


def _over_recent(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, p: int) -> Tensor:
    """Each query over the last RECENT tokens, its own included, and the sum of weights: (N, T, G, E + 1)."""

    def window(x: Tensor) -> Tensor:  # (N, T, C) -> (N, T, C, RECENT)
        return pad(x, (0, 0, RECENT - 1, 0)).unfold(1, RECENT, 1)

    logits = q @ window(k)  # zero where there is no token
    later = pad(window(gates)[..., 1:], (0, 1))  # the gates after each token
    weights = logits**p * later.flip(-1).cumsum(-1).flip(-1).exp()
    return weights @ window(with_ones(v)).mT


class _Chunks:
    """Chunks of (N, T, ...): attention inside all chunks as one problem, and the gates that their states need.

    T is padded to chunks of equal size, each a whole number of leaves.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, p: int) -> None:
        self.length = q.shape[1]
        (k, v, gates), self.poison = contained((k, v, gates))  # type: ignore[assignment]
        count = -(-self.length // chunk_tokens(q.shape[3], p))
        chunk = -(-self.length // (count * LEAF)) * LEAF
        self.padding = -self.length % chunk
        q, k, v = (self.whole(x) for x in (q, k, v))
        gates = None if gates is None else self.whole(gates)
        self.p, self.count = p, q.shape[1] // chunk
        inside = (None if x is None else x.reshape(-1, chunk, *x.shape[2:]) for x in (q, k, v, gates))
        q, k, v, gates = inside  # type: ignore[assignment]
        self.problem = Problem.prepare(q, k, v, None, None, gates, Power(p), 1.0, LEAF)
        self.tensors = [self.split(x) for x in (self.problem.queries, self.problem.keys, self.problem.values)]
        self.dtype = state_dtype(q.dtype, p, q.device)
        if self.problem.sums is None:
            ones = torch.ones((), dtype=self.dtype, device=q.device)
            self.from_start = self.to_end = ones.expand(*self.tensors[1].shape[:3], 1)
        else:
            sums = self.split(self.problem.sums)  # within a chunk, in float64
            self.from_start, self.to_end = (faded(x, self.dtype) for x in (sums, sums[:, :, -1:] - sums))
        self.across = self.from_start[:, :, -1]  # (N, chunks, kinds)

    def whole(self, x: Tensor, value: float = 0.0) -> Tensor:
        """(N, T, ...), padded."""
        return pad(x, (0, 0) * (x.dim() - 2) + (0, self.padding), value=value)

    def cut(self, x: Tensor) -> Tensor:
        """(N · chunks, chunk, ...) -> (N, T, ...), without the padding."""
        return self.split(x).flatten(1, 2)[:, : self.length].contiguous()

    def split(self, x: Tensor) -> Tensor:
        """(N · chunks, chunk, ...) -> (N, chunks, chunk, ...)."""
        return x.unflatten(0, (-1, self.count))

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a chunk, in the precision of states."""
        q, k, v = (x[:, n].to(self.dtype) for x in self.tensors)
        return q, k, v

    def states(self) -> Iterator[tuple[int, Tensor]]:
        """The index of each chunk, from the second on, and the state of all preceding chunks."""
        state: Tensor | None = None
        for n in range(self.count - 1):
            _, k, v = self[n]
            new = written(k, v, self.to_end[:, n], self.p)
            state = new if state is None else new.addcmul_(state, self.across[:, n, None, :, None])
            yield n + 1, state


def _state_gradients(
    chunks: _Chunks, grad: Tensor, out: Tensor, total: Tensor, answered: Tensor, states: Sequence[Tensor] | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and gates through states, from the last chunk to the first."""
    p, kinds = chunks.p, chunks.across.shape[2]
    grad_read = torch.cat([grad.to(out.dtype), -(grad * out).sum(-1, keepdim=True)], dim=-1) / total.unsqueeze(-1)
    grad_read = chunks.split(grad_read.to(chunks.dtype)) * chunks.from_start.unsqueeze(-1)  # of what was read
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in chunks.tensors)
    grad_gates = torch.zeros(chunks.from_start.shape, dtype=exact(out.device), device=out.device)
    grad_state = torch.zeros_like(states[0])
    for n in range(chunks.count - 1, -1, -1):
        q, k, v = chunks[n]
        if n < chunks.count - 1:
            grad_k[:, n], grad_v[:, n], by_key = write_gradients(k, v, chunks.to_end[:, n], p, grad_state)
            grad_gates[:, n, 1:] += by_key[:, :-1].to(grad_gates).cumsum(1)
            grad_state *= chunks.across[:, n, None, :, None]
            if n:
                grad_gates[:, n] += (grad_state * states[n - 1]).sum((1, 3)).unsqueeze(1)
        if n:
            counted = grad_read[:, n] * answered[:, n].unsqueeze(-1)
            grad_q[:, n] = read_gradients(states[n - 1], q, p, counted, grad_state)
            # What is read is homogeneous of degree p in q: so d log-weights add up to q · dq / p.
            by_query = (q * grad_q[:, n]).sum(-1, dtype=grad_gates.dtype) / p
            by_query = by_query if kinds > 1 else by_query.sum(-1, keepdim=True)
            grad_gates[:, n] += by_query.flip(1).cumsum(1).flip(1)
    return grad_q, grad_k, grad_v, grad_gates


# The operator ---------------------------------------------------------------------------------------------------------


def _state_count(q: Tensor, gates: Tensor | None, p: int, form: str) -> int:
    """The number of states passed from chunk to chunk: none in the attention form."""
    length, width = q.shape[1], q.shape[3]
    if form == "attention" or (form == "auto" and length < chunked_from(width, p, q.device, gates is not None)):
        return 0
    return (length - 1) // chunk_tokens(width, p)


def _room(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, p: int, form: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors in the shapes of the operator's results; also its fake implementation."""
    precise = exact(q.device)
    out = q.new_empty(*q.shape[:3], v.shape[2])
    total = q.new_empty(q.shape[:3], dtype=precise)
    count = _state_count(q, gates, p, form) if keep else 0
    state = (q.shape[0], dimension(q.shape[3], p), 1 if gates is None else gates.shape[2], v.shape[2] + 1)
    states = q.new_empty(count, *state, dtype=state_dtype(q.dtype, p, q.device))
    return out, torch.empty_like(out, dtype=precise), total, torch.empty_like(total, dtype=torch.bool), states


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, p: int, form: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention of q (N, T, G, D), k (N, T, D), v (N, T, E), gates (N, T, 1 or G).

    Returns:
        The output (N, T, G, E); for the backward pass, the same in float64, the sum of weights of each row (N, T, G),
        which queries read more than rounding errors from a state (N, T, G), and the states, if they are kept.
    """
    *_, answered, states = _room(q, k, v, gates, p, form, keep)
    if not _state_count(q, gates, p, form):
        return *tree_forward_pass(q, k, v, None, None, gates, "power", p, 1.0), answered.zero_(), states
    chunks = _Chunks(q, k, v, gates, p)
    out, total = forward(chunks.problem)
    outs, totals = chunks.split(out), chunks.split(total)
    answered = torch.zeros_like(total, dtype=torch.bool)
    for n, state in chunks.states():
        past = read(state, chunks[n][0], p)  # (N, chunk, G, E + 1)
        chunks.split(answered)[:, n] = past[..., -1] != 0
        past *= chunks.from_start[:, n].unsqueeze(3)
        outs[:, n] += past[..., :-1]
        totals[:, n] += past[..., -1]
        if keep:
            states[n - 1] = state
    out = chunks.problem.dense.score.finish(out, total)
    out, total, answered = (chunks.cut(x) for x in (out, total, answered))
    if chunks.poison is not None:
        out += chunks.poison[:, :, None, None]
    return out.to(q.dtype, copy=True), out, total, answered, states


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rounded_out: Tensor, out: Tensor,
    total: Tensor, answered: Tensor, states: Tensor, p: int, form: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if there are any, gates. φ is recomputed."""
    if not _state_count(q, gates, p, form):
        return tree_backward_pass(grad, q, k, v, None, None, gates, rounded_out, out, total, "power", p, 1.0)
    with without_autocast(q):
        chunks = _Chunks(q, k, v, gates, p)
        size = chunks.tensors[0].shape[2]
        grad, out, answered = (chunks.whole(x).unflatten(1, (-1, size)) for x in (grad, out, answered))
        total = chunks.whole(total, chunks.problem.dense.score.padding_statistic).unflatten(1, (-1, size))
        grad, out, total = (x.flatten(0, 1) for x in (grad, out, total))
        inside = backward(chunks.problem, grad.contiguous(), out, total)
        kept = states if len(states) else [state for _, state in chunks.states()]
        across = _state_gradients(chunks, grad, out, total, answered, kept)
        pairs = zip((inside.q, inside.k, inside.v, inside.gates), across, strict=True)
        return [chunks.cut(x + y.view_as(x)) for x, y in pairs if x is not None]


def _gradient_room(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rounded_out: Tensor, out: Tensor,
    total: Tensor, answered: Tensor, states: Tensor, p: int, form: str,
) -> list[Tensor]:  # fmt: skip
    return room_like(q, k, v, gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, p, form, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = p, form
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    grad_q, grad_k, grad_v, *grad_gates = power_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return grad_q, grad_k, grad_v, *(grad_gates or [None]), None, None, None


power_backward = operator("deadreckon::even_power_backward", _backward, _gradient_room)
power_forward = operator("deadreckon::even_power", _forward, _room, gradients=_gradients, save=_save)
