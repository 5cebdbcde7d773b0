"""One way up the route tree, computing outputs, and one way down, computing gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from deadreckon.ops.blockwise.causal import CausalLeaves, leaf_size
from deadreckon.ops.blockwise.finite import contained
from deadreckon.ops.blockwise.leaf import HouseholderLeaf, plain_logits
from deadreckon.ops.blockwise.precision import exact, work
from deadreckon.ops.blockwise.runs import LEAF, Gate, Run, gate_of, levels
from deadreckon.ops.blockwise.scores import EvenPower, Softmax, StickBreaking, Tiled
from deadreckon.ops.blockwise.stock import Backend, backend_for, dense_backward, dense_forward
from deadreckon.ops.blockwise.wide import Wide
from deadreckon.ops.factors import Power, Score

TILE = 1 << 20  # logits held at a time where no stock kernel serves
REACH = 256  # query tokens that share a decision on which keys are in reach
CACHED = 64  # matrices of a leaf that a CPU works on at a time

Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries and keys of a run before they rose, and the products of its left and right blocks."""


def score_of(score: Score) -> Tiled:
    """The tiled form of a score."""
    if isinstance(score, Power):
        return EvenPower(score.p)
    return Softmax() if score == "softmax" else StickBreaking()


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, H·G, ...) -> (B·H, T, G, ...)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)


def gates_by_head(log_gate: Tensor, heads: int) -> Tensor:
    """(B, T, H or Hq) -> (B·H, T, 1 or G), fit to be summed: exp(-1e4) is 0 too, and -inf - (-inf) is no number."""
    return by_head(log_gate, heads).to(exact(log_gate.device)).clamp(min=-1e4)


