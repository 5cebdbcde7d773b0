"""The route tree on kernels, for some heads at a time: leaves, walks through blocks of leaves, and the levels above.

As in `blockwise/tree.py`, but glue is fused, head by head. A block of leaves is walked through (`kernels/walk.py`);
above that, levels are dense attention: cuDNN's, where there are no gates and it serves, else ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF, Run, levels
from deadreckon.ops.blockwise.stock import Backend, backend_for, dense_backward, dense_forward
from deadreckon.ops.triton.gated.delta import prepare
from deadreckon.ops.triton.gated.flash import Documents, Pairs, Reach, Sums, flash_backward, flash_forward
from deadreckon.ops.triton.householder.frames import Side, cross, cross_back, multiply, multiply_back, place
from deadreckon.ops.triton.householder.leaf import Back, Frames, Leaves, Place
from deadreckon.ops.triton.householder.merge import Part, merge
from deadreckon.ops.triton.householder.walk import WALK, Walk


class Rows(NamedTuple):
    """What going back through dense blocks needs of each query, head by head."""

    out: Tensor  # (n, T, G, E)
    lse: Tensor  # (n, T, G)
    back: Back


def stock_for(q: Tensor, v: Tensor) -> Backend | None:
    """The stock kernel for dense blocks without gates, if it is faster than ours."""
    return "cudnn" if q.shape[-1] == v.shape[-1] <= 128 and backend_for(q) == "cudnn" else None


class Dense:
    """The dense blocks of some heads."""

    def __init__(
        self, frames: Frames, sums: Sums | None, reach: Reach | None, documents: Documents | None, scale: float
    ) -> None:
        self.frames, self.sums, self.reach, self.documents, self.scale = frames, sums, reach, documents, scale
        plain = sums is None and documents is None
        self.stock = stock_for(frames.queries, frames.values) if plain else None

    def forward(self, run: Run) -> Part:
        """Output and log-sum-exp of a run's queries over its keys."""
        q, k, v = run.halves(self.frames.queries)[1], run.halves(self.frames.keys)[0], run.halves(self.frames.values)[0]
        if self.stock:
            out, lse = dense_forward(self.stock, q.flatten(2, 3), k, v, self.scale)
            return (out.contiguous(), lse.contiguous()), run
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        flash_forward(
            _grouped(q),
            k.unsqueeze(1),
            v.unsqueeze(1),
            self.sums,
            self.scale,
            _grouped(out),
            _grouped(lse),
            Pairs(*run),
            self.reach,
            self.documents,
        )
        return (out, lse), run

    def backward(self, run: Run, q: Tensor, k: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q (n, pairs, right, G, D), k and v (n, pairs, left, ·); q and k are in the run's frames."""
        v = run.halves(self.frames.values)[0]
        if self.stock and not torch.are_deterministic_algorithms_enabled():  # cuDNN adds up dq in any order
            grad, out, lse = (run.halves(x)[1].flatten(2, 3) for x in (rows.back.grad, rows.out, rows.lse))
            found = dense_backward(self.stock, grad, q.flatten(2, 3), k, v, out, lse, self.scale, steady=True)
            grad_q, grad_k, grad_v = (x.contiguous() for x in found)
            return grad_q.view(q.shape), grad_k, grad_v
        back = rows.back
        grad, delta, own, by_query = (run.halves(x)[1] for x in (back.grad, back.delta, back.own, back.by_query))
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        flash_backward(
            _grouped(q), k.unsqueeze(1), v.unsqueeze(1), self.sums, self.scale, _grouped(grad), _grouped(delta),
            _grouped(own), _grouped(grad_q), grad_k.unsqueeze(1), grad_v.unsqueeze(1), _grouped(by_query),
            back.by_key, Pairs(*run), self.reach, self.documents,
        )  # fmt: skip
        return grad_q, grad_k, grad_v


def _grouped(x: Tensor) -> Tensor:
    """(n, pairs, tokens, G, ...) -> (n, 1, G, pairs, tokens, ...), a view."""
    return x.movedim(3, 1).unsqueeze(1)


class Kept(NamedTuple):
    """What the forward pass keeps of leaves for going back, all heads: to make it anew takes as long as it took."""

    queries: Tensor  # frames, see `Frames`; empty where one leaf is all there is
    keys: Tensor
    values: Tensor
    products: Tensor
    inverse: Tensor  # (N, leaves, 64, 64): M⁻¹

    @classmethod
    def room(cls, q: Tensor, k: Tensor, v: Tensor) -> Kept:
        """To be written to."""
        heads, leaves = k.shape[0] * k.shape[2], -(-k.shape[1] // LEAF)
        inverse = q.new_empty(heads, leaves, LEAF, LEAF)
        return cls(*frames_for(q, k, v, heads), inverse) if leaves > 1 else cls.nothing(q)._replace(inverse=inverse)

    @classmethod
    def nothing(cls, q: Tensor) -> Kept:
        """Where nobody will go back."""
        return cls(*(q.new_empty(0) for _ in range(5)))


def frames_for(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Frames:
    """Room for the frames of so many key heads of q (B, T, Hq, D), k (B, T, H, D), v (B, T, H, E)."""
    leaves, width = -(-k.shape[1] // LEAF), k.shape[3]
    tokens, group = leaves * LEAF, q.shape[2] // k.shape[2]
    return Frames(
        buffer(q, heads, tokens, group, width), buffer(q, heads, tokens, width), buffer(q, heads, tokens, v.shape[3]),
        q.new_empty(heads, leaves, width, width, dtype=torch.float32),
    )  # fmt: skip


def buffer(like: Tensor, heads: int, tokens: int, *shape: int) -> Tensor:
    """(n, T, ...) with room for one more token in each head.

    That gives cuDNN's plans, which PyTorch finds by the layout of q, k and v alone, a layout that is only used here,
    always with the same layout of output and gradient.
    """
    return like.new_empty(heads, tokens + 1, *shape)[:, :tokens]


class Closed:
    """The first leaves of some heads, as what comes later sees them: keys in the frame of their end, and one product.

    They are cut like the binary digits of their number: blocks of the tree, the largest first, and at last less than a
    block of leaves. What follows on a block are smaller ones, known by the time the climb is at its level: its keys
    cross them all at once.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.tokens = keys, keys.shape[1]  # (n, tokens, D), to be written to
        width = keys.shape[2]
        self.product = torch.eye(width, dtype=torch.float32, device=keys.device).expand(keys.shape[0], width, width)

    def take_leaves(self, frames: Frames) -> None:
        """The leaves after the last whole block."""
        start = self.tokens // (WALK * LEAF) * (WALK * LEAF)
        first, end = start // LEAF, self.tokens // LEAF
        if first < end:
            some = frames._replace(keys=frames.keys[:, start:], products=frames.products[:, first:end])
            self.product = Walk(some, None, None, 1.0).suffixes(self.keys[:, start:], keep=False)[1][:, 0]

    def take_block(self, frames: Frames, size: int) -> None:
        """The block of so many tokens, if it is one of the digits, while frames are at its level."""
        number = self.tokens // size
        if number % 2:
            cross(frames.keys, self.product, 0, 1, Side((number - 1) * size, 1, size, size), False, self.keys)
            self.product = frames.products[:, number - 1] @ self.product


class Tree:
    """The route tree over all tokens of some heads: leaves, blocks of leaves, and what is above them."""

    def __init__(self, leaves: Leaves, reach: Reach | None, kept: Kept | None = None) -> None:
        self.leaves = leaves
        self.tokens = leaves.leaves * LEAF
        self.levels = list(levels(self.tokens, WALK * LEAF))
        self.count, self.group, self.dtype = leaves.taken, leaves.group, leaves.q.dtype
        some = slice(leaves.first, leaves.first + self.count)
        self.sums = None if leaves.sums is None else Sums(leaves.sums.left[some], leaves.sums.edge[some])
        self.reach = None if reach is None else Reach(reach.first[some], reach.last[some])
        self.inverse = None if kept is None else kept.inverse[some]
        self.frames: Frames | None = None
        if leaves.leaves > 1:
            self.frames = (
                frames_for(leaves.q, leaves.k, leaves.v, self.count)
                if kept is None
                else Frames(kept.queries[some], kept.keys[some], kept.values[some], kept.products[some])
            )

    def buffer(self, *shape: int) -> Tensor:
        """(n, T, ...): see :func:`buffer`."""
        return buffer(self.leaves.q, self.count, self.tokens, *shape)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Room for queries and keys."""
        width = self.leaves.k.shape[3]
        return self.buffer(self.group, width), self.buffer(width)

    def ascend(self, out: Tensor, row: Tensor, closed: Closed | None = None, to_top: bool = False) -> Tensor | None:
        """Writes the output (B, T, Hq, E) and log-sum-exp (n, T, G) of these heads, and closes the first tokens.

        With to_top (and more than one leaf), returns queries in the frame of the first token.
        """
        part, lse = self.buffer(self.group, out.shape[3]), torch.empty_like(row)
        self.leaves.forward(self.frames, self.inverse, part, lse)
        parts: list[Part] = []
        above = None
        if self.frames:
            walk = Walk(self.frames, self.sums, self.leaves.documents, self.leaves.scale)
            above = Blocks(self, walk) if self.levels or to_top else None
            walk.forward(part, lse, above.frames.queries if above else None)
            if closed:
                closed.take_leaves(self.frames)
            parts = above.ascend(closed, to_top) if above else []
        merge(part, lse, parts, out, row, self.leaves.first, self.leaves.documents)
        return above.frames.queries if above and to_top else None

    def descend(self, out: Tensor, grad: Tensor, lse: Tensor, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Writes dq, dk, dv, dw, dbeta of these heads; returns what gates receive by query and by key, (n, T, G)."""
        leaves = self.leaves
        width = out.shape[3]
        own_out, own_grad = self.buffer(self.group, width), self.buffer(self.group, width)
        delta, own = prepare(out, grad, lse, leaves.sums, leaves.k.shape[2], leaves.first, (own_out, own_grad))
        assert self.inverse is not None
        room = torch.empty_like if self.sums is None else torch.zeros_like  # kernels add to it
        back = Back(own_grad, delta, own, room(lse), room(lse))
        if self.frames is None:
            leaves.backward(self.inverse, back, None, None, None, [], found)
            return back.by_query, back.by_key
        walk = Walk(self.frames, self.sums, leaves.documents, leaves.scale)
        parts: list[tuple[Tensor, Place]] = []
        if self.levels:
            above = Blocks(self, walk, keep=True)
            passing, suffixes = walk.again(above.frames.queries), above.suffixes
            grad_q, grad_k, grad_blocks = above.descend(back, own_out, lse, parts)
            del above, own_out  # what follows takes the most memory
            grad_v, grad_products, grad_suffixes = walk.backward(back, passing, grad_q, grad_k, suffixes)
            assert suffixes is not None
            assert grad_suffixes is not None
            walk.suffixes_back(suffixes, grad_suffixes, grad_blocks, grad_products)
        else:
            grad_q, grad_k = self.buffers()
            grad_v, grad_products, _ = walk.backward(back, walk.again(None), grad_q, grad_k, None)
        parts.append((grad_v, (0, 1, self.tokens, 0)))
        leaves.backward(self.inverse, back, grad_q, grad_k, grad_products, parts, found)
        return back.by_query, back.by_key


class Blocks:
    """The levels above blocks of leaves: dense attention, and frames that rise from level to level."""

    def __init__(self, tree: Tree, walk: Walk, keep: bool = False) -> None:
        self.tree, self.levels, self.group, self.dtype = tree, tree.levels, tree.group, tree.dtype
        assert tree.frames is not None
        queries, keys = tree.buffers()
        self.suffixes, products = walk.suffixes(keys, keep)
        self.frames = Frames(queries, keys, tree.frames.values, products)
        self.dense = Dense(self.frames, tree.sums, tree.reach, tree.leaves.documents, tree.leaves.scale)

    def sides(self, run: Run) -> tuple[Side, Side]:
        """Rows of queries and of keys that cross to the level above."""
        step = run.left + run.right
        queries = Side((run.start + run.left) * self.group, run.pairs, run.right * self.group, step * self.group)
        return queries, Side(run.start, run.pairs, run.left, step)

    def rise(self, runs: list[Run], products: Tensor, keep: bool) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Takes frames up a level; returns queries and keys as they were, if that is kept, and the new products."""
        kept, first, documents = [], 0, self.tree.leaves.documents
        for run in runs:
            queries, keys = self.sides(run)
            old_q = cross(
                self.frames.queries.flatten(1, 2), products, first, 2, queries, True, None, keep, documents, self.group
            )
            old_k = cross(self.frames.keys, products, first + 1, 2, keys, False, None, keep, documents)
            if old_q is not None and old_k is not None:
                kept.append((old_q.unflatten(2, (-1, self.group)), old_k))
            first += 2 * run.pairs
        return kept, multiply(products, self.dtype)

    def ascend(self, closed: Closed | None, to_top: bool) -> list[Part]:
        """Outputs and log-sum-exps of all levels. Frames stop below the topmost; queries may go on to the top."""
        parts: list[Part] = []
        for number, runs in enumerate(self.levels):
            parts += [self.dense.forward(run) for run in runs]
            if closed:
                closed.take_block(self.frames, runs[0].left)
            if number + 1 < len(self.levels):
                products = self.rise(runs, self.frames.products, keep=False)[1]
                self.frames = self.frames._replace(products=products)
            elif to_top:  # one pair of blocks
                cross(self.frames.queries.flatten(1, 2), self.frames.products, 0, 2, self.sides(runs[0])[0], True)
        return parts

    def descend(
        self, back: Back, out: Tensor, lse: Tensor, parts: list[tuple[Tensor, Place]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the blocks' queries, keys and (unless there is one level) products; dv is added to parts."""
        rows, documents = Rows(out, lse, back), self.tree.leaves.documents
        products, kept = [self.frames.products], []
        for runs in self.levels[:-1]:
            old, above = self.rise(runs, products[-1], keep=True)
            kept.append(old)
            products.append(above)
        grad_q, grad_k = self.tree.buffers()
        grad_products: Tensor | None = None
        for number in range(len(self.levels) - 1, -1, -1):
            at_top = number == len(self.levels) - 1
            outer, first = [], 0
            for i, run in enumerate(self.levels[number]):
                right, left = run.halves(self.frames.queries)[1], run.halves(self.frames.keys)[0]
                q, k = (right, left) if at_top else kept[number][i]
                fresh_q, fresh_k, fresh_v = self.dense.backward(run, q, k, rows)
                parts.append((fresh_v, run))
                if at_top:  # one pair of blocks
                    place(grad_q.flatten(1, 2), fresh_q, run.left * self.group, False, documents, self.group)
                    place(grad_k, fresh_k, run.left, True, documents)
                    continue
                queries, keys = self.sides(run)
                outer_q = cross_back(
                    grad_q.flatten(1, 2), q, fresh_q, products[number], first, queries, True, documents, self.group
                )
                outer_k = cross_back(grad_k, k, fresh_k, products[number], first + 1, keys, False, documents)
                outer.append((outer_q, outer_k))
                first += 2 * run.pairs
            if not at_top:
                grad_products = multiply_back(products[number], grad_products, outer, self.dtype)
                kept.pop()
                products.pop()
        return grad_q, grad_k, grad_products
