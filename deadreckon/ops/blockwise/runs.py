"""Which dense blocks make up the causal triangle above the leaves, and the gates on their routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

LEAF = 64  # tokens of a leaf, in PyTorch and Triton alike


class Run(NamedTuple):
    """Equal pairs of blocks, one after the other: `pairs` times (left, right) tokens from `start`."""

    start: int
    pairs: int
    left: int
    right: int

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of x (N, T, ...): its left halves (N, pairs, left, ...) and right halves (N, pairs, right, ...)."""
        size = self.left + self.right
        blocks = x[:, self.start : self.start + self.pairs * size].view(x.shape[0], self.pairs, size, *x.shape[2:])
        return blocks[:, :, : self.left], blocks[:, :, self.left :]

    def left_of(self, x: Tensor) -> Tensor:
        """The left halves alone, as one operation: the launches of each level wait for some ten of these views."""
        return self._blocks(x, 0, self.left)

    def right_of(self, x: Tensor) -> Tensor:
        """The right halves alone."""
        return self._blocks(x, self.left, self.right)

    def _blocks(self, x: Tensor, offset: int, tokens: int) -> Tensor:
        heads, along, *rest = x.stride()
        strides = (heads, (self.left + self.right) * along, along, *rest)
        shape = (x.shape[0], self.pairs, tokens, *x.shape[2:])
        return x.as_strided(shape, strides, x.storage_offset() + (self.start + offset) * along)


def levels(length: int, leaf: int) -> Iterator[list[Run]]:
    """The pairs of each level, near to far: whole ones, and a ragged last one where the length is no power of two."""
    size = leaf
    while size < length:
        pairs, rest = divmod(length, 2 * size)
        runs = [Run(0, pairs, size, size)] if pairs else []
        if rest > size:
            runs.append(Run(2 * size * pairs, 1, size, rest - size))
        yield runs
        size *= 2


class Gate(NamedTuple):
    """The gates of a run's routes, in two local parts that add up."""

    shift: Tensor  # (N, n, right, 1 | G): from the middle to the query
    bias: Tensor  # (N, n, left, 1 | G): from the key to the middle


def gate_of(sums: Tensor | None, run: Run) -> Gate | None:
    if sums is None:
        return None
    left, right = run.halves(sums)
    middle = left[:, :, -1:]
    return Gate(right - middle, middle - left)