def leaf_tokens(length: int, householder: bool, gates: Tensor | None, score: Score, like: Tensor) -> int:
    """The size of a leaf: what the stock kernel can do by itself or, failing that, what tiles do best."""
    small = min(LEAF, -(-length // 8) * 8)
    if householder or score != "softmax" or backend_for(like) is None:
        return small
    if gates is not None and like.device.type != "cpu":  # only on a CPU it costs nothing to look at the gates
        return small
    return max(small, leaf_size(gates, length) or 0)


class Climb:
    """One pass over the tree. `queries` and `keys` move up from frame to frame in place."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gates: Tensor | None,
        score: Score, scale: float, leaf: int,
    ) -> None:  # fmt: skip
        self.stock: Backend | None = backend_for(q) if score == "softmax" else None
        self.stock_dtype = q.dtype
        strengths = None if w is None or beta is None else beta * w.square().sum(-1)  # of which steps are made
        (k, v, w, beta, gates), self.poison = contained((k, v, w, beta, gates), strengths)  # type: ignore[assignment]
        self.queries, self.keys, self.values = (x.to(work(q.dtype)).contiguous() for x in (q, k, v))
        self.w, self.beta = (None if x is None else x.contiguous() for x in (w, beta))
        self.sums = None if gates is None else gates.contiguous().cumsum(1)
        self.scale, self.leaf, self.group = scale, leaf, q.shape[2]
        self.causal = leaf > LEAF  # leaves that large are the stock kernel's
        self.levels = list(levels(q.shape[1], leaf))
        self.score: Tiled = score_of(score)
        self.leaf_dtype = exact(q.device) if self.score.careful else work(q.dtype)

    # --- both ways -----------------------------------------------------------------------------------------------

    def in_leaves(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """x (N, T, ...), or some of its leaves, as (1, leaves, S, ...): leaves of all heads in one row."""
        return x.view(-1, self.leaf, *x.shape[2:])[part].unsqueeze(0)  # always a view: it is written to

    def leaf_parts(self) -> Iterator[slice]:
        """Leaves, so many at a time that on a CPU their matrices stay in its cache."""
        count = self.keys.shape[0] * self.keys.shape[1] // self.leaf
        size = max(1, CACHED // self.group) if self.keys.device.type == "cpu" else count
        for start in range(0, count, size):
            yield slice(start, start + size)

    def visible(self) -> Tensor:
        """(S, 1, S): which keys of its leaf a query sees; with a stick, not its own."""
        ones = torch.ones(self.leaf, self.leaf, dtype=torch.bool, device=self.keys.device)
        return ones.tril(0 if self.score.sees_itself else -1).unsqueeze(1)

    def leaf_gate(self, part: slice) -> Tensor | None:
        """(N, n, S, 1 | G, S) sums of log gates along the routes inside each leaf."""
        if self.sums is None:
            return None
        sums = self.in_leaves(self.sums, part)
        between = sums.unsqueeze(-1) - sums.mT.unsqueeze(2)
        # What lies above the diagonal is no route: keep it from overflowing.
        return between.masked_fill(~self.visible(), 0).to(self.leaf_dtype)

    def householder_leaf(self, part: slice) -> HouseholderLeaf | None:
        if self.w is None or self.beta is None:
            return None
        return HouseholderLeaf(*(self.in_leaves(x, part) for x in (self.queries, self.keys, self.w, self.beta)))

    def leaf_logits(self, leaf: HouseholderLeaf | None, part: slice) -> Tensor:
        """(N, n, S, G, S) logits inside each leaf, scaled."""
        if leaf:
            return self.scale * leaf.logits.to(self.leaf_dtype)
        q, k = (self.in_leaves(x, part) for x in (self.queries, self.keys))
        return self.scale * plain_logits(q, k).to(self.leaf_dtype)

    def enter_frames(self, leaves: list[HouseholderLeaf]) -> Tensor:
        """Takes queries and keys from the input's frames to those of the leaves; returns the leaves' products."""
        self.queries = torch.cat([leaf.queries for leaf in leaves], dim=1).view_as(self.queries)
        self.keys = torch.cat([leaf.keys for leaf in leaves], dim=1).view_as(self.keys)
        products = torch.cat([leaf.products for leaf in leaves], dim=1)
        return products.view(self.keys.shape[0], -1, *products.shape[2:])

    def causal_leaves(self) -> CausalLeaves:
        assert self.stock is not None
        q, k, v = (self.in_leaves(x)[0] for x in (self.queries, self.keys, self.values))
        sums = None if self.sums is None else self.in_leaves(self.sums)[0]
        return CausalLeaves(self.stock, self.stock_dtype, q, k, v, sums, self.scale)

    def tiles(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        """Query tokens of a block, so many at a time that a tile of logits stays small."""
        size = max(16, TILE // (k.shape[:3].numel() * self.group))
        for start in range(0, q.shape[2], size):
            yield slice(start, start + size)

    def tile_gate(self, gate: Gate | None, tokens: slice) -> Tensor | None:
        if gate is None:
            return None
        return (gate.shift[:, :, tokens].unsqueeze(-1) + gate.bias.mT.unsqueeze(2)).to(self.keys.dtype)

    def reach(self, q: Tensor, k: Tensor, gate: Gate | None, row: Tensor) -> Iterator[tuple[slice, slice]]:
        """Query tokens and the keys they can reach: what gates have shrunk below the output's precision is left out.

        A weight is at most exp(scale ‖q‖ ‖k‖ + gates − row), row being the log-sum-exp of keys that are nearer (or of
        all). Tokens that are left out together weigh less than an eighth of the rounding error. To look at the data
        costs nothing on a CPU, where it also keeps the kernel from the slow arithmetic of denormal numbers.
        """
        whole = slice(0, k.shape[2])
        if gate is None or k.device.type != "cpu":
            yield slice(0, q.shape[2]), whole
            return
        negligible = math.log(torch.finfo(k.dtype).eps / 8 / self.keys.shape[1])
        longest = self.scale * k.norm(dim=-1).amax(2)
        bound = longest[:, :, None, None] * q.norm(dim=-1) + gate.shift - row
        bound = bound if gate.bias.shape[-1] > 1 else bound.amax(-1, keepdim=True)
        waiting: tuple[int, int, int] | None = None  # tokens from, to, and the first key of calls that can be one
        for start in range(0, q.shape[2], REACH):
            nearest = bound[:, :, start : start + REACH].amax(2, keepdim=True)
            reached = (~(nearest + gate.bias < negligible)).flatten(0, 1).any(0).any(-1).nonzero()  # NaN reaches
            if reached.numel() == 0:
                continue
            first, stop = int(reached[0]), min(start + REACH, q.shape[2])
            if waiting and waiting[1:] == (start, first):
                waiting = (waiting[0], stop, first)
                continue
            if waiting:
                yield slice(*waiting[:2]), slice(waiting[2], whole.stop)
            waiting = (start, stop, first)
        if waiting:
            yield slice(*waiting[:2]), slice(waiting[2], whole.stop)

    def rise(self, runs: list[Run], products: Tensor, kept: list[list[Kept]] | None = None) -> Tensor:
        """Moves frames up a level, in place, and returns the products of the larger blocks."""
        pairs = products.shape[1] // 2
        left_products, right_products = products[:, 0 : 2 * pairs : 2], products[:, 1 : 2 * pairs : 2]
        first, old = 0, list[Kept]()
        for run in runs:
            p_left, p_right = (p[:, first : first + run.pairs] for p in (left_products, right_products))
            right, left = run.halves(self.queries)[1].flatten(2, 3), run.halves(self.keys)[0]
            if kept is not None:
                old.append((right.clone(), left.clone(), p_left, p_right))
            run.halves(self.queries)[1].copy_((right @ p_left.mT).unflatten(2, (run.right, self.group)))
            run.halves(self.keys)[0].copy_(left @ p_right)
            first += run.pairs
        if kept is not None:
            kept.append(old)
        return torch.cat([left_products @ right_products, products[:, 2 * pairs :]], dim=1)

    # --- forward -------------------------------------------------------------------------------------------------

    def ascend(self, to_top: bool = False) -> tuple[Tensor, Tensor]:
        """What the score has gathered: outputs (N, T, G, E) and the statistic of each row (N, T, G), not finished.

        With to_top, queries end in the frame of the first token, keys in that of the last, and `products` is the
        whole way: what lies before and after can go on from there.
        """
        out = self.queries.new_zeros(*self.queries.shape[:3], self.values.shape[2], dtype=self.leaf_dtype)
        row = self.score.start(self.queries[..., 0])
        leaves = []
        if self.causal:
            found_out, found_row = self.causal_leaves().forward()
            self.in_leaves(out)[0].copy_(found_out)
            self.in_leaves(row)[0].copy_(found_row)
        for part in () if self.causal else self.leaf_parts():
            leaf = self.householder_leaf(part)
            values = self.in_leaves(self.values, part).to(self.leaf_dtype)
            self.score.add(
                self.leaf_logits(leaf, part), self.leaf_gate(part), self.visible(), values,
                self.in_leaves(out, part), self.in_leaves(row, part),
            )  # fmt: skip
            if leaf:
                leaf.forget()
                leaves.append(leaf)
        products = self.enter_frames(leaves) if leaves else None
        for number, runs in enumerate(self.levels, start=1):
            for run in runs:
                self.add_run(run, out, row)
            if products is not None and (to_top or number < len(self.levels)):
                products = self.rise(runs, products)
        self.products = products
        if self.poison is not None:
            out += self.poison[:, :, None, None]
            if to_top:
                self.keys += self.poison[:, -1:, None]
                self.sums = None if self.sums is None else self.sums + self.poison.unsqueeze(2)
        return out, row

    def add_run(self, run: Run, out: Tensor, row: Tensor) -> None:
        q, k, v = run.halves(self.queries)[1], run.halves(self.keys)[0], run.halves(self.values)[0]
        self.add_block(q, k, v, gate_of(self.sums, run), run.halves(out)[1], run.halves(row)[1])

    def add_block(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, out: Tensor, row: Tensor) -> None:
        """Adds keys that all queries of a block see: q (N, n, tokens, G, D) × k (N, n, S, D), in one frame."""
        if self.stock:
            assert isinstance(self.score, Softmax)
            for tokens, keys in self.reach(q, k, gate, row):
                wide = Wide(self.stock, self.stock_dtype, q, k, v, gate, self.scale, tokens, keys)
                tile_out, lse = dense_forward(self.stock, wide.q, wide.k, wide.v, self.scale)
                tile_out, lse = (x.unflatten(2, wide.tokens_and_group) for x in (tile_out, lse))
                lse = lse if gate is None else lse + gate.shift[:, :, tokens].to(lse.dtype)
                self.score.merge(tile_out[..., : v.shape[-1]], lse, out[:, :, tokens], row[:, :, tokens])
            return
        for tokens in self.tiles(q, k):
            z = self.scale * plain_logits(q[:, :, tokens], k)
            self.score.add(z, self.tile_gate(gate, tokens), None, v, out[:, :, tokens], row[:, :, tokens])

    # --- backward ------------------------------------------------------------------------------------------------

    def descend(self, grad: Tensor, out: Tensor, row: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, w, beta and gates, given that of the output."""
        q, k = self.queries, self.keys
        leaves = [leaf for part in self.leaf_parts() if (leaf := self.householder_leaf(part))]
        kept: list[list[Kept]] = []
        if leaves:
            products = self.enter_frames(leaves)
            for runs in self.levels[:-1]:
                products = self.rise(runs, products, kept)

        self.grad, self.out, self.row = grad, out, row
        rows = (grad.to(self.leaf_dtype) * out.to(self.leaf_dtype)).sum(-1)
        # d weight = grad · v − inner, the second part where rows are divided by their sum.
        self.inner = rows if self.score.normalised else torch.zeros_like(rows)
        self.far = torch.zeros_like(rows)
        self.grad_q, self.grad_k = torch.zeros_like(self.queries), torch.zeros_like(self.keys)
        self.grad_v = torch.zeros_like(self.values)
        self.grad_gates = None if self.sums is None else torch.zeros_like(self.sums)
        grad_products = None
        for number in range(len(self.levels) - 1, -1, -1):
            runs = self.levels[number]
            if number < len(kept):
                grad_products = self.fall(runs, kept[number], grad_products)
                kept.pop()
            for run in runs:
                self.run_gradients(run)
        grad_w, grad_beta = (None if x is None else torch.empty_like(x) for x in (self.w, self.beta))
        self.queries, self.keys = q, k
        if self.causal:
            self.causal_leaf_gradients()
        for number, part in enumerate(() if self.causal else self.leaf_parts()):
            leaf = leaves[number] if leaves else None
            grad_logits = self.leaf_gradients(leaf, part)
            grad_q, grad_k = self.in_leaves(self.grad_q, part), self.in_leaves(self.grad_k, part)
            if leaf and grad_w is not None and grad_beta is not None:
                grad_p = None if grad_products is None else grad_products.flatten(0, 1)[part].unsqueeze(0)
                found = leaf.gradients(grad_logits, grad_q, grad_k, grad_p)
                wanted = (grad_q, grad_k, self.in_leaves(grad_w, part), self.in_leaves(grad_beta, part))
                for x, value in zip(wanted, found, strict=True):
                    x.copy_(value)
            else:
                rows = grad_logits.flatten(2, 3)
                grad_q += (rows @ self.in_leaves(k, part)).view_as(grad_q)
                grad_k += rows.mT @ self.in_leaves(q, part).flatten(2, 3)
        grad_q, grad_k = self.grad_q, self.grad_k
        as_given = self.stock_dtype
        return grad_q.to(as_given), grad_k.to(as_given), self.grad_v.to(as_given), grad_w, grad_beta, self.grad_gates

    def fall(self, runs: list[Run], old: list[Kept], grad_products: Tensor | None) -> Tensor:
        """Undoes `rise`: gradients of frames and products of this level from those of the level above."""
        grad_lefts, grad_rights, first = [], [], 0
        for run, (right, left, p_left, p_right) in zip(runs, old, strict=True):
            # Back in the frames of this level, where the dense blocks of this run are computed.
            frame_q, frame_k = run.halves(self.queries)[1], run.halves(self.keys)[0]
            frame_q.copy_(right.unflatten(2, frame_q.shape[2:4]))
            frame_k.copy_(left)
            grad_q, grad_k = run.halves(self.grad_q)[1], run.halves(self.grad_k)[0]
            rows = grad_q.flatten(2, 3)
            grad_left, grad_right = rows.mT @ right, left.mT @ grad_k
            grad_q.copy_((rows @ p_left).unflatten(2, grad_q.shape[2:4]))
            grad_k.copy_(grad_k @ p_right.mT)
            if grad_products is not None:
                above = grad_products[:, first : first + run.pairs]
                grad_left += above @ p_right.mT
                grad_right += p_left.mT @ above
            first += run.pairs
            grad_lefts.append(grad_left)
            grad_rights.append(grad_right)
        pairs = torch.stack([torch.cat(grad_lefts, 1), torch.cat(grad_rights, 1)], dim=2).flatten(1, 2)
        if grad_products is None:  # the level above is the top, whose products nobody needs
            blocks = -(-self.queries.shape[1] // runs[0].left)
            lone = pairs.new_zeros(pairs.shape[0], blocks - pairs.shape[1], *pairs.shape[2:])
        else:
            lone = grad_products[:, first:]
        return torch.cat([pairs, lone], dim=1)

    def run_gradients(self, run: Run) -> None:
        q, k, v = run.halves(self.queries)[1], run.halves(self.keys)[0], run.halves(self.values)[0]
        grad, out, row = (run.halves(x)[1] for x in (self.grad, self.out, self.row))
        grad_q, grad_k, grad_v = (
            run.halves(self.grad_q)[1], run.halves(self.grad_k)[0], run.halves(self.grad_v)[0]
        )  # fmt: skip
        gate = gate_of(self.sums, run)
        if self.stock:
            by_query, by_key = self.gate_gradients_for(q, k, gate)
            for tokens, keys in self.reach(q, k, gate, row):
                wide = Wide(self.stock, self.stock_dtype, q, k, v, gate, self.scale, tokens, keys)
                lse = row[:, :, tokens]
                lse = lse if gate is None else lse - gate.shift[:, :, tokens].to(lse.dtype)
                wide_q, wide_k, wide_v = dense_backward(
                    self.stock, wide.like(grad[:, :, tokens]), wide.q, wide.k, wide.v, wide.like(out[:, :, tokens]),
                    lse.flatten(2, 3), self.scale,
                )  # fmt: skip
                grad_q[:, :, tokens] += wide_q[..., : q.shape[-1]].unflatten(2, wide.tokens_and_group)
                grad_k[:, :, keys] += wide_k[..., : k.shape[-1]]
                grad_v[:, :, keys] += wide_v[..., : v.shape[-1]]
                if by_query is not None and by_key is not None:
                    rows, columns = wide.gate_gradients(wide_q, wide_k)
                    by_query[:, :, tokens] += rows
                    by_key[:, :, keys] += columns
            if by_query is not None and by_key is not None:
                self.add_gate_gradients(run, by_query, by_key)
            return
        inner, far = run.halves(self.inner)[1].to(k.dtype), run.halves(self.far)[1]
        by_query, by_key = self.gate_gradients_for(q, k, gate)
        for tokens in self.tiles(q, k):
            grad_tile = grad[:, :, tokens].to(k.dtype)
            grad_weight = plain_logits(grad_tile, v) - inner[:, :, tokens].unsqueeze(-1)
            z = self.scale * plain_logits(q[:, :, tokens], k)
            grad_z, grad_gate, weights = self.score.gradients(
                z, self.tile_gate(gate, tokens), None, grad_weight, row[:, :, tokens], far[:, :, tokens]
            )
            rows = self.scale * grad_z.flatten(2, 3)
            grad_q[:, :, tokens] += (rows @ k).unflatten(2, grad_z.shape[2:4])
            grad_k += rows.mT @ q[:, :, tokens].flatten(2, 3)
            grad_v += weights.flatten(2, 3).mT @ grad_tile.flatten(2, 3)
            if by_query is not None and by_key is not None:
                by_query[:, :, tokens] = grad_gate.sum(-1)
                column = grad_gate.sum(2).mT  # (N, n, S, G)
                by_key += column if by_key.shape[-1] > 1 else column.sum(-1, keepdim=True)
        if by_query is not None and by_key is not None:
            self.add_gate_gradients(run, by_query, by_key)

    def gate_gradients_for(self, q: Tensor, k: Tensor, gate: Gate | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Room for what the log-weights' gradients add up to: (N, n, right, G) by query, (N, n, left, 1 | G) by key."""
        if gate is None:
            return None, None
        return q.new_zeros(q.shape[:4]), k.new_zeros(gate.bias.shape)

    def add_gate_gradients(self, run: Run, by_query: Tensor, by_key: Tensor) -> None:
        """A gate at s is on the routes that cross it: from keys before s in the left half, to queries from s on."""
        assert self.grad_gates is not None
        if self.grad_gates.shape[2] == 1:
            by_query = by_query.sum(-1, keepdim=True)
        by_query, by_key = by_query.to(self.grad_gates.dtype), by_key.to(self.grad_gates.dtype)
        left, right = run.halves(self.grad_gates)
        left[:, :, 1:] += by_key[:, :, :-1].cumsum(2)
        right += by_query.flip(2).cumsum(2).flip(2)

    def add_leaf_gate_gradients(self, ends: Tensor, part: slice = slice(None)) -> None:
        """A gate at s is on the routes that end at s or later, less those that also begin there."""
        assert self.grad_gates is not None
        ends = ends.to(self.grad_gates.dtype).flip(2).cumsum(2).flip(2)
        self.in_leaves(self.grad_gates, part).add_(ends)

    def causal_leaf_gradients(self) -> None:
        assert self.grad_gates is not None
        grad, out, row = (self.in_leaves(x)[0] for x in (self.grad, self.out, self.row))
        *found, ends = self.causal_leaves().gradients(grad, out, row)
        for x, value in zip((self.grad_q, self.grad_k, self.grad_v), found, strict=True):
            self.in_leaves(x)[0].add_(value)
        if self.grad_gates.shape[2] == 1:
            ends = ends.sum(-1, keepdim=True)
        self.add_leaf_gate_gradients(ends.unsqueeze(0))

    def leaf_gradients(self, leaf: HouseholderLeaf | None, part: slice) -> Tensor:
        """d logits of these leaves, before scaling; d values and d gates are added where they belong."""
        values, grad = (self.in_leaves(x, part).to(self.leaf_dtype) for x in (self.values, self.grad))
        inner, row, far = (self.in_leaves(x, part) for x in (self.inner, self.row, self.far))
        grad_weight = plain_logits(grad, values) - inner.unsqueeze(-1)
        grad_z, grad_gate, weights = self.score.gradients(
            self.leaf_logits(leaf, part), self.leaf_gate(part), self.visible(), grad_weight, row, far
        )
        self.in_leaves(self.grad_v, part).add_(weights.flatten(2, 3).mT @ grad.flatten(2, 3))
        if self.grad_gates is not None:
            if self.grad_gates.shape[2] == 1:
                grad_gate = grad_gate.sum(3, keepdim=True)
            self.add_leaf_gate_gradients(grad_gate.sum(-1) - grad_gate.sum(2).mT, part)
        return (self.scale * grad_z).to(self.keys.dtype)
