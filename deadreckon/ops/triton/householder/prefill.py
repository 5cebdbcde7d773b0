"""What prefill leaves for decode: the first leaves closed into a segment, and queries in the first token's frame."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.triton.householder.cross import Side, cross
from deadreckon.ops.triton.householder.frames import Frames
from deadreckon.ops.triton.householder.walk import WALK, Walk


class Ascended(NamedTuple):
    """Softmax attention along Householder steps by kernels, and what streaming keeps of it; N = B · H."""

    out: Tensor  # (B, T, Hq, E)
    lse: Tensor  # (N, T padded, G)
    queries: Tensor | None  # (N, T padded, G, D) in the frame of the first token, if they attend further back
    keys: Tensor  # (N, closed, D): the first ones, in the frame of the last of them
    product: Tensor | None  # (N, D, D) of their steps, if there are any
    sums: Tensor | None  # (N, 1 | G, T padded) of log gates up to each token, float64


class Closed:
    """The first leaves of n key heads, as later tokens see them: keys in the frame of their end, and one product.

    They are cut by the binary digits of their number: blocks of the tree, the largest first, and at last less than a
    block of leaves. A block is followed by smaller ones, whose product is known by the time the levels have risen to
    it: its keys cross them all at once.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.tokens = keys, keys.shape[1]  # (n, tokens, D), to be written to
        width = keys.shape[2]
        self.product = torch.eye(width, dtype=torch.float32, device=keys.device).expand(keys.shape[0], width, width)

    def take_leaves(self, frames: Frames) -> None:
        """Takes the leaves after the last whole block."""
        start = self.tokens // (WALK * LEAF) * (WALK * LEAF)
        first, end = start // LEAF, self.tokens // LEAF
        if first < end:
            last = frames._replace(
                keys=frames.keys[:, start:], products=frames.products[:, first:end],
                rest=None if frames.rest is None else frames.rest[:, first:end],
            )  # fmt: skip
            self.product = Walk(last, None, None, 1.0).suffixes(self.keys[:, start:], keep=False)[1][:, 0]

    def take_block(self, frames: Frames, size: int) -> None:
        """Takes the block of `size` tokens, if it is one of the digits, while frames are at its level."""
        number = self.tokens // size
        if number % 2:
            cross(frames.keys, self.product, 0, 1, Side((number - 1) * size, 1, size, size), False, self.keys)
            self.product = frames.products[:, number - 1] @ self.product
